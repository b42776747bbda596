"""Kills packing and appending, and lets their calls fail: the old state or the new, never between.

After each kill or failure the disk must show what was there before, or what was to come, and what
was committed before must be complete. The next run, or a repair, must find what it needs and leave
no stale files. Killed processes are forked; calls fail in this process, one per run (`faults.py`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import select
import shutil
import signal
from typing import TYPE_CHECKING, Any

from paceline import store
from paceline.core.clock import SystemClock
from paceline.core.errors import CorruptPack, PacelineError
from paceline.store import open_pack
from paceline.store.care.damage import verify_files
from paceline.store.care.repair import repair_pack
from paceline.studies.faults import Faults, fail_with
from paceline.studies.torture_parts import Tally, TortureOptions, make_source, pack_options

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_CODES = (errno.ENOSPC, errno.EIO, errno.EINTR)
_SIGNAL_INTERVAL_S = 0.0005
_DEADLINE_S = 600.0  # for what takes well below a second: a child that hangs is killed


def run_kills(
    place: Path,
    source: Path,
    options: TortureOptions,
    tally: Tally,
    on_progress: Callable[[str], None],
) -> None:
    """Kill every other time a packing, every other time an appending, at a random moment."""
    more = source.with_name("more")
    store.pack(store.Folder(source), place / "base", options=pack_options())
    generator = random.Random(options.seed)
    usual_s = {kind: _usual_s(place, kind, source, more) for kind in ("pack", "append")}
    for k in range(options.kills):
        on_progress(f"kills: {k:,} of {options.kills:,}")
        kind = ("pack", "append")[k % 2]
        target = place / f"{kind}{k}"
        if kind == "append":
            shutil.copytree(place / "base", target)
        delay_s = generator.uniform(0, 1.1 * usual_s[kind])
        _in_child(_work(kind, source, more, target), delay_s)
        look = _after_append if kind == "append" else _after_pack
        result, problem = look(source, target)
        how = f"seed {options.seed}, kill {k} of {kind} after {delay_s * 1000:.2f} ms"
        tally.note(f"{kind}: {result}", problem and f"{how}: {problem}")
        shutil.rmtree(target, ignore_errors=True)


def _usual_s(place: Path, kind: str, source: Path, more: Path) -> float:
    """Return how long it takes without a kill."""
    target = place / f"trial-{kind}"
    if kind == "append":
        shutil.copytree(place / "base", target)
    clock = SystemClock()
    start_s = clock.now_s()
    _in_child(_work(kind, source, more, target), None)
    return clock.now_s() - start_s


def _work(kind: str, source: Path, more: Path, target: Path) -> Callable[[], Any]:
    if kind == "append":
        return lambda: store.append(store.Folder(more), target, options=pack_options())
    return lambda: store.pack(store.Folder(source), target, options=pack_options())


def _in_child(work: Callable[[], Any], kill_after_s: float | None) -> int:
    """Run `work` in a forked process, killed after that time unless it is done; return its end."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(ours)
            work()
            code = 0
        finally:
            os._exit(code)
    os.close(theirs)
    try:
        wait_s = _DEADLINE_S if kill_after_s is None else kill_after_s
        has_gone, _, _ = select.select([ours], [], [], wait_s)  # then the pipe is at its end
        with contextlib.suppress(ProcessLookupError):
            if kill_after_s is not None or not has_gone:
                os.kill(child, signal.SIGKILL)
    finally:
        os.close(ours)
        status = os.waitpid(child, 0)[1]
    return os.waitstatus_to_exitcode(status)


def _after_pack(source: Path, target: Path) -> tuple[str, str]:
    """Return in which state a pack is after its packing was interrupted, and what is wrong."""
    partial = target.with_name(target.name + ".partial")
    result = "complete" if target.exists() else "partial" if partial.exists() else "absent"
    problem = ""
    if result == "partial":
        with contextlib.suppress(CorruptPack):
            open_pack(partial).close()
            problem = "an unfinished pack was opened"
    if result != "complete":
        try:
            store.pack(store.Folder(source), target, options=pack_options())
        except PacelineError as error:
            return result, f"the next packing failed: {error}"
    elif partial.exists():
        problem = "the pack is complete, but its partial folder is left"
    return result, problem or compare(source, target) or stale_files(target)


def _after_append(source: Path, target: Path) -> tuple[str, str]:
    """Return whether a pack has the appended samples, and what is wrong with it."""
    more = source.with_name("more")
    try:
        with open_pack(target) as pack:
            result = "new" if len(pack) != _file_count(source) else "old"
        before = compare(source, target, *([more] if result == "new" else []), digests=False)
        repaired = repair_pack(target)  # from parity alone: all else must be intact
        problem = before or ("" if repaired.ok else f"not repaired: {repaired.lost[0].what}")
        problem = problem or stale_files(target)
        if result == "old":
            store.append(store.Folder(more), target, options=pack_options())
    except PacelineError as error:
        return "unusable", str(error)
    return result, problem or compare(source, target, more) or stale_files(target)


def _files(sources: tuple[Path, ...]) -> dict[str, bytes]:
    """Return what must be in a pack of these folders."""
    return {
        str(path.relative_to(source)): path.read_bytes()
        for source in sources
        for path in source.rglob("*")
        if path.is_file()
    }


def _file_count(source: Path) -> int:
    return sum(path.is_file() for path in source.rglob("*"))


