"""What is recorded of some steps, and of nodes, in real runs: layers, memory, operators."""

import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.launching import SCRIPTS, last_json, paceline
from torch import nn

from paceline.native import Recorder
from paceline.trace.collectors import torch_internals as internals
from paceline.trace.collectors.torch_internals import Capability
from paceline.trace.collectors.torch_layers import LayerRecorder
from paceline.trace.format.events import NODE, Kind, LocationType
from paceline.trace.format.files import read_trace
from paceline.trace.merge import load_run

STEPS, SECONDS, PROFILED = 40, 1.0, 2
WIDTH, BATCH, FLOAT = 32, 64, 4
LAYERS = {"body", "body.first", "body.second", "head"}


def results(folder, name):
    return [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in (0, 1)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("detail")
    script = SCRIPTS / "layered.py"
    for name, seconds, flags in (
        ("recorded", SECONDS, ("--profile-steps", PROFILED)),
        ("plain", 0, ("--no-record",)),
    ):
        command = ("run", "-n", 2, *flags, "--out", f"RUN-{name}", script, name, STEPS, seconds)
        done = paceline(folder, *command)
        assert done.code == 0, done.err
        assert "not recorded" not in done.err
    return folder


@pytest.fixture(scope="module")
def run(folder):
    return folder / "RUN-recorded"


@pytest.fixture(scope="module")
def stats(folder):
    done = paceline(folder, "trace", "stats", "RUN-recorded", "--json")
    assert done.code == 0, done.err
    return last_json(done.out)


def test_the_weights_are_those_of_an_unrecorded_run_bit_for_bit(folder):
    recorded, plain = results(folder, "recorded"), results(folder, "plain")
    assert recorded == plain
    assert recorded[0]["hooks"] == []
    assert recorded[0]["digest"] == recorded[1]["digest"]


def test_layers_are_timed_in_few_steps_of_all_ranks(stats, run):
    layers = {layer["name"]: layer for layer in stats["sampled"]["layers"]}
    assert {name for name, layer in layers.items() if layer["calls"]} == LAYERS
    body, first = layers["body"], layers["body.first"]
    assert body["calls"] == 1
    assert body["forward_s"] >= first["forward_s"] + layers["body.second"]["forward_s"] > 0
    assert first["gradient_bytes"] == FLOAT * (2 * WIDTH * WIDTH + 2 * WIDTH)
    assert layers["(model)"]["gradient_bytes"] == FLOAT
    # Backward goes the other way.
    order = ("(model)", "head", "body.second", "body.first")
    ready = [layers[name]["ready_s"] for name in order]
    assert ready == sorted(ready)
    for rank in load_run(run).ranks:
        sampled = set(rank.events_of(Kind.LAYER)["step"].tolist())
        assert 4 in sampled
        assert len(sampled) <= 1 + STEPS // 16


def test_layers_lie_within_the_forward_pass_and_gradients_in_the_backward_pass(run):
    for rank in load_run(run).ranks:
        for inner, outer in ((Kind.LAYER, Kind.FORWARD), (Kind.GRADIENT, Kind.BACKWARD)):
            around = rank.events_of(outer)
            for event in rank.events_of(inner):
                inside = (around["begin_ns"] <= event["begin_ns"]) & (
                    event["end_ns"] <= around["end_ns"]
                )
                assert inside.sum() == 1


def test_memory_is_counted_by_what_holds_it(stats, folder):
    parameters = results(folder, "recorded")[0]["parameters"]
    for held in stats["sampled"]["memory"]:
        kinds = held["held_bytes"]
        assert kinds["parameters"] == kinds["gradients"] == FLOAT * parameters
        steps = 7 * FLOAT  # AdamW counts the steps of each parameter
        assert kinds["optimizer"] == 2 * FLOAT * parameters + steps
        assert kinds["other"] > 0
        # What the first layer gives to the next: linear and relu keep it.
        assert kinds["activations"] >= FLOAT * BATCH * 2 * WIDTH
        assert held["host_bytes"] > sum(kinds.values()) / 2
    assert [held["rank"] for held in stats["sampled"]["memory"]] == [0, 1]


def test_the_profiler_adds_operators_of_the_steps_that_were_asked_for(stats, run):
    operators = {row["name"]: row for row in stats["sampled"]["operators"]}
    assert operators["aten::addmm"]["calls"] == 3
    assert operators["aten::addmm"]["device"] == "cpu"
    assert operators["aten::linear"]["total_s"] >= operators["aten::linear"]["self_s"] > 0
    assert operators["aten::addmm"]["steps"] == 2 * PROFILED
    for rank in load_run(run).ranks:
        events = rank.events_of(Kind.OPERATOR)
        assert set(events["step"].tolist()) == {5, 6}
        forwards = rank.events_of(Kind.FORWARD)
        linear = events[events["name"] == rank.names.index("aten::linear")]
        inside = [
            (
                (forwards["begin_ns"] <= event["begin_ns"])
                & (event["end_ns"] <= forwards["end_ns"])
            ).any()
            for event in linear
        ]
        assert all(inside), "the profiler's clock is brought onto the recorder's"


def test_one_rank_of_a_node_counts_for_it(stats, run):
    (node,) = stats["nodes"]
    assert node["ranks"] == [0, 1]
    series = {figure["name"]: figure for figure in node["series"]}
    assert 0 < series["memory"]["most"] <= node["memory_bytes"]
    assert {"cpu", "runnable", "received", "sent"} <= set(series)
    assert 0 < series["cpu"]["most"] <= 1.1
    assert node["ends_s"] == sorted(node["ends_s"])
    assert len(node_ranks(run)) == 1


def node_ranks(run):
    """Return the ranks that recorded counters of their node."""
    found = []
    for rank in load_run(run).ranks:
        names = {
            number
            for number, location in enumerate(rank.locations)
            if location.type is LocationType.PROCESS and location.name.startswith(NODE)
        }
        if set(rank.events["location"].tolist()) & names:
            found.append(rank.rank)
    return found


def test_other_tools_and_the_report_show_them(folder, run):
    for words in (("trace", "export", run), ("report", run), ("trace", "stats", run)):
        done = paceline(folder, *words)
        assert done.code == 0, done.err
    assert "body.second" in done.out
    events = json.loads((run / "trace.json").read_text())["traceEvents"]
    kinds = {event.get("cat") for event in events}
    assert {"layer", "gradient", "operator"} <= kinds
    assert any(event["ph"] == "C" and event["name"] == "node_busy_ns" for event in events)
    page = (run / "report.html").read_text()
    assert 'id="nodes"' in page
    assert "body.second" in page
    assert "aten::addmm" in page


def test_an_mpi_program_s_node_is_counted_too(tmp_path):
    pytest.importorskip("mpi4py")
    script = Path(__file__).parent / "mpi" / "timed.py"
    done = paceline(tmp_path, "run", "--mpi", "-n", 2, "--out", "RUN", "--", script, SECONDS)
    assert done.code == 0, done.err
    assert len(node_ranks(tmp_path / "RUN")) == 1


# NVML as NVIDIA documents it, for two GPUs.
NVML = """
#include <stdint.h>
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
  *device = (void *)(uintptr_t)(index + 1);
  return 0;
}
int nvmlDeviceGetUtilizationRates(void *device, unsigned *rates) {
  rates[0] = 10 * (unsigned)(uintptr_t)device;
  rates[1] = 0;
  return 0;
}
int nvmlDeviceGetMemoryInfo(void *device, unsigned long long *bytes) {
  bytes[0] = 1000;
  bytes[2] = 100 * (uintptr_t)device;
  return 0;
}
int nvmlDeviceGetPowerUsage(void *device, unsigned *milliwatts) {
  if ((uintptr_t)device == 2) return 3;  // not supported
  *milliwatts = 7000;
  return 0;
}
"""
COUNTING = """
import os, sys, threading
from paceline.native import Recorder
from paceline.trace.format.files import read_trace
from pathlib import Path
path = Path(sys.argv[1]) / "rank-00000.trace"
recorder = Recorder(str(path), 0, 1, 1 << 10, 0.01)
recorder.count_node(os.fsencode(path.parent))
recorder.begin(3)
never = threading.Event()
while "node_gpu1_busy_percent" not in read_trace(path).names:
    never.wait(0.02)
recorder.close()
"""


def test_gpus_are_counted_by_nvml(tmp_path):
    """By a library that stands for it: no GPU is here."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler here")
    (tmp_path / "nvml.c").write_text(NVML)
    library = tmp_path / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", tmp_path / "nvml.c", "-o", library], check=True)
    subprocess.run(
        [sys.executable, "-c", COUNTING, tmp_path],
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
        timeout=60,
        check=True,
    )
    trace = read_trace(tmp_path / "rank-00000.trace")
    counters = {
        trace.names[event["name"]]: int(event["amount"])
        for event in trace.events_of(Kind.COUNTER)
        if trace.names[event["name"]].startswith("node_gpu")
    }
    assert counters == {
        "node_gpu0_busy_percent": 10,
        "node_gpu0_memory_bytes": 100,
        "node_gpu0_memory_total_bytes": 1000,
        "node_gpu0_power_mw": 7000,
        "node_gpu1_busy_percent": 20,
        "node_gpu1_memory_bytes": 200,
        "node_gpu1_memory_total_bytes": 1000,
    }


# --- a torch whose hooks changed -----------------------------------------------------------------


def test_a_torch_without_gradient_hooks_loses_them_and_says_so(monkeypatch, caplog, tmp_path):
    monkeypatch.delattr(torch.Tensor, "register_post_accumulate_grad_hook")
    available = internals.available()
    assert Capability.GRADIENT_HOOKS not in available
    assert "not recorded: when gradients become ready; torch " in caplog.text
    names, counts = sampled_step(tmp_path, available)
    assert names == {"0", "1"}, "layers are timed all the same"
    assert Kind.GRADIENT not in counts


def test_a_hook_that_fails_stops_the_sampling_and_nothing_else(monkeypatch, caplog, tmp_path):
    def fail(*_):
        raise AttributeError("torch calls it otherwise")

    monkeypatch.setattr(internals, "see_gradient", fail)
    with caplog.at_level(logging.WARNING):
        names, _ = sampled_step(tmp_path, frozenset(Capability))
    assert names == {"0", "1"}
    assert caplog.text.count("not recorded from here on: times of layers, and when gradients") == 1


def sampled_step(folder, available):
    """Sample a step of a model; return the layers that were timed, and the events by kind."""
    path = folder / "rank-00000.trace"
    recorder = Recorder(str(path), 0, 1)
    passed_on = {int(Kind.FORWARD)}
    layers = LayerRecorder(recorder, passed_on, available)
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    for _ in range(4):
        layers.timed.attempt(layers.end_step, 0)
        recorder.end_step()
    assert layers.sampling
    assert not passed_on
    layers.enter_model(model)
    for module in model:
        layers.close(layers.open(module))
    layers.timed.attempt(layers.before_backward)
    model(torch.ones(1, 2)).sum().backward()
    layers.timed.attempt(layers.after_backward)
    layers.timed.attempt(layers.end_step, 0)
    assert passed_on == {int(Kind.FORWARD)}
    assert all(weight._post_accumulate_grad_hooks is None for weight in model.parameters())
    recorder.close()
    trace = read_trace(path)
    names = {trace.names[name] for name in trace.events_of(Kind.LAYER)["name"]}
    return names, {Kind(kind) for kind in trace.events["kind"].tolist()}
