"""Checks whether this machine is fit for training, and says what to fix.

Each check is a pure function from facts to a finding; `diagnose` gathers the facts: files under
/proc and /sys through `root`, programs through `run`, torch through `ask_torch` in a process of its
own with a deadline, since importing it may take seconds or crash. A finding fails only when
training here cannot work.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from paceline.core import node
from paceline.core.affinity import allowed_cores
from paceline.core.config import environment
from paceline.core.errors import DeadlineExceeded, NotFound, PacelineError, WorkerFailed
from paceline.core.interfaces import GLOO_INTERFACE, gloo_problem
from paceline.core.record import Record
from paceline.core.worker_process import WorkerCall, call
from paceline.probe.protocol import TorchFacts, TorchRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from paceline.core.node import Limits

GIB = 1 << 30
TORCH_DEADLINE_S, PROGRAM_DEADLINE_S = 60.0, 5.0
LEAST_MEMORY_BYTES = GIB
LEAST_SHARED_BYTES = GIB  # loader workers hand whole batches over through it
SHARED_FILE_SYSTEMS = {
    "lustre": "Lustre",
    "gpfs": "GPFS",
    "nfs": "NFS",
    "nfs4": "NFS",
    "beegfs": "BeeGFS",
    "ceph": "CephFS",
    "cifs": "SMB",
    "fuse.sshfs": "SSHFS",
}
FAST_CLOCKS = ("tsc", "kvm-clock", "arch_sys_counter", "timebase", "hyperv_clocksource_tsc_page")


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding(Record):
    """One row of the diagnosis.

    Attributes:
        topic: of the check, for example ``memory``.
        status: ``fail`` when training here cannot work as things are.
        what: the observed state.
        fix: what to do; empty when there is nothing to do.
    """

    topic: str
    status: Literal["ok", "warn", "fail"]
    what: str
    fix: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramOutput:
    """What a program printed: None for `out` when it is not installed, failed or took too long."""

    out: str | None
    problem: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchAnswer:
    """The installed torch: None for `facts` when it is not installed or does not import."""

    facts: TorchFacts | None
    problem: str = ""


def run_program(command: list[str], deadline_s: float) -> ProgramOutput:
    """Run a program and return what it printed."""
    if shutil.which(command[0]) is None:
        return ProgramOutput(out=None, problem="not found")
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=deadline_s, check=False
        )
    except subprocess.TimeoutExpired:
        return ProgramOutput(out=None, problem=f"no answer within {deadline_s:g} s")
    except OSError as problem:
        return ProgramOutput(out=None, problem=str(problem))
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return ProgramOutput(out=None, problem=last)
    return ProgramOutput(out=done.stdout)


def diagnose(
    folder: Path,
    *,
    root: Path = node.ROOT,
    run: Callable[[list[str], float], ProgramOutput] = run_program,
    ask_torch: Callable[[], TorchAnswer] | None = None,
    environ: Mapping[str, str] | None = None,
) -> tuple[Finding, ...]:
    """Return the findings, one per topic.

    Args:
        folder: from which data are read, and in which runs are written.
        root: the folder of ``proc``, ``sys`` and ``dev``.
        run: runs a program with a deadline in seconds.
        ask_torch: returns what is installed; by default `ask_torch_worker`.
        environ: in place of the process's environment.

    Raises:
        NotFound: there is no such folder.
    """
    if not folder.is_dir():
        raise NotFound("no such folder", where=str(folder), fix="Give an existing folder")
    environ = environment() if environ is None else environ
    limits = node.read_limits(root)
    mount = node.mount_of(str(folder.resolve()), node.read_mounts(root))
    clock = root / "sys/devices/system/clocksource/clocksource0/current_clocksource"
    torch = (ask_torch or ask_torch_worker)()
    return (
        check_cores(os.cpu_count() or 1, len(allowed_cores()), limits),
        check_memory(node.total_memory_bytes(root), limits),
        check_shared_memory(_free_bytes(root / "dev/shm")),
        check_folder(mount.kind if mount else "unknown", folder),
        check_torch(torch),
        check_interface(gloo_problem(environ), environ.get(GLOO_INTERFACE, "")),
        check_mpi(run(["mpirun", "--version"], PROGRAM_DEADLINE_S), _installed("mpi4py")),
        check_slurm(run(["sinfo", "--version"], PROGRAM_DEADLINE_S), environ),
        check_gpu(run(["nvidia-smi", "-L"], PROGRAM_DEADLINE_S), torch),
        check_clock(
            clock.read_text().strip() if clock.exists() else "",
            run(["timedatectl", "show", "-p", "NTPSynchronized", "--value"], PROGRAM_DEADLINE_S),
        ),
    )


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def ask_torch_worker() -> TorchAnswer:
    """Return what torch says of itself, imported in a process of its own."""
    if not _installed("torch"):
        return TorchAnswer(facts=None, problem="not installed")
    work = WorkerCall(
        module="paceline.probe.torch_worker",
        request=TorchRequest(),
        answer=TorchFacts,
        name="import torch",
    )
    try:
        return TorchAnswer(facts=call(work, deadline_s=TORCH_DEADLINE_S))
    except WorkerFailed as problem:
        return TorchAnswer(facts=None, problem=f"{problem.what}: {problem.why}")
    except (DeadlineExceeded, PacelineError) as problem:
        return TorchAnswer(facts=None, problem=str(problem))


def _free_bytes(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def check_cores(total: int, allowed: int, limits: Limits) -> Finding:
    """Compare the node's cores with those that affinity and control groups leave."""
    if limits.cores is not None and limits.cores < allowed:
        return Finding(
            topic="cores",
            status="warn",
            what=f"{allowed} cores, but a control group allows the time of {limits.cores:g}",
            fix=f"Use at most {max(1, int(limits.cores))} threads in all, or raise the CPU limit",
        )
    if allowed < total:
        return Finding(
            topic="cores",
            status="warn",
            what=f"{allowed} of {total} cores are allowed (affinity)",
            fix="If more are yours, ask for them (Slurm: --cpus-per-task) or start without taskset",
        )
    return Finding(topic="cores", status="ok", what=f"{allowed} cores, all allowed")


