"""Says what this machine offers a training job, what is wrong with it, and what to do.

Each check is a pure function from facts to a finding; `diagnose` gathers the facts: files under
/proc and /sys through `root`, programs through `run`, torch in a process of its own with a
deadline, since importing it may take seconds or crash. A finding fails only when training here
cannot work.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from paceline.core.affinity import allowed_cores
from paceline.core.config import environment
from paceline.core.errors import NotFound
from paceline.core.record import Record
from paceline.probe import node

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from paceline.probe.node import Limits

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
TORCH_QUESTION = """
import json, torch, torch.distributed as d
ready = d.is_available()
print(json.dumps({
    "version": torch.__version__,
    "cuda": torch.cuda.is_available(),
    "gpus": torch.cuda.device_count(),
    "backends": [name for name in ("gloo", "nccl", "mpi")
                 if ready and getattr(d, f"is_{name}_available")()],
}))
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding(Record):
    """One row of the diagnosis.

    Attributes:
        topic: what was looked at.
        status: ``fail`` when training here cannot work as things are.
        what: was found.
        fix: what to do; empty when there is nothing to do.
    """

    topic: str
    status: Literal["ok", "warn", "fail"]
    what: str
    fix: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What a program said: None for `out` when it is not here, failed or took too long."""

    out: str | None
    problem: str = ""


def ask(command: list[str], deadline_s: float) -> Answer:
    """Run a program and return what it printed."""
    if shutil.which(command[0]) is None:
        return Answer(out=None, problem="not found")
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=deadline_s, check=False
        )
    except subprocess.TimeoutExpired:
        return Answer(out=None, problem=f"no answer within {deadline_s:g} s")
    except OSError as problem:
        return Answer(out=None, problem=str(problem))
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return Answer(out=None, problem=last)
    return Answer(out=done.stdout)


def diagnose(
    folder: Path,
    *,
    root: Path = node.ROOT,
    run: Callable[[list[str], float], Answer] = ask,
    environ: Mapping[str, str] | None = None,
) -> tuple[Finding, ...]:
    """Return the findings, one per topic.

    Args:
        folder: where data are read and runs written.
        root: where ``proc``, ``sys`` and ``dev`` are.
        run: asks a program.
        environ: in place of the process's environment.

    Raises:
        NotFound: there is no such folder.
    """
    if not folder.is_dir():
        raise NotFound("no such folder", where=str(folder), fix="Name one that is there")
    environ = environment() if environ is None else environ
    limits = node.read_limits(root)
    mount = node.mount_of(str(folder.resolve()), node.read_mounts(root))
    clock = root / "sys/devices/system/clocksource/clocksource0/current_clocksource"
    torch = _ask_torch(run)
    return (
        check_cores(os.cpu_count() or 1, len(allowed_cores()), limits),
        check_memory(node.total_memory_bytes(root), limits),
        check_shared_memory(_free_bytes(root / "dev/shm")),
        check_folder(mount.kind if mount else "unknown", folder),
        check_torch(torch),
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


def _ask_torch(run: Callable[[list[str], float], Answer]) -> Answer:
    if not _installed("torch"):
        return Answer(out=None, problem="not installed")
    return run([sys.executable, "-c", TORCH_QUESTION], TORCH_DEADLINE_S)


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


def check_torch(answer: Answer) -> Finding:
    """Judge torch and its communication backends."""
    if answer.problem == "not installed":
        return Finding(
            topic="torch",
            status="warn",
            what="not installed; packs, traces and reports work without it",
            fix="pip install 'paceline[torch]' where you train",
        )
    if answer.out is None:
        return Finding(
            topic="torch",
            status="fail",
            what=f"installed, but does not import: {answer.problem}",
            fix='Run: python -c "import torch" and repair what it names',
        )
    found = _torch_facts(answer)
    if found is None:
        return Finding(
            topic="torch",
            status="fail",
            what="imports, but ends without an answer",
            fix='Run: python -c "import torch" and see what it prints',
        )
    backends = ", ".join(found["backends"]) or "no backend"
    what = f"{found['version']}, {found['gpus']} GPU(s), {backends}"
    if not found["backends"]:
        fix = "Install a torch that was built with distributed support"
        return Finding(topic="torch", status="fail", what=what, fix=fix)
    return Finding(topic="torch", status="ok", what=what)


def _torch_facts(answer: Answer) -> dict[str, Any] | None:
    try:
        facts = json.loads(
            (answer.out or "").strip().rpartition("\n")[2]
        )  # others may print before
    except json.JSONDecodeError:
        return None
    return facts if isinstance(facts, dict) else None


def check_mpi(answer: Answer, bindings: bool) -> Finding:
    """Say which MPI is here; none is needed unless jobs are started with it."""
    if answer.out is None:
        return Finding(topic="MPI", status="ok", what="none here; only MPI jobs need it")
    lines = [line.strip() for line in answer.out.splitlines() if line.strip()] or ["mpirun"]
    name = lines[0]
    if name.startswith("HYDRA"):  # MPICH's launcher, which spreads its name over lines
        found = [line.split()[-1] for line in lines if line.startswith("Version:")]
        name = " ".join(["MPICH (Hydra)", *found])
    python = "with mpi4py" if bindings else "without mpi4py, which only scripts that use it need"
    return Finding(topic="MPI", status="ok", what=f"{name}, {python}")


def check_slurm(answer: Answer, environ: Mapping[str, str]) -> Finding:
    """Say whether this is a Slurm cluster, and whether we are inside a job."""
    job = environ.get("SLURM_JOB_ID")
    if answer.out is None:
        what = "none here; only clusters have it" if job is None else f"inside job {job}"
        return Finding(topic="Slurm", status="ok", what=what)
    version = answer.out.strip() or "slurm"
    where = f"inside job {job}" if job else "outside of a job"
    return Finding(topic="Slurm", status="ok", what=f"{version}, {where}")


def check_gpu(answer: Answer, torch: Answer) -> Finding:
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
    facts = _torch_facts(torch)
    if names and facts is not None and not facts.get("gpus"):
        return Finding(
            topic="GPU",
            status="warn",
            what=f"{what}; torch {facts.get('version', '')} sees none of them",
            fix="Install a torch that was built for CUDA, and check CUDA_VISIBLE_DEVICES",
        )
    return Finding(topic="GPU", status="ok", what=what)


def check_clock(source: str, synchronised: Answer) -> Finding:
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
