"""The node's cores: hardware threads, shared caches, NUMA nodes.

`lstopo` of hwloc says it for every system that hwloc knows; without it the files under
/sys/devices/system do, and without those each hardware thread counts as a core of one NUMA node.

Source: hwloc's ``hwloc2.dtd``; Documentation/admin-guide/cputopology.rst of Linux.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from xml.etree import ElementTree as ET

from paceline.core.affinity import parse_core_list

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path("/")
LSTOPO_DEADLINE_S = 5.0
_CPUS, _NODES = "sys/devices/system/cpu", "sys/devices/system/node"
TopologySource = Literal["lstopo", "sysfs", "none"]


@dataclass(frozen=True, order=True, kw_only=True, slots=True)
class PhysicalCore:
    """A core, with numbers of the operating system; ordered so that neighbours share most.

    Attributes:
        package: socket.
        node: NUMA node.
        cache: first hardware thread of those that share its last-level cache.
        threads: its hardware threads, which the system calls CPUs.
    """

    package: int
    node: int
    cache: int
    threads: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class CpuTopology:
    """The cores of a node, in an order in which neighbours share most.

    Attributes:
        source: what it was read from.
        cores: all that the source knows, or what `restricted` leaves of them.
    """

    source: TopologySource
    cores: tuple[PhysicalCore, ...]

    def __post_init__(self) -> None:
        assert list(self.cores) == sorted(self.cores)

    @property
    def nodes(self) -> tuple[tuple[PhysicalCore, ...], ...]:
        """The cores of each NUMA node."""
        numbers = sorted({core.node for core in self.cores})
        return tuple(tuple(core for core in self.cores if core.node == node) for node in numbers)

    def restricted(self, allowed: Iterable[int]) -> CpuTopology:
        """Return what is left with the hardware threads `allowed`; unknown ones become cores."""
        allowed = set(allowed)
        kept = [
            PhysicalCore(package=core.package, node=core.node, cache=core.cache, threads=threads)
            for core in self.cores
            if (threads := tuple(thread for thread in core.threads if thread in allowed))
        ]
        unknown = allowed - {thread for core in kept for thread in core.threads}
        kept += [_lone(thread) for thread in unknown]
        return CpuTopology(source=self.source, cores=tuple(sorted(kept)))

    def split(self) -> CpuTopology:
        """Return the same with each hardware thread as a core of its own."""
        cores = [
            PhysicalCore(package=core.package, node=core.node, cache=core.cache, threads=(thread,))
            for core in self.cores
            for thread in core.threads
        ]
        return CpuTopology(source=self.source, cores=tuple(sorted(cores)))


def _lone(thread: int) -> PhysicalCore:
    return PhysicalCore(package=0, node=0, cache=0, threads=(thread,))


def read_topology(root: Path = ROOT) -> CpuTopology:
    """Return this node's topology; of another `root` what its sysfs says."""
    text = _lstopo() if root == ROOT else ""
    return (text and parse_lstopo(text)) or read_sysfs(root) or _unknown()


