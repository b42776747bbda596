"""Hosts on one machine that see each other over a network only: namespaces on a bridge."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess

import pytest

_PREFIX = f"pt{os.getpid() % 10000}"  # a device's name has 15 letters
_SUBNET = os.getpid() % 250


def require_networks():
    """Skip the test where networks cannot be made."""
    can = os.geteuid() == 0 and shutil.which("ip") and shutil.which("unshare")
    if not can or subprocess.run(["unshare", "-n", "true"], capture_output=True).returncode:
        pytest.skip("no network namespaces here: they need root and iproute2")


@contextlib.contextmanager
def network(count):
    """Make hosts; yield for each its address and the words that run a command on it."""
    with contextlib.ExitStack() as stack:
        _ip("link", "add", f"{_PREFIX}b", "type", "bridge")
        stack.callback(_ip, "link", "del", f"{_PREFIX}b", check=False)
        _ip("link", "set", f"{_PREFIX}b", "up")
        hosts = []
        for number in range(count):
            name, device = f"{_PREFIX}n{number}", f"{_PREFIX}v{number}"
            address = f"10.77.{_SUBNET}.{number + 1}"
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "del", name, check=False)
            _ip("link", "add", device, "type", "veth", "peer", "name", "eth0", "netns", name)
            stack.callback(_ip, "link", "del", device, check=False)
            _ip("link", "set", device, "master", f"{_PREFIX}b", "up")
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
            words = ["ip", "netns", "exec", name, "unshare", "-u", "sh", "-c"]
            hosts.append((address, [*words, f'hostname {name}; exec "$@"', "sh"]))
        yield hosts


def _ip(*words, check=True):
    subprocess.run(["ip", *words], check=check, capture_output=not check)
