"""Prints which path calls take in groups with each of the given machine files, or their error.

chosen_paths.py MACHINE...
"""

import json
import logging
import sys
import warnings

import torch
import torch.distributed as dist

from paceline.collectives.options import CollectivesConfig
from paceline.core.errors import PacelineError

KIB = 1024
warned = []


class Collect(logging.Handler):
    def emit(self, record):
        warned.append(record.getMessage())


def path_of(work):
    work.wait()
    return getattr(work, "path", "gloo")


def paths(machine):
    try:
        group = dist.new_group(backend="paceline", pg_options=CollectivesConfig(machine=machine))
    except PacelineError as problem:
        return f"{type(problem).__name__}: {problem}"
    found = {}
    for size in (4 * KIB, 64 * KIB, 2048 * KIB):
        data = torch.ones(size // 4)
        found[f"all_reduce {size}"] = path_of(dist.all_reduce(data, group=group, async_op=True))
        assert data[0].item() == dist.get_world_size()
        found[f"broadcast {size}"] = path_of(dist.broadcast(data, 0, group=group, async_op=True))
    return found


def main():
    warnings.simplefilter("ignore")
    logging.getLogger("paceline").addHandler(Collect())
    dist.init_process_group("gloo")
    found = {machine: paths(machine) for machine in sys.argv[1:]}
    dist.barrier()
    print(json.dumps({"rank": dist.get_rank(), "paths": found, "warned": warned}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
