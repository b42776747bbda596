"""Processes that the package starts in a test's own process are forked too."""

import functools
import subprocess
import types

import forking
import pytest

from paceline.core import worker_process
from paceline.store.feed.node import client


@pytest.fixture(autouse=True, scope="session")
def _forked_workers():
    with pytest.MonkeyPatch.context() as patch:
        for module, modules in ((worker_process, forking.TORCH), (client, forking.PLAIN)):
            forked = types.SimpleNamespace(**vars(subprocess))
            forked.Popen = functools.partial(forking.Popen, modules=modules)
            patch.setattr(module, "subprocess", forked)
        yield
