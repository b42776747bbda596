"""Two ranks train from a pack and are killed in mid-epoch; one and four ranks go on from there."""

import json
import shutil
from itertools import chain

import pytest
from support.launching import SCRIPTS, paceline

from paceline import store
from paceline.store import open_pack
from paceline.trace.format.events import Kind
from paceline.trace.merge import load_run

COUNT, BATCH, SAMPLE_BYTES = 203, 16, 32
SAVED, KILLED = 5, 7
SCRIPT = SCRIPTS / "from_pack.py"


def batches_of(folder, ranks):
    """Return the global batch of each step: the ranks' parts, side by side."""
    parts = [(folder / f"rank-{rank}").read_text().splitlines() for rank in range(ranks)]
    steps = min(map(len, parts))  # a rank that was killed wrote less
    return [
        list(chain.from_iterable(json.loads(part[step]) for part in parts)) for step in range(steps)
    ]


def train(folder, name, ranks, *args, code=0, pack="pack"):
    log = folder / name
    log.mkdir()
    state = log / "state.json"
    if pack == "pack" and (folder / "state.json").exists():
        shutil.copy(folder / "state.json", state)
    command = [SCRIPT, folder / pack, log, "--state", state, *args]
    done = paceline(folder, "run", "-n", ranks, "--out", f"{name}-run", *command)
    assert done.code == code, done.err
    done.assert_nothing_left()
    return batches_of(log, ranks), state


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume")
    (folder / "source").mkdir()
    for number in range(COUNT):
        (folder / "source" / f"{number:03d}").write_bytes(bytes([number]) * SAMPLE_BYTES)
    store.pack(store.Folder(folder / "source"), folder / "pack")
    return folder


@pytest.fixture(scope="module")
def uninterrupted(folder):
    batches, _ = train(folder, "whole", 2)
    return batches


@pytest.fixture(scope="module")
def killed(folder, uninterrupted):
    batches, state = train(folder, "killed", 2, "--kill-step", KILLED, code=5)
    shutil.copy(state, folder / "state.json")
    return batches


def test_an_epoch_gives_each_sample_once(uninterrupted):
    assert sorted(chain.from_iterable(uninterrupted)) == list(range(COUNT))
    assert [len(batch) for batch in uninterrupted] == [BATCH] * (COUNT // BATCH) + [COUNT % BATCH]


@pytest.mark.parametrize(
    ("ranks", "kind"),
    [
        (1, "thread"),
        pytest.param(4, "thread", marks=pytest.mark.campaign("e2e")),
        pytest.param(4, "process", marks=pytest.mark.campaign("e2e")),
    ],
)
def test_what_follows_a_kill_completes_the_epoch(folder, uninterrupted, killed, ranks, kind):
    assert len(killed) == KILLED
    resumed, state = train(folder, f"resumed-{ranks}-{kind}", ranks, "--kind", kind)
    assert killed[:SAVED] + resumed == uninterrupted
    assert sorted(chain.from_iterable(killed[:SAVED] + resumed)) == list(range(COUNT))
    assert killed[SAVED:] == resumed[: KILLED - SAVED]  # trained after the checkpoint: again
    assert json.loads(state.read_text())["position"] % BATCH == 0


def test_waiting_for_the_loader_is_recorded_as_input(folder, uninterrupted):
    with open_pack(folder / "pack") as pack:
        total = int(pack.lengths.sum())
    run = load_run(folder / "whole-run")
    recorded = 0
    for rank in run.ranks:
        inputs = rank.events_of(Kind.INPUT)
        names = [rank.names[number] for number in inputs["name"].tolist()]
        assert names.count("iter") == 1
        assert names.count("next") == len(uninterrupted) + 1  # the last one says that it is over
        recorded += int(inputs["amount"].sum())
    assert recorded == total == COUNT * SAMPLE_BYTES


def test_damaged_samples_that_were_skipped_are_counted_in_the_trace(folder):
    shutil.copytree(folder / "pack", folder / "damaged")
    shard = folder / "damaged" / "shard-00000.pace"
    content = bytearray(shard.read_bytes())
    for number in (10, 20, 30):
        content[content.index(bytes([number]) * SAMPLE_BYTES)] ^= 1
    shard.write_bytes(content)
    args = ("--on-corrupt", "skip")
    batches, _ = train(folder, "skipped", 1, *args, pack="damaged")
    assert sorted(chain.from_iterable(batches)) == sorted({*range(COUNT)} - {10, 20, 30})
    assert len(batches) == -(-COUNT // BATCH)
    (rank,) = load_run(folder / "skipped-run").ranks
    counters = rank.events_of(Kind.COUNTER)
    name = rank.names.index("loader_skipped_samples")
    assert counters[counters["name"] == name]["amount"].max() == 3
