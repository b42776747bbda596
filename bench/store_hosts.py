"""A pack that is spread over four emulated hosts with links of 1 Gbit/s, read through a mount.

`paceline run --data PACK:/mnt/x` on hosts that are network namespaces on a bridge
(emulated_hosts.py), each link limited in both directions; ranks read files of 107 KB with open and
read. All shards are on their nodes before the time is taken, and each file is read once.

- links: each host reads only files that other hosts have, with 16 threads. The rate is that of the
  files' bytes; wire is what the links received meanwhile; stream: plain sockets from each host to
  all others at the same time, in the same run.
- epoch: a loop that takes a batch of 8 files (856 KB) each 20 ms, read ahead by 4 threads: each
  host reads its share of the epoch in a random order, and holds as much data however many hosts
  there are. Efficiency is the time on one host, where all files are local, over that on more.

All hosts share the processors of this machine, and its memory stands for their disks.

    python bench/store_hosts.py --json [--quick]

Needs root and iproute2.
"""

from __future__ import annotations

import collections
import concurrent.futures
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from emulated_hosts import address_of, available, inside, network
from harness import Report, options, tell

from paceline import store

FILE_BYTES = 107_000
SHARD_BYTES = 8 << 20
HOST_BYTES = 256 << 20  # of files that each host holds, and reads in an epoch
LINK_BITS = 1_000_000_000
MOUNT = "/mnt/x"
READERS = 16
BATCH, STEP_S, AHEAD = 8, 0.02, 16
DEADLINE_S = 240


def make_pack(folder, hosts):
    """Pack the files of so many hosts."""
    count = HOST_BYTES * hosts // FILE_BYTES
    random = np.random.default_rng(0)

    def samples():
        for k in range(count):
            yield f"{k % 100:02}/{k:06d}", random.bytes(FILE_BYTES)

    place = folder / f"{hosts}.pack"
    store.pack(store.Samples(samples()), place, options=store.PackOptions(shard_bytes=SHARD_BYTES))
    return place


# --- what runs on the hosts ---------------------------------------------------------------------


def meet(folder, name, rank, hosts):
    """Wait for the other ranks."""
    (folder / f"{name}{rank}").touch()
    while len(list(folder.glob(f"{name}*"))) < hosts:
        time.sleep(0.005)


def read_file(name):
    descriptor = os.open(f"{MOUNT}/{name}", os.O_RDONLY)
    data = os.read(descriptor, FILE_BYTES + 1)
    os.close(descriptor)
    return len(data)


def received_bytes():
    return int(Path("/sys/class/net/eth0/statistics/rx_bytes").read_text())


def read_links(names):
    with concurrent.futures.ThreadPoolExecutor(READERS) as pool:
        left = iter(names)  # of all threads: none ends much before the others
        return sum(pool.map(lambda _: sum(map(read_file, left)), range(READERS)))


def read_epoch(names):
    batches = [names[at : at + BATCH] for at in range(0, len(names), BATCH)]
    total = 0
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        ahead = collections.deque()
        waiting = iter(batches)
        for _ in range(AHEAD):
            ahead.append([pool.submit(read_file, name) for name in next(waiting, ())])
        for _ in batches:
            total += sum(future.result() for future in ahead.popleft())
            ahead.append([pool.submit(read_file, name) for name in next(waiting, ())])
            time.sleep(STEP_S)  # what the loop computes
    return total


def reader(what, place, folder, rounds):
    """Run on a host, as the rank of a run: read, and print a line of JSON for each round."""
    rank, hosts = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with store.open_pack(place, index_only=True) as pack:
        shards = np.array([pack.extents(sample)[0].shard for sample in range(len(pack))])
        names = list(pack.names)
        count = pack.shard_count
    while len(list(folder.glob("local*/*/shard-*.pace"))) < count:
        time.sleep(0.05)
    held = {int(path.stem[6:]) for path in (folder / f"local{rank}").glob("*/shard-*.pace")}
    for number in range(rounds):
        order = np.random.default_rng(number).permutation(len(names))
        if what == "links":
            chosen = [sample for sample in order if shards[sample] not in held]
            chosen = chosen[rank :: hosts - 1][: HOST_BYTES // FILE_BYTES]
        else:
            chosen = order[rank::hosts]
        wanted = [names[sample] for sample in chosen]
        meet(folder, f"round{number}-", rank, hosts)
        before, begin = received_bytes(), time.perf_counter()
        total = (read_links if what == "links" else read_epoch)(wanted)
        seconds = time.perf_counter() - begin
        meet(folder, f"end{number}-", rank, hosts)
        wire = received_bytes() - before
        print(json.dumps({"round": number, "s": seconds, "bytes": total, "wire": wire}), flush=True)


def stream(rank, hosts, size):
    """Run on a host: receive from all other hosts, and send to all of them, by plain sockets."""
    listener = socket.create_server((address_of(rank), 7000))
    others = [(rank + step) % hosts for step in range(1, hosts)]
    share = size // len(others)

    def send(peer):
        buffer = bytearray(1 << 20)
        deadline_s = time.monotonic() + 10
        while True:
            try:
                connection = socket.create_connection((address_of(peer), 7000))
                break
            except OSError:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.01)
        with connection:
            left = share
            while left > 0:
                left -= connection.send(buffer[:left])

    def receive(connection):
        buffer, got = bytearray(1 << 20), 0
        with connection:
            while count := connection.recv_into(buffer):
                got += count
        return got

    with concurrent.futures.ThreadPoolExecutor(2 * len(others)) as pool:
        sending = [pool.submit(send, peer) for peer in others]
        connections = [listener.accept()[0] for _ in others]
        begin = time.perf_counter()
        got = sum(pool.map(receive, connections))
        print(json.dumps({"bytes": got, "s": time.perf_counter() - begin}), flush=True)
        for sent in sending:
            sent.result()


