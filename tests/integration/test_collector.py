"""What the torch collector records of unchanged scripts: collectives, and loops of any shape."""

import json
import os
import subprocess
import sys
from collections import Counter

import pytest
from support.launching import SCRIPTS, last_json, paceline

from paceline.trace.analysis import analyse
from paceline.trace.format.events import (
    COMMUNICATION,
    DRAIN,
    EVALUATION_SPAN,
    LOADER_WORKERS,
    MAIN,
    NAN_READ,
    Kind,
)
from paceline.trace.merge import load_run

# --- collectives ---------------------------------------------------------------------------------

FLOAT_BYTES = 4


@pytest.fixture(scope="module")
def collectives(tmp_path_factory):
    folder = tmp_path_factory.mktemp("collectives")
    names = ("plain", "any_source", "groups", "fsdp", "dtensor", "ddp")
    done = paceline(folder, "run", "-n", 2, "--out", "RUN", SCRIPTS / "collectives.py", *names)
    assert done.code == 0, done.err
    return done


@pytest.fixture(scope="module")
def trace(collectives):
    return load_run(collectives.folder / "RUN")


@pytest.fixture(scope="module")
def by_rank(trace):
    """Each rank's collectives and messages as (name, bytes), in order of issue."""
    return [
        [
            (rank.names[name], amount)
            for name, amount in rank.events_of(Kind.COLLECTIVE, Kind.SEND, Kind.RECV)[
                ["name", "amount"]
            ].tolist()
        ]
        for rank in trace.ranks
    ]


def test_nothing_that_the_script_can_ask_about_changes(collectives):
    assert last_json(collectives.out) == {"backend": "gloo", "size": 2}


def test_both_ranks_tell_the_same_of_each_collective(trace):
    matches = trace.matches
    common = matches.instances["ranks"] == 2
    assert common.sum() > 30
    assert matches.mismatches() == ()
    assert (matches.instances["mean"] == matches.instances["largest"]).all()


def test_only_a_group_of_ones_own_is_not_common(trace):
    matches = trace.matches
    alone = matches.calls[(matches.instances["ranks"] == 1)[matches.calls["instance"]]]
    assert alone["trace"].tolist() == [0, 1]
    assert {matches.operations[number] for number in alone["operation"]} == {"all_reduce"}
    assert set(alone["amount"].tolist()) == {10 * FLOAT_BYTES}
    assert [matches.groups[number].members for number in alone["group"]] == [(0,), (1,)]


def test_sequences_of_each_group_count_from_one(trace):
    for rank in trace.ranks:
        events = rank.events_of(Kind.COLLECTIVE)
        groups = set(events["group"].tolist())
        for group in groups:
            numbers = events["sequence"][events["group"] == group].tolist()
            assert numbers == list(range(1, len(numbers) + 1))
        assert len(groups) >= 3


def test_groups_have_their_members(trace):
    for rank in trace.ranks:
        members = {group.members for group in rank.groups[1:]}
        assert members == {(0, 1), (rank.rank,)}


def test_messages_are_matched_by_peer_and_tag_and_take_no_numbers_from_collectives(trace):
    messages = trace.matches.messages
    assert len(messages) == 2 * (1 + 4)
    assert (messages["partner"] >= 0).all()
    partners = messages[messages["partner"]]
    assert (messages["sends"] != partners["sends"]).all()
    for field in ("amount", "tag", "sequence", "group"):
        assert (messages[field] == partners[field]).all(), field
    assert sorted(set(messages["tag"].tolist())) == [0, 5]


