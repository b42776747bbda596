"""The event schema: flat records of a rank's activity, the same for every framework.

An event is an interval at a location: a thread, a stream of a device, or a communication lane.
Events of one location are properly nested, except on communication lanes, where collectives and
messages last from issue to completion and overlap. Analyses see arrays of `EVENT_DTYPE`, never
objects. The bytes on disk are in docs/reference/trace-format.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

FORMAT_VERSION = 3
IDLE = 0  # a rank's phase between phases; no kind of event has this number


class Kind(IntEnum):
    """The kind of an event; the numbers are those of the file."""

    INPUT = 1
    COPY = 2
    FORWARD = 3
    BACKWARD = 4
    OPTIMIZER = 5
    COLLECTIVE = 6
    WAIT = 7
    CHECKPOINT = 8
    COUNTER = 9
    STEP = 10
    SEND = 11
    RECV = 12
    EVALUATION = 13
    HOST = 14
    SAMPLE = 15
    STAGE = 16
    READ = 17
    WRITE = 18
    LAYER = 19
    GRADIENT = 20
    OPERATOR = 21
    KERNEL = 22
    COMPILATION = 23


class LocationType(IntEnum):
    """The type of a location; the numbers are those of the file."""

    PROCESS = 1
    THREAD = 2
    STREAM = 3
    COMMUNICATION = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Location:
    """Where events happen.

    Attributes:
        type: a process, a thread, a stream of a device, or a lane of communication.
        name: for people.
        process: id of its process in the operating system; 0 if not known.
        number: id of the thread, or number of the stream or lane, within the process.
    """

    type: LocationType
    name: str
    process: int = 0
    number: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Ranks that communicate.

    Attributes:
        name: equal on all members.
        members: global ranks, in order of their rank in the group; empty if not known.
    """

    name: str
    members: tuple[int, ...] = ()


# The first two locations of each file: the thread of the training loop, and the lane of its
# collectives and messages.
MAIN, COMMUNICATION = 0, 1

# `amount` is the bytes of the rank's tensors; of a counter, its value. `name`, `group`, `location`
# are indices into the rank's tables. `sequence` counts from 1: a group's collectives, or the
# messages of one (group, source, destination, tag). `peer` is the global rank of the root or of
# the other side, -1 for none. `tag` is that of a message; of an optimizer's step, a loader's batch
# and a forward pass it is the number of the optimizer, loader or module, from 1; of a collective it
# is the name of the path that its bytes took, of a call for a file (READ, WRITE) the name that is
# its path (indices like `name`); 0 for none. Of an action of a pipeline (STAGE) `tag` is the stage,
# `amount` the microbatch, and `sequence` the number of the batch on this rank. Of an operator
# (OPERATOR) `amount` is the nanoseconds that it spent outside of operators within it.
EVENT_DTYPE = np.dtype(
    [
        ("begin_ns", "<u8"),
        ("end_ns", "<u8"),
        ("amount", "<u8"),
        ("step", "<u4"),
        ("sequence", "<u4"),
        ("peer", "<i4"),
        ("tag", "<i4"),
        ("name", "<u2"),
        ("group", "<u2"),
        ("location", "<u2"),
        ("kind", "u1"),
        ("flags", "u1"),
    ]
)

# A flag: completion was not observed, so `end_ns` is when the call returned. Backends that queue
# collectives on a device's stream (NCCL) report completion when the work is queued.
COMPLETION_UNKNOWN = 1
# A flag of a collective or message: the main thread waited for it from begin to end.
# `merge.blocking` adds that wait.
BLOCKING = 8
# Flags of a forward pass: gradients were disabled; the module was in evaluation mode.
WITHOUT_GRADIENTS, EVALUATION_MODE = 2, 4

