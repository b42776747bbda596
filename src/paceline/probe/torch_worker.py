"""The worker that `doctor` asks which torch is installed: its import may hang or crash."""

from __future__ import annotations

import torch
import torch.distributed as dist

from paceline.core.worker_process import serve
from paceline.probe.protocol import TorchFacts, TorchRequest


def run(_request: TorchRequest) -> TorchFacts:
    """Return what torch says of itself."""
    available = {}
    if dist.is_available():
        available = {
            "gloo": dist.is_gloo_available(),
            "nccl": dist.is_nccl_available(),
            "mpi": dist.is_mpi_available(),
        }
    return TorchFacts(
        torch=str(torch.__version__),
        gpus=torch.cuda.device_count(),
        backends=tuple(name for name, built_in in available.items() if built_in),
    )


if __name__ == "__main__":
    serve(TorchRequest, run)
