"""What all tests share: skips are accounted for, and the way to the project's own shared data."""

import os
import re
import signal
import time
from pathlib import Path

import pytest
from support import examples, forking

examples.load()

# A shell has what it starts in the background ignore SIGINT; programs of tests would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).parent.parent

# In CI a skip that is not on this list fails the run: a test that nobody runs proves nothing.
ALLOWED_SKIPS = (
    "mounting a tmpfs needs root",
    "mounting a file system needs root",
    "no loop devices here",
    "no direct transfers here",
    "vm.overcommit_memory is 1 here",
    "no Slurm here",
    "no GPU here",
    "one core here",
    "no Open MPI here",
    "no Fortran compiler of an MPI here",
    "no glibc here",
    "no namespaces of process ids here",
    "no network namespaces here",
    "no library here of which `make test` has no other use",  # h5py, OpenCV
    "no published traces here",
    "no environment with Keras is named",  # 1.5 GB, beside the project's own
    "timm is not installed",  # it needs torchvision; pip install --no-deps timm is enough here
)


@pytest.fixture(scope="session", autouse=True)
def _settings(tmp_path_factory):
    """Give the tests a token of their own, and let the user's settings be."""
    before = os.environ.get("XDG_CONFIG_HOME")
    os.environ["XDG_CONFIG_HOME"] = str(tmp_path_factory.mktemp("settings"))
    yield
    os.environ.pop("XDG_CONFIG_HOME")
    if before is not None:
        os.environ["XDG_CONFIG_HOME"] = before


# What runs behind `make test`, each part by itself: the list in scripts/campaign.
CAMPAIGNS = re.findall(r"^#   ([a-z]\w*)  +\S", (ROOT / "scripts/campaign").read_text(), re.M)


def pytest_addoption(parser):
    parser.addoption(
        "--campaign", choices=(*CAMPAIGNS, "all"), help="run this part's tests, and no others"
    )
    parser.addoption("--for-seconds", type=float, help="begin no test after this many seconds")


class _TimeLimit:
    """Passes over the tests that would begin after the time is over (`--for-seconds`)."""

    def __init__(self, seconds):
        self._end_s = time.monotonic() + seconds
        self._begun = set()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item):
        return True if time.monotonic() > self._end_s else None

    def pytest_runtest_logreport(self, report):
        self._begun.add(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter):
        terminalreporter.write_line(
            f"{len(self._begun)} tests began before time was over (--for-seconds)"
        )


def pytest_configure(config):
    seconds = config.getoption("--for-seconds")
    if seconds is not None:
        config.pluginmanager.register(_TimeLimit(seconds))


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no GPU here")


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    if nextitem is None or nextitem.path != item.path:
        leaked = forking.leaked_variables()
        assert not leaked, f"tests of {item.path.name} changed for all after them: {leaked}"


def pytest_collection_modifyitems(config, items):
    """Keep the tests of the campaign that was asked for; without one, those of no campaign."""
    wanted = config.getoption("--campaign")
    kept, left_out = [], []
    for item in items:
        parts = {part for mark in item.iter_markers("campaign") for part in mark.args}
        unknown = parts - {*CAMPAIGNS}
        if unknown:
            raise pytest.UsageError(f"{item.nodeid}: no campaign is called {unknown}")
        chosen = bool(parts) if wanted == "all" else wanted in parts if wanted else not parts
        (kept if chosen else left_out).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=left_out)


def pytest_terminal_summary(terminalreporter):
    unexpected = _unexpected_skips(terminalreporter)
    for reason in unexpected:
        terminalreporter.write_line(
            f"skip not on the list in tests/conftest.py: {reason}", red=True
        )


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session, exitstatus):
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("CI") and reporter and _unexpected_skips(reporter) and exitstatus == 0:
        session.exitstatus = 1


def _unexpected_skips(reporter):
    reasons = {str(report.longrepr[2]) for report in reporter.stats.get("skipped", [])}
    return sorted(
        reason for reason in reasons if not any(known in reason for known in ALLOWED_SKIPS)
    )


@pytest.fixture(scope="session")
def root():
    return ROOT
