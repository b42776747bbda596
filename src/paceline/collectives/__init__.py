"""Collectives that know the node: shared memory inside a host, schedules between hosts.

`HostGroup` is a group of ranks that share memory; `find_hosts` finds which ranks do. Nothing here
imports torch but what is loaded by name.
"""

from paceline.collectives.host_group import DType, HostGroup, ReduceOp
from paceline.collectives.hosts import KeyValueStore, find_hosts

__all__ = ["DType", "HostGroup", "KeyValueStore", "ReduceOp", "find_hosts"]
