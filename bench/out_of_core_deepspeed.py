"""DeepSpeed's offload on the models of bench/out_of_core.py: ZeRO stage 3, one rank on CPU.

out_of_core_deepspeed.py '{"model": ..., "device": "cpu" or "nvme", "steps": ..., "folder": ...}'

Runs in an environment of its own, with torch and DeepSpeed and without Paceline.
"""

import json
import os
import sys
import time
from pathlib import Path

os.environ.update(
    {"DS_ACCELERATOR": "cpu", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0",
     "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29417"}
)  # fmt: skip

import deepspeed
import torch
from out_of_core_models import make
from torch import nn


def main():
    asked = json.loads(sys.argv[1])
    model, inputs, target = make(asked["model"], False, asked["quick"])
    offload = {"device": asked["device"]}
    if asked["device"] == "nvme":
        offload["nvme_path"] = str(Path(asked["folder"]))
    engine, *_ = deepspeed.initialize(
        model=model,
        config={
            "train_batch_size": len(inputs),
            "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": offload,
                "offload_param": offload,
            },
        },
    )
    times = []
    for step in range(asked["steps"]):
        torch.manual_seed(step)
        begin = time.perf_counter()
        engine.backward(nn.functional.cross_entropy(engine(inputs), target))
        engine.step()
        times.append(time.perf_counter() - begin)
    print(json.dumps({"step_s": times}))


main()
