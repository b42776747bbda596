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
