"""Collectives of the ranks of one host: Paceline against gloo, MPICH and Open MPI.

All contenders' ranks live through the whole run and block while others are measured; batches of
contenders alternate, and a ratio is the median over batches of the ratios of neighbouring batches.

    native     paceline.collectives.HostGroup on private arrays
    heap       the same on arrays in the symmetric heap (all-reduce only)
    paceline   torch.distributed with the backend paceline, on ordinary tensors
    gloo       torch.distributed with gloo
    mpich, openmpi   mpi4py in environments of their own: scripts/peers mpich openmpi

The memory limit is that of memory_limit.cpp: the best of several kernels with which two processes
that run at once do a = b = a + b, on half of the message each. It is measured beside each size.

    python bench/collectives.py --quick          # two ranks, float32, five sizes: about a minute
    python bench/collectives.py --json           # also 4 ranks and bfloat16
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from harness import Report, options, tell

HERE = Path(__file__).parent
PEERS = HERE.parent / "build" / "peers"
KIB, MIB = 1024, 1024 * 1024
SIZES = [4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB]
QUICK_SIZES = [4 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB]
OPERATIONS = ["all_reduce", "reduce", "broadcast"]
CONTENDERS = ["native", "heap", "paceline", "gloo", "mpich", "openmpi"]
MPIS = ["mpich", "openmpi"]
BATCHES = 7
BATCH_S = 0.03
ANSWER_TIMEOUT_S = 120.0
AS_ROOT = {
    f"{prefix}_ALLOW_RUN_AS_ROOT{suffix}": "1"
    for prefix in ("OMPI", "PRTE")
    for suffix in ("", "_CONFIRM")
}


class Contender:
    """The ranks of one library; `error` says why there are none."""

    def __init__(self, name, ranks, folder):
        self.name, self.ranks = name, ranks
        self.error = ""
        self.streams = []
        self.processes = []
        try:
            self._start(folder)
        except Exception as problem:
            self.error = str(problem) or type(problem).__name__
            self.stop()

    def _start(self, folder):
        listener = socket.socket(socket.AF_UNIX)
        path = f"{folder}/{self.name}-{self.ranks}"
        listener.bind(path)
        listener.listen(self.ranks)
        listener.settimeout(ANSWER_TIMEOUT_S)
        self._launch(path)
        for _ in range(self.ranks):
            connection, _ = listener.accept()
            connection.settimeout(ANSWER_TIMEOUT_S)
            self.streams.append(connection.makefile("rw"))
        for answer in [self._receive(stream) for stream in self.streams]:
            if "error" in answer:
                raise RuntimeError(answer["error"])

    def _launch(self, path):
        command = [str(HERE / "collective_ranks.py"), self.name, path, str(_free_port())]
        environment = {**os.environ, **AS_ROOT, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        if self.name in MPIS:
            bin_folder = PEERS / self.name / "bin"
            if not (bin_folder / "mpiexec").exists():
                raise RuntimeError(f"no {bin_folder}: scripts/peers {self.name}")
            launch = [str(bin_folder / "mpiexec"), "-n", str(self.ranks)]
            if self.name == "openmpi":
                launch += ["--map-by", ":OVERSUBSCRIBE"]
            launch += [str(bin_folder / "python"), *command]
            self.processes = [subprocess.Popen(launch, env=environment, **quiet)]
            return
        for rank in range(self.ranks):
            environment.update(RANK=str(rank), WORLD_SIZE=str(self.ranks))
            process = subprocess.Popen([sys.executable, *command], env=environment, **quiet)
            self.processes.append(process)

    def _receive(self, stream):
        line = stream.readline()
        if not line:
            raise RuntimeError("a rank died")
        return json.loads(line)

    def measure(self, operation, size_bytes, dtype, calls):
        """Return the seconds per call of the slowest rank."""
        request = {
            "operation": operation,
            "size_bytes": size_bytes,
            "dtype": dtype,
            "calls": calls,
        }
        for stream in self.streams:
            stream.write(json.dumps(request) + "\n")
            stream.flush()
        return max(self._receive(stream)["seconds"] for stream in self.streams)

    def can(self, operation, dtype):
        if self.error:
            return False
        if self.name == "heap" and operation != "all_reduce":
            return False
        return not (self.name in MPIS and dtype != "float32")  # mpi4py has no bfloat16

    def stop(self):
        for stream in self.streams:
            with contextlib.suppress(OSError):
                stream.close()
        for process in self.processes:
            process.kill()
            process.wait()


def _free_port():
    """Return a port outside the range of outgoing connections.

    A client that retries within that range may connect to itself before the server listens.
    """
    for port in range(20_000 + os.getpid() % 5_000, 32_000):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no free port below 32000")


def measure_point(contenders, operation, size_bytes, dtype):
    """Return the seconds per call of each contender, by batch."""
    able = [contender for contender in contenders if contender.can(operation, dtype)]
    calls = {}
    for contender in able:
        once_s = contender.measure(operation, size_bytes, dtype, 3)
        calls[contender.name] = max(2, min(1000, int(BATCH_S / once_s)))
    seconds = {contender.name: [] for contender in able}
    for _ in range(BATCHES):
        for contender in able:
            taken_s = contender.measure(operation, size_bytes, dtype, calls[contender.name])
            seconds[contender.name].append(taken_s)
    return seconds


def ratio(seconds, slower, faster):
    """Return the median over batches of how many times faster a contender is, or None."""
    if slower not in seconds or faster not in seconds:
        return None
    pairs = zip(seconds[slower], seconds[faster], strict=True)
    return statistics.median(slow / fast for slow, fast in pairs)


def compile_limit(folder):
    """Return the program that measures the memory limit, or None without a compiler."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        tell("no memory limit: no C++ compiler")
        return None
    program = f"{folder}/memory_limit"
    flags = ["-std=c++20", "-O3", "-march=native"]
    source = str(HERE / "memory_limit.cpp")
    subprocess.run([compiler, *flags, source, "-o", program], check=True)
    return program


