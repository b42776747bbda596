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

- slow: three hosts serve a pack, each shard on two of them, and a fourth reads batches of 64 files;
  then the link of one that serves has a twentieth of its rate, and then its own again.

All hosts share the processors of this machine, and its memory stands for their disks.

    python bench/store_hosts.py --json [--quick]

Needs root and iproute2.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from emulated_hosts import address_of, available, change_rate, inside, network
from harness import Report, options, tell

from paceline import store
from paceline.store.serve.remote_pack import open_remote

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


# --- one slow link ------------------------------------------------------------------------------


def client(place, nodes):
    """Run on a host: read batches, and print the rate of each second, until stdin ends."""
    with open_remote(place, nodes.split(","), replicas=2, maps_files=False) as pack:
        random, ended = np.random.default_rng(0), threading.Event()
        threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
        pack.read(0)
        while not ended.is_set():
            begin, count = time.perf_counter(), 0
            while (seconds := time.perf_counter() - begin) < 1.0:
                count += len(pack.read_batch(random.integers(len(pack), size=64))[0])
            print(json.dumps({"bytes_per_s": count / seconds}), flush=True)


def measure_slow(report, folder, seconds):
    place = make_pack(folder, 1)
    with network(4, LINK_BITS), contextlib.ExitStack() as stack:
        places = [f"{address_of(host)}:7420" for host in range(3)]
        paceline = (sys.executable, "-m", "paceline", "store")
        for host in range(3):
            peers = ",".join(other for other in places if other != places[host])
            words = ("--listen", places[host], "--peers", peers, "--replicas", "2")
            local = folder / f"slow{host}"
            command = [*inside(host), *paceline, "serve", str(place), *words, "--local", str(local)]
            node = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            stack.callback(node.wait)
            stack.callback(node.terminate)
        with store.open_pack(place, index_only=True) as pack:
            wanted = 2 * pack.shard_count
        end = time.monotonic() + DEADLINE_S
        while len(list(folder.glob("slow*/shard-*.pace"))) < wanted:
            assert time.monotonic() < end, "the nodes did not copy their shards"
            time.sleep(0.1)
        reader = subprocess.Popen(
            [*inside(3), sys.executable, __file__, "--client", str(place), ",".join(places)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        stack.callback(reader.wait)
        stack.callback(reader.stdin.close)

        def rates(count):
            return [json.loads(reader.stdout.readline())["bytes_per_s"] for _ in range(count)]

        rates(2)  # opens connections
        before = rates(seconds)
        change_rate(1, LINK_BITS / 20)
        slowed = rates(2 * seconds)
        change_rate(1, LINK_BITS)
        after = rates(seconds + 5)[5:]
    means = {"before": before, "slow": slowed, "after": after}
    means = {name: statistics.mean(found) for name, found in means.items()}
    report.row(what="slow", seconds=[round(rate / 1e6) for rate in slowed], **means)
    ratio = means["slow"] / means["before"]
    report.bar("one slow link of three: rate over the undisturbed one", ratio, 0.7, at_least=True)


def main():
    asked = options(__doc__, "--reader", "--stream", "--client", "--only")
    if asked.reader:
        what, place, folder, rounds = asked.reader
        reader(what, place, Path(folder), int(rounds))
        return
    if asked.client:
        client(*asked.client)
        return
    if asked.stream:
        stream(*map(int, asked.stream))
        return
    if reason := available():
        sys.exit(reason)
    report = Report("store_hosts", asked.json)
    rounds = 1 if asked.quick else 3
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if not asked.only or "slow" in asked.only:
            tell("slow")
            measure_slow(report, folder, 4 if asked.quick else 10)
        if not asked.only or "links" in asked.only:
            tell("epoch")
            place = measure_epoch(report, folder, rounds)
            tell("links")
            measure_links(report, place, rounds)
    sys.exit(report.print())


if __name__ == "__main__":
    main()
