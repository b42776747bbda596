"""Upgrades a Machine of version 1 to version 2: JSON data in, JSON data out.

Version 1 had one kind of link for three things: the connection of two ranks (``send``), the cost of
a library's collective over it (level ``gloo``), and DistributedDataParallel's cost of collectives
(level ``ddp``). It had operators ``step`` and ``ddp`` for framework overheads. Predictions from an
upgraded machine are those that version 1 gave.
"""

from __future__ import annotations

from typing import Any

LIBRARIES = ("gloo", "nccl", "mpi")
FRAMEWORKS = {"step": ("torch", "phase"), "ddp": ("ddp", "wrapper")}
LINE_BYTES = 16 << 20  # where the second point of a line lies


def split_overheads(device: dict[str, Any]) -> dict[str, Any]:
    """Return a device with framework overheads separate from its operators' overheads."""
    operators, frameworks = [], list(device.get("framework_overheads", ()))
    for overhead in device.get("overheads", ()):
        if overhead["operator"] not in FRAMEWORKS:
            operators.append(overhead)
            continue
        framework, what = FRAMEWORKS[overhead["operator"]]
        rest = {key: value for key, value in overhead.items() if key != "operator"}
        frameworks.append({"framework": framework, "what": what, **rest})
    return {**device, "overheads": operators, "framework_overheads": frameworks}


def split_links(machine: dict[str, Any]) -> dict[str, Any]:
    """Return a machine with links, collectives and DDP's overheads in separate fields."""
    links = machine.get("links", ())
    measured = [link for link in links if link.get("operation", "send") != "send"]
    ddp = {link["operation"]: link for link in measured if link["level"] == "ddp"}
    bare = {link["operation"]: link for link in measured if link["level"] != "ddp"}
    devices = list(machine["devices"])
    if ddp and devices:
        frameworks = list(_ddp_overheads(devices[0], ddp, bare))
        devices[0] = {**devices[0], "framework_overheads": frameworks}
    return {
        **machine,
        "devices": devices,
        "links": [link for link in links if link not in measured],
        "collectives": [_collective_of(link) for link in {**ddp, **bare}.values()],
    }


def _collective_of(link: dict[str, Any]) -> dict[str, Any]:
    """Return a collective that version 1 described by a line, as a curve of two points."""
    latency, bandwidth = link["latency_s"], link["bandwidth_bytes_per_s"]
    far_s = latency["value"] + LINE_BYTES / bandwidth["value"]
    return {
        "backend": link["level"] if link["level"] in LIBRARIES else "gloo",
        "operation": link["operation"],
        "ranks": link.get("ranks", 2),
        # The probe measured libraries between two processes of one node, over its loopback.
        "level": "loopback" if link["level"] in (*LIBRARIES, "ddp") else link["level"],
        "points": [
            {"bytes": 0.0, "seconds": {"value": latency["value"], "source": latency["source"]}},
            {"bytes": float(LINE_BYTES), "seconds": {"value": far_s, "source": "fit"}},
        ],
    }


def _ddp_overheads(
    device: dict[str, Any], ddp: dict[str, Any], bare: dict[str, Any]
) -> list[dict[str, Any]]:
    """Return DDP's overheads: its links of version 1 minus the bare collectives."""
    known = [cost for cost in device.get("overheads", ()) if cost["operator"] == "ddp"]
    where = {
        "framework": "ddp",
        "threads": known[0]["threads"] if known else 1,
        "processes": known[0]["processes"] if known else 2,
    }
    result = []
    if "all_reduce" in ddp and "all_reduce" in bare:
        own, plain = (
            links["all_reduce"]["bandwidth_bytes_per_s"]["value"] for links in (ddp, bare)
        )
        added = {"value": max(0.0, 1 / own - 1 / plain), "source": "probe"}
        result.append(
            {**where, "what": "reduction", "phase": "backward", "seconds_per_byte": added}
        )
    if "broadcast" in ddp:
        seconds = ddp["broadcast"]["latency_s"]
        result.append({**where, "what": "buffer_broadcast", "phase": "forward", "seconds": seconds})
    return result