def memory_limit_s(program, size_bytes):
    """Return the least seconds in which two processes can do the work of an all-reduce."""
    if program is None:
        return None
    command = [program, "2", str(size_bytes // 2), str(BATCHES)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return min(float(line.split()[1]) for line in output.splitlines())


def measure_ranks(report, ranks, dtypes, sizes, operations, program, folder):
    """Measure all points of one number of ranks; return their seconds."""
    contenders = [Contender(name, ranks, folder) for name in CONTENDERS]
    points = {}
    try:
        for contender in contenders:
            if contender.error:
                report.row(ranks=ranks, contender=contender.name, skipped=contender.error)
        for dtype in dtypes:
            for operation in operations if dtype == "float32" else ["all_reduce"]:
                for size_bytes in sizes:
                    seconds = measure_point(contenders, operation, size_bytes, dtype)
                    limit_s = None
                    if (ranks, operation, dtype) == (2, "all_reduce", "float32"):
                        limit_s = memory_limit_s(program, size_bytes)
                    points[dtype, operation, size_bytes] = (seconds, limit_s)
                    add_row(report, ranks, dtype, operation, size_bytes, seconds, limit_s)
    finally:
        for contender in contenders:
            contender.stop()
    return points


def add_row(report, ranks, dtype, operation, size_bytes, seconds, limit_s):
    medians_us = {name: statistics.median(times) * 1e6 for name, times in seconds.items()}
    row = {"ranks": ranks, "dtype": dtype, "operation": operation, "size_bytes": size_bytes}
    row["median_us"] = medians_us
    if limit_s is not None:
        row["memory_limit_us"] = limit_s * 1e6
        for name in ("native", "heap", "paceline"):
            if name in medians_us:
                row[f"{name}_fraction_of_limit"] = limit_s * 1e6 / medians_us[name]
    report.row(**row)


def add_bars(report, points, skipped):
    """Add what issue 9 asks for, of two ranks and float32."""
    for (dtype, operation, size_bytes), (seconds, limit_s) in points.items():
        if dtype != "float32":
            continue
        place = f"{operation} {_size(size_bytes)}"
        least = gloo_bar(operation, size_bytes)
        if least is not None and "paceline" not in skipped:
            value = ratio(seconds, "gloo", "paceline")
            report.bar(f"{place}: paceline against gloo", value, least, at_least=True)
        least = mpi_bar(operation, size_bytes)
        ratios = [ratio(seconds, mpi, "native") for mpi in MPIS]
        values = [value for value in ratios if value is not None]
        if least is not None and values:
            report.bar(f"{place}: native against MPI", min(values), least, at_least=True)
        if operation == "all_reduce" and size_bytes >= 16 * MIB and limit_s is not None:
            for name, least in (("heap", 0.7), ("native", 0.5), ("paceline", 0.5)):
                if name in seconds:
                    value = limit_s / statistics.median(seconds[name])
                    text = f"{place}: {name}, fraction of the memory limit"
                    report.bar(text, value, least, at_least=True)


def gloo_bar(operation, size_bytes):
    if operation != "all_reduce":
        return 5 if 64 * KIB <= size_bytes <= 64 * MIB else None
    for most_bytes, least in ((256 * KIB, 10), (4 * MIB, 15), (16 * MIB, 10), (64 * MIB, 8)):
        if size_bytes <= most_bytes:
            return least
    return 5


def mpi_bar(operation, size_bytes):
    if operation != "all_reduce":
        return 0.95 if size_bytes >= 16 * KIB else None
    if size_bytes < 64 * KIB:
        return 0.95
    if size_bytes <= 16 * MIB:
        return 1.5
    return 3 if size_bytes <= 64 * MIB else 2


def _size(size_bytes):
    return f"{size_bytes // MIB} MiB" if size_bytes >= MIB else f"{size_bytes // KIB} KiB"


def main():
    arguments = options(__doc__)
    report = Report("collectives", arguments.json)
    sizes = QUICK_SIZES if arguments.quick else SIZES
    with tempfile.TemporaryDirectory() as folder:
        program = compile_limit(folder)
        dtypes = ["float32"] if arguments.quick else ["float32", "bfloat16"]
        points = measure_ranks(report, 2, dtypes, sizes, OPERATIONS, program, folder)
        skipped = {row["contender"] for row in report.rows if "skipped" in row}
        if not arguments.quick:
            measure_ranks(report, 4, dtypes, sizes, OPERATIONS, program, folder)
    add_bars(report, points, skipped)
    return report.print()


if __name__ == "__main__":
    sys.exit(main())
