"""The memory of a rank's process at the peak of a step, by kind.

::

    process       interpreter, torch, imports: before there is a model
    parameters, gradients, optimizer, buffers, input
    activations   tensors alive at the peak beyond these: saved ones, and what operators hand on
    buckets       DistributedDataParallel's copies of the gradients
    allocator     what operators use within themselves, and holes between tensors

Kinds that are not alive at the same time (all gradients are there when most activations are gone)
are not added up: activations are what the peak of the captured step has beyond the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.core.measured_step import MeasuredStep
    from paceline.core.plan import Plan
    from paceline.core.workload import Workload

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
# Processes have more than their tensors: kernels' code and buffers, and holes between tensors.
# Measured by bench/predict_unseen.py; see bench/LOG.md.
KERNEL_BYTES = 16 << 20
HOLES_SHARE = 0.08  # of the tensors


def memory_bytes(
    workload: Workload, plan: Plan, measured: MeasuredStep | None = None
) -> dict[str, int]:
    """Return the bytes that a rank needs at its peak, by kind.

    Args:
        workload: of a rank's step.
        plan: how it is spread.
        measured: the step as it ran in a process of its own, without buckets; None: none did.
    """
    scale = DTYPE_BYTES[plan.precision] / DTYPE_BYTES["float32"]
    kinds = {
        "parameters": workload.parameter_bytes,
        "gradients": workload.trained_bytes,
        "optimizer": workload.optimizer_bytes,
        "activations": int(workload.saved_bytes * scale),
        "buffers": workload.buffer_bytes,
        "input": workload.input_bytes,
    }
    if workload.peak_bytes:
        others = sum(size for kind, size in kinds.items() if kind != "activations")
        kinds["activations"] = int(max(0, workload.peak_bytes - others) * scale)
    tensors = sum(kinds.values())
    kinds["buckets"] = workload.trained_bytes if plan.mesh.data > 1 else 0
    if measured is not None and measured.peak_bytes:
        kinds["process"] = measured.base_bytes
        kinds["allocator"] = max(0, measured.peak_bytes - measured.base_bytes - tensors)
    elif workload.process_bytes:
        kinds["process"] = workload.process_bytes
        kinds["allocator"] = KERNEL_BYTES + int(HOLES_SHARE * tensors)
    return kinds