def _lstopo() -> str:
    """Return lstopo's XML; empty where it is not installed or fails."""
    program = shutil.which("lstopo-no-graphics") or shutil.which("lstopo")
    if program is None:
        return ""
    try:
        done = subprocess.run(
            [program, "--of", "xml"],
            capture_output=True,
            timeout=LSTOPO_DEADLINE_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode(errors="replace") if done.returncode == 0 else ""


def _unknown() -> CpuTopology:
    threads = sorted(os.sched_getaffinity(0))
    return CpuTopology(source="none", cores=tuple(_lone(thread) for thread in threads))


def parse_lstopo(text: str) -> CpuTopology | None:
    """Return the topology in hwloc's XML, of version 1 or 2; None if it holds no cores.

    In version 2 a NUMA node is a leaf beside the caches that it belongs to, in version 1 their
    parent: either way its attribute ``cpuset`` says which hardware threads are its.
    """
    try:
        top = ET.fromstring(text)  # what a program of this machine has written
    except ET.ParseError:
        return None
    packages: dict[int, int] = {}
    nodes: dict[int, int] = {}
    caches: dict[int, tuple[int, int]] = {}  # level, first hardware thread
    cores: list[tuple[int, ...]] = []
    for element in top.iter("object"):
        kind, number = element.get("type", ""), int(element.get("os_index", "0"))
        threads = _cpuset(element.get("cpuset", ""))
        if not threads:
            continue
        if kind in ("Package", "Socket"):
            packages.update(dict.fromkeys(threads, number))
        elif kind == "NUMANode":
            nodes.update(dict.fromkeys(threads, number))
        elif level := _data_cache_level(element):
            caches.update(
                (thread, (level, threads[0]))
                for thread in threads
                if level > caches.get(thread, (0, 0))[0]
            )
        elif kind == "Core":
            units = [unit for unit in element.iter("object") if unit.get("type") == "PU"]
            cores.append(tuple(sorted(int(unit.get("os_index", "0")) for unit in units)))
    found = [
        PhysicalCore(
            package=packages.get(threads[0], 0),
            node=nodes.get(threads[0], 0),
            cache=caches.get(threads[0], (0, threads[0]))[1],
            threads=threads,
        )
        for threads in cores
        if threads
    ]
    return CpuTopology(source="lstopo", cores=tuple(sorted(found))) if found else None


def _data_cache_level(element: ET.Element) -> int:
    """Return the level of a cache that holds data; 0 for anything else."""
    kind = element.get("type", "")
    if kind == "Cache":  # version 1; type 2 holds instructions
        return int(element.get("depth", "0")) if element.get("cache_type") != "2" else 0
    if len(kind) == len("L3Cache") and kind.startswith("L") and kind.endswith("Cache"):
        return int(kind[1])
    return 0


def _cpuset(text: str) -> tuple[int, ...]:
    """Return the members of ``0x00000001,0x0000000f``: words of 32 bits, the highest first."""
    value = 0
    for word in text.split(","):
        try:
            value = value << 32 | int(word or "0", 16)
        except ValueError:  # 0xf...f, of a set without an end
            return ()
    return tuple(bit for bit in range(value.bit_length()) if value >> bit & 1)


def read_sysfs(root: Path = ROOT) -> CpuTopology | None:
    """Return what the files under /sys/devices/system say; None where they say nothing."""
    folder = root / _CPUS
    node_of = {
        thread: int(node.name.removeprefix("node"))
        for node in sorted((root / _NODES).glob("node[0-9]*"))
        for thread in _list(node / "cpulist")
    }
    found: dict[tuple[int, ...], PhysicalCore] = {}
    for thread in _list(folder / "online"):
        cpu = folder / f"cpu{thread}"
        siblings = (
            _list(cpu / "topology/core_cpus_list")
            or _list(cpu / "topology/thread_siblings_list")  # before Linux 5.3
            or (thread,)
        )
        found[siblings] = PhysicalCore(
            package=max(0, _number(cpu / "topology/physical_package_id")),
            node=node_of.get(thread, 0),
            cache=_last_cache(cpu, siblings[0]),
            threads=siblings,
        )
    return CpuTopology(source="sysfs", cores=tuple(sorted(found.values()))) if found else None


def _last_cache(cpu: Path, default: int) -> int:
    """Return the first hardware thread of those that share the last-level cache."""
    level, first = 0, default
    for index in (cpu / "cache").glob("index*"):
        shared = _list(index / "shared_cpu_list")
        if shared and (found := _number(index / "level")) > level:
            level, first = found, shared[0]
    return first


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def _list(path: Path) -> tuple[int, ...]:
    try:
        return parse_core_list(_text(path))
    except ValueError:
        return ()


def _number(path: Path) -> int:
    text = _text(path)
    return int(text) if text.lstrip("-").isdecimal() else 0
