"""Fault campaigns against the store, on the user's own file system: what breaks, and is it seen?

Four campaigns, each with its counts. *Corruptions*: bytes of a pack are damaged, and every sample
whose bytes changed must be refused by name (`studies/torture_corruption.py`, in processes of their
own). *Kills*: packing and appending are killed at random moments; what was committed is whole, and
the next run leaves no litter. *Faults*: each k-th call that changes the disk fails once; the old
state or the new one, never between. *Names*: packs with hostile names write nothing outside the
folder that they are extracted to. A seed gives the same damage again.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.core.clock import Clock, SystemClock
from paceline.core.errors import CorruptPack, NotFound, PacelineError
from paceline.core.record import Record
from paceline.store import PackOptions, append_pack, open_pack, pack_folder
from paceline.store.damage import verify_files
from paceline.store.extract import extract
from paceline.store.layout import resealed, sections
from paceline.store.repair import repair_pack
from paceline.studies.faults import Faults, fail_with

if TYPE_CHECKING:
    from collections.abc import Callable

_CASES_PER_PROCESS = 250
_MAX_SHOWN = 20
_SHARD_BYTES = 60_000
_LENGTHS = (0, 1, 17, 100, 700, 2_000, 9_000, 30_000, 70_000)
_CODES = (errno.ENOSPC, errno.EIO, errno.EINTR)
_SIGNAL_INTERVAL_S = 0.0005
HOSTILE_NAMES = (
    b"../x",
    b"../../../x",
    b"/tmp/x",
    b"/x",
    b"a/../../x",
    b"./x",
    b"a//x",
    b"a/./x",
    b"x/..",
    b"x/",
    b"x\0y",
    b"..",
    b"\0",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Campaign(Record):
    """What one campaign did, and the first few things that went wrong in it."""

    name: str
    cases: int
    counts: dict[str, int]
    failures: tuple[str, ...]
    failure_count: int
    elapsed_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TortureReport(Record):
    """What all campaigns did."""

    folder: str
    file_system: str
    seed: int
    campaigns: tuple[Campaign, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing went wrong."""
        return not any(one.failure_count for one in self.campaigns)


@dataclass(frozen=True, kw_only=True, slots=True)
class TortureOptions:
    """How much to do; a `fault_limit` of None lets each call fail."""

    corruptions: int = 2000
    kills: int = 100
    fault_limit: int | None = None
    seed: int = 1


def torture_store(
    folder: Path,
    options: TortureOptions | None = None,
    *,
    on_progress: Callable[[str], None] | None = None,
    clock: Clock | None = None,
) -> TortureReport:
    """Run the campaigns in a new folder below `folder`, which is removed at the end.

    Args:
        folder: on the file system to test.
        options: how many cases.
        on_progress: is given a line for each step.
        clock: in place of the system's.

    Raises:
        NotFound: there is no such folder.
        StorageError: it cannot be written to.
    """
    options = options or TortureOptions()
    clock = clock or SystemClock()
    if not folder.is_dir():
        raise NotFound("no such folder", where=str(folder), fix="Name one on the disk to test")
    folder = folder.absolute()  # errors name files so
    tell = on_progress or (lambda _line: None)
    work = Path(tempfile.mkdtemp(prefix="paceline-torture-", dir=folder))
    try:
        source = work / "source"
        _make_source(source, options.seed, "class")
        _make_source(work / "more", options.seed + 1, "more", 12)
        campaigns = []
        for name, run in (
            ("corruptions", _corruptions),
            ("kills", _kills),
            ("faults", _faults),
            ("names", _names),
        ):
            place = work / name
            place.mkdir()
            start_s = clock.now_s()
            tally = _Tally()
            run(place, source, options, tally, tell)
            campaigns.append(tally.campaign(name, clock.now_s() - start_s))
            shutil.rmtree(place)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return TortureReport(
        folder=str(folder),
        file_system=_file_system(folder),
        seed=options.seed,
        campaigns=tuple(campaigns),
    )


