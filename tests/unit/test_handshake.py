"""Both sides prove the token; strangers have few places and little time."""

import contextlib
import logging
import selectors
import socket
import threading

import pytest

from paceline.core import handshake
from paceline.core.clock import ManualClock
from paceline.core.handshake import (
    NONCE_BYTES,
    PROOF_BYTES,
    Entrance,
    NotTheServer,
    TokenRefused,
    proof,
    prove,
)

TOKEN = "the token"
WAIT_S = 60.0


class Server:
    """An entrance whose clock and turns are the test's."""

    def __init__(self, most=4, tokens=(TOKEN,)):
        self.selector = selectors.DefaultSelector()
        self.clock = ManualClock()
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.address = listener.getsockname()
        self.entrance = Entrance(listener, self.selector, tokens, most=most, clock=self.clock)
        self.admitted = []

    def turn(self, timeout_s=0.0):
        """Do what a server does."""
        admitted, others = self.entrance.select(timeout_s)
        self.admitted += [found.connection for found in admitted]
        assert others == []

    def dial(self):
        return socket.create_connection(self.address, WAIT_S)

    def meet(self, token):
        """Have a client prove a token; return what it raised."""
        found = []

        def client():
            with self.dial() as connection:
                try:
                    prove(connection, token, WAIT_S)
                    found.append(None)
                except OSError as problem:
                    found.append(problem)

        thread = threading.Thread(target=client)
        thread.start()
        while thread.is_alive():
            self.turn(0.01)
        thread.join()
        return found[0]


@pytest.fixture
def server():
    with contextlib.ExitStack() as stack:

        def make(**options):
            made = Server(**options)
            stack.callback(made.entrance.close)
            stack.callback(lambda: [connection.close() for connection in made.admitted])
            return made

        yield make


def is_closed(connection):
    """Whether the server has closed it; what it said before is read."""
    connection.settimeout(WAIT_S)
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(4096):
            pass
    return True


@pytest.mark.parametrize("token", ["one", "another"])
def test_any_of_the_tokens_suffices(server, token):
    made = server(tokens=("one", "another"))
    assert made.meet(token) is None
    assert len(made.admitted) == 1


def test_another_token_is_refused_by_name(server):
    made = server()
    assert isinstance(made.meet("a guess"), TokenRefused)
    assert made.admitted == []
    assert made.meet(TOKEN) is None


def test_a_server_without_a_token_is_none():
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        selectors.DefaultSelector() as selector,
        pytest.raises(ValueError, match="without a token"),
    ):
        Entrance(listener, selector, ("",))


@pytest.mark.parametrize("answer", [b"x" * PROOF_BYTES, "the client's own proof"])
def test_who_only_listens_there_is_not_the_server(answer):
    """Someone else has the port: it learns nothing, and nothing of it is believed."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def pretend():
            with listener.accept()[0] as connection:
                connection.sendall(bytes(NONCE_BYTES))
                said = b""
                while len(said) < NONCE_BYTES + PROOF_BYTES:
                    said += connection.recv(4096)
                connection.sendall(answer if isinstance(answer, bytes) else said[NONCE_BYTES:])

        thread = threading.Thread(target=pretend)
        thread.start()
        with (
            socket.create_connection(listener.getsockname(), WAIT_S) as connection,
            pytest.raises(NotTheServer),
        ):
            prove(connection, TOKEN, WAIT_S)
        thread.join()


def test_a_proof_is_of_no_use_on_another_connection(server):
    made = server()
    with made.dial() as old, made.dial() as new:
        made.turn(WAIT_S)
        nonces = [connection.recv(NONCE_BYTES) for connection in (old, new)]
        assert nonces[0] != nonces[1]
        new.sendall(bytes(NONCE_BYTES) + proof(TOKEN, "client", bytes(NONCE_BYTES), nonces[0]))
        made.turn(WAIT_S)
        assert is_closed(new)
    assert made.admitted == []


def test_the_oldest_stranger_makes_way(server):
    made = server(most=4)
    with contextlib.ExitStack() as open_connections:
        strangers = []
        for _ in range(10):
            strangers.append(open_connections.enter_context(made.dial()))
            made.turn(WAIT_S)
        assert made.meet(TOKEN) is None
        assert all(is_closed(stranger) for stranger in strangers[:6])
        assert len(made.selector.get_map()) <= 1 + 4


def test_a_stranger_that_sends_byte_after_byte_has_no_more_time(server):
    made = server()
    with made.dial() as slow:
        made.turn(WAIT_S)
        for _ in range(20):
            slow.sendall(b"x")
            made.turn(WAIT_S)
            made.clock.advance(handshake.PATIENCE_S / 20)
        made.turn()
        assert is_closed(slow)


def test_a_flood_of_wrong_tokens_does_not_fill_the_log(server, caplog):
    made = server()
    with caplog.at_level(logging.WARNING):
        for _ in range(30):
            made.meet("a guess")
        assert len(caplog.records) == 1
        made.clock.advance(61)
        made.meet("a guess")
    assert "refused 30 connection(s)" in caplog.text
