"""Hostile frames over real sockets.

A server ends nothing but their connection, does not grow, and says nothing to a client that cannot
prove its token.
"""

import contextlib
import errno
import hashlib
import hmac
import json
import os
import socket
import ssl
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.launching import await_true

from paceline import store
from paceline.store.serve.card import digest
from paceline.store.serve.links import tcp_connector

WAIT_S = 60.0
TOKEN = "correct horse battery staple"
HEADER = struct.Struct("<IHHQIIQ")
MAGIC, VERSION = 0x4E4C4350, 3
HELLO, WELCOME, READ, DATA, REFUSED, CARD, CHALLENGE, PROOF = range(1, 9)
MOST_RANGES, MOST_CALLER_BYTES = 1024, 256
# A challenge and a refusal: all that a client without the token may be told.
MOST_UNPROVED_BYTES = 2 * HEADER.size + 32
MOST_GROWTH_BYTES = 64 << 20


def frame(kind, body=b"", *, magic=MAGIC, version=VERSION, count=0, shard=0, body_bytes=None):
    length = len(body) if body_bytes is None else body_bytes
    return HEADER.pack(magic, version, kind, 1, shard, count, length) + body


def proof_of(who, token, client, node, pack):
    parts = who.encode() + client + node + pack
    return hmac.new(digest(token), parts, hashlib.sha256).digest()


def receive(connection, size):
    """Return so many bytes, or fewer if the connection ends."""
    got = b""
    while len(got) < size and (piece := connection.recv(size - len(got))):
        got += piece
    return got


def drain(connection):
    """Return what still comes, until the other side ends the connection."""
    got = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(1 << 16):
            got += piece
    return got


