"""Hosts on one machine: network namespaces on a bridge, each with a link of limited rate.

Needs root and iproute2. Ranks of two emulated hosts see each other over the link only.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from pathlib import Path

PREFIX = f"ps{os.getpid() % 10000}"  # of namespaces and devices: a device's name has 15 letters


def available():
    """Return why hosts cannot be emulated here; empty if they can."""
    if os.geteuid() != 0:
        return "emulated hosts need root"
    missing = [tool for tool in ("ip", "tc", "unshare") if not shutil.which(tool)]
    return f"emulated hosts need {', '.join(missing)}" if missing else ""


@contextlib.contextmanager
def network(hosts, rate_bits_per_s):
    """Make a bridge and a namespace for each host, limited in both directions; remove them."""
    shape = f"root tbf rate {rate_bits_per_s / 1e6:.0f}mbit burst 256kb latency 50ms"
    with contextlib.ExitStack() as stack:
        _run(f"ip link add {PREFIX}b type bridge")
        stack.callback(_run, f"ip link del {PREFIX}b", check=False)
        _run(f"ip link set {PREFIX}b up")
        for host in range(hosts):
            space, device = name_of(host), f"{PREFIX}v{host}"
            _run(f"ip netns add {space}")
            stack.callback(_run, f"ip netns del {space}", check=False)
            _run(f"ip link add {device} type veth peer name eth0 netns {space}")
            # It would go with its namespace, but later: the next network may have its name by then.
            stack.callback(_run, f"ip link del {device}", check=False)
            _run(f"ip link set {device} master {PREFIX}b up")
            _run(f"ip -n {space} addr add {address_of(host)}/24 dev eth0")
            _run(f"ip -n {space} link set eth0 up")
            _run(f"ip -n {space} link set lo up")
            _run(f"tc qdisc add dev {device} {shape}")
            _run(f"ip netns exec {space} tc qdisc add dev eth0 {shape}")
        yield


def change_rate(host, rate_bits_per_s):
    """Change the rate of one host's link, in both directions."""
    shape = f"root tbf rate {rate_bits_per_s / 1e6:.0f}mbit burst 256kb latency 50ms"
    _run(f"tc qdisc change dev {PREFIX}v{host} {shape}")
    _run(f"ip netns exec {name_of(host)} tc qdisc change dev eth0 {shape}")


def name_of(host):
    """Return the name of a host's namespace."""
    return f"{PREFIX}n{host}"


def address_of(host):
    """Return the address of a host on its link, eth0."""
    return f"10.78.0.{host + 1}"


def inside(host):
    """Return the words that run a command on a host, under a host name of its own."""
    script = f'hostname {name_of(host)}; exec "$@"'
    return ["ip", "netns", "exec", name_of(host), "unshare", "-u", "bash", "-c", script, "-"]


def sent_bytes():
    """Return the bytes that the host of this process has sent over its link."""
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def _run(command, *, check=True):
    subprocess.run(command.split(), check=check, capture_output=not check)
