"""Files per second from a node: one client, one server, both on this machine.

Every contender serves the same bytes from the page cache, from a process of its own; the rounds of
all contenders take turns, and each row is the median over rounds.

- tcp: `RemotePack` over loopback, in batches, each sample compared with its checksum.
- tls: the same, encrypted.
- epoll: two plain C++ programs (epoll_pair.cpp), which compare and frame nothing.
- sockets: Python on both ends, `sendfile` and `recv_into`, one request at a time.
- flight: Arrow Flight, if the environment has pyarrow; otherwise skipped, with the reason.
- views, mapped: the same files on the same host, mapped: as views, and copied by `read_batch`;
  memcpy: the same bytes copied by NumPy from a mapping, without a checksum.
- waiting: processor time of a client that waits for a silent node, and of an idle server.

    python bench/store_remote.py --json [--quick]
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import mmap
import os
import secrets
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from harness import Report, options, tell

from paceline import store
from paceline.core.errors import DeadlineExceeded
from paceline.store.serve.card import NodeAddress
from paceline.store.serve.links import TcpNodeLink
from paceline.store.serve.remote_pack import open_remote

HERE = Path(__file__).parent
KB = 1000
SIZES = {
    "107 KB": 107 * KB,
    "128 KB": 128 << 10,
    "512 KB": 512 << 10,
    "2 MB": 2 << 20,
    "8 MB": 8 << 20,
}
DEPTH = 16  # of a batch, and of the C++ client's requests in flight
ROUND_BYTES = 200 << 20
SET_BYTES = 400 << 20
RANGE = struct.Struct("<QQ")


def make_pack(folder, size, set_bytes=SET_BYTES):
    """Pack files of one size, as many as `set_bytes` has room for, in one shard."""
    count = max(DEPTH, set_bytes // size)
    random = np.random.default_rng(0)

    def samples():
        for k in range(count):
            yield f"{k:06d}", random.bytes(size)

    place = folder / f"{size}.pack"
    store.pack(store.Samples(samples()), place, options=store.PackOptions(shard_bytes=1 << 30))
    return place


class Round:
    """What one round reads: the same files for all contenders."""

    def __init__(self, pack, seed, quick):
        size = int(pack.lengths[0])
        count = max(2 * DEPTH, ROUND_BYTES // size // (4 if quick else 1))
        self.ids = np.random.default_rng(seed).integers(0, len(pack), count // DEPTH * DEPTH)
        extents = [pack.extents(int(sample))[0] for sample in self.ids]
        self.ranges = [(extent.offset, extent.stored_length) for extent in extents]


@contextlib.contextmanager
def process(*command):
    """Yield a server and the first line that it prints."""
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield server, server.stdout.readline().strip()
    finally:
        server.kill()
        server.wait()


def timed(work, count):
    begin = time.perf_counter()
    work()
    return count / (time.perf_counter() - begin)


def read_batches(pack, ids, out):
    for begin in range(0, len(ids), DEPTH):
        pack.read_batch(ids[begin : begin + DEPTH], out)


def touch_views(pack, ids):
    for begin in range(0, len(ids), DEPTH):
        pack.views(ids[begin : begin + DEPTH])


def copy_ranges(mapping, ranges, out):
    for k, (offset, length) in enumerate(ranges):
        begin = k % DEPTH * length
        out[begin : begin + length] = mapping[offset : offset + length]


def fetch_by_c(program, port, ranges, folder):
    path = folder / "ranges"
    path.write_bytes(b"".join(RANGE.pack(*place) for place in ranges))
    command = [program, "fetch", port, str(path), str(len(ranges)), str(DEPTH)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def fetch_by_sockets(connection, ranges, out):
    view = memoryview(out)
    for offset, length in ranges:
        connection.sendall(RANGE.pack(offset, length))
        got = 0
        while got < length:
            got += connection.recv_into(view[got:length], length - got, socket.MSG_WAITALL)


def serve_sockets(path):
    """Run as a process: the plainest server that Python can be."""
    with Path(path).open("rb") as file, socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while asked := connection.recv(RANGE.size, socket.MSG_WAITALL):
            offset, left = RANGE.unpack(asked)
            while left:
                sent = os.sendfile(connection.fileno(), file.fileno(), offset, left)
                offset, left = offset + sent, left - sent


def serve_flight(path):
    """Run as a process: a batch of ranges per ticket."""
    import pyarrow as pa
    from pyarrow import flight

    with Path(path).open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)

    class Server(flight.FlightServerBase):
        def do_get(self, _context, ticket):
            bodies = [data[at : at + n] for at, n in RANGE.iter_unpack(ticket.ticket)]
            return flight.RecordBatchStream(pa.table({"body": pa.array(bodies, pa.large_binary())}))

    server = Server("grpc://127.0.0.1:0")
    print(server.port, flush=True)
    server.serve()


def fetch_by_flight(client, ranges):
    from pyarrow import flight

    for begin in range(0, len(ranges), DEPTH):
        ticket = b"".join(RANGE.pack(*place) for place in ranges[begin : begin + DEPTH])
        client.do_get(flight.Ticket(ticket)).read_all()


def measure_size(report, name, place, program, folder, quick):
    """Measure all contenders with files of one size; return the medians."""
    has_flight = importlib.util.find_spec("pyarrow") is not None
    with contextlib.ExitStack() as stack:
        pack = stack.enter_context(store.open_pack(place))
        shard = str(pack.index.shard_path(0))
        python = sys.executable
        serve = (python, "-m", "paceline", "store", "serve", str(place), "--json")
        _, line = stack.enter_context(process(*serve))
        node = json.loads(line)["node"]
        token = secrets.token_hex(32)
        (folder / "token").write_text(token)
        secret = ("--tls", "--token-file", str(folder / "token"))
        _, line = stack.enter_context(process(*serve, *secret))
        encrypted = stack.enter_context(
            open_remote(place, [json.loads(line)["node"]], maps_files=False, token=token, tls=True)
        )
        _, c_port = stack.enter_context(process(program, "serve", shard))
        _, port = stack.enter_context(process(python, __file__, "--serve-sockets", shard))
        plain = stack.enter_context(socket.create_connection(("127.0.0.1", int(port))))
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        remote = stack.enter_context(open_remote(place, [node], maps_files=False))
        near = stack.enter_context(open_remote(place, [node]))
        mapping = np.memmap(shard, np.uint8, "r")
        out = np.ones(DEPTH * int(pack.lengths[0]), np.uint8)
        contenders = {
            "tcp": lambda r: timed(lambda: read_batches(remote, r.ids, out), len(r.ids)),
            "tls": lambda r: timed(lambda: read_batches(encrypted, r.ids, out), len(r.ids)),
            "epoll": lambda r: fetch_by_c(program, c_port, r.ranges, folder),
            "sockets": lambda r: timed(lambda: fetch_by_sockets(plain, r.ranges, out), len(r.ids)),
            "views": lambda r: timed(lambda: touch_views(near, r.ids), len(r.ids)),
            "mapped": lambda r: timed(lambda: read_batches(near, r.ids, out), len(r.ids)),
            "memcpy": lambda r: timed(lambda: copy_ranges(mapping, r.ranges, out), len(r.ids)),
        }
        if has_flight:
            from pyarrow import flight

            flight_server = (python, __file__, "--serve-flight", shard)
            _, port = stack.enter_context(process(*flight_server))
            client = flight.connect(f"grpc://127.0.0.1:{port}")
            contenders["flight"] = lambda r: timed(
                lambda: fetch_by_flight(client, r.ranges), len(r.ids)
            )
        rates = {contender: [] for contender in contenders}
        for number in range(4 if quick else 9):
            work = Round(pack, number, quick)
            for contender, run in contenders.items():
                rate = run(work)
                if number > 0:  # the first warms up
                    rates[contender].append(rate)
    medians = {contender: statistics.median(found) for contender, found in rates.items()}
    for contender, found in rates.items():
        spread = (max(found) - min(found)) / medians[contender]
        report.row(size=name, contender=contender, files_per_s=medians[contender], spread=spread)
    return medians


def bars(report, found):
    """Report what the figures for 107 KB have to reach."""
    tcp = found["tcp"]
    reached = max(tcp / 20_000, tcp / found["epoll"] / 0.9)
    report.bar("tcp: part of 20,000 files/s or of 0.9 of the C pair", reached, 1, at_least=True)
    report.bar("tcp over Python sockets", tcp / found["sockets"], 2.5, at_least=True)
    if "flight" in found:
        report.bar("tcp over Arrow Flight", tcp / found["flight"], 4, at_least=True)
    else:
        reason = "skipped: pyarrow is not installed in this environment"
        report.bar("tcp over Arrow Flight", None, 4, at_least=True, reason=reason)
    report.bar("mapped, as views, files/s", found["views"], 60_000, at_least=True)
    report.bar("mapped, copied, over memcpy", found["mapped"] / found["memcpy"], 0.7, at_least=True)


def measure_waiting(report, place):
    """Measure processor time over wall time of a client that waits, and of an idle server."""
    wait_s = 1.0
    with store.open_pack(place, index_only=True) as pack:
        identity = pack.identity
    with socket.create_server(("127.0.0.1", 0)) as silent:
        link = TcpNodeLink(NodeAddress(host="127.0.0.1", port=silent.getsockname()[1]), identity)
        begin, cpu = time.perf_counter(), time.process_time()
        with contextlib.suppress(DeadlineExceeded):
            link.card(wait_s)
        share = (time.process_time() - cpu) / (time.perf_counter() - begin)
    report.bar("CPU of a waiting client, share of a core", share, 0.01)
    serve = (sys.executable, "-m", "paceline", "store", "serve", str(place), "--json")
    with process(*serve) as (server, line):
        link = TcpNodeLink(NodeAddress.parse(json.loads(line)["node"]), identity)
        link.card(wait_s)  # a connection that stays open
        before, begin = cpu_s(server.pid), time.perf_counter()
        threading.Event().wait(3.0)
        share = (cpu_s(server.pid) - before) / (time.perf_counter() - begin)
        link.close()
    report.bar("CPU of an idle server, share of a core", share, 0.01)


def cpu_s(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main():
    asked = options(__doc__, "--serve-sockets", "--serve-flight")
    if asked.serve_sockets:
        serve_sockets(asked.serve_sockets[0])
        return
    if asked.serve_flight:
        serve_flight(asked.serve_flight[0])
        return
    report = Report("store_remote", asked.json)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        program = str(folder / "epoll_pair")
        source = str(HERE / "epoll_pair.cpp")
        subprocess.run(["c++", "-std=c++20", "-O3", source, "-o", program], check=True)
        for size_name, size in SIZES.items():
            tell(size_name)
            place = make_pack(folder, size)
            found = measure_size(report, size_name, place, program, folder, asked.quick)
            if size_name == "107 KB":
                bars(report, found)
                measure_waiting(report, place)
    sys.exit(report.print())


if __name__ == "__main__":
    main()
