r"""The two messages of a rendezvous, as frozen dataclasses and as lines of JSON.

A member sends `TaskReport`\ s, the root answers with `Notice`\ s. Each carries the whole state of
its sender, and state only ever advances: the next message makes up for a lost one, and a repeated
or late message changes nothing. So no message needs to be acknowledged or numbered, and every
transport suffices that delivers the latest message now and then.

In a report, `rank` is the number of the task and `world_size` the number of tasks. Both are those
of ranks where each task is one rank (Slurm, mpirun), and of nodes with ``--nnodes``.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any

from paceline.core.errors import ConfigError
from paceline.launch.exits import ExitOutcome, RankExit
from paceline.runs.result import Failure

MAX_MESSAGE_BYTES = 64 << 10  # a report names up to some thousand cores
_MAX_TEXT = 4096


class BadMessage(ValueError):
    """A line that is not a message; the connection that carried it is closed."""


class JobPhase(IntEnum):
    """How far the job is; it only advances."""

    GATHERING = 0  # not all tasks have arrived
    RUNNING = 1  # all tasks have arrived, and run their ranks
    STOPPING = 2  # a task failed: the others end their ranks
    FINISHED = 3  # rank 0's launcher has written the result


@dataclass(frozen=True, kw_only=True, slots=True)
class DataOffer:
    """Where the first task of a node serves one pack of ``--data``.

    Attributes:
        port: on which its server listens.
        requests: path by which programs on the node reach the server.
        local: folder of the node's shards.
    """

    port: int
    requests: str
    local: str


@dataclass(frozen=True, kw_only=True, slots=True)
class DataStart:
    """Where the packs of ``--data`` are served, for one task.

    Attributes:
        servers: for each pack the addresses of all nodes.
        number: of the task's node in these.
        offers: for each pack that of the task's node.
        token: of all servers.
    """

    servers: tuple[tuple[str, ...], ...]
    number: int
    offers: tuple[DataOffer, ...]
    token: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StartInfo:
    """The values that a task needs to start its ranks.

    Attributes:
        address: address on which rank 0's process group listens.
        port: port on which it listens.
        share_index: number of this task among the tasks of its node that share its cores.
        share_count: number of these tasks; 1 for a task with cores of its own.
        data: where the packs of ``--data`` are served; None without.
    """

    address: str
    port: int
    share_index: int
    share_count: int
    data: DataStart | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class JobEnd:
    """How the whole run ended, as rank 0's launcher wrote it into result.json."""

    exit_code: int
    signal: str = ""
    failure: Failure | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskReport:
    """A member's state.

    Attributes:
        job: identity that all tasks of the job know beforehand.
        run: number of the run that the task has joined; empty before the root's first notice.
        task: random id, which distinguishes this process from an earlier one of the same number.
        rank: number of the task; its global rank, unless tasks are nodes with several ranks.
        world_size: number of tasks that this task expects.
        host: node name.
        cores: cores that the task may use.
        ended: how the task's rank ended; None while the rank runs or waits. Of several ranks: the
            first that ended badly, or else the first that ended.
        others: exits of further ranks of the task that may explain the run's end.
        leaving: whether this is the member's last report.
        data: packs of ``--data`` that this task's node serves, in their order; of a task that is
            not the first one of its node, none.
    """

    job: str
    run: str
    task: str
    rank: int
    world_size: int
    host: str
    cores: tuple[int, ...]
    ended: RankExit | None = None
    others: tuple[RankExit, ...] = ()
    leaving: bool = False
    data: tuple[DataOffer, ...] = ()

    def to_line(self) -> bytes:
        """Return the message as one line of JSON."""
        return _line({**asdict(self), "version": 1})


@dataclass(frozen=True, kw_only=True, slots=True)
class Notice:
    """The root's state, for one member.

    Attributes:
        run: number of this run.
        phase: phase of the job.
        heard_end: whether the root knows how the member's rank ended.
        start: how to start the rank; None before all tasks have arrived.
        end: how the run ended; None before its end.
        refusal: why the root does not take this task; empty if it does.
        reason: why the job stops, for error messages.
        heartbeat_interval_s: time between two reports of the member.
        heartbeat_timeout_s: silence after which either side takes the other for lost.
    """

    run: str
    phase: JobPhase
    heard_end: bool = False
    start: StartInfo | None = None
    end: JobEnd | None = None
    refusal: str = ""
    reason: str = ""
    heartbeat_interval_s: float = 10.0
    heartbeat_timeout_s: float = 60.0

    def to_line(self) -> bytes:
        """Return the message as one line of JSON."""
        fields = {name: getattr(self, name) for name in _NOTICE_PLAIN}
        fields["start"] = asdict(self.start) if self.start else None
        fields["end"] = self.end and {
            "exit_code": self.end.exit_code,
            "signal": self.end.signal,
            "failure": self.end.failure and self.end.failure.to_json(),
        }
        return _line({**fields, "version": 1})