class _Tally:
    def __init__(self) -> None:
        self.cases = 0
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []

    def note(self, result: str, problem: str = "") -> None:
        """Count a case."""
        self.cases += 1
        self.counts[result if not problem else "FAILED"] += 1
        if problem:
            self.failures.append(problem)

    def campaign(self, name: str, elapsed_s: float) -> Campaign:
        """Return the counts as they are."""
        return Campaign(
            name=name,
            cases=self.cases,
            counts=dict(sorted(self.counts.items())),
            failures=tuple(self.failures[:_MAX_SHOWN]),
            failure_count=len(self.failures),
            elapsed_s=round(elapsed_s, 3),
        )


def _make_source(source: Path, seed: int, folder: str, count: int = 48) -> None:
    """Make samples of all kinds: empty, small, larger than a page or a shard, dense or not."""
    generator = random.Random(seed)
    (source / "empty").mkdir(parents=True)
    for k in range(count):
        path = source / f"{folder}{k % 4}" / f"sample-{k:02d}"
        path.parent.mkdir(exist_ok=True)
        length = _LENGTHS[k % len(_LENGTHS)]
        body = generator.randbytes(length)
        path.write_bytes(body if k % 3 else (b"%d and again " % k * (length // 8))[:length])


def _options() -> PackOptions:
    return PackOptions(shard_bytes=_SHARD_BYTES, codec="auto", parity_group=3)


# Corruptions


def _corruptions(
    place: Path, source: Path, options: TortureOptions, tally: _Tally, tell: Callable[[str], None]
) -> None:
    pack_folder(source, place / "pack", options=_options())
    whole = {path.name: path.read_bytes() for path in (place / "pack").iterdir()}
    case = 0
    while case < options.corruptions:
        tell(f"corruptions: {case:,} of {options.corruptions:,}")
        end = min(case + _CASES_PER_PROCESS, options.corruptions)
        case = _corrupt_in_child(place / "pack", source, options.seed, range(case, end), tally)
        for name, content in whole.items():  # also after a crash amid a case
            (place / "pack" / name).write_bytes(content)


def _corrupt_in_child(path: Path, source: Path, seed: int, cases: range, tally: _Tally) -> int:
    """Run cases in a process of their own; return the case to go on with."""
    command = [sys.executable, "-m", "paceline.studies.torture_corruption"]
    command += [str(path), str(source), str(seed), str(cases.start), str(cases.stop)]
    done = subprocess.run(command, capture_output=True, check=False)  # our own module
    begun = None
    for line in done.stdout.splitlines():
        fields = json.loads(line)
        if "begun" in fields:
            begun = fields["begun"]
            continue
        begun = None
        problem = fields["problem"]
        if problem:
            how = f"seed {seed}, case {fields['case']}: {fields['kind']} in {fields['file']}"
            problem = f"{how}: {problem}"
        tally.note(f"{fields['kind']}: {fields['result']}", problem)
        warm = fields["case"] % 2 == 1 and fields["file"] != "index.pace"
        tally.counts["after a good read and eviction"] += warm
        tally.counts["mended again"] += fields["repaired"]
    if done.returncode == 0:
        return cases.stop
    where = cases.start if begun is None else begun
    ending = done.stderr.decode(errors="replace").strip()[-300:]
    how = f"ended with {done.returncode}"
    if done.returncode < 0:
        how = f"was killed by {signal.Signals(-done.returncode).name}"
    tally.note("crash", f"seed {seed}, case {where}: the reader's process {how}. {ending}")
    return where + 1


# Kills


def _kills(
    place: Path, source: Path, options: TortureOptions, tally: _Tally, tell: Callable[[str], None]
) -> None:
    more = source.with_name("more")
    pack_folder(source, place / "base", options=_options())
    generator = random.Random(options.seed)
    usual_s = {kind: _usual_s(place, kind, source, more) for kind in ("pack", "append")}
    for k in range(options.kills):
        tell(f"kills: {k:,} of {options.kills:,}")
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
    """Return how long it takes when nobody kills it."""
    target = place / f"trial-{kind}"
    if kind == "append":
        shutil.copytree(place / "base", target)
    clock = SystemClock()
    start_s = clock.now_s()
    _in_child(_work(kind, source, more, target), None)
    return clock.now_s() - start_s


def _work(kind: str, source: Path, more: Path, target: Path) -> Callable[[], Any]:
    if kind == "append":
        return lambda: append_pack(more, target, options=_options())
    return lambda: pack_folder(source, target, options=_options())


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
        select.select([ours], [], [], kill_after_s)  # readable when the child has gone
        with contextlib.suppress(ProcessLookupError):
            if kill_after_s is not None:
                os.kill(child, signal.SIGKILL)
    finally:
        os.close(ours)
        status = os.waitpid(child, 0)[1]
    return os.waitstatus_to_exitcode(status)


def _after_pack(source: Path, target: Path) -> tuple[str, str]:
    """Return in which state a pack is after its packing was interrupted, and what is wrong."""
    partial = target.with_name(target.name + ".partial")
    result = "whole" if target.exists() else "partial" if partial.exists() else "absent"
    problem = ""
    if result == "partial":
        with contextlib.suppress(CorruptPack):
            open_pack(partial).close()
            problem = "an unfinished pack was opened"
    if result != "whole":
        try:
            pack_folder(source, target, options=_options())
        except PacelineError as error:
            return result, f"the next packing failed: {error}"
    elif partial.exists():
        problem = "the pack is whole, but its partial folder is left"
    return result, problem or _compare(source, target) or _litter(target)


def _after_append(source: Path, target: Path) -> tuple[str, str]:
    """Return whether a pack has the appended samples, and what is wrong with it."""
    more = source.with_name("more")
    try:
        with open_pack(target) as pack:
            result = "new" if len(pack) != _file_count(source) else "old"
        before = _compare(source, target, *([more] if result == "new" else []), digests=False)
        repaired = repair_pack(target)  # from parity alone: all else must be whole
        problem = before or ("" if repaired.ok else f"not mended: {repaired.lost[0].what}")
        problem = problem or _litter(target)
        if result == "old":
            append_pack(more, target, options=_options())
    except PacelineError as error:
        return "unusable", str(error)
    return result, problem or _compare(source, target, more) or _litter(target)


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


def _compare(source: Path, target: Path, *more: Path, digests: bool = True) -> str:
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


def _litter(target: Path) -> str:
    """Return what lies about that belongs to no pack, "" if nothing does."""
    left = [path.name for path in target.parent.glob("*.partial")]
    planned = repair_pack(target, dry_run=True)
    if left or planned.litter or planned.mended or planned.lost:
        return f"left behind: {left + list(planned.litter)}"
    return ""


# Faults


def _faults(
    place: Path, source: Path, options: TortureOptions, tally: _Tally, tell: Callable[[str], None]
) -> None:
    few = place / "few"
    _make_source(few, options.seed, "class", 9)
    _make_source(place / "more", options.seed + 1, "more", 5)
    for code in _CODES:
        for name, operation in _FAULTED.items():
            tell(f"faults: {name}, {errno.errorcode[code]} in each call")
            at = 0
            while options.fault_limit is None or at < options.fault_limit:
                one = operation(place / f"{name}-{code}-{at}", few)
                with Faults(at, fail_with(code)) as faults:
                    problem = one.run()
                if not faults.struck:
                    one.clean()
                    break
                call = faults.seen[at][0]
                problem = problem or one.check()
                one.clean()
                how = f"{name}: {errno.errorcode[code]} in call {at}, os.{call}"
                tally.note(f"{name}: {errno.errorcode[code]}", problem and f"{how}: {problem}")
                at += 1
    tell("faults: a storm of signals")
    for k in range(10):
        ended = _in_child(lambda k=k: _pack_amid_signals(source, place / f"storm{k}"), None)  # type: ignore[misc]  # a default binds k
        problem = _compare(source, place / f"storm{k}") if ended == 0 else f"ended with {ended}"
        tally.note("pack: interrupted by signals throughout", problem)
        shutil.rmtree(place / f"storm{k}", ignore_errors=True)


class _PackFault:
    """A packing of which one call fails."""

    def __init__(self, place: Path, source: Path) -> None:
        self.place = place
        self.source = source
        self.target = place / "pack"
        place.mkdir()

    def do(self) -> None:
        """Pack."""
        pack_folder(self.source, self.target, options=_options())

    def run(self) -> str:
        """Do it; an error of ours is what must come, if any."""
        try:
            self.do()
        except PacelineError:
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
        pack_folder(source, self.target, options=_options())

    def do(self) -> None:
        """Append."""
        append_pack(self.source.with_name("more"), self.target, options=_options())

    def check(self) -> str:
        """Return what is wrong afterwards."""
        return _after_append(self.source, self.target)[1]


class _RepairFault(_PackFault):
    """A repair of which one call fails: of a wrong byte, a missing and a cut-off shard."""

    def __init__(self, place: Path, source: Path) -> None:
        super().__init__(place, source)
        pack_folder(source, self.target, options=_options())
        shards = sorted(self.target.glob("shard-*.pace"))
        self.whole = {path.name: path.read_bytes() for path in self.target.iterdir()}
        shards[0].write_bytes(shards[0].read_bytes()[:64] + b"?" + shards[0].read_bytes()[65:])
        shards[1].unlink()
        os.truncate(shards[2], 100)

    def do(self) -> None:
        """Repair."""
        repair_pack(self.target, source=self.source)

    def check(self) -> str:
        """Return what is wrong after it was done again."""
        if not repair_pack(self.target, source=self.source).ok:
            return "it could not be mended afterwards"
        found = {path.name: path.read_bytes() for path in self.target.iterdir()}
        return "" if found == self.whole else "files differ after mending"


_FAULTED = {"pack": _PackFault, "append": _AppendFault, "repair": _RepairFault}


def _pack_amid_signals(source: Path, target: Path) -> None:
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.siginterrupt(signal.SIGALRM, True)  # the function's own way
    signal.setitimer(signal.ITIMER_REAL, _SIGNAL_INTERVAL_S, _SIGNAL_INTERVAL_S)
    pack_folder(source, target, options=_options())
    signal.setitimer(signal.ITIMER_REAL, 0)


# Names


def _names(
    place: Path, _source: Path, _options: TortureOptions, tally: _Tally, tell: Callable[[str], None]
) -> None:
    tell("names")
    for hostile in HOSTILE_NAMES:
        for kind in ("sample", "folder"):
            with tempfile.TemporaryDirectory(dir=place) as inner:
                problem = _extract_hostile(Path(inner), hostile, kind)
            tally.note(f"{kind}: refused", problem and f"{kind} {hostile!r}: {problem}")


def _extract_hostile(place: Path, hostile: bytes, kind: str) -> str:
    """Extract a pack in which something is called `hostile`; return what went wrong."""
    deep = place / "a" / "b" / "c"
    plain = b"z" * len(hostile)
    (deep / "source").mkdir(parents=True)
    (deep / "source" / "good").write_bytes(b"good")
    victim = deep / "source" / os.fsdecode(plain)
    victim.mkdir() if kind == "folder" else victim.write_bytes(b"hostile")
    pack_folder(deep / "source", deep / "pack")
    index = deep / "pack" / "index.pace"
    content = index.read_bytes()
    for number in (9, 11):
        begin, length = sections(content)[number]
        part = content[begin : begin + length].replace(plain, hostile)
        content = content[:begin] + part + content[begin + length :]
    index.write_bytes(resealed(content))
    before = sorted(place.rglob("*"))
    try:
        with open_pack(deep / "pack") as pack:
            extract(pack, deep / "out")
        return "it was extracted"
    except CorruptPack:
        pass
    return "" if sorted(place.rglob("*")) == before else "something was written"


def _file_system(folder: Path) -> str:
    """Return the type of the file system that `folder` lies on."""
    best = ("", "unknown")
    with contextlib.suppress(OSError):
        for line in Path("/proc/mounts").read_text().splitlines():
            _, mount, kind, *_ = line.split(" ")
            mount = mount.encode().decode("unicode_escape")
            if folder.resolve().is_relative_to(mount) and len(mount) >= len(best[0]):
                best = (mount, kind)
    return best[1]
