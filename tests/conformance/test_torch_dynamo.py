"""torch.compile makes the same of a recorded script as of an unrecorded one.

The same graphs, frames, breaks and warnings, and the same weights bit for bit, on two ranks. Run
under another version of torch by scripts/torch-conformance.
"""

import json
from pathlib import Path

import pytest
import torch
from support.launching import paceline

from paceline.trace.format.events import Kind
from paceline.trace.merge import load_run

SCRIPT = Path(__file__).parent / "scripts" / "compile_cases.py"
QUICK = (
    *("compiled_ddp_of_torchs_modules", "compiled_ddp_of_own_modules", "compiled_fsdp"),
    *("compiled_optimizer", "full_graph", "functional_collective"),
)
ALL = (
    *QUICK,
    *("eager_ddp", "ddp_of_compiled", "compiled_optimizer_in_a_function", "recomputed"),
    *("recomputed_eagerly", "breaking", "whole_step", "functional", "reset", "refused_calls"),
)


def outcomes(folder, name, backend, cases, *flags):
    """Run the cases and return what came of them: for each rank and case."""
    env = {"TORCHINDUCTOR_CACHE_DIR": str(folder / f"cache-{name}"), "OMP_NUM_THREADS": "1"}
    # Not measured: coverage asks Python functions what to trace, and Dynamo counts their frames.
    env |= {"COVERAGE_PROCESS_CONFIG": "", "COVERAGE_PROCESS_START": ""}
    arguments = ["--out", f"RUN-{name}", SCRIPT, name, backend, *cases]
    done = paceline(folder, "run", "-n", 2, *flags, *arguments, env=env, deadline_s=900)
    assert done.code == 0, done.err
    return [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in (0, 1)]


def assert_same(folder, backend, cases):
    plain = outcomes(folder, "plain", backend, cases, "--no-record")
    recorded = outcomes(folder, "recorded", backend, cases)
    for case in cases:
        for key in plain[0][case]:
            for rank in (0, 1):
                assert recorded[rank][case][key] == plain[rank][case][key], (case, key, rank)
    return recorded


def test_dynamo_makes_of_a_recorded_script_what_it_makes_of_an_unrecorded_one(tmp_path):
    recorded = assert_same(tmp_path, "aot_eager", QUICK)[0]
    graphs = {case: len(recorded[case]["graphs"]) for case in QUICK}
    assert graphs.pop("compiled_ddp_of_torchs_modules") == 0  # Dynamo leaves these modules alone
    assert all(graphs.values()), graphs
    trace = load_run(tmp_path / "RUN-recorded")
    assert trace.matches.mismatches() == ()
    for rank in trace.ranks:
        trained = 3 * 5  # steps of the cases that train
        assert len(rank.events_of(Kind.BACKWARD)) == trained
        names = [rank.names[name] for name in rank.events_of(Kind.FORWARD)["name"].tolist()]
        assert names.count("loss") == trained
        collectives = rank.events_of(Kind.COLLECTIVE)["name"].tolist()
        assert [rank.names[name] for name in collectives].count("all_reduce") >= 2 * 3 + 3
        # Looked at closely in each step but the first: parameters of compiled modules, and layers
        # between them. A compiled optimizer's steps are one.
        sampled = rank.names.index("sampled_layers_ns")
        assert (rank.events_of(Kind.COUNTER)["name"] == sampled).sum() == trained - 3 - 1
        assert len(rank.events_of(Kind.GRADIENT)) >= 10 * (trained - 3 - 1)
        assert len(rank.events_of(Kind.LAYER)) > 0
        # One after the other, not within each other.
        compiled = rank.events_of(Kind.COMPILATION)
        assert len(compiled) >= sum(graphs.values())
        assert (compiled["begin_ns"][1:] >= compiled["end_ns"][:-1]).all()


@pytest.mark.campaign("torch")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_every_way_to_compile_gives_the_same_weights_and_graphs(tmp_path, backend):
    assert_same(tmp_path, backend, ALL)


@pytest.mark.campaign("torch")
def test_cuda_graphs_give_the_same_weights(tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    assert_same(tmp_path, "cudagraphs", ("on_device", "captured"))
