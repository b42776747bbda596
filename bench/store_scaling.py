"""Weak scaling of a read epoch over nodes that serve a pack, extrapolated from service times.

Measured here: the processor time of a server and of a client for a file of 107 KB over loopback,
and for a node's card. Simulated from them: N nodes, each with its share of the shards by the
placement that nodes really use (`placement.place`). In an epoch each file is read once, by any
node, in random order; a node reads batches, several in flight, from the nodes that
`Membership.holders` names first. A node is three queues in a row, each serving one file at a time:
the owner's processor, the owner's link, the reader's link and processor. What a node holds itself
is read from local storage.

- network: FDR InfiniBand, 56 Gbit/s, and Omni-Path, 100 Gbit/s, on which FanStore was published.
- efficiency: files/s of a node among N over those of a node among 2, where half is remote already,
  scaled by the remote part: 1 is a network without contention, and placement in balance.
- what saturates: the busiest owner's queues; the questions for cards, of which each node asks 64 in
  each beat; and placement, which each node computes when a node joins or is lost.

All figures of the simulation are marked as estimated; the service times are measured.

    python bench/store_scaling.py --json [--quick]
"""

from __future__ import annotations

import heapq
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from harness import Report, options, tell

from paceline import store
from paceline.store.serve.card import NodeAddress, NodeCard, digest
from paceline.store.serve.links import TcpNodeLink
from paceline.store.serve.membership import Membership
from paceline.store.serve.placement import place
from paceline.store.serve.remote_pack import open_remote

FILE_BYTES = 107_000
BATCH = 32
IN_FLIGHT = 4  # batches, as LoaderOptions.batches_ahead
SHARDS_PER_NODE = 64  # 16 GB in shards of 256 MiB
NETWORKS = {"FDR InfiniBand": 56e9 / 8, "Omni-Path": 100e9 / 8}
NODES = (2, 4, 16, 64, 512, 4096)
LOCAL_S = 30e-6  # of a file from a mapping of local storage; store_remote.py, row "mapped"
BEAT_S = 1.0
ASKED_PER_BEAT = 64  # node.py