def check_memory(total: int, limits: Limits) -> Finding:
    """Compare the node's memory with the control groups' limit."""
    limit = limits.memory_bytes
    usable = min(total, limit) if limit else total
    text = f"{usable / GIB:.1f} GiB"
    if usable < LEAST_MEMORY_BYTES:
        return Finding(
            topic="memory",
            status="fail",
            what=f"{text} may be used",
            fix="Ask for at least 1 GiB (Slurm: --mem; containers: --memory)",
        )
    if limit and limit < total:
        return Finding(
            topic="memory",
            status="warn",
            what=f"{text} of {total / GIB:.1f} GiB may be used (cgroup v{limits.version})",
            fix="Plan for this limit: beyond it the kernel kills a rank without a message",
        )
    return Finding(topic="memory", status="ok", what=f"{text}, no lower limit")


def check_shared_memory(free: int | None) -> Finding:
    """Judge /dev/shm, through which loader workers hand over their batches."""
    fix = "Enlarge it (containers: --shm-size=8g) or load data with num_workers=0"
    if free is None:
        return Finding(topic="/dev/shm", status="fail", what="not there", fix=fix)
    status: Literal["ok", "warn"] = "warn" if free < LEAST_SHARED_BYTES else "ok"
    return Finding(
        topic="/dev/shm",
        status=status,
        what=f"{free / GIB:.1f} GiB free",
        fix=fix if status == "warn" else "",
    )


def check_folder(kind: str, folder: Path) -> Finding:
    """Judge the file system on which data are read."""
    name = SHARED_FILE_SYSTEMS.get(kind)
    if name is None:
        return Finding(topic="file system", status="ok", what=f"{kind} at {folder.resolve()}")
    return Finding(
        topic="file system",
        status="warn",
        what=f"{folder.resolve()} lies on {name}, which is slow for many small files",
        fix="Pack the data set once: paceline pack SRC DST",
    )


