"""paceline plan --model: a transformer on a described machine, from the command line."""

import json

import pytest
from click.testing import CliRunner

from paceline.cli.plan import plan
from paceline.core.errors import DestinationExists, MemoryExceeded, NotFound, UsageError
from paceline.core.plan import Mesh
from paceline.core.plan_file import load_plan_file

CONFIG = {
    "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
    "intermediate_size": 11008, "vocab_size": 32000, "max_position_embeddings": 4096,
}  # fmt: skip
BIG = "layers=96,hidden=12288,heads=96,vocab=51200,sequence=2048"


def run(*arguments):
    done = CliRunner().invoke(plan, list(arguments))
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return str(path)


def test_a_published_model_is_planned_on_a_machine_of_the_library(config):
    flags = ("--nodes", "16", "--batch", "1024", "--tensor", "8", "--stages", "2", "--zero", "1")
    shown = run("--model", config, "--machine", "dgx-h100", *flags, "--recompute", "selective")
    assert "128 ranks on 16 nodes (8 data x 8 tensor x 2 pipeline)" in " ".join(shown.split())
    for words in ("memory of pipeline rank", "a rank sends over", "limited by", "prior of gpu"):
        assert words in shown
    found = json.loads(run("--model", config, "--machine", "dgx-h100", *flags, "--json"))
    assert found["plan"]["mesh"] == {"data": 8, "pipeline": 2, "tensor": 8, "context": 1}
    assert found["plan"]["zero"] == 1
    assert found["fits"]
    assert found["low_s"] < found["step_time_s"] < found["high_s"]


def test_the_plan_file_has_plan_and_estimate(config, tmp_path):
    out = tmp_path / "plan.json"
    flags = ("--machine", "dgx-h100", "--zero", "3", "--batch", "32")
    assert f"plan: wrote {out}" in run("--model", config, *flags, "--out", str(out))
    file = load_plan_file(out)
    assert file.plan.mesh == Mesh(data=8)
    assert (file.plan.engine, file.plan.zero, file.workload) == ("fsdp2", 3, None)
    assert file.estimate is not None
    assert file.estimate.batch == 32


def test_another_file_is_not_replaced_by_a_plan(config, tmp_path):
    out = tmp_path / "notes.txt"
    out.write_text("mine")
    with pytest.raises(DestinationExists):
        run("--model", config, "--machine", "dgx-h100", "--out", str(out))
    assert out.read_text() == "mine"


def test_a_model_that_does_not_fit_says_so():
    shown = run("--model", BIG, "--machine", "selene", "--tensor", "8")
    assert "does not fit: every rank needs" in shown


def test_parameters_take_the_bytes_of_their_precision():
    """The report tells by them whether the model that was planned is the one that was trained."""
    flags = ("--model", BIG, "--machine", "dgx-h100", "--batch", "64", "--json")
    found = {
        precision: json.loads(run(*flags, "--precision", precision))["trained_parameter_bytes"]
        for precision in ("bfloat16", "float32")
    }
    assert found["float32"] == 2 * found["bfloat16"] > 0


def test_supply_compression_and_a_budget_have_flags(config):
    flags = ("--machine", "selene", "--nodes", "2", "--batch", "64", "--recompute", "full")
    loading = ("--loader-workers", "4", "--sample-bytes", "600KiB", "--sample-seconds", "20")
    found = json.loads(run("--model", config, *flags, *loading, "--json"))
    assert found["limit"] == "data loading"
    assert found["step_time_s"] == pytest.approx(64 / 16 * 20 / 4)
    assert found["plan"]["loader_workers"] == 4
    less = json.loads(run("--model", config, *flags, "--compression", "50", "--json"))
    assert less["plan"]["compression"] == 50
    assert less["memory_bytes"]["compression"] > 0
    shown = run("--model", config, *flags, "--fit", "70GiB")
    for words in ("within 70.0 GiB", "optimizer state", "spilled at", "host link"):
        assert words in " ".join(shown.split())


def test_the_library_is_listed():
    assert "NVIDIA A100 SXM4 80 GB" in run("--machines")
    listed = json.loads(run("--machines", "--json"))
    assert {"summit", "laptop"} <= {row["name"] for row in listed["machines"]}


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (("--model", BIG, "--ranks", "4"), UsageError, "--ranks has no effect on an architecture"),
        (("--model", BIG, "--compute", "rates"), UsageError, "--compute has no effect"),
        (("--model", BIG, "--machine", "selene", "--fit", "8GiB"), MemoryExceeded, "no plan keeps"),
        (("--compression", "10"), UsageError, "--compression has an effect with --model"),
        (
            ("--model", BIG, "--machine", "selene", "--loader-workers", "4"),
            UsageError,
            "loader processes have nothing to load",
        ),
        (("--nodes", "3"), UsageError, "--nodes has an effect with --model"),
        ((), UsageError, "there is no model to plan"),
        (("x.py:step", "--model", BIG), UsageError, "of a script's function or of an architecture"),
        (("--model", BIG, "--machine", "selenee"), NotFound, "selenee"),
        (("--model", BIG, "--machine", "selene", "--stages", "3"), UsageError, "do not divide"),
        (
            ("--model", BIG, "--machine", "selene", "--tensor", "8", "--batch", "3",
             "--microbatch", "2"),
            UsageError,
            "is not a multiple",
        ),
    ],
)  # fmt: skip
def test_wrong_flags_say_what_is_wrong(arguments, error, words):
    with pytest.raises(error, match=words):
        run(*arguments)
