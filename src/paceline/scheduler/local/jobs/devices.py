"""The devices of this machine as a cluster of one node, and how a job is kept to its share."""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.core.affinity import allowed_cores
from paceline.core.errors import ConfigError, Missing
from paceline.core.record import Record
from paceline.scheduler.cluster import Cluster, Node

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from paceline.scheduler.placement import Placement

NODE = "local"
GPU_QUERY = ("nvidia-smi", "--query-gpu=uuid,name,memory.total", "--format=csv,noheader,nounits")
_QUERY_S = 30.0
_ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"  # the key that limits memory is torch 2.13's


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalDevices(Record):
    """What jobs of this machine's queue can be given.

    Attributes:
        cluster: one node; for the policy.
        cores: of each CPU slot, by its index; empty if devices are GPUs.
        gpus: UUID of each GPU, by its index; empty if devices are CPU slots.
    """

    cluster: Cluster
    cores: tuple[int, ...] = ()
    gpus: tuple[str, ...] = ()

    def cores_of(self, placement: Placement) -> tuple[int, ...]:
        """Return the cores to which a job is bound; empty: unbound."""
        return (
            tuple(sorted({self.cores[index] for index in _indices(placement)}))
            if self.cores
            else ()
        )

    def names(self, indices: Iterable[int]) -> str:
        """Return devices in words, for example ``GPU GPU-1b2c`` or ``core 3``."""
        if self.gpus:
            return ", ".join(f"GPU {self.gpus[index]}" for index in indices)
        return ", ".join(f"core {self.cores[index]}" for index in indices)

    def environment(self, placement: Placement, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that keep a job to its devices, and to its share of them.

        The share of a GPU's processors, and of its memory for all CUDA programs, is a limit only
        where NVIDIA MPS runs; torch's allocator keeps to its share of the memory anyway.

        Args:
            placement: of the job.
            environ: the job's own variables.
        """
        if not self.gpus:
            return {}
        chosen = [self.gpus[index] for index in _indices(placement)]
        variables = {"CUDA_VISIBLE_DEVICES": ",".join(chosen)}
        if placement.share < 1:
            memory = int(self.cluster.nodes[0].memory_bytes * placement.share) >> 20
            variables["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = f"{100 * placement.share:g}"
            variables["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = ",".join(
                f"{index}={memory}M" for index in range(len(chosen))
            )
            settings = environ.get(_ALLOCATOR, "")
            limit = f"per_process_memory_fraction:{placement.share:g}"
            variables[_ALLOCATOR] = f"{settings},{limit}" if settings else limit
        return variables


def cpu_devices(slots: int | None = None) -> LocalDevices:
    """Return CPU slots: as many as there are allowed cores, or `slots`, which then share cores.

    Raises:
        ConfigError: there would be no slot.
    """
    allowed = allowed_cores()
    count = len(allowed) if slots is None else slots
    if count < 1:
        raise ConfigError(f"{count} CPU slots", fix="Give at least one: --slots 2")
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // count
    node = Node(name=NODE, device_type="cpu", devices=count, memory_bytes=memory_bytes)
    cores = tuple(allowed[index % len(allowed)] for index in range(count))
    return LocalDevices(cluster=Cluster(nodes=(node,)), cores=cores)


def gpu_devices(visible: str | None = None) -> LocalDevices:
    """Return the NVIDIA GPUs of this machine.

    Args:
        visible: value of CUDA_VISIBLE_DEVICES: UUIDs or indices; None: all GPUs.

    Raises:
        Missing: there is no nvidia-smi, or it finds none.
    """
    if shutil.which(GPU_QUERY[0]) is None:
        raise Missing("no nvidia-smi here", fix="Install NVIDIA's driver, or serve CPU slots")
    done = subprocess.run(GPU_QUERY, capture_output=True, text=True, timeout=_QUERY_S, check=False)
    if done.returncode:
        raise Missing(
            "nvidia-smi failed",
            why=(done.stderr or done.stdout).strip(),
            fix="Repair the driver, or serve CPU slots",
        )
    return gpus_of(done.stdout, visible)


def gpus_of(text: str, visible: str | None = None) -> LocalDevices:
    """Return the GPUs that nvidia-smi lists as ``uuid, name, MiB``; see `gpu_devices`.

    >>> gpus_of("GPU-1, NVIDIA H200, 143771").cluster.device_counts()
    {'h200': 1}
    """
    rows = [tuple(cell.strip() for cell in row) for row in csv.reader(text.splitlines()) if row]
    if visible is not None:
        wanted = [part.strip() for part in visible.split(",") if part.strip()]
        rows = [rows[int(w)] if w.isdecimal() else _by_uuid(rows, w) for w in wanted]
    if not rows:
        raise Missing("no NVIDIA GPU here", fix="Check nvidia-smi, or serve CPU slots")
    kinds = {_kind(name) for _, name, _ in rows}
    node = Node(
        name=NODE,
        device_type=kinds.pop() if len(kinds) == 1 else "gpu",
        devices=len(rows),
        memory_bytes=min(int(mib) for *_, mib in rows) << 20,
    )
    return LocalDevices(cluster=Cluster(nodes=(node,)), gpus=tuple(uuid for uuid, *_ in rows))


def _by_uuid(rows: Sequence[tuple[str, ...]], uuid: str) -> tuple[str, ...]:
    for row in rows:
        if row[0].startswith(uuid):
            return row
    raise Missing(f"no GPU '{uuid}' here", where="CUDA_VISIBLE_DEVICES", fix="See nvidia-smi -L")


def _kind(name: str) -> str:
    """Return a device type of a GPU's name, for example ``h200`` of ``NVIDIA H200``."""
    words = name.lower().removeprefix("nvidia ").removeprefix("tesla ")
    return re.sub(r"[^a-z0-9.]+", "-", words).strip("-") or "gpu"


def _indices(placement: Placement) -> list[int]:
    return [index for part in placement.parts for index in part.devices]