_NOTICE_PLAIN = (
    *("run", "phase", "heard_end", "refusal", "reason"),
    *("heartbeat_interval_s", "heartbeat_timeout_s"),
)


def parse_report(line: bytes) -> TaskReport:
    """Return the report in a line from the network.

    Raises:
        BadMessage: the line is not a valid message.
    """
    data = _object(line)
    ended = data.get("ended")
    try:
        return TaskReport(
            job=_text(data["job"]),
            run=_text(data["run"]),
            task=_text(data["task"]),
            rank=_count(data["rank"]),
            world_size=_count(data["world_size"]),
            host=_text(data["host"]),
            cores=tuple(_count(core) for core in _list(data["cores"])),
            ended=None if ended is None else _exit(ended),
            others=tuple(_exit(other) for other in _list(data.get("others", []))),
            leaving=bool(data["leaving"]),
            data=_offers(data.get("data", [])),
        )
    except (KeyError, TypeError, ValueError) as problem:
        raise BadMessage(f"not a report: {type(problem).__name__}: {problem}") from None


def parse_notice(line: bytes) -> Notice:
    """Return the notice in a line from the root.

    Raises:
        BadMessage: the line is not a valid message.
    """
    data = _object(line)
    start, end = data.get("start"), data.get("end")
    try:
        return Notice(
            run=_text(data["run"]),
            phase=JobPhase(_count(data["phase"])),
            heard_end=bool(data["heard_end"]),
            start=None if start is None else _start(start),
            end=None if end is None else _end(end),
            refusal=_text(data["refusal"]),
            reason=_text(data["reason"]),
            heartbeat_interval_s=_seconds(data["heartbeat_interval_s"]),
            heartbeat_timeout_s=_seconds(data["heartbeat_timeout_s"]),
        )
    except (KeyError, TypeError, ValueError) as problem:
        raise BadMessage(f"not a notice: {type(problem).__name__}: {problem}") from None


def _exit(data: Any) -> RankExit:  # whatever a stranger sends
    return RankExit(
        rank=_count(data["rank"]),
        code=_code(data["code"]),
        signal=_text(data["signal"]),
        outcome=ExitOutcome(data["outcome"]),
        at_s=_seconds(data["at_s"]),
    )


def _start(data: dict[str, Any]) -> StartInfo:
    return StartInfo(
        address=_text(data["address"]),
        port=_count(data["port"]),
        share_index=_count(data["share_index"]),
        share_count=_count(data["share_count"]),
        data=None if data.get("data") is None else _data_start(data["data"]),
    )


def _data_start(data: dict[str, Any]) -> DataStart:
    servers = tuple(tuple(_text(name) for name in _list(names)) for names in _list(data["servers"]))
    return DataStart(
        servers=servers,
        number=_count(data["number"]),
        offers=_offers(data["offers"]),
        token=_text(data["token"]),
    )


def _offers(data: object) -> tuple[DataOffer, ...]:
    offers: list[Any] = _list(data)
    return tuple(
        DataOffer(
            port=_count(offer["port"]),
            requests=_text(offer["requests"]),
            local=_text(offer["local"]),
        )
        for offer in offers
    )


def _end(data: dict[str, Any]) -> JobEnd:
    failure = data["failure"]
    try:
        known = None if failure is None else Failure.from_json(failure)
    except ConfigError as problem:
        raise ValueError(str(problem)) from None
    return JobEnd(exit_code=_code(data["exit_code"]), signal=_text(data["signal"]), failure=known)


def _line(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


def _object(line: bytes) -> dict[str, Any]:
    if len(line) > MAX_MESSAGE_BYTES:
        raise BadMessage(f"a message of {len(line)} bytes; the limit is {MAX_MESSAGE_BYTES}")
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as problem:
        raise BadMessage(f"not JSON: {problem}") from None
    if not isinstance(data, dict) or data.get("version") != 1:
        raise BadMessage("not a message of version 1")
    return data


def _text(value: object) -> str:
    if not isinstance(value, str) or len(value) > _MAX_TEXT:
        raise ValueError(f"{str(value)[:40]!r} is not text of at most {_MAX_TEXT} characters")
    return value


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 31:
        raise ValueError(f"{str(value)[:40]!r} is not a count")
    return value


def _code(value: object) -> int:
    if type(value) is not int or abs(value) > 1 << 16:
        raise ValueError(f"{str(value)[:40]!r} is not an exit code")
    return value


def _list(value: object) -> list[object]:
    if not isinstance(value, list):
        raise TypeError("not a list")
    return value


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e12:
        raise ValueError(f"{str(value)[:40]!r} is not a time")
    return float(value)
