"""Mutated frames against each server, and mutated files for each format that is read.

- frames: 10,000 for each protocol, by a client that has proved the token where there is one: honest
  bytes with some of them changed, cut, doubled, left out or put in. The server must neither end nor
  hang, answers honest calls as before, and its memory does not grow by more than 64 MiB.
- files: 10,000 for each format, likewise. What is read is the right content or an error by name: no
  crash, none that takes 20 s, no growth of memory beyond 512 MiB. Formats with checksums are never
  read wrong without an error (`wrong` 0); a TFRecord file that ends after a record, and a trace
  that is reported as incomplete, are `shorter`. Of other formats the numbers are given.

    python bench/mutated.py --json [--quick] [--only SECTION]
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import io
import json
import logging
import os
import random
import resource
import shutil
import signal
import socket
import struct
import sys
import tarfile
import tempfile
from pathlib import Path

from harness import Report, options, run_sections
from strangers import CALL_S, TOKEN, Server

COUNT, QUICK_COUNT = 10_000, 300
MOST_SERVER_GROWTH, MOST_READER_GROWTH = 64 << 20, 512 << 20
HANG_S = 20
WORKERS = 2


def main():
    flags = options(__doc__, "--only")
    report = Report("mutated", flags.json)
    count = QUICK_COUNT if flags.quick else COUNT
    sections = {"frames": frames, "files": files}
    names = flags.only or list(sections)
    run_sections(names, lambda name: sections[name](report, count), report)
    return report.print()


def mutated(data, draw):
    """Return `data` with one to four changes."""
    data = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        at = draw.randrange(len(data)) if data else 0
        size = min(draw.choice((1, 1, 2, 4, 8, 64, 512)), max(1, len(data) - at))
        kind = draw.randrange(7)
        if kind == 0 and data:
            data[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            data[at : at + size] = draw.randbytes(size)
        elif kind == 2:
            data[at : at + size] = draw.choice((b"\0", b"\xff", b"\x7f")) * size
        elif kind == 3:
            del data[at:]
        elif kind == 4:
            del data[at : at + size]
        elif kind == 5:
            data[at:at] = data[at : at + size]
        else:
            data[at:at] = draw.randbytes(size)
    return bytes(data)


# --- frames -------------------------------------------------------------------------------------


def frames(report, count):
    for name, (greet, honest) in PROTOCOLS.items():
        with tempfile.TemporaryDirectory() as folder, Server(name, Path(folder)) as server:
            pid = server.pid
            server.call()
            before, draw, ended = memory_bytes(pid), random.Random(1), 0
            for _ in range(count):
                with contextlib.suppress(OSError), greet(server) as connection:
                    connection.settimeout(HANG_S)
                    connection.sendall(mutated(draw.choice(honest), draw))
                    with contextlib.suppress(OSError):
                        connection.shutdown(socket.SHUT_WR)
                    while connection.recv(1 << 16):
                        pass
                    ended += 1
            server.call()
            growth = memory_bytes(pid) - before
            is_up = server.process.poll() is None
        report.row(protocol=name, frames=count, ended=ended, growth_bytes=growth, up=is_up)
        report.bar(f"{name}: the server is up, and answers", int(is_up), 1, at_least=True)
        report.bar(f"{name}: memory, bytes", growth, MOST_SERVER_GROWTH)


def memory_bytes(pid):
    status = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) << 10


def dial(server):
    return socket.create_connection(tuple(server.place), CALL_S)


def proved(server):
    from paceline.core.handshake import prove

    connection = dial(server)
    prove(connection, server.token, CALL_S)
    return connection


def proved_data(server):
    """As `PeerLink` does (peer_frames.hpp, peer_proof.hpp)."""
    from paceline.store.serve.card import digest

    connection = dial(server)
    connection.settimeout(CALL_S)
    nonce, pack = os.urandom(32), digest(server.said["pack"])
    connection.sendall(HEADER.pack(MAGIC, 3, HELLO, 1, 0, 0, 32) + nonce)
    challenge = receive(connection, HEADER.size + 32)[HEADER.size :]
    parts = b"paceline client" + nonce + challenge + pack
    own = hmac.new(digest(TOKEN), parts, hashlib.sha256).digest()
    connection.sendall(HEADER.pack(MAGIC, 3, PROOF, 2, 0, 0, 64) + own + pack)
    header = HEADER.unpack(receive(connection, HEADER.size))
    assert header[2] == WELCOME, header
    receive(connection, header[6])
    return connection


def receive(connection, size):
    data = b""
    while len(data) < size and (piece := connection.recv(size - len(data))):
        data += piece
    return data


def unix(server):
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(server.place)
    return connection


HEADER = struct.Struct("<IHHQIIQ")
MAGIC, HELLO, WELCOME, READ, CARD, PROOF = 0x4E4C4350, 1, 2, 3, 6, 8


def output_frame(**message):
    data = json.dumps(message).encode()
    return struct.pack("<I", len(data)) + data


REPORT = {
    "version": 1, "job": "x", "run": "", "task": "t", "rank": 1, "world_size": 2, "host": "h",
    "cores": [0], "ended": None, "others": [], "leaving": False, "data": [],
}  # fmt: skip
PROTOCOLS = {
    "data": (
        proved_data,
        [
            HEADER.pack(MAGIC, 3, READ, 3, 0, 2, 32) + struct.pack("<4Q", 0, 100, 200, 300),
            HEADER.pack(MAGIC, 3, CARD, 3, 0, 0, 0),
            HEADER.pack(MAGIC, 3, CARD, 3, 1, 1, 14) + b"10.0.0.1:12345",
        ],
    ),
    "outputs": (
        proved,
        [
            output_frame(do="written"),
            output_frame(do="is written", path="a/b"),
            output_frame(do="read", path="a/b", identity="1-1", size=10),
            output_frame(do="apply", kind="mkdir", path="a", mode=0o755, node=1),
            output_frame(do="apply", kind="publish", path="a/b", identity="1-1", node=1),
        ],
    ),
    "rendezvous": (proved, [json.dumps(REPORT).encode() + b"\n"]),
    "turns": (proved, [b"?", b"!" + struct.pack("<Q", 5), b"?" + b"!" + struct.pack("<Q", 5)]),
    "queue": (
        unix,
        [
            b'{"version": 1, "verb": "list", "ended": true}\n',
            b'{"version": 1, "verb": "why", "name": "a-1"}\n',
            b'{"version": 1, "verb": "submit", "submission": {"command": ["true"]}}\n',
        ],
    ),
}


# --- files --------------------------------------------------------------------------------------


def files(report, count):
    for name, (make, read, is_checked) in FORMATS.items():
        # In memory: an index that is made anew is synchronised, which is not what is tried here.
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            place = Path(folder)
            target = make(place / "good")
            found = spread(place, target, read, count)
        report.row(format=name, files=count, checksums=is_checked, **found)
        if is_checked:
            report.bar(f"{name}: read wrong without an error", found["wrong"], 0)
        report.bar(f"{name}: crashes and hangs", found["crashed"], 0)
        report.bar(f"{name}: memory, bytes", found["growth_bytes"], MOST_READER_GROWTH)


def spread(place, target, read, count):
    """Read mutated copies of `target`, a file below ``good``, in processes that may crash."""
    good, name = place / "good", target.relative_to(place / "good")
    data = target.read_bytes()
    total = {"right": 0, "refused": 0, "shorter": 0, "wrong": 0, "crashed": 0, "growth_bytes": 0}
    kinds = {}
    share, begins = count // WORKERS, []
    pending = [(worker, worker * share, (worker + 1) * share) for worker in range(WORKERS)]
    while pending:
        worker, begin, end = pending.pop()
        copy = place / f"copy{worker}"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(good, copy)
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            os.close(reader)
            check(copy, copy / name, data, read, range(begin, end), writer)
        os.close(writer)
        begins.append((child, reader, worker, begin, end))
        if pending:
            continue
        again = []
        for child, reader, worker, begin, end in begins:
            lines = os.fdopen(reader).read().splitlines()
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            for line in lines:
                said = json.loads(line)
                if "outcome" in said:
                    total[said["outcome"]] += 1
                    kinds[said["kind"]] = kinds.get(said["kind"], 0) + 1
                    begin = said["number"] + 1
                else:
                    total["growth_bytes"] = max(total["growth_bytes"], said["growth_bytes"])
            if code or begin < end:
                total["crashed"] += 1
                kinds[f"exit {code} at {begin}"] = 1
                again.append((worker, begin + 1, end))
        begins, pending = [], [entry for entry in again if entry[1] < entry[2]]
    return {**total, "kinds": dict(sorted(kinds.items(), key=lambda item: -item[1])[:6])}


def check(copy, target, data, read, numbers, writer):
    """Read one mutated file after the other, in a child; say of each what came of it."""
    from paceline.core.errors import PacelineError

    code = 1
    try:
        logging.disable(logging.CRITICAL)
        right, said = read(copy), os.fdopen(writer, "w", buffering=1)
        keep = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for number in numbers:
            draw = random.Random(number)
            target.write_bytes(mutated(data, draw))
            signal.alarm(HANG_S)
            try:
                found = read(copy)
                outcome = "right" if found == right else "wrong"
                if outcome == "wrong" and is_shorter(found, right):
                    outcome = "shorter"
                kind = outcome
            except PacelineError as problem:
                outcome, kind = "refused", type(problem).__name__
            signal.alarm(0)
            print(json.dumps({"number": number, "outcome": outcome, "kind": kind}), file=said)
            for path in copy.rglob("*"):
                if path not in keep and path.is_file():
                    path.unlink()
            for path, content in keep.items():
                if not path.exists() or path.stat().st_size != len(content) or path != target:
                    path.write_bytes(content)
        growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
        print(json.dumps({"growth_bytes": growth}), file=said)
        said.flush()
        code = 0
    except BaseException as problem:  # an exception that is none of ours counts as a crash
        print(f"{target.name}: {type(problem).__name__}: {problem}", file=sys.stderr)
    finally:
        os._exit(code)


class Records(list):
    """Content of a format that does not say how many records there are."""


def is_shorter(found, right):
    """Whether less was read, and the format cannot tell, or the reader says so."""
    if isinstance(found, Records):
        return found == right[: len(found)]
    return isinstance(found, tuple) and found[0] == "incomplete"


def samples(count=24):
    draw = random.Random(5)
    return [(f"d{k % 3}/{k:03}.bin", draw.randbytes(draw.randrange(1, 3000))) for k in range(count)]


def content(pack):
    with pack as opened:
        return [(str(name), opened.read(k)) for k, name in enumerate(opened.names)]


def make_pack(folder, codec="none"):
    from paceline import store

    folder.mkdir()
    chosen = store.PackOptions(shard_bytes=16_000, codec=codec)
    store.pack(store.Samples(samples()), folder / "pack", options=chosen)
    return folder / "pack"


def read_pack(folder):
    from paceline import store

    return content(store.open_pack(folder / "pack"))


def make_tar(folder):
    folder.mkdir(exist_ok=True)
    with tarfile.open(folder / "data.tar", "w") as archive:
        for name, data in samples():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return folder / "data.tar"


def make_side_file(folder):
    make_tar(folder)
    read_tar(folder)
    return next(path for path in folder.iterdir() if path.name != "data.tar")


def read_tar(folder):
    from paceline import store

    return content(store.open_pack(folder / "data.tar"))


def make_records(folder):
    from paceline.native import crc32c

    folder.mkdir()
    with (folder / "data.tfrecord").open("wb") as file:
        for _, data in samples():
            for part in (struct.pack("<Q", len(data)), data):
                found = crc32c(part)
                masked = ((found >> 15 | found << 17) + 0xA282EAD8) & 0xFFFFFFFF
                file.write(part + struct.pack("<I", masked))
    return folder / "data.tfrecord"


def read_records(folder):
    from paceline import store

    return Records(content(store.open_pack(folder / "data.tfrecord")))


def make_trace(folder):
    from paceline.native import Recorder

    folder.mkdir()
    recorder = Recorder(str(folder / "rank-00000.trace"), 0, 1, buffer_events=256)
    for k in range(100):
        recorder.record(
            1, 0, recorder.intern(f"e{k % 7}"), 1000 * k, 1000 * k + 500, k,
            recorder.define_group("g", (0,)), k, -1, 0, k, 0,
        )  # fmt: skip
    recorder.flush()
    recorder.close()
    return folder / "rank-00000.trace"


def read_trace(folder):
    from paceline.trace.format.files import read_trace as read

    found = read(folder / "rank-00000.trace")
    state = "complete" if found.complete else "incomplete"
    return state, found.events.tobytes(), found.names, repr((found.groups, found.locations))


def make_machine(folder):
    from paceline.core.machine import Machine

    folder.mkdir()
    source = Path(__file__).parent / "results" / "collectives.json"
    machine = json.loads(source.read_text())["machine"]
    (folder / "machine.json").write_text(json.dumps(machine))
    Machine.from_json(machine)
    return folder / "machine.json"


def read_machine(folder):
    from paceline.core.files import read_text
    from paceline.core.machine import Machine

    return json.dumps(Machine.from_text(read_text(folder / "machine.json")).to_json())


FORMATS = {
    "pack's index": (lambda folder: make_pack(folder) / "index.pace", read_pack, True),
    "shard": (lambda folder: make_pack(folder) / "shard-00000.pace", read_pack, True),
    "compressed shard": (
        lambda folder: make_pack(folder, "zstd") / "shard-00000.pace",
        read_pack,
        True,
    ),
    "side file": (make_side_file, read_tar, True),
    "tar": (make_tar, read_tar, False),
    "TFRecord": (make_records, read_records, True),
    "trace": (make_trace, read_trace, True),
    "machine": (make_machine, read_machine, False),
}


if __name__ == "__main__":
    sys.exit(main())
