"""A real Slurm cluster of two nodes on this machine, for as long as a test module needs it."""

import contextlib
import os
import shutil
import socket
import subprocess
import threading
import time
from pathlib import Path

NEEDED = ("munged", "slurmctld", "slurmd", "srun")
START_S = 30.0

CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
NodeName=n0 NodeHostname={host} NodeAddr=127.0.0.1 Port={first_port} CPUs=4 State=UNKNOWN
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={second_port} CPUs=4 State=UNKNOWN
PartitionName=all Nodes=n[0-1] Default=YES MaxTime=INFINITE State=UP
"""


def is_here():
    """Whether Slurm is installed, and this user may start its daemons."""
    path = os.environ["PATH"] + ":/usr/sbin:/sbin"
    return os.getuid() == 0 and all(shutil.which(name, path=path) for name in NEEDED)


@contextlib.contextmanager
def cluster(folder: Path):
    """Start the daemons in `folder`; yield the environment in which srun finds them."""
    folder.chmod(0o755)
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    ports = _free_ports(3)
    config = folder / "slurm.conf"
    config.write_text(
        CONFIG.format(
            host=socket.gethostname(),
            user="root",
            folder=folder,
            control_port=ports[0],
            first_port=ports[1],
            second_port=ports[2],
        )
    )
    (folder / "cgroup.conf").write_text("CgroupAutomount=no\n")
    path = os.environ["PATH"] + ":/usr/sbin:/sbin"
    environ = {**os.environ, "SLURM_CONF": str(config), "PATH": path}
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            _daemon(
                folder,
                environ,
                "munged",
                "--force",
                "--foreground",
                f"--key-file={key}",
                f"--socket={folder}/munge.sock",
                f"--pid-file={folder}/munged.pid",
                f"--log-file={folder}/munged.log",
                f"--seed-file={folder}/munge.seed",
            )
        )
        _await(folder, (folder / "munge.sock").exists)
        stack.enter_context(_daemon(folder, environ, "slurmctld", "-D", "-c", "-f", str(config)))
        for node in ("n0", "n1"):
            (folder / f"spool-{node}").mkdir()
            stack.enter_context(
                _daemon(folder, environ, "slurmd", "-D", "-N", node, "-f", str(config))
            )
        _await(folder, lambda: _idle_nodes(environ) == 2)
        yield environ


@contextlib.contextmanager
def _daemon(folder, environ, name, *args):
    with (folder / f"{name}-{len(list(folder.iterdir()))}.out").open("wb") as out:
        process = subprocess.Popen([name, *args], env=environ, stdout=out, stderr=out)
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _idle_nodes(environ):
    done = subprocess.run(
        ["sinfo", "-h", "-N", "-t", "idle", "-o", "%N"],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=10,
    )
    return len(set(done.stdout.split()))


def _await(folder, condition):
    deadline_s = time.monotonic() + START_S
    while not condition():
        if time.monotonic() > deadline_s:
            logs = "\n".join(
                f"{path.name}: {path.read_text(errors='replace')[-2000:]}"
                for path in sorted(folder.glob("*.out"))
            )
            raise TimeoutError(f"Slurm did not start within {START_S:.0f} s\n{logs}")
        threading.Event().wait(0.1)


def _free_ports(count):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for listener in sockets:
            listener.bind(("127.0.0.1", 0))
        return [listener.getsockname()[1] for listener in sockets]