# Collectives after which every rank of the group knows that all others have entered. In all others
# data flows one way, in some of them from or to a root.
SYNCHRONISING = frozenset(
    {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier", "fence"}
)
TO_ROOT = frozenset({"reduce", "gather"})
ROOTED = TO_ROOT | {"broadcast", "scatter"}
# Collectives to which each rank gives the same number of bytes.
EQUAL_SIZES = frozenset({"all_reduce", "reduce_scatter", "broadcast", "reduce"})

SEND, RECV = "send", "recv"  # names of messages, and of waits for them
NEXT, LOSS = "next", "loss"  # names of a loader's batch, and of what follows the forward pass
# Names of STEP events: what ended the step as it was recorded. `merge.steps` joins them to steps.
BY_OPTIMIZER, BY_BATCH, BY_BACKWARD, BY_SCRIPT = "step", "batch", "backward", "paceline.step()"
# The same in MPI programs: marks of the program, repetitions that `merge.repetition` finds, and the
# end of the whole run.
BY_PCONTROL, BY_REPETITION, BY_RUN = "MPI_Pcontrol", "repeated collectives", "MPI_Finalize"
BACKEND = "backend "  # begins a name of no event: what carries the messages of the rank's groups
EVALUATION_SPAN = "evaluation"  # name of the event from the first to the last of an evaluation
PYTHON_CODE = "Python code"  # name of a SAMPLE: of what function or line is not known
GARBAGE_COLLECTION = "garbage collection"  # name of a HOST event
NAN_READ = "nan_read"  # a counter: the script read a tensor's value, and it was not a number
WAIT_ALL = "wait_all"  # a wait for several collectives and messages, which end with it
DRAIN = "drain"  # the wait at the end of a backward pass for collectives issued within it
# Counters of a step, summed over the process's threads: time on a core, and time runnable without.
RUNNING, NOT_RUNNING = "running_ns", "not_running_ns"
# The same of the main thread alone.
MAIN_RUNNING, MAIN_NOT_RUNNING = "main_running_ns", "main_not_running_ns"
# The same of the main thread of an MPI program outside of MPI, where it may spin while it waits.
PROGRAM_RUNNING, PROGRAM_NOT_RUNNING = "program_running_ns", "program_not_running_ns"
# Counters of the main thread since the last of them: page faults for which it had to wait for
# storage, as of a mapped file, and bytes that it had fetched from there, by faults and by calls.
MAJOR_FAULTS, STORAGE_BYTES = "major_faults", "storage_bytes"
# A counter: the process was stopped (SIGSTOP, a debugger, a frozen container) until this moment.
STOPPED = "stopped"
# A counter at an optimizer's first step: bytes of all parameters that optimizers have stepped.
TRAINED_BYTES = "trained_parameter_bytes"
# A counter at each broadcast of a model's buffers by DistributedDataParallel: their bytes.
BUFFER_BYTES = "broadcast_buffer_bytes"
# A counter when the script begins to iterate over a loader: its workers, which load ahead.
LOADER_WORKERS = "loader_workers"
# Counters of a step on a node that serves data, by the node's first rank: how much each count of
# the memory of requests (range_requests.hpp) grew.
DATA_COUNTERS = {
    "data_local_bytes": "local_bytes",
    "data_peer_bytes": "peer_bytes",
    "data_request_source_bytes": "request_source_bytes",
    "data_program_source_bytes": "program_source_bytes",
    "data_read_ns": "read_ns",
    "data_staged_source_bytes": "staged_source_bytes",
    "data_staged_peer_bytes": "staged_peer_bytes",
    "data_sent_bytes": "sent_bytes",
}
DATA_QUEUE = "data_queue"  # a counter of the same: requests that waited at the end of the step
# Counters of each batch of the store's loader, with the loader's number as their tag: nanoseconds
# that its worker spent by stage, and its samples.
LOADER_STAGES = {
    stage: f"loader_{stage}_ns" for stage in ("read", "verify", "decode", "transform", "collate")
}
LOADER_SAMPLES = "loader_samples"
# Counters of a DataLoader of torch, with its number as their tag: by how much sums over its workers
# grew since the last of them. Fetching is all that a data set does for a batch, of which the thread
# ran on a core for `core`, was runnable without one for `queued` (where the kernel says so), and
# spent `files` in calls for files, where these are recorded; handing over lasts from the end of a
# worker's batch, or of the loop's own work, until the loop has it.
DATALOADER_COUNTERS = {
    "batches": "dataloader_batches",
    "samples": "dataloader_samples",
    "fetch": "dataloader_fetch_ns",
    "core": "dataloader_fetch_core_ns",
    "queued": "dataloader_fetch_queued_ns",
    "files": "dataloader_fetch_files_ns",
    "collate": "dataloader_collate_ns",
    "hand_over": "dataloader_hand_over_ns",
}
# Calls for files. Long ones are events of these names: write, sync and close are WRITE, the others
# READ. At the end of the run each file has counters with its path as their tag: "io_read" counts
# its calls, "io_read_ns" and "io_read_bytes" are theirs.
IO_OPERATIONS = ("open", "stat", "list", "read", "write", "sync", "map", "close")
IO_COUNTERS = {operation: f"io_{operation}" for operation in IO_OPERATIONS}
IO_AT_ONCE = "io_at_once"  # a counter: how many of a file's calls were under way at one time
# Steps in which layers are timed, and where the memory of a rank is counted, come now and then: a
# counter at the end of each says what that took of the rank's time, and of what it was.
SAMPLED_LAYERS, SAMPLED_MEMORY = "sampled_layers_ns", "sampled_memory_ns"
# Counters of memory, by what holds it: at the end of a step, but activations, which are what the
# forward pass left for the backward pass; the last is resident anonymous memory of the process.
MEMORY_KINDS = ("parameters", "gradients", "optimizer", "activations", "other")
MEMORY_COUNTERS = {kind: f"memory_{kind}_bytes" for kind in MEMORY_KINDS}
MEMORY_HOST = "memory_host_bytes"
PROFILED = "torch.profiler"  # name of a HOST event: the profiler started, or gave its events
# Counters of a node, at a location of their own, by one rank of the node. Each is of the time from
# `begin_ns` to `end_ns`; those of GPUs are called node_gpu0_busy_percent and so on.
NODE = "node "  # begins the name of that location
NODE_BUSY, NODE_STOLEN, NODE_CORES = "node_busy_ns", "node_stolen_ns", "node_cores"
NODE_RUNNABLE = "node_runnable"
NODE_MEMORY, NODE_MEMORY_TOTAL = "node_memory_bytes", "node_memory_total_bytes"
NODE_BYTES = {
    "received": "node_received_bytes",
    "sent": "node_sent_bytes",
    "read": "node_read_bytes",
    "written": "node_written_bytes",
}
NODE_GPU = "node_gpu"  # begins the name of a GPU's counter
