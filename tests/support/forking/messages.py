"""Messages between a test process and its server of forks: a length, JSON, and descriptors."""

from __future__ import annotations

import array
import json
import socket
from typing import Any

_HEAD_BYTES = 8
_MOST_DESCRIPTORS = 64


def send(connection: socket.socket, message: Any, descriptors=()) -> None:
    """Send a message, and copies of open descriptors."""
    data = json.dumps(message).encode()
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
    head = len(data).to_bytes(_HEAD_BYTES, "little")
    connection.sendmsg([head], rights if descriptors else [])
    connection.sendall(data)


def receive(connection: socket.socket) -> tuple[Any, list[int]]:
    """Return a message and the descriptors that came with it.

    Raises:
        EOFError: the other end has gone.
    """
    space = socket.CMSG_SPACE(_MOST_DESCRIPTORS * array.array("i").itemsize)
    head, ancillary, *_ = connection.recvmsg(_HEAD_BYTES, space)
    descriptors = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    head += _exactly(connection, _HEAD_BYTES - len(head))
    data = _exactly(connection, int.from_bytes(head, "little"))
    return json.loads(data), list(descriptors)


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise EOFError
        data += part
    return data
