"""Loops with and without rebalancing, whose shares are given and so do not depend on times.

    rebalanced_ranks.py STORE RANK RANKS FOLDER

Prints {case: {"plain": what the loop did, "shared": the same with shares, and its warnings}}.
"""

import json
import logging
import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from rebalanced import train, write_pack

from paceline.training.balance.script import ScriptBalance

CASES = {
    "plain": {},
    "workers": {"workers": 2},
    "accumulation": {"accumulate": 2},
    "store threads": {},
    "store processes": {"worker_kind": "process"},
    "accelerated": {"accelerate": True, "workers": 2},
    "sum": {"loss": "sum"},
    "ahead": {"ahead": True},
    "prepared": {"prepared": True},  # last: from then on this process weighs gradients itself
}


BALANCES = []  # kept to the end, as a run's is: its connections are not closed before the peers'


class Kept(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def shared(folder, options):
    folder.mkdir(exist_ok=True)
    balance = ScriptBalance(folder, weights=(1, 0.5))
    BALANCES.append(balance)
    kept = Kept()
    logging.getLogger("paceline.training.balance").addHandler(kept)
    balance.install()
    try:
        return {**train(**options), "warnings": kept.lines}
    finally:
        balance.hooks.remove()
        balance.close()
        logging.getLogger("paceline.training.balance").removeHandler(kept)


def main():
    store_path, rank, ranks, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    store = dist.FileStore(store_path, ranks)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    if rank == 0:
        write_pack(Path(folder))
    dist.barrier()
    for case in ("store threads", "store processes"):
        CASES[case]["store"] = str(Path(folder, "pack"))
    said = {
        case: {"plain": train(**options), "shared": shared(Path(folder, case), options)}
        for case, options in CASES.items()
    }
    print(json.dumps(said))


main()
