"""Memory of transformers against the formulas and tables of the papers that they are from."""

import pytest

from paceline.core.machine_file import library_machine
from paceline.core.plan import Mesh, Plan
from paceline.perf.transformer import Architecture, estimate_transformer
from paceline.perf.transformer.layer import activation_bytes
from paceline.perf.transformer.memory import rank_memory, rank_parameters, state_bytes

# Rajbhandari et al. 2020, table 1: GB of model states per device, by parameters, stage, ranks.
ZERO = [
    (7.5e9, 0, 1, 120), (7.5e9, 1, 16, 35.6), (7.5e9, 1, 256, 30.4), (7.5e9, 2, 16, 21.6),
    (7.5e9, 2, 256, 15.4), (7.5e9, 3, 64, 1.88), (128e9, 1, 16, 608), (128e9, 2, 256, 263),
    (128e9, 3, 1024, 2), (1e12, 2, 16, 2875), (1e12, 3, 64, 250), (1e12, 3, 1024, 15.6),
]  # fmt: skip
# Korthikanti et al. 2022, figure 7: GiB of activations on the first rank, by layers, hidden, heads,
# stages, interleaving, microbatch; 8 tensor-parallel ranks, sequence parallel and selective.
ACTIVATIONS = [
    (48, 6144, 64, 1, 1, 4, 9.5625),
    (96, 12288, 96, 8, 3, 1, 12.3515625),
    (105, 20480, 128, 35, 3, 1, 23.076171875),
    (128, 25600, 160, 64, 1, 1, 26.5625),
]


def gpt(layers=96, hidden=12288, heads=96):
    return Architecture(
        layers=layers, hidden=hidden, heads=heads, vocab=51200, sequence=2048, positions=2048,
        dropout=True,
    )  # fmt: skip


@pytest.mark.parametrize(("parameters", "stage", "ranks", "gigabytes"), ZERO)
def test_states_are_those_of_zero(parameters, stage, ranks, gigabytes):
    plan = Plan(mesh=Mesh(data=ranks), zero=stage, precision="float16", reduce_precision="bfloat16")
    assert state_bytes(parameters, plan).total / 1e9 == pytest.approx(gigabytes, rel=0.01)


def test_stages_keep_gradients_whole_that_zero_2_reduces_once_a_step():
    alone, staged = (
        state_bytes(1e9, Plan(mesh=Mesh(data=8, pipeline=stages), zero=2, precision="bfloat16"))
        for stages in (1, 2)
    )
    assert staged.gradients == 8 * alone.gradients
    assert staged.parameters == alone.parameters
    assert staged.optimizer == alone.optimizer


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "stages", "interleave", "samples", "gibibytes"), ACTIVATIONS
)
def test_activations_are_those_of_the_paper(
    layers, hidden, heads, stages, interleave, samples, gibibytes
):
    plan = Plan(
        mesh=Mesh(tensor=8, pipeline=stages), stages_per_rank=interleave, fused_attention=False,
        microbatches=8 * stages, sequence_parallel=True, recompute="selective", nodes=stages,
        precision="float16",
    )  # fmt: skip
    device = library_machine("selene").devices[0]
    first = rank_memory(gpt(layers, hidden, heads), plan, samples, device)[0]
    assert first["activations"] / 2**30 == pytest.approx(gibibytes, rel=1e-3)


def test_a_layer_keeps_34_bytes_and_its_scores():
    model = gpt()
    plan = Plan(fused_attention=False)
    tokens = 2048
    expected = tokens * 12288 * (34 + 5 * 96 * 2048 / 12288)
    assert activation_bytes(model, plan, 1)[0] == pytest.approx(expected)


@pytest.mark.parametrize("recompute", ["none", "selective", "operators", "full"])
@pytest.mark.parametrize("fused", [True, False])
def test_what_is_computed_again_is_not_kept(recompute, fused):
    model = gpt()
    whole = activation_bytes(model, Plan(fused_attention=fused), 1)[0]
    kept, again = activation_bytes(model, Plan(fused_attention=fused, recompute=recompute), 1)
    assert kept <= whole <= kept + again + 4 * 2048 * 12288


def test_with_its_operators_recomputed_a_layer_keeps_half_of_the_products_outputs():
    """And its input: of 34 bytes 28 are outputs of products."""
    whole = activation_bytes(gpt(), Plan(fused_attention=False), 1)[0]
    kept, again = activation_bytes(gpt(), Plan(fused_attention=False, recompute="operators"), 1)
    assert kept == 2048 * 12288 * (2 + 14)
    assert again == whole - 2048 * 12288 * 14


@pytest.mark.parametrize(("sequence_parallel", "ranks"), [(False, 1), (True, 8)])
def test_recomputed_whole_a_layer_keeps_its_input_in_half_precision(sequence_parallel, ranks):
    """Korthikanti et al. 2022, table 2: 2 s b h, divided among ranks of a parallel sequence."""
    plan = Plan(mesh=Mesh(tensor=8), sequence_parallel=sequence_parallel, recompute="full")
    assert activation_bytes(gpt(), plan, 3)[0] == 3 * 2048 * 12288 * 2 / ranks


def test_ranks_of_a_pipeline_have_all_parameters_and_a_copy_of_a_tied_embedding():
    model = gpt()
    plan = Plan(mesh=Mesh(pipeline=8, tensor=2), nodes=2)
    copy = model.vocab * model.hidden
    assert sum(rank_parameters(model, plan)) * 2 == pytest.approx(model.parameters + copy)


def test_a_plan_that_nearly_fills_the_device_is_called_tight():
    plan = Plan(
        mesh=Mesh(tensor=8, pipeline=6), nodes=6, microbatches=6, precision="bfloat16",
        recompute="full",
    )  # fmt: skip
    found = estimate_transformer(library_machine("selene"), gpt(), plan, 6)
    assert found.fits
    assert any(text.startswith("tight: ") for text in found.warnings)


def test_a_plan_that_does_not_fit_says_by_how_much_where_and_of_what():
    plan = Plan(mesh=Mesh(tensor=8, pipeline=4), nodes=4, microbatches=16, precision="bfloat16")
    found = estimate_transformer(library_machine("selene"), gpt(), plan, 16)
    assert not found.fits
    (warning,) = [text for text in found.warnings if text.startswith("does not fit")]
    over = (found.needed_memory_bytes - found.available_memory_bytes) / 2**30
    assert f"rank {found.fullest_rank} of 4 pipeline ranks" in warning
    assert f"{over:.1f} GiB more" in warning
    assert "optimizer" in warning
