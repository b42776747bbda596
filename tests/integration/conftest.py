"""The reader of a node, which the package starts in a test's own process, is forked too."""

import functools
import subprocess
import types

import forking
import pytest

from paceline.store.feed.node import client


@pytest.fixture(autouse=True, scope="session")
def _forked_reader():
    forked = types.SimpleNamespace(**vars(subprocess))
    forked.Popen = functools.partial(forking.Popen, modules=forking.PLAIN)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "subprocess", forked)
        yield
