"""What all tests share: skips are accounted for, and the way to the project's own shared data."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# In CI a skip that is not on this list fails the run: a test that nobody runs proves nothing.
ALLOWED_SKIPS = (
    "mounting a tmpfs needs root",
    "no Slurm here",
    "no GPU here",
)


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
    return sorted(one for one in reasons if not any(known in one for known in ALLOWED_SKIPS))


@pytest.fixture(scope="session")
def root():
    return ROOT
