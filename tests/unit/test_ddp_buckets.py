"""DDP's bucket sizes by default: the plan's, unless the script sets its own."""

import sys

import pytest
from support import forking

pytest.importorskip("torch")

PROGRAM = """
import sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from paceline.launch.worker.ddp_buckets import set_bucket_bytes

set_bucket_bytes(int(sys.argv[1]), int(sys.argv[2]))
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
settings = eval(sys.argv[3])
model = DistributedDataParallel(torch.nn.Linear(2, 2), **settings)
config = getattr(model, "_bucket_config", None)
first = config.per_bucket_bytes_caps[0] if config and config.per_bucket_bytes_caps else (
    dist._DEFAULT_FIRST_BUCKET_BYTES if model.bucket_bytes_cap_default else model.bucket_bytes_cap)
print(model.bucket_bytes_cap, first)
dist.destroy_process_group()
"""
MIB = 1 << 20


@pytest.mark.parametrize(
    ("plan", "script", "expected"),
    [
        ((25 * MIB, MIB // 2), "{}", (25 * MIB, MIB // 2)),
        ((4 * MIB, 4 * MIB), "{}", (4 * MIB, 4 * MIB)),
        ((4 * MIB, 2 * MIB), "{}", (4 * MIB, 2 * MIB)),
        ((4 * MIB, 4 * MIB), "{'bucket_cap_mb': 7}", (7 * MIB, 7 * MIB)),
        ((4 * MIB, 4 * MIB), "{'bucket_cap_mb': None}", (4 * MIB, 4 * MIB)),
    ],
)
def test_the_plan_sets_the_default_and_the_script_wins(plan, script, expected):
    command = [sys.executable, "-c", PROGRAM, *map(str, plan), script]
    done = forking.run(command, modules=forking.TORCH, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = tuple(map(int, done.stdout.split()[-2:]))
    if "takes bucket_bytes" in done.stderr:  # a torch that has one size for all but its default
        expected = (expected[0], expected[0])
    assert found == expected
