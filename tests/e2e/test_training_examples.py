"""The examples of `prepare` and `Trainer`: with one process, on ranks, and on from a state."""

import json
import subprocess
import sys

import pytest
from support.launching import last_json, paceline

pytest.importorskip("torch")
pytestmark = pytest.mark.campaign("e2e")
DEADLINE_S = 300


def alone(script, folder, *arguments):
    done = subprocess.run(
        [sys.executable, script, *map(str, arguments)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def on_ranks(script, folder, *arguments, options=("-n", 2)):
    out = ("--no-record", "--out", f"run{len(list(folder.iterdir()))}")
    done = paceline(folder, "run", *options, *out, script, *arguments, deadline_s=DEADLINE_S)
    assert done.code == 0, done.err
    return last_json(done.out)


@pytest.mark.parametrize("engine", ["allreduce", "sharded", "fsdp2"])
def test_images_are_learnt_alike_by_one_process_and_by_ranks(tmp_path, root, engine):
    script = root / "examples/train_images.py"
    one = alone(script, tmp_path, "--epochs", 12)
    two = on_ranks(script, tmp_path, "--epochs", 12, "--engine", engine)
    assert two["steps"] == one["steps"]
    assert one["accuracy"] > 0.85
    assert two["accuracy"] == pytest.approx(one["accuracy"], abs=0.03)


def test_a_script_is_divided_among_ranks_by_the_command_that_runs_it(tmp_path, root):
    script = root / "examples/pipeline_digits.py"
    one = alone(script, tmp_path, "--epochs", 2)
    assert (one["replicas"], one["divided"]) == (1, False)
    two = on_ranks(script, tmp_path, "--epochs", 2, options=("-n", 2, "--strategy", "model"))
    assert (two["replicas"], two["divided"]) == (1, True)
    four = ("-n", 4, "--strategy", "hybrid", "--partitions", 2, "--microbatches", 3)
    hybrid = on_ranks(script, tmp_path, "--epochs", 2, options=four)
    assert (hybrid["replicas"], hybrid["divided"]) == (2, True)
    (tmp_path / "plan.json").write_text(json.dumps({"plan": {"mesh": {"pipeline": 2}}}))
    planned = on_ranks(script, tmp_path, "--epochs", 2, options=("--plan", "plan.json"))
    assert (planned["replicas"], planned["divided"]) == (1, True)
    for ranks in (two, hybrid, planned):  # the same steps, up to the rounding of sums
        assert ranks["loss"] == pytest.approx(one["loss"], rel=0.2)
        assert ranks["accuracy"] == pytest.approx(one["accuracy"], abs=0.05)


def test_a_text_is_learnt_on_from_the_state_of_another_engine_and_number_of_ranks(tmp_path, root):
    script = root / "examples/train_text.py"
    (tmp_path / "text").write_bytes((root / "docs/architecture.md").read_bytes() * 2)
    text = ("--text", "text", "--batch", 8)
    first = on_ranks(script, tmp_path, *text, "--epochs", 1, "--engine", "sharded")
    state = (*text, "--resume", "text.pt")
    assert alone(script, tmp_path, *state, "--epochs", 1)["loss"] is None  # it has ended already
    third = on_ranks(script, tmp_path, *state, "--epochs", 3, "--precision", "bfloat16")
    last = alone(script, tmp_path, *state, "--epochs", 4)
    assert last["loss"] < third["loss"] < first["loss"] < 5.6  # that of chance: ln 256


def test_a_data_set_is_read_as_it_is(tmp_path, root):
    script = root / "examples/read_in_place.py"
    made = alone(script, tmp_path)
    assert (made["samples"], made["classes"], made["verified"]) == (1797, 10, False)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a").write_bytes(b"abc")
    own = alone(script, tmp_path, "data")
    assert (own["samples"], own["batches"]) == (1, 1)
