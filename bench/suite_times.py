"""A pytest plugin: appends seconds and outcome of each phase of each test to $SUITE_TIMES.

Fixtures have entries of their own: pytest charges a shared fixture to the first test that uses it.
"""

import json
import os
import time

import pytest


def _append(**entry):
    line = json.dumps(entry) + "\n"
    handle = os.open(os.environ["SUITE_TIMES"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(handle, line.encode())
    os.close(handle)


def _is_controller():
    return "PYTEST_XDIST_WORKER" not in os.environ


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report):
    if _is_controller():
        _append(
            test=report.nodeid,
            phase=report.when,
            seconds=round(report.duration, 4),
            outcome=report.outcome,
        )


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef, request):
    begin = time.perf_counter()
    try:
        return (yield)
    finally:
        took = time.perf_counter() - begin
        if took > 0.05:
            name = f"{fixturedef.baseid}::{fixturedef.argname}"
            _append(fixture=name, scope=fixturedef.scope, seconds=round(took, 4))