def check_torch(answer: TorchAnswer) -> Finding:
    """Judge torch and its communication backends."""
    if answer.problem == "not installed":
        return Finding(
            topic="torch",
            status="warn",
            what="not installed; packs, traces and reports work without it",
            fix="pip install 'paceline[torch]' where you train",
        )
    facts = answer.facts
    if facts is None:
        return Finding(
            topic="torch",
            status="fail",
            what=f"installed, but does not import: {answer.problem}",
            fix='Run: python -c "import torch" and fix the error that it prints',
        )
    backends = ", ".join(facts.backends) or "no backend"
    what = f"{facts.torch}, {facts.gpus} GPU(s), {backends}"
    if not facts.backends:
        fix = "Install a torch that was built with distributed support"
        return Finding(topic="torch", status="fail", what=what, fix=fix)
    return Finding(topic="torch", status="ok", what=what)


def check_interface(problem: str, given: str) -> Finding:
    """Judge the network interface by which ranks reach each other with gloo."""
    if not problem:
        what = f"{given} can be bound" if given else "the host's name can be bound"
        return Finding(topic="gloo", status="ok", what=what)
    return Finding(
        topic="gloo",
        status="fail" if given else "warn",
        what=problem,
        fix=f"Set {GLOO_INTERFACE} to an interface that `ip addr` lists; one host needs none",
    )


def check_mpi(answer: ProgramOutput, bindings: bool) -> Finding:
    """Say which MPI is installed; none is needed unless jobs are started with it."""
    if answer.out is None:
        return Finding(topic="MPI", status="ok", what="not installed; only MPI jobs need it")
    lines = [line.strip() for line in answer.out.splitlines() if line.strip()] or ["mpirun"]
    name = lines[0]
    if name.startswith("HYDRA"):  # MPICH's mpirun, which spreads its name over lines
        versions = [line.split()[-1] for line in lines if line.startswith("Version:")]
        name = " ".join(["MPICH (Hydra)", *versions])
    python = "with mpi4py" if bindings else "without mpi4py, which only scripts that use it need"
    return Finding(topic="MPI", status="ok", what=f"{name}, {python}")


def check_slurm(answer: ProgramOutput, environ: Mapping[str, str]) -> Finding:
    """Say whether this is a Slurm cluster, and whether we are inside a job."""
    job = environ.get("SLURM_JOB_ID")
    if answer.out is None:
        what = "not installed; only clusters have it" if job is None else f"inside job {job}"
        return Finding(topic="Slurm", status="ok", what=what)
    version = answer.out.strip() or "slurm"
    where = f"inside job {job}" if job else "outside of a job"
    return Finding(topic="Slurm", status="ok", what=f"{version}, {where}")


def check_gpu(answer: ProgramOutput, torch: TorchAnswer) -> Finding:
    """Count NVIDIA GPUs; a driver that fails, or a torch that sees none of them, is a warning."""
    if answer.problem == "not found":
        return Finding(topic="GPU", status="ok", what="none; training runs on the CPU")
    if answer.out is None:
        return Finding(
            topic="GPU",
            status="warn",
            what=f"nvidia-smi fails: {answer.problem}",
            fix="Check the driver: nvidia-smi",
        )
    names = [line.partition(": ")[2].partition(" (")[0] for line in answer.out.splitlines() if line]
    what = f"{len(names)}: {', '.join(sorted(set(names)))}"
    if names and torch.facts is not None and not torch.facts.gpus:
        return Finding(
            topic="GPU",
            status="warn",
            what=f"{what}; torch {torch.facts.torch} sees none of them",
            fix="Install a torch that was built for CUDA, and check CUDA_VISIBLE_DEVICES",
        )
    return Finding(topic="GPU", status="ok", what=what)


def check_clock(source: str, synchronised: ProgramOutput) -> Finding:
    """Judge the clock that traces are stamped with."""
    state = {"yes": "synchronised", "no": "not synchronised"}.get(
        (synchronised.out or "").strip(), "synchronisation unknown"
    )
    if source and source not in FAST_CLOCKS:
        return Finding(
            topic="clock",
            status="warn",
            what=f"{source}, {state}: reading it is slow, which traces would show",
            fix="Boot with a stable TSC (clocksource=tsc)",
        )
    if state == "not synchronised":
        return Finding(
            topic="clock",
            status="warn",
            what=f"{source or 'clock'}, {state}",
            fix="Run chrony or ntpd before tracing on several nodes; one node needs nothing",
        )
    return Finding(topic="clock", status="ok", what=f"{source or 'clock'}, {state}")
