"""Runs a script as if its ranks were on several hosts, given as "0,2/1,3": by host, its ranks.

    pretended_hosts.py STORE RANK RANKS HOSTS WIRE SCRIPT [ARGUMENT ...]

WIRE is "same", "bfloat16", or "mpi"; with the last, mpiexec starts the ranks, and RANK is "mpi".

The script gets STORE RANK RANKS ARGUMENT ... as its arguments.
"""

import runpy
import sys

import torch.distributed as dist

from paceline.collectives import backend
from paceline.collectives import path as paths
from paceline.collectives.host_group import HostGroup
from paceline.collectives.host_path import HostPath
from paceline.collectives.options import CollectivesConfig
from paceline.collectives.settings import GroupSettings, choose


class Hosts:
    """Hosts that are pretended, with chunks so small that tensors of tests have several."""

    def __init__(self, layout, wire):
        self.ranks = [[int(rank) for rank in host.split(",")] for host in layout.split("/")]
        self.are_even = len(set(map(len, self.ranks))) == 1
        carrier = {"between_hosts": "mpi"} if wire == "mpi" else {"wire": wire}
        self.config = CollectivesConfig(flat_below_bytes=0, chunk_bytes=2048, **carrier)

    def make_path(self, store, rank, members, timeout_s, config):
        """Return the path of a group, in place of `paceline.collectives.path.make_path`."""
        own = [[members.index(peer) for peer in host if peer in members] for host in self.ranks]
        hosts, store = list(filter(None, own)), dist.PrefixStore("pretended/", store)
        if len(hosts) == 1:
            return HostPath(HostGroup.form(store, rank, len(members), timeout_s), members)
        settings = GroupSettings(
            config=self.config, choice=choose(self.config, len(hosts), len(members))
        )
        return paths.two_levels(store, hosts, rank, members, timeout_s, settings)


def rank_of(text):
    """Return the rank that an argument gives; "mpi" leaves it to MPI."""
    if text != "mpi":
        return int(text)
    from mpi4py import MPI

    return MPI.COMM_WORLD.Get_rank()


def main():
    store, rank, ranks, layout, wire, script, *arguments = sys.argv[1:]
    rank = str(rank_of(rank))
    backend.make_path = Hosts(layout, wire).make_path
    sys.argv = [script, store, rank, ranks, *arguments]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
