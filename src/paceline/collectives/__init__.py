"""Collectives that know the node: shared memory inside a host, schedules between hosts.

    torch.distributed.init_process_group("paceline")     `registration`, `backend`
        ranks of one host        `host_path` -> `host_group` -> native/src/host_*.cpp
        several hosts            `two_level`: `sharded`, `leader`

`HostGroup` is a group of ranks that share memory; `find_hosts` finds which ranks do. What is
imported from here is loaded when it is first accessed: torch imports `registration` in every
process, and must not wait for the rest. Only leaf modules, loaded by name, import torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.collectives.host_group import DType, HostGroup, ReduceOp
    from paceline.collectives.hosts import KeyValueStore, find_hosts

__all__ = ["DType", "HostGroup", "KeyValueStore", "ReduceOp", "find_hosts"]


def __getattr__(name: str) -> Any:
    if name in ("DType", "HostGroup", "ReduceOp"):
        from paceline.collectives import host_group

        return getattr(host_group, name)
    if name in ("KeyValueStore", "find_hosts"):
        from paceline.collectives import hosts

        return getattr(hosts, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