def compare(source: Path, target: Path, *more: Path, digests: bool = True) -> str:
    """Return how a pack differs from its sources, "" if it does not."""
    try:
        with open_pack(target) as pack:
            found = {name: pack.read(k) for k, name in enumerate(pack.names)}
    except PacelineError as error:
        return f"the pack cannot be read: {error}"
    files = _files((source, *more))
    lost = sorted(name for name in files if found.get(name) != files[name])
    if lost or len(found) != len(files):
        return f"{len(lost)} samples are lost or changed, {len(found)} found: {lost[:3]}"
    wrong = verify_files(target)[1] if digests else []
    return f"silent damage: {wrong[0].what}" if wrong else ""


def stale_files(target: Path) -> str:
    """Return which stale files are left, "" if none."""
    left = [path.name for path in target.parent.glob("*.partial")]
    planned = repair_pack(target, dry_run=True)
    if left or planned.stale_files or planned.repaired or planned.lost:
        return f"left behind: {left + list(planned.stale_files)}"
    return ""


def run_faults(
    place: Path,
    source: Path,
    options: TortureOptions,
    tally: Tally,
    on_progress: Callable[[str], None],
) -> None:
    """Let each call that changes the disk fail once, with each errno; then a storm of signals."""
    few = place / "few"
    make_source(few, options.seed, "class", 9)
    make_source(place / "more", options.seed + 1, "more", 5)
    for code in _CODES:
        for name, operation in _FAULTED.items():
            on_progress(f"faults: {name}, {errno.errorcode[code]} in each call")
            at = 0
            while options.fault_limit is None or at < options.fault_limit:
                case = operation(place / f"{name}-{code}-{at}", few)
                with Faults(at, fail_with(code)) as faults:
                    problem = case.run()
                if not faults.struck:
                    case.clean()
                    break
                call = faults.seen[at][0]
                problem = problem or case.check()
                case.clean()
                how = f"{name}: {errno.errorcode[code]} in call {at}, os.{call}"
                tally.note(f"{name}: {errno.errorcode[code]}", problem and f"{how}: {problem}")
                at += 1
    on_progress("faults: a storm of signals")
    for k in range(10):
        ended = _in_child(lambda k=k: _pack_amid_signals(source, place / f"storm{k}"), None)  # type: ignore[misc]  # a default binds k
        problem = compare(source, place / f"storm{k}") if ended == 0 else f"ended with {ended}"
        tally.note("pack: interrupted by signals throughout", problem)
        shutil.rmtree(place / f"storm{k}", ignore_errors=True)


class _PackFault:
    """A packing of which one call fails."""

    def __init__(self, place: Path, source: Path) -> None:
        self.place = place
        self.source = source
        self.target = place / "pack"
        self.said = ""
        place.mkdir()

    def do(self) -> None:
        """Pack."""
        store.pack(store.Folder(self.source), self.target, options=pack_options())

    def run(self) -> str:
        """Do it; only an error of our tree may come."""
        try:
            self.do()
        except PacelineError as problem:
            self.said = str(problem)
            return ""
        except Exception as problem:  # noqa: BLE001  # whatever it is, it is not of our tree
            return f"{type(problem).__name__}: {problem}"
        return ""

    def check(self) -> str:
        """Return what is wrong afterwards."""
        return _after_pack(self.source, self.target)[1]

    def clean(self) -> None:
        """Remove it all."""
        shutil.rmtree(self.place, ignore_errors=True)


class _AppendFault(_PackFault):
    """An appending of which one call fails."""

    def __init__(self, place: Path, source: Path) -> None:
        super().__init__(place, source)
        store.pack(store.Folder(source), self.target, options=pack_options())

    def do(self) -> None:
        """Append."""
        store.append(
            store.Folder(self.source.with_name("more")), self.target, options=pack_options()
        )

    def check(self) -> str:
        """Return what is wrong afterwards."""
        result, problem = _after_append(self.source, self.target)
        if result == "new" and "as it was" in self.said:
            return f"the samples are in, but the error says: {self.said}"
        return problem


class _RepairFault(_PackFault):
    """A repair of which one call fails: of a wrong byte, a missing and a cut-off shard."""

    def __init__(self, place: Path, source: Path) -> None:
        super().__init__(place, source)
        store.pack(store.Folder(source), self.target, options=pack_options())
        shards = sorted(self.target.glob("shard-*.pace"))
        self.before = {path.name: path.read_bytes() for path in self.target.iterdir()}
        shards[0].write_bytes(shards[0].read_bytes()[:64] + b"?" + shards[0].read_bytes()[65:])
        shards[1].unlink()
        os.truncate(shards[2], 100)

    def do(self) -> None:
        """Repair."""
        repair_pack(self.target, source=self.source)

    def check(self) -> str:
        """Return what is wrong after it was done again."""
        if not repair_pack(self.target, source=self.source).ok:
            return "it could not be repaired afterwards"
        found = {path.name: path.read_bytes() for path in self.target.iterdir()}
        return "" if found == self.before else "files differ after the repair"


_FAULTED = {"pack": _PackFault, "append": _AppendFault, "repair": _RepairFault}


def _pack_amid_signals(source: Path, target: Path) -> None:
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.siginterrupt(signal.SIGALRM, True)  # the function's own way
    signal.setitimer(signal.ITIMER_REAL, _SIGNAL_INTERVAL_S, _SIGNAL_INTERVAL_S)
    store.pack(store.Folder(source), target, options=pack_options())
    signal.setitimer(signal.ITIMER_REAL, 0)