class Attacked:
    """A server in a process of its own, and what is known of it."""

    def __init__(self, pack, folder, *options):
        (folder / "token").write_text(TOKEN)
        (folder / "token").chmod(0o600)
        command = [sys.executable, "-m", "paceline", "store", "serve", str(pack), "--json"]
        command += ["--token-file", str(folder / "token"), *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        said = json.loads(self.process.stdout.readline())
        self.name, self.identity = said["node"], said["pack"]
        self.port = int(self.name.rpartition(":")[2])
        self.pack = digest(self.identity)
        self.tls = "--tls" in options

    def connect(self):
        return socket.create_connection(("127.0.0.1", self.port), timeout=WAIT_S)

    def greet(self, connection, token=TOKEN):
        """Go through the introduction as a client with this token would; return what came."""
        nonce = os.urandom(32)
        connection.sendall(frame(HELLO, nonce))
        challenge = receive(connection, HEADER.size + 32)[HEADER.size :]
        own = proof_of("paceline client", token, nonce, challenge, self.pack)
        connection.sendall(frame(PROOF, own + self.pack))
        answer = receive(connection, HEADER.size)
        if HEADER.unpack(answer)[2] == WELCOME:
            body = receive(connection, HEADER.unpack(answer)[6])
            assert body[:32] == proof_of("paceline server", token, nonce, challenge, self.pack)
            answer += body
        return answer

    def memory_bytes(self):
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
        return int(line.split()[1]) << 10

    def descriptor_count(self):
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def card(self):
        link = tcp_connector(self.identity, TOKEN, tls=self.tls)(self.name)
        try:
            return link.card(WAIT_S)
        finally:
            link.close()

    def close(self):
        self.process.kill()
        self.process.wait(WAIT_S)
        self.process.stdout.close()


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    random = np.random.default_rng(3)
    samples = store.Samples([(f"{k:02}", random.bytes(20_000)) for k in range(40)])
    store.pack(samples, folder / "pack", options=store.PackOptions(shard_bytes=200_000))
    return folder / "pack"


@pytest.fixture
def attacked(pack, tmp_path):
    servers = []

    def start(*options):
        servers.append(Attacked(pack, tmp_path, *options))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def without_token(random, server, overheard):
    """Return what a client sends that has never known the token."""
    hello = frame(HELLO, random.bytes(32))
    whole = struct.pack("<QQ", 0, 100)
    kinds = [
        lambda: random.bytes(int(random.integers(1, 400))),
        lambda: b"GET /index.pace HTTP/1.1\r\nHost: node\r\n\r\n",
        lambda: bytes(int(random.integers(1, 400))),
        lambda: frame(READ, whole, count=1),
        lambda: frame(CARD),
        lambda: frame(PROOF, random.bytes(64)),
        lambda: frame(HELLO, random.bytes(64)),
        lambda: frame(HELLO, b"", body_bytes=1 << int(random.integers(6, 64))),
        lambda: frame(HELLO, random.bytes(32), version=1),
        lambda: frame(HELLO, digest(TOKEN)),  # even its digest proves nothing
        lambda: hello + frame(READ, whole, count=1),
        lambda: hello + frame(CARD),
        lambda: hello + hello,
        lambda: hello + frame(PROOF, random.bytes(32) + server.pack),
        lambda: hello + frame(PROOF, digest(TOKEN) + server.pack),
        lambda: hello + frame(PROOF, bytes(64), body_bytes=(1 << 64) - 1),
        lambda: overheard,  # all that a client with the token has said
        lambda: overheard[: int(random.integers(1, len(overheard)))],
        lambda: b"\x16\x03\x01" + random.bytes(200),  # a handshake of TLS, so it says
        lambda: hello[: int(random.integers(1, len(hello)))],
    ]
    return kinds[int(random.integers(len(kinds)))]()


def odd(random, right):
    values = [0, 1, right - 1, right + 1, 2 * right, 1 << 31, (1 << 32) - 1]
    return max(0, values[int(random.integers(len(values)))])


def with_token(random):
    """Return a frame of a client that has the token and means ill."""
    ranges = random.integers(0, 1 << 63, (int(random.integers(1, 9)), 2), np.uint64)
    count = len(ranges)
    many = np.tile(np.array([0, 200_000], np.uint64), (MOST_RANGES, 1))
    kinds = [
        lambda: frame(READ, ranges.tobytes(), count=count),
        lambda: frame(READ, ranges.tobytes(), count=count, shard=odd(random, 4)),
        lambda: frame(READ, ranges.tobytes(), count=odd(random, count) & 0xFFFFFFFF),
        lambda: frame(READ, b"", count=odd(random, MOST_RANGES) & 0xFFFFFFFF, body_bytes=1 << 60),
        lambda: frame(READ, many.tobytes() * 2, count=2 * MOST_RANGES),
        lambda: frame(READ, b"", count=0),
        lambda: frame(CARD, bytes(MOST_CALLER_BYTES + 1)),
        lambda: frame(CARD, random.bytes(int(random.integers(1, MOST_CALLER_BYTES)))),
        lambda: frame(CARD, b"no address"),
        lambda: frame(HELLO, random.bytes(32)),
        lambda: frame(int(random.integers(0, 1 << 16))),
        lambda: frame(READ, ranges.tobytes(), count=count)[: int(random.integers(1, 40))],
        lambda: random.bytes(int(random.integers(32, 400))),
    ]
    return kinds[int(random.integers(len(kinds)))]()


def overhear(server):
    """Return what a client with the token says in an introduction, as it was seen on the wire."""
    said = []

    class Recorded:
        def __init__(self, connection):
            self._connection, self.recv = connection, connection.recv

        def sendall(self, data):
            said.append(data)
            self._connection.sendall(data)

    with server.connect() as connection:
        assert HEADER.unpack(server.greet(Recorded(connection))[: HEADER.size])[2] == WELCOME
    return b"".join(said)


def send_hostile(connection, sent):
    try:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
    except ConnectionError:  # refused by its beginning
        pass
    except OSError as problem:
        if problem.errno != errno.ENOTCONN:
            raise


def attack(server, count):
    """Send so many hostile frames; check each answer, and the server's memory now and then."""
    random = np.random.default_rng(11)
    overheard = b"" if server.tls else overhear(server)
    base_bytes, base_descriptors = server.memory_bytes(), server.descriptor_count()
    for number in range(count):
        with server.connect() as connection:
            if number % 4 == 3 and not server.tls:
                assert HEADER.unpack(server.greet(connection)[: HEADER.size])[2] == WELCOME
                send_hostile(connection, with_token(random))
                drain(connection)
            else:
                send_hostile(
                    connection, without_token(random, server, overheard or b"\x17\x03\x03")
                )
                got = drain(connection)
                assert len(got) <= MOST_UNPROVED_BYTES
                assert b"node" not in got
        if number % 250 == 0:
            assert server.memory_bytes() - base_bytes < MOST_GROWTH_BYTES
    assert server.process.poll() is None
    assert server.memory_bytes() - base_bytes < MOST_GROWTH_BYTES
    await_true(
        lambda: server.descriptor_count() <= base_descriptors + 1, "the end of hostile connections"
    )
    # A good client is served as before. Figures are brought up to date by beats.
    await_true(
        lambda: server.card().load.refused_connections > count // 4, "the count of what was refused"
    )


@pytest.mark.parametrize("options", [(), ("--tls",)], ids=["plain", "tls"])
def test_hostile_frames_end_their_connection_and_nothing_else(attacked, options):
    attack(attacked(*options), 200)


@pytest.mark.campaign("faults")
@pytest.mark.parametrize("options", [(), ("--tls",)], ids=["plain", "tls"])
def test_5000_hostile_frames(attacked, options):
    attack(attacked(*options), 5000)


def test_a_client_that_asks_and_never_reads_takes_no_memory(attacked):
    server = attacked()
    base_bytes = server.memory_bytes()
    ranges = np.tile(np.array([0, 100_000], np.uint64), (MOST_RANGES, 1)).tobytes()
    with contextlib.ExitStack() as stack:
        for _ in range(8):  # each asks for 100 MB at a time
            connection = stack.enter_context(server.connect())
            server.greet(connection)
            connection.setblocking(False)
            with contextlib.suppress(BlockingIOError):  # the server takes no more
                for _ in range(1000):
                    connection.send(frame(READ, ranges, count=MOST_RANGES))
        assert server.card().held  # and a good client is answered meanwhile
        # What is mapped is the pack's, and is the kernel's to drop.
        assert server.memory_bytes() - base_bytes < MOST_GROWTH_BYTES


def test_only_the_token_proves_and_a_proof_serves_once(attacked):
    server = attacked()
    for token in ("", "guess", TOKEN.upper(), digest(TOKEN).hex()):
        with server.connect() as connection:
            answer = server.greet(connection, token)
            assert HEADER.unpack(answer)[2] == REFUSED
            assert drain(connection) == b""
    said = overhear(server)
    with server.connect() as connection:
        send_hostile(connection, said)
        assert len(drain(connection)) <= MOST_UNPROVED_BYTES
    assert digest(TOKEN) not in said
    assert TOKEN.encode() not in said


def test_over_tls_a_client_without_the_key_gets_no_handshake(attacked):
    server = attacked("--tls")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with server.connect() as connection, pytest.raises((ssl.SSLError, ConnectionError)):
        context.wrap_socket(connection)
    assert server.card().node == server.name
