"""A paused collector leaves torch as it was: what bench/record_overhead.py rests on."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.launching import last_json

from paceline.trace.collectors.hook_registry import HookRegistry

SCRIPT = Path(__file__).parent / "scripts" / "paused_collector.py"


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Where torch differs from before the collector, after each of its changes."""
    done = subprocess.run(
        [sys.executable, SCRIPT, tmp_path_factory.mktemp("paused")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return last_json(done.stdout)


def test_the_comparison_sees_each_kind_of_hook(places):
    installed = places["installed"]
    for place in (
        "torch.nn.modules.module.Module.__call__",
        "torch.autograd.backward",
        "torch.distributed._broadcast_coalesced",
        "torch.optim.optimizer._global_optimizer_pre_hooks",
        "dispatcher c10d::allreduce_",
        "dispatcher _c10d_functional::wait_tensor",
        "paceline.store.feed.loader.LoaderIterator.__next__",
    ):
        assert place in installed


def test_nothing_of_it_is_left_in_a_pause(places):
    assert places["paused"] == []
    assert places["paused again"] == []


def test_what_resumes_is_all_of_it_and_only_its_steps_are_recorded(places):
    assert places["resumed"] == places["installed"]
    assert places["steps"] == 6


class Owner:
    """Has an attribute of its own and one that it inherits."""

    def own(self):
        return "own"


class Heir(Owner):
    """Inherits it."""


def test_a_hook_that_the_script_has_replaced_is_left_to_it():
    hooks = HookRegistry()
    hooks.replace(Heir, "own", lambda _: "hook")
    hooks.remove()
    assert "own" not in vars(Heir)
    hooks.put_back()
    assert Heir().own() == "hook"
    Heir.own = lambda _: "script"
    hooks.remove()
    assert Heir().own() == "script"


def test_a_hook_that_comes_during_a_pause_waits_for_its_end():
    hooks, seen = HookRegistry(), []
    hooks.remove()
    hooks.add(lambda: seen.append("put") or (lambda: seen.append("removed")))
    assert seen == []
    hooks.put_back()
    hooks.put_back()
    hooks.remove()
    assert seen == ["put", "removed"]
