"""How a script is run: the configuration of ``paceline run``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from paceline.core.allocator import AllocatorChoice
from paceline.core.config import Configuration
from paceline.core.errors import UsageError
from paceline.core.plan import CollectivesChoice, StrategyChoice
from paceline.launch.rendezvous.root import Deadlines

PROFILE_STEPS_MAX = 100
HANG_TIMEOUT_S = 300.0  # shorter than gloo's 1800 s, and than NCCL's 600 s


def check_hang_timeout(seconds: float) -> None:
    """Check how long ranks may wait for one that hangs.

    Raises:
        UsageError: it is neither 0 nor a number of seconds from 1 on.
    """
    if not (seconds == 0 or 1 <= seconds <= 1e6):
        raise UsageError(
            f"hang_timeout_s must be 0 or between 1 and 1e6, got {seconds:g}",
            fix="Give seconds, or off",
        )


def check_profile_steps(count: int) -> None:
    """Check how many steps torch.profiler is to look at.

    Raises:
        UsageError: it is negative, or more than a trace should hold.
    """
    if not 0 <= count <= PROFILE_STEPS_MAX:
        raise UsageError(
            f"profile_steps must be between 0 and {PROFILE_STEPS_MAX}, got {count}",
            why="each profiled step adds thousands of events",
            fix="Give a few steps",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig(Configuration):
    """How to run a script.

    Changes results: `ranks`, since the script divides its data by them; `collectives`, `rebalance`,
    `shares`, and `strategy` with `partitions`, `replicas` and `microbatches`, in the last bits of
    sums.
    Changes speed: `record`, `record_io`, `profile_steps`, `budget`, `allocator`, `node_reader`,
    `pace`, `memory_budget_bytes`, `spill_folder`, `tune` (and, with the number of threads, last
    bits).
    Changes what is printed: `tag_output`; what a folder is called: `again`.
    Says where the other nodes are, with the meaning that torchrun gives these names: `nnodes`,
    `node_rank`, `rdzv_endpoint`, `rdzv_id`.
    Changes how long several launchers wait for each other: the others, see `Deadlines`.

    Attributes:
        ranks: number of ranks on each node; None is one, or under Slurm or mpirun one per task.
        record: whether to record traces.
        record_io: whether traces hold calls for files, too (`launch.file_calls`).
        profile_steps: steps of which torch.profiler adds operators and kernels to the traces.
        budget: ``auto`` gives each rank cores, and threads for them; ``off`` leaves that to the
            system; else the path of a budget in JSON (`launch.budget`, docs/guides/cpu-budget.md).
        allocator: ``keep`` leaves freed memory with the ranks, ``system`` with the C library. On
            seven models a step took 0.78 to 1.02 times the CPU time with ``keep`` (median 0.81), 1
            to 9 MiB more memory, and gave equal weights (bench/allocator.py): hence the default.
        collectives: ``paceline`` has init_process_group make a group of that backend where a script
            asks for gloo or for no backend; ``torch`` leaves it what the script says.
        node_reader: whether one process of each node reads for the loaders of all its ranks, where
            the script does not say (`paceline.store.LoaderOptions`); None: as its own section of
            the configuration does (`paceline.store.LoaderConfig`).
        pace: ``on`` has loaders, torch's DataLoader among them, refill in the parts of a step
            that leave cores free (docs/guides/pacing.md), ``auto`` on ranks without a GPU; None: as
            the section of loaders says.
        strategy: how a script that calls `paceline.training.prepare` and does not say it divides
            batches and layers among the ranks (`paceline.training.TrainingOptions`).
        partitions: parts of the model's layers, for the same scripts.
        replicas: of the model, for the same scripts.
        microbatches: parts of a batch, for the same scripts.
        rebalance: whether ranks that are slower than others get fewer samples of a batch
            (docs/guides/rebalancing.md). Not by default: a batch normalisation sees other batches.
        shares: of a batch, with which `rebalance` begins: speeds such as ``1,0.6``, one for each
            rank, or the folder of a run that was rebalanced; empty: equal ones.
        memory_budget_bytes: that each rank's process stays under: tensors that a step does not need
            for a while are spilled to a file (docs/guides/out-of-core.md); None: without limit.
        spill_folder: of that file, on a disk of each node; empty: the folder for temporary files.
        mounts: packs that the ranks see as folders, each ``PACK:/path`` (docs/guides/posix.md).
        data: packs that servers on the nodes of the run spread over local storage and serve to all
            ranks, each ``PACK``, or ``PACK:/path`` to be seen as a folder
            (docs/guides/store-nodes.md).
        data_folder: on local storage of each node, where its shards are kept for the next run;
            empty: they go with the run, from the folder for temporary files.
        data_replicas: copies of each shard, on different nodes.
        data_tls: whether what servers of packs send to other nodes is encrypted, with a key that
            follows from their token.
        token_file: with the secret of all launchers and servers of the run (`core.token`); empty:
            launchers have their user's, and servers one that rank 0's launcher makes and that
            travels with the rendezvous, which is not encrypted.
        data_source_rate: most bytes per second that a node copies from a pack; 0: no limit.
        outputs: folders of the shared file system that ranks write to by way of local storage, each
            ``FOLDER:/path`` (docs/guides/store-nodes.md).
        output_limit_bytes: of published files on a node that wait to be copied to such a folder; a
            close then waits; 0: no limit but the disk.
        output_wait_s: the longest time that a close waits for that.
        output_end_s: the longest time without progress when the rest is copied at the end.
        tune: a setting and two values of it, as ``threads=1,2``, that are tried by turns in the
            running job; the better one is kept (docs/guides/tune.md). Empty: none.
        tag_output: whether each line that a rank prints carries its rank.
        again: whether an earlier run in the folder is kept under another name, or refused.
        nnodes: number of nodes, each with a launcher of its own and `ranks` ranks.
        node_rank: number of this node, 0 to nnodes - 1; None is the task's rank in a Slurm step
            with one task per node, else 0.
        rdzv_endpoint: HOST or HOST:PORT of node 0, where the launchers meet.
        rdzv_id: name of the job, the same on all nodes. Empty: nodes with the same endpoint,
            program and arguments are one job.
        rendezvous_timeout_s: the longest wait until all tasks have arrived.
        heartbeat_interval_s: time between two reports of a task to rank 0's task.
        heartbeat_timeout_s: a task without a message for this time is lost.
        stop_timeout_s: time that tasks have to end their ranks when another rank has failed.
        hang_timeout_s: how long ranks wait for one that shows no sign of work until the run is
            ended, and its stack shown (docs/guides/hangs.md); 0: for ever.
    """

    section: ClassVar[str] = "run"
    version: ClassVar[int] = 3
    ranks: int | None = None
    record: bool = True
    record_io: bool = False
    profile_steps: int = 0
    budget: str = "auto"
    allocator: AllocatorChoice = "keep"
    collectives: CollectivesChoice = "torch"
    node_reader: Literal["auto", "on", "off"] | None = None
    pace: Literal["auto", "on", "off"] | None = None
    strategy: StrategyChoice | None = None
    partitions: int | None = None
    replicas: int | None = None
    microbatches: int | None = None
    rebalance: bool = False
    shares: str = ""
    memory_budget_bytes: int | None = None
    spill_folder: str = ""
    mounts: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    data_folder: str = ""
    data_replicas: int = 1
    data_tls: bool = False
    token_file: str = ""
    data_source_rate: float = 0.0
    outputs: tuple[str, ...] = ()
    output_limit_bytes: int = 0
    output_wait_s: float = 600.0
    output_end_s: float = 300.0
    tune: str = ""
    tag_output: bool = False
    again: bool = False
    nnodes: int = 1
    node_rank: int | None = None
    rdzv_endpoint: str = ""
    rdzv_id: str = ""
    rendezvous_timeout_s: float = 120.0
    heartbeat_interval_s: float = 10.0
    heartbeat_timeout_s: float = 60.0
    stop_timeout_s: float = 10.0
    hang_timeout_s: float = HANG_TIMEOUT_S

    def __post_init__(self) -> None:
        if self.ranks is not None and self.ranks < 1:
            raise UsageError(f"ranks must be at least 1, got {self.ranks}", fix="Give at least 1")
        for name in ("partitions", "replicas", "microbatches"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} must be at least 1, got {value}", fix="Give at least 1")
        if self.memory_budget_bytes is not None and self.memory_budget_bytes < 1:
            raise UsageError(
                f"memory_budget_bytes must be at least 1, got {self.memory_budget_bytes}",
                fix="Give the bytes of each rank's process, as 8GiB",
            )
        if self.data_replicas < 1 or not 0 <= self.data_source_rate < float("inf"):
            raise UsageError(
                f"data_replicas is {self.data_replicas}, data_source_rate "
                f"{self.data_source_rate:g}",
                fix="Give at least 1 replica, and bytes per second of at least 0",
            )
        if self.output_limit_bytes < 0:
            raise UsageError(
                f"output_limit_bytes must be at least 0, got {self.output_limit_bytes}",
                fix="Give bytes, as 16GiB; 0: no limit",
            )
        if self.nnodes < 1:
            raise UsageError(f"nnodes must be at least 1, got {self.nnodes}", fix="Give at least 1")
        for name in (
            "rendezvous_timeout_s",
            "heartbeat_interval_s",
            "stop_timeout_s",
            "output_wait_s",
            "output_end_s",
        ):
            if not 0 < getattr(self, name) <= 1e6:
                raise UsageError(
                    f"{name} must be above 0 and at most 1e6, got {getattr(self, name):g}",
                    fix="Give seconds",
                )
        check_profile_steps(self.profile_steps)
        check_hang_timeout(self.hang_timeout_s)
        if not 2 * self.heartbeat_interval_s <= self.heartbeat_timeout_s <= 1e6:
            raise UsageError(
                f"heartbeat_timeout_s must be at least twice heartbeat_interval_s, got "
                f"{self.heartbeat_timeout_s:g} and {self.heartbeat_interval_s:g}",
                why="one late heartbeat would lose a rank",
                fix="Raise the timeout or lower the interval",
            )

    @classmethod
    def upgrade(cls, data: dict[str, Any], from_version: int) -> dict[str, Any]:
        """Version 1 had `bind`, whether each rank gets cores of its own; 2 `data_token_file`."""
        if from_version == 1:
            bind = data.pop("bind", True)
            data = {**data, "budget": "auto" if bind else "off"}
        token_file = data.pop("data_token_file", "")
        return {**data, "token_file": token_file}

    @property
    def training(self) -> dict[str, str]:
        """Environment variables for `paceline.training.prepare` in the ranks."""
        names = ("strategy", "partitions", "replicas", "microbatches")
        values = {name: getattr(self, name) for name in names}
        return {
            f"PACELINE_TRAINING__{name.upper()}": str(value)
            for name, value in values.items()
            if value is not None
        }

    @property
    def deadlines(self) -> Deadlines:
        """How long tasks wait for each other."""
        return Deadlines(
            rendezvous_timeout_s=self.rendezvous_timeout_s,
            heartbeat_interval_s=self.heartbeat_interval_s,
            heartbeat_timeout_s=self.heartbeat_timeout_s,
            stop_timeout_s=self.stop_timeout_s,
        )
