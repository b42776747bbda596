"""The resources of this process: cores, memory, file systems. Pure parsers of text of /proc.

`doctor` turns these facts into advice and `probe` puts them into a Machine. Every function that
reads takes the root folder, so that a test can feed it a tree of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")
UNLIMITED_BYTES = 1 << 60  # cgroup v1 writes a number near 2**63 for "no limit"


@dataclass(frozen=True, kw_only=True, slots=True)
class Mount:
    """One line of /proc/self/mountinfo."""

    root: str
    point: str
    kind: str
    options: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What control groups allow; None where they set no limit.

    Attributes:
        version: of the control groups, 1 or 2; 0 for none.
        memory_bytes: least limit on the way from the process's group to the root.
        cores: CPU time per time, for example 1.5.
    """

    version: int
    memory_bytes: int | None = None
    cores: float | None = None


def parse_mounts(text: str) -> list[Mount]:
    """Return the mounts of /proc/self/mountinfo; its octal escapes are undone."""
    mounts = []
    for line in text.splitlines():
        left, separator, right = line.partition(" - ")
        fields, rest = left.split(), right.split()
        if separator and len(fields) >= 6 and len(rest) >= 3:  # fields of proc(5)
            mounts.append(
                Mount(
                    root=_unescape(fields[3]),
                    point=_unescape(fields[4]),
                    kind=rest[0],
                    options=tuple(rest[2].split(",")),
                )
            )
    return mounts


def _unescape(text: str) -> str:
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, character)
    return text


def parse_groups(text: str) -> dict[str, str]:
    """Return the process's path by controller from /proc/self/cgroup; ``""`` stands for v2."""
    groups = {}
    for line in text.splitlines():
        parts = line.split(":", 2)
        if len(parts) == 3:  # hierarchy:controllers:path
            for controller in parts[1].split(","):
                groups[controller] = parts[2]
    return groups


def mount_of(path: str, mounts: list[Mount]) -> Mount | None:
    """Return the mount that holds `path`: the last one among those with the longest point."""
    holder = None
    for mount in mounts:
        inside = path == mount.point or path.startswith(mount.point.rstrip("/") + "/")
        if inside and (holder is None or len(mount.point) >= len(holder.point)):
            holder = mount
    return holder


def read_mounts(root: Path = ROOT) -> list[Mount]:
    """Return the mounts of this process; none where there is no /proc."""
    return parse_mounts(_read(root / "proc/self/mountinfo"))


def read_limits(root: Path = ROOT) -> Limits:
    """Return what the control groups of this process allow.

    Version 1 keeps the memory limit under the process's own path of the memory controller, version
    2 under its one path; a parent's limit holds as well. A system may run both.
    """
    groups = parse_groups(_read(root / "proc/self/cgroup"))
    mounts = read_mounts(root)
    memory_v1 = _folders(root, mounts, "memory", groups)
    cpu_v1 = _folders(root, mounts, "cpu", groups)
    unified = _folders(root, mounts, "", groups)
    memory = [_number(folder / "memory.limit_in_bytes") for folder in memory_v1]
    memory += [_number(folder / "memory.max") for folder in unified]
    cores = [_ratio(folder) for folder in cpu_v1]
    cores += [_max_ratio(_read(folder / "cpu.max")) for folder in unified]
    finite = [limit for limit in memory if limit is not None and limit < UNLIMITED_BYTES]
    version = 1 if memory_v1 else 2 if unified else 0
    return Limits(
        version=version,
        memory_bytes=min(finite, default=None),
        cores=min((limit for limit in cores if limit is not None), default=None),
    )


def oom_kills(root: Path = ROOT) -> int:
    """Return how many processes of this process's control group the OOM killer has killed.

    Those of groups above it count where the kernel says so (version 2). 0 where nothing is known.
    """
    groups = parse_groups(_read(root / "proc/self/cgroup"))
    mounts = read_mounts(root)
    for controller, file in (("memory", "memory.oom_control"), ("", "memory.events")):
        for folder in _folders(root, mounts, controller, groups)[:1]:
            for line in _read(folder / file).splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
    return 0


def _folders(
    root: Path, mounts: list[Mount], controller: str, groups: dict[str, str]
) -> list[Path]:
    """Return the folder of the process's group and those above it, up to the mount."""
    for mount in mounts:
        fits = (
            mount.kind == "cgroup2"
            if not controller
            else (mount.kind == "cgroup" and controller in mount.options)
        )
        if fits and controller in groups:
            # Inside a container the mount may show only a part of the hierarchy.
            path = groups[controller].removeprefix(mount.root.rstrip("/")).strip("/")
            base = root / mount.point.lstrip("/")
            parts = [part for part in path.split("/") if part not in ("", "..")]
            return [base.joinpath(*parts[:count]) for count in range(len(parts), -1, -1)]
    return []


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def _ratio(folder: Path) -> float | None:
    quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    return quota / period if quota and period else None


def _max_ratio(text: str) -> float | None:
    parts = text.split()
    if len(parts) == 2 and parts[0].isdigit() and int(parts[1]):  # "quota period"
        return int(parts[0]) / int(parts[1])
    return None


def total_memory_bytes(root: Path = ROOT) -> int:
    """Return the memory of the node; 0 if unknown."""
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return 0


def memory_bytes(root: Path = ROOT) -> int:
    """Return the memory that a job may use: the node's, or less where a control group says so."""
    total, limit = total_memory_bytes(root), read_limits(root).memory_bytes
    return min(total, limit) if limit and total else total or limit or 0


def cpu_name(root: Path = ROOT) -> str:
    """Return the processor's name."""
    for line in _read(root / "proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "cpu"


def cache_bytes(root: Path = ROOT) -> int | None:
    """Return the size of the last-level cache that core 0 sees."""
    sizes = []
    for folder in sorted((root / "sys/devices/system/cpu/cpu0/cache").glob("index*")):
        text = _read(folder / "size").strip()
        units = {"K": 1 << 10, "M": 1 << 20}
        if text[:-1].isdigit() and text[-1:] in units:
            sizes.append(int(text[:-1]) * units[text[-1]])
    return max(sizes, default=None)