def test_every_front_end_is_seen(by_rank):
    """The operations of collectives.py, in its order, with the bytes that a rank gives."""
    seen = by_rank[0]
    thousand = 1000 * FLOAT_BYTES
    plain = [("all_reduce", thousand), ("broadcast", thousand), ("all_gather", thousand)]
    plain += [("barrier", 0), ("send", thousand)]
    assert seen[: len(plain)] == plain
    # The object's size, then the object.
    assert [name for name, _ in seen[5:7]] == ["all_gather", "all_gather"]
    of = Counter(seen)
    assert of["all_reduce", 10 * FLOAT_BYTES] == 2  # new_group
    layer = (64 * 64 + 64) * FLOAT_BYTES
    steps = 3
    # Sharded: each step gathers both layers, forward and backward but for the last, and reduces.
    assert of["all_gather", layer // 2] >= 2 * steps
    assert of["reduce_scatter", layer] == 2 * steps
    # DTensor: a shard of 4 rows is gathered.
    assert of["all_gather", 4 * 8 * FLOAT_BYTES] >= 2
    # DDP: its reducer's only bucket, once a step.
    assert of["all_reduce", layer] == steps


def test_a_collective_ends_after_it_began(trace):
    for rank in trace.ranks:
        events = rank.events_of(Kind.COLLECTIVE, Kind.SEND, Kind.RECV)
        assert (events["begin_ns"] <= events["end_ns"]).all()
        assert not events["flags"].any()
        assert set(events["location"].tolist()) == {COMMUNICATION}


def test_roots_and_peers_are_known(trace):
    for rank, other in zip(trace.ranks, (1, 0), strict=True):
        roots = rank.events_of(Kind.COLLECTIVE)
        roots = roots[roots["name"] == rank.names.index("broadcast")]
        assert roots["peer"][0] == 1
        assert set(rank.events_of(Kind.SEND, Kind.RECV)["peer"].tolist()) == {other}


def test_no_wait_is_without_a_name(trace):
    for rank in trace.ranks:
        waits = rank.events_of(Kind.WAIT)
        names = {rank.names[number] for number in waits["name"].tolist()}
        assert "" not in names
        assert {"all_reduce", "all_gather", "reduce_scatter", "barrier", DRAIN} <= names
        assert set(waits["location"].tolist()) == {MAIN}


# --- loops ---------------------------------------------------------------------------------------

LOOPS = (
    *("lbfgs", "accumulation", "recomputation", "step_in_backward", "step_that_raises"),
    *("optimizer_of_optimizers", "saving", "sharded_saving", "copies", "evaluation"),
    *("computed_input", "clipping", "validation", "host_work", "not_a_number"),
)


class Section:
    """The events of one of the loops in scripts/loops.py."""

    def __init__(self, rank, begin_ns, end_ns):
        self.rank = rank
        events = rank.events
        # A step begins where the one before it ended: it is of the section in which it ends.
        inside = (events["end_ns"] >= begin_ns) & (events["end_ns"] <= end_ns)
        self.events = events[inside]

    def of(self, kind):
        chosen = self.events[self.events["kind"] == kind]
        return chosen[chosen["begin_ns"].argsort(kind="stable")]

    def names(self, kind):
        return [self.rank.names[number] for number in self.of(kind)["name"].tolist()]

    def inside(self, kind, outer):
        """Return how many events of `kind` lie within one of `outer`."""
        return sum(
            any(
                o["begin_ns"] <= event["begin_ns"] and event["end_ns"] <= o["end_ns"] for o in outer
            )
            for event in self.of(kind)
        )


@pytest.fixture(scope="module")
def loops(tmp_path_factory):
    folder = tmp_path_factory.mktemp("loops")
    done = paceline(folder, "run", "--out", "RUN", SCRIPTS / "loops.py", *LOOPS)
    assert done.code == 0, done.err
    rank = load_run(folder / "RUN").ranks[0]
    sections = {name: Section(rank, *ns) for name, ns in last_json(done.out).items()}
    sections["folder"] = folder
    return sections


def test_a_closure_runs_the_model_within_the_optimizer(loops):
    section = loops["lbfgs"]
    assert len(section.of(Kind.STEP)) == 2
    steps = section.of(Kind.OPTIMIZER)
    assert section.names(Kind.OPTIMIZER).count("step") == 2
    backwards = section.of(Kind.BACKWARD)
    assert len(backwards) == section.inside(Kind.BACKWARD, steps) == 6
    assert section.names(Kind.FORWARD).count("forward") == 6
    assert section.inside(Kind.FORWARD, steps) == len(section.of(Kind.FORWARD))


def test_accumulated_gradients_are_one_step(loops):
    section = loops["accumulation"]
    assert len(section.of(Kind.STEP)) == 2
    assert section.names(Kind.FORWARD) == ["forward", "loss"] * 6
    assert section.names(Kind.BACKWARD) == ["backward"] * 6
    first = section.of(Kind.STEP)["step"][0]
    assert section.of(Kind.BACKWARD)["step"].tolist() == [first] * 3 + [first + 1] * 3


def test_what_is_recomputed_in_backward_is_backward(loops):
    section = loops["recomputation"]
    assert len(section.of(Kind.BACKWARD)) == 2
    assert section.names(Kind.FORWARD).count("forward") == 4
    assert section.inside(Kind.FORWARD, section.of(Kind.BACKWARD)) == 0


def test_steps_taken_in_backward_are_one_step_each_time(loops):
    section = loops["step_in_backward"]
    assert len(section.of(Kind.STEP)) == 3
    assert len(section.of(Kind.BACKWARD)) == 3
    assert section.inside(Kind.OPTIMIZER, section.of(Kind.BACKWARD)) == 3 * 4


def test_a_step_that_raises_is_none_and_those_after_it_count(loops):
    section = loops["step_that_raises"]
    assert len(section.of(Kind.STEP)) == 2
    assert section.names(Kind.OPTIMIZER) == ["step", "step"]
    assert section.names(Kind.BACKWARD) == ["backward"] * 3


def test_an_optimizer_within_an_optimizer_is_one_step(loops):
    section = loops["optimizer_of_optimizers"]
    assert len(section.of(Kind.STEP)) == 2
    assert section.names(Kind.OPTIMIZER) == ["step", "step"]


def test_saving_is_checkpointing_with_its_bytes(loops):
    section = loops["saving"]
    assert section.names(Kind.CHECKPOINT) == ["save", "save"]
    size = (loops["folder"] / "model.pt").stat().st_size
    assert section.of(Kind.CHECKPOINT)["amount"].tolist() == [size, 0]  # a stream has no size


def test_a_sharded_checkpoint_is_one(loops):
    assert loops["sharded_saving"].names(Kind.CHECKPOINT) == ["checkpoint save"]


def test_only_copies_between_devices_are_copies(loops):
    section = loops["copies"]
    assert section.names(Kind.COPY) == ["copy to", "copy copy_"]
    assert section.of(Kind.COPY)["amount"].tolist() == [8 * 16 * FLOAT_BYTES, 16 * FLOAT_BYTES]


def test_an_evaluation_is_neither_a_step_nor_has_it_a_loss(loops):
    section = loops["evaluation"]
    assert len(section.of(Kind.STEP)) == 1
    assert section.names(Kind.FORWARD) == ["forward", "forward", "forward"]


def test_a_model_that_makes_samples_is_input(loops):
    section = loops["computed_input"]
    assert section.names(Kind.INPUT) == ["iter", "next", "next", "next"]
    workers = section.rank.names.index(LOADER_WORKERS)
    counters = section.of(Kind.COUNTER)
    assert counters["amount"][counters["name"] == workers].tolist() == [0]
    assert len(section.of(Kind.FORWARD)) == 0
    assert len(section.of(Kind.STEP)) == 0


def test_clipping_and_clearing_gradients_is_of_the_optimizer(loops):
    section = loops["clipping"]
    assert section.names(Kind.OPTIMIZER) == ["clip_grad_norm", "step", "zero_grad"]


def test_an_evaluation_lasts_from_its_first_batch_to_its_last(loops):
    section = loops["validation"]
    spans = section.of(Kind.EVALUATION)
    spans = spans[[section.rank.names[name] == EVALUATION_SPAN for name in spans["name"]]]
    assert len(spans) == 2
    assert section.inside(Kind.INPUT, spans) == 2 * (1 + 4 + 1)  # iter, batches, the end
    assert section.inside(Kind.EVALUATION, spans) - len(spans) == 2 * 4
    assert section.inside(Kind.BACKWARD, spans) == 0
    assert section.names(Kind.FORWARD) == ["forward", "loss"] * 4


def test_work_between_phases_has_names(loops):
    section = loops["host_work"]
    names = Counter(section.names(Kind.HOST))
    assert names["lr_scheduler"] == 2
    assert names["logging"] == 2
    assert names["garbage collection"] >= 2
    assert section.names(Kind.OPTIMIZER) == ["clip_grad_value", "step"] * 2


def test_a_value_that_is_no_number_is_counted_when_it_is_read(loops):
    section = loops["not_a_number"]
    assert section.names(Kind.COUNTER).count(NAN_READ) == 4


def test_phases_of_the_main_lane_are_properly_nested(loops):
    rank = loops["lbfgs"].rank
    timed = [Kind.INPUT, Kind.COPY, Kind.FORWARD, Kind.BACKWARD, Kind.OPTIMIZER, Kind.CHECKPOINT]
    events = rank.events[[kind in timed for kind in rank.events["kind"].tolist()]]
    open_until: list[int] = []
    for begin, end in sorted(
        zip(events["begin_ns"].tolist(), events["end_ns"].tolist(), strict=True),
        key=lambda pair: (pair[0], -pair[1]),
    ):
        while open_until and open_until[-1] <= begin:
            open_until.pop()
        assert not open_until or end <= open_until[-1]
        open_until.append(end)


@pytest.mark.campaign("e2e")
def test_a_compiled_model_computes_the_same(tmp_path):
    script = SCRIPTS / "compiled.py"
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    plain = subprocess.run(
        [sys.executable, script, "inductor"],
        env={**os.environ, **cache},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    done = paceline(tmp_path, "run", "--out", "RUN", script, "inductor", env=cache)
    assert done.code == 0, done.err
    assert json.loads(done.out) == last_json(plain.stdout)
    rank = load_run(tmp_path / "RUN").ranks[0]
    assert len(rank.events_of(Kind.STEP)) == len(rank.events_of(Kind.BACKWARD)) == 5


# --- call signatures -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def signatures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("signatures")
    script = SCRIPTS / "signatures.py"
    for name, flags in (("plain", ["--no-record"]), ("recorded", [])):
        where = {"SIGNATURES": str(folder / name)}
        done = paceline(folder, "run", "-n", 2, *flags, "--out", f"RUN-{name}", script, env=where)
        assert done.code == 0, done.err
    return folder


@pytest.mark.parametrize("rank", [0, 1])
def test_every_legal_call_does_recorded_what_it_does_unrecorded(signatures, rank):
    plain, recorded = (
        json.loads((signatures / f"{name}-{rank}" / "found.json").read_text())
        for name in ("plain", "recorded")
    )
    assert recorded == plain
    assert all(plain.values())


def test_a_saved_file_has_its_bytes_however_it_is_named(signatures):
    (rank, _) = load_run(signatures / "RUN-recorded").ranks
    saved = [
        (signatures / "recorded-0" / f"{name}.pt").stat().st_size
        for name in ("plain", "keyword", "mixed", "protocol")
    ]
    assert rank.events_of(Kind.CHECKPOINT)["amount"].tolist() == [*saved, 0]  # a stream has no size


def test_copies_between_devices_are_seen_however_they_are_called(signatures):
    (rank, _) = load_run(signatures / "RUN-recorded").ranks
    names = [rank.names[number] for number in rank.events_of(Kind.COPY)["name"]]
    assert names == ["copy to", "copy to", "copy to", "copy copy_"]


def test_messages_of_all_signatures_find_their_other_side(signatures):
    matches = load_run(signatures / "RUN-recorded").matches
    assert len(matches.messages) == 2 * 5
    assert (matches.messages["partner"] >= 0).all()
    assert matches.mismatches() == ()


# --- gradients reduced by the script itself -------------------------------------------------------


def test_what_is_waited_for_after_backward_is_known_and_no_drain(tmp_path):
    done = paceline(tmp_path, "run", "-n", 2, "--out", "RUN", SCRIPTS / "own_reduction.py")
    assert done.code == 0, done.err
    assert last_json(done.out) == {"annotation": "<class 'int'>"}  # ours would make it text
    for rank in load_run(tmp_path / "RUN").ranks:
        waits = rank.events_of(Kind.WAIT)
        named = Counter(rank.names[name] for name in waits["name"])
        assert named["all_reduce"] == 4 * 4
        assert "" not in named
        reductions = rank.events_of(Kind.COLLECTIVE)
        assert set(waits["sequence"][waits["sequence"] > 0]) == set(reductions["sequence"])


@pytest.mark.parametrize("engine", ["allreduce", "sharded"])
def test_reductions_of_our_engines_are_collectives_of_both_ranks(tmp_path, engine):
    """One in shared memory was not recorded: no rank had waited for the late one."""
    script = (SCRIPTS / "engine_steps.py", engine)
    done = paceline(tmp_path, "run", "-n", 2, "--out", "RUN", *script)
    assert done.code == 0, done.err
    matches = load_run(tmp_path / "RUN").matches
    assert (matches.instances["ranks"] == 2).sum() >= 4
    assert matches.mismatches() == ()


# --- messages before each collective --------------------------------------------------------------


@pytest.mark.parametrize("collectives", ["torch", "paceline"])
def test_messages_between_two_of_three_ranks_make_nobody_wait_or_late(tmp_path, collectives):
    """Rank 0 sends to rank 1 before each all-reduce; ranks 1 and 2 send in a group of their own.

    Joined by a common numbering, collectives of rank 2 would meet others of ranks 0 and 1.
    """
    given = ("-n", 3, "--out", "RUN", "--collectives", collectives)
    done = paceline(tmp_path, "run", *given, SCRIPTS / "messages.py")
    assert done.code == 0, done.err
    trace = load_run(tmp_path / "RUN")
    for rank, receives in enumerate((0, 20, 20)):
        waits = trace.ranks[rank].events_of(Kind.WAIT)["name"]
        assert Counter(trace.ranks[rank].names[name] for name in waits)["recv"] == receives
    matches, analysis = trace.matches, analyse(trace)
    assert matches.mismatches() == ()
    names = [matches.operations[number] for number in matches.instances["operation"]]
    world = matches.instances["ranks"] == 3
    assert Counter(name for name, of_all in zip(names, world, strict=True) if of_all) == {
        "all_reduce": 20,
        "barrier": 1,
    }
    entered = matches.calls["enter_ns"][matches.by_instance]
    steps = matches.calls["step"][matches.by_instance]
    for row in range(len(names)):
        members = slice(*matches.instance_starts[row : row + 2])
        assert len(set(steps[members].tolist())) == 1, "joined with another step's"
        assert entered[members].max() == matches.instances["last_ns"][row]
    messages = matches.messages
    assert (messages["partner"] >= 0).all()
    assert len(messages) == 2 * 2 * 20
    # A message joined with another one, or a collective with another step's, would make ranks wait
    # for several steps; by itself nobody waits here for longer than a step takes.
    for phases in analysis.phases:
        assert (phases.seconds <= phases.step_s[:, None]).all()
    assert analysis.stragglers == ()


def test_a_model_may_outlive_its_process_group(tmp_path):
    """Our callbacks waited for the GIL, while the model joined the threads that ran them."""
    done = paceline(tmp_path, "run", "-n", 2, "--out", "RUN", SCRIPTS / "outlived_groups.py")
    assert done.code == 0, done.err


ENDS = """
import sys, paceline, torch.distributed as dist
from paceline.launch import attach
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
paceline.record("RUN")
group = dist.group.WORLD
collectives = attach._recording.collector.collectives
dist.destroy_process_group()
held = collectives.ended_group is group
attach.close()
print(held, collectives.ended_group)
"""


def test_the_last_to_hold_a_destroyed_group_is_python(tmp_path):
    """Freed by DistributedDataParallel, it joined threads with the GIL that they waited for."""
    command = [sys.executable, "-c", ENDS, str(tmp_path / "store")]
    done = subprocess.run(
        command, check=True, cwd=tmp_path, timeout=120, capture_output=True, text=True
    )
    assert done.stdout.split() == ["True", "None"]