# --- what starts them ---------------------------------------------------------------------------


def said_by(processes):
    lines = []
    try:
        for process in processes:
            out, _ = process.communicate(timeout=DEADLINE_S)
            if process.returncode:
                sys.exit(f"a host ended with {process.returncode}")
            lines.append([json.loads(line) for line in out.splitlines()])
    finally:
        for process in processes:
            process.kill()
    return lines


def on_hosts(hosts, place, what, rounds):
    """Return for each round what each host measured."""
    with tempfile.TemporaryDirectory() as name, network(hosts, LINK_BITS):
        folder = Path(name)
        run = (sys.executable, "-m", "paceline", "run", "--no-record", "--no-bind")
        processes = [
            subprocess.Popen(
                [
                    *inside(host),
                    *run,
                    *("--out", str(folder / "RUN"), "--nnodes", str(hosts)),
                    *("--node-rank", str(host), "--rdzv-endpoint", f"{address_of(0)}:28400"),
                    *("--data", f"{place}:{MOUNT}", "--data-folder", str(folder / f"local{host}")),
                    *(__file__, "--reader", what, str(place), name, str(rounds)),
                ],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                cwd=name,
            )
            for host in range(hosts)
        ]
        return list(zip(*said_by(processes), strict=True))


def stream_rate(hosts, size):
    """Return the bytes per second that plain sockets carry over all links at the same time."""
    with network(hosts, LINK_BITS):
        command = [sys.executable, __file__, "--stream"]
        processes = [
            subprocess.Popen(
                [*inside(host), *command, str(host), str(hosts), str(size)],
                stdout=subprocess.PIPE,
                text=True,
            )
            for host in range(hosts)
        ]
        found = [lines[0] for lines in said_by(processes)]
    return sum(host["bytes"] for host in found) / max(host["s"] for host in found)


def measure_links(report, place, rounds):
    hosts = 4
    plain = stream_rate(hosts, HOST_BYTES // 2)
    found = on_hosts(hosts, place, "links", rounds + 1)[1:]  # the first one opens connections
    rates, wires = [], []
    for measured in found:
        seconds = max(host["s"] for host in measured)
        rates.append(sum(host["bytes"] for host in measured) / seconds)
        wires.append(sum(host["wire"] for host in measured) / seconds)
    rate, wire = statistics.median(rates), statistics.median(wires)
    report.row(what="links", hosts=hosts, bytes_per_s=rate, wire_bytes_per_s=wire, stream=plain)
    report.bar("4 hosts: rate of the files over the links'", rate * 8 / LINK_BITS / hosts, 0.9,
               at_least=True)  # fmt: skip
    report.bar("4 hosts: rate of the files over plain sockets", rate / plain, 0.9, at_least=True)


def measure_epoch(report, folder, rounds):
    times = {}
    for hosts in (1, 2, 4):
        place = make_pack(folder, hosts)
        found = on_hosts(hosts, place, "epoch", rounds)
        times[hosts] = statistics.median(max(host["s"] for host in measured) for measured in found)
        wire = statistics.median(sum(host["wire"] for host in measured) for measured in found)
        report.row(what="epoch", hosts=hosts, s=times[hosts], wire_bytes_per_s=wire / times[hosts])
    for hosts in (2, 4):
        report.bar(f"weak scaling of an epoch, 1 to {hosts} hosts", times[1] / times[hosts], 0.9,
                   at_least=True)  # fmt: skip
    return place


def main():
    asked = options(__doc__, "--reader", "--stream")
    if asked.reader:
        what, place, folder, rounds = asked.reader
        reader(what, place, Path(folder), int(rounds))
        return
    if asked.stream:
        stream(*map(int, asked.stream))
        return
    if reason := available():
        sys.exit(reason)
    report = Report("store_hosts", asked.json)
    rounds = 1 if asked.quick else 3
    with tempfile.TemporaryDirectory() as name:
        tell("epoch")
        place = measure_epoch(report, Path(name), rounds)
        tell("links")
        measure_links(report, place, rounds)
    sys.exit(report.print())


if __name__ == "__main__":
    main()
