"""The network interface that gloo takes, and whether it can."""

from __future__ import annotations

import fcntl
import socket
import struct
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915
_IFNAME_BYTES = 16


def gloo_problem(environ: Mapping[str, str]) -> str:
    """Return why gloo will not find its interface on this host, in words; empty if it will.

    Without the variable, torch has gloo bind to an address of the host's name, and to the loopback
    interface where it cannot, which ranks of other hosts do not reach.
    """
    if not (given := environ.get(GLOO_INTERFACE, "")):
        name = socket.gethostname()
        if any(_binds(address) for address in _addresses_of_host(name)):
            return ""
        return (
            f"the host's name, {name}, has no address here: gloo takes the loopback interface, "
            f"which other hosts do not reach, unless {GLOO_INTERFACE} names another one"
        )
    known = [name for _, name in socket.if_nameindex()]
    for name in given.split(","):
        if name not in known:
            form = " (gloo takes names, not NCCL's ^)" if name.startswith(("^", "=")) else ""
            return (
                f"{GLOO_INTERFACE}={given}: no interface here is called {name}{form}; there are "
                f"{', '.join(known)}"
            )
        if not any(_binds(address) for address in _addresses_of_interface(name)):
            return f"{GLOO_INTERFACE}={given}: {name} has no address that can be bound"
    return ""


def _addresses_of_host(name: str) -> list[str]:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [str(entry[4][0]) for entry in found]


def _addresses_of_interface(name: str) -> list[str]:
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        request = struct.pack("256s", name.encode()[: _IFNAME_BYTES - 1])
        try:
            answer = fcntl.ioctl(asking, _SIOCGIFADDR, request)
        except OSError:  # none of version 4
            pass
        else:
            found.append(socket.inet_ntoa(answer[20:24]))
    try:
        lines = Path("/proc/net/if_inet6").read_text("ascii").splitlines()
    except OSError:  # without version 6
        return found
    for fields in map(str.split, lines):
        if fields[-1] == name:
            address = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(fields[0]))
            found.append(f"{address}%{name}")
    return found


def _binds(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as bound:
            bound.bind(socket.getaddrinfo(address, 0, family, socket.SOCK_STREAM)[0][4])
    except OSError:
        return False
    return True
