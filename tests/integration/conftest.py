"""What the package starts in a test's own process is forked, too: readers of nodes, and workers."""

import functools
import os
import subprocess
import types
import weakref

import pytest
from support import forking

from paceline.core import worker_process
from paceline.store.feed.node import client


@pytest.fixture(autouse=True, scope="session")
def _forked_processes():
    started = weakref.WeakValueDictionary()

    def start_worker(*args, **options):
        process = forking.Popen(*args, modules=forking.TORCH, **options)
        started[process.pid] = process
        return process

    forks = {
        client: functools.partial(forking.Popen, modules=forking.PLAIN),
        worker_process: start_worker,
    }
    with pytest.MonkeyPatch.context() as patch:
        for module, start in forks.items():
            forked = types.SimpleNamespace(**vars(subprocess))
            forked.Popen = start
            patch.setattr(module, "subprocess", forked)
        # A fork is a child of its server, whom a worker's caller asks how it ended.
        asking = types.SimpleNamespace(**vars(os))
        asking.waitid = lambda _kind, pid, flags: started[pid].waitid(flags)
        patch.setattr(worker_process, "os", asking)
        yield
