"""The part of Horovod's interface that training scripts use, on torch.distributed.

    import paceline.collectives.horovod as hvd        # was: import horovod.torch as hvd

The process group is the script's own if it has made one, else one of the backend ``paceline``. The
ranks are those of torchrun, `paceline run`, mpirun or srun. A name that is not here raises an
AttributeError, rather than doing something else (docs/guides/collectives.md lists them).

Source: A. Sergeev, M. Del Balso, Horovod: fast and easy distributed deep learning in TensorFlow,
2018; names and numbers are those of horovod.torch 0.28.
"""

from paceline.collectives.horovod.calls import (
    Average,
    Max,
    Min,
    Product,
    Sum,
    allgather,
    allgather_object,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    barrier,
    broadcast,
    broadcast_,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
    grouped_allreduce,
    poll,
    synchronize,
)
from paceline.collectives.horovod.compression import Compression
from paceline.collectives.horovod.optimizer import DistributedOptimizer
from paceline.collectives.horovod.ranks import (
    cross_rank,
    cross_size,
    init,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)

__all__ = [
    "Average",
    "Compression",
    "DistributedOptimizer",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "cross_rank",
    "cross_size",
    "grouped_allreduce",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "poll",
    "rank",
    "shutdown",
    "size",
    "synchronize",
]

# Names of Horovod that are not here: each with what to do.
_ABSENT = {
    "Adasum": "use hvd.Average or hvd.Sum",
    "ProcessSet": "make a group with torch.distributed.new_group",
    "add_process_set": "make a group with torch.distributed.new_group",
    "elastic": "start the script again from its last checkpoint",
    "join": "give all ranks equally many steps, or use torch.distributed.algorithms.Join",
    "reducescatter": "call torch.distributed.reduce_scatter_tensor",
    "sparse_allreduce_async": "use dense gradients (nn.Embedding(sparse=False))",
}


def __getattr__(name: str) -> object:
    if name in _ABSENT:
        raise AttributeError(f"{__name__} has no {name}, which Horovod has: {_ABSENT[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