def cpu_s(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(folder, quick):
    """Return seconds of processor time: of a server and a client for a file, and for a card."""
    random = np.random.default_rng(0)
    samples = ((f"{k:05d}", random.bytes(FILE_BYTES)) for k in range(1000))
    place_ = folder / "pack"
    store.pack(store.Samples(samples), place_, options=store.PackOptions(shard_bytes=1 << 28))
    command = [sys.executable, "-m", "paceline", "store", "serve", str(place_)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        name = server.stdout.readline().split()[-1]
        with open_remote(place_, [name], maps_files=False) as remote:
            ids = random.integers(0, 1000, (200 if quick else 2000, BATCH))
            out = np.ones(BATCH * FILE_BYTES, np.uint8)
            for row in ids[:20]:
                remote.read_batch(row, out)
            before, mine = cpu_s(server.pid), time.process_time()
            for row in ids:
                remote.read_batch(row, out)
            client_s = (time.process_time() - mine) / ids.size
            server_s = (cpu_s(server.pid) - before) / ids.size
            link = TcpNodeLink(NodeAddress.parse(name), remote.identity)
            times = []
            for _ in range(200):
                begin = time.process_time()
                link.card(5.0)
                times.append(time.process_time() - begin)
            link.close()
        return server_s, client_s, statistics.median(times)
    finally:
        server.kill()
        server.wait()


def first_owners(count):
    """Return for each shard of a pack over `count` nodes whom readers ask first."""
    names = [f"node{k:04d}" for k in range(count)]
    shards = SHARDS_PER_NODE * count
    placement = place(names, shards, 1)
    members = Membership(self_name="", peers=names, shard_count=shards, replicas=1, grace_s=0.0)
    assert members.placement.nodes == placement.nodes
    first = placement.owners[:, 0]
    for shard in range(0, shards, max(1, shards // 64)):  # a client asks no one else first
        assert members.holders(shard)[0] == placement.nodes[first[shard]]
    return first


def simulate(owners, count, batches, service, bytes_per_s):
    """Return files/s of all nodes together, and the busiest owner's share of the time."""
    server_s, client_s = service
    wire_s = FILE_BYTES / bytes_per_s
    files_per_shard = -(-count * batches * BATCH // len(owners))
    epoch = np.random.default_rng(1).permutation(np.repeat(owners, files_per_shard))
    asked_of = epoch[: count * batches * BATCH].reshape(count, batches, BATCH)
    server_free = np.zeros(count)
    out_free = np.zeros(count)
    in_free = np.zeros(count)
    busy = np.zeros(count)
    left = np.full(count, batches)
    events = [(0.0, node) for node in range(count) for _ in range(IN_FLIGHT)]
    heapq.heapify(events)
    end_s = 0.0
    while events:
        now_s, node = heapq.heappop(events)
        end_s = max(end_s, now_s)
        if left[node] == 0:
            continue
        left[node] -= 1
        done_s = now_s
        for owner in asked_of[node, left[node]].tolist():
            if owner == node:
                begin = max(now_s, in_free[node])
                in_free[node] = done = begin + LOCAL_S
            else:
                served = max(now_s, server_free[owner]) + server_s
                server_free[owner] = served
                busy[owner] += server_s
                sent = max(served, out_free[owner]) + wire_s
                out_free[owner] = sent
                begin = max(sent, in_free[node])
                in_free[node] = done = begin + max(client_s, wire_s)
            done_s = max(done_s, done)
        heapq.heappush(events, (done_s, node))
    return count * batches * BATCH / end_s, float(busy.max() / end_s)


def ideal_rate(count, service, bytes_per_s):
    """Return files/s of a node if no two requests ever met: of its slowest queue."""
    server_s, client_s = service
    wire_s = FILE_BYTES / bytes_per_s
    remote = 1 - 1 / count
    return 1 / max(remote * server_s, remote * max(client_s, wire_s) + (1 - remote) * LOCAL_S)


def card_bytes(count):
    """Return the length of the card of a node among `count`."""
    names = tuple(f"10.0.{k // 250}.{k % 250}:7420" for k in range(count))
    held = tuple(range(0, SHARDS_PER_NODE * count, count))
    card = NodeCard(node=names[0], host=digest("").hex(), folder="/local", held=held, peers=names)
    return len(card.to_bytes())


def main():
    asked = options(__doc__)
    report = Report("store_scaling", asked.json)
    with tempfile.TemporaryDirectory() as name:
        tell("service times")
        server_s, client_s, card_s = measure(Path(name), asked.quick)
    report.row(what="server, processor time of a file", seconds=server_s, kind="measured")
    report.row(what="client, processor time of a file", seconds=client_s, kind="measured")
    report.row(what="client, processor time of a card", seconds=card_s, kind="measured")
    efficiency = {}
    for count in NODES[:5] if asked.quick else NODES:
        tell(f"{count} nodes")
        owners = first_owners(count)
        batches = max(12, min(400, 40_000 // count))
        for network, bytes_per_s in NETWORKS.items():
            service = server_s, client_s
            rate, busiest = simulate(owners, count, batches, service, bytes_per_s)
            part = rate / count / ideal_rate(count, service, bytes_per_s)
            efficiency[network, count] = part
            report.row(
                nodes=count,
                network=network,
                files_per_s=rate,
                of_ideal=part,
                busiest_owner=busiest,
                kind="simulated",
            )
        share = min(count - 1, ASKED_PER_BEAT) * card_s / BEAT_S
        begin = time.process_time()
        place([f"node{k:04d}" for k in range(count)], SHARDS_PER_NODE * count, 2)
        report.row(
            nodes=count,
            cards_share_of_core=share,
            card_bytes=card_bytes(count),
            placement_s=time.process_time() - begin,
            kind="measured",
        )
    for network in ("FDR InfiniBand", "Omni-Path"):
        scaled = efficiency[network, 512] / efficiency[network, 2]
        report.bar(f"weak scaling, 512 nodes over 2, {network}", scaled, 0.9, at_least=True)
    sys.exit(report.print())


if __name__ == "__main__":
    main()
