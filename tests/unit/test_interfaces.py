"""Whether gloo can bind to the interface that it is told, or to the host's name."""

import socket

import pytest

from paceline.core.interfaces import gloo_problem


@pytest.mark.parametrize("given", ["lo", "lo,lo"])
def test_an_interface_with_an_address_is_no_problem(given):
    assert gloo_problem({"GLOO_SOCKET_IFNAME": given}) == ""


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("ib0", "no interface here is called ib0; there are "),
        ("lo,ib0", "no interface here is called ib0; there are "),
        ("^lo,docker", "no interface here is called ^lo (gloo takes names, not NCCL's ^)"),
    ],
)
def test_an_interface_that_is_not_here_is_named_with_those_that_are(given, said):
    problem = gloo_problem({"GLOO_SOCKET_IFNAME": given})
    assert problem.startswith(f"GLOO_SOCKET_IFNAME={given}: {said}")
    assert "lo" in problem.rpartition("there are ")[2].split(", ")


def test_an_interface_without_an_address_cannot_be_bound(monkeypatch):
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "ib0")])
    problem = gloo_problem({"GLOO_SOCKET_IFNAME": "ib0"})
    assert problem == "GLOO_SOCKET_IFNAME=ib0: ib0 has no address that can be bound"


@pytest.mark.parametrize("name", ["localhost", "203.0.113.9", "no-such-host.invalid"])
def test_without_the_variable_the_hosts_name_counts(monkeypatch, name):
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    problem = gloo_problem({})
    assert bool(problem) == (name != "localhost")
    assert not problem or problem.startswith(f"the host's name, {name}, has no address here")
