"""Fault campaigns against the store, on the user's own file system: is all damage noticed?

Four campaigns, each with its counts; a seed gives the same damage again. ::

    corruptions  bytes of a pack are damaged: each sample whose bytes changed must be refused by
                 name (`torture_corruption.py`, in processes of their own)
    kills        packing and appending are killed at random moments: what was committed is
                 complete, and the next run leaves no stale files (`torture_interruptions.py`)
    faults       each call that changes the disk fails once: the old state or the new, never between
    names        packs with hostile names write nothing outside the folder of an extraction
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline import store
from paceline.core.clock import Clock, SystemClock
from paceline.core.errors import CorruptPack, NotFound
from paceline.core.record import Record
from paceline.store import open_pack
from paceline.store.format.header import parse_sections, resealed
from paceline.store.read.extract import extract
from paceline.studies.torture_interruptions import run_faults, run_kills
from paceline.studies.torture_parts import (
    Campaign,
    Tally,
    TortureOptions,
    make_source,
    pack_options,
)

if TYPE_CHECKING:
    from collections.abc import Callable

_CASES_PER_PROCESS = 250
_DEADLINE_S = 1800.0  # for so many cases, which take seconds
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
class TortureReport(Record):
    """The results of all campaigns."""

    folder: str
    file_system: str
    seed: int
    campaigns: tuple[Campaign, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing went wrong."""
        return not any(campaign.failure_count for campaign in self.campaigns)


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
        raise NotFound("no such folder", where=str(folder), fix="Give a folder on the disk to test")
    folder = folder.absolute()  # errors name files so
    work = Path(tempfile.mkdtemp(prefix="paceline-torture-", dir=folder))
    try:
        source = work / "source"
        make_source(source, options.seed, "class")
        make_source(work / "more", options.seed + 1, "more", 12)
        campaigns = []
        for name, run in (
            ("corruptions", _corruptions),
            ("kills", run_kills),
            ("faults", run_faults),
            ("names", _names),
        ):
            place = work / name
            place.mkdir()
            start_s = clock.now_s()
            tally = Tally()
            run(place, source, options, tally, on_progress or (lambda _line: None))
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


def _corruptions(
    place: Path,
    source: Path,
    options: TortureOptions,
    tally: Tally,
    on_progress: Callable[[str], None],
) -> None:
    store.pack(store.Folder(source), place / "pack", options=pack_options())
    intact = {path.name: path.read_bytes() for path in (place / "pack").iterdir()}
    case = 0
    while case < options.corruptions:
        on_progress(f"corruptions: {case:,} of {options.corruptions:,}")
        end = min(case + _CASES_PER_PROCESS, options.corruptions)
        case = _corrupt_in_child(place / "pack", source, options.seed, range(case, end), tally)
        for name, content in intact.items():  # also after a crash amid a case
            (place / "pack" / name).write_bytes(content)


def _corrupt_in_child(path: Path, source: Path, seed: int, cases: range, tally: Tally) -> int:
    """Run cases in a process of their own; return the case to go on with."""
    command = [sys.executable, "-m", "paceline.studies.torture_corruption"]
    command += [str(path), str(source), str(seed), str(cases.start), str(cases.stop)]
    try:
        done = subprocess.run(command, capture_output=True, check=False, timeout=_DEADLINE_S)
    except subprocess.TimeoutExpired as late:  # it was killed
        written = (late.stdout or b"", late.stderr or b"")
        done = subprocess.CompletedProcess(command, -signal.SIGKILL, *written)
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
        tally.counts["repaired again"] += fields["repaired"]
    if done.returncode == 0:
        return cases.stop
    where = cases.start if begun is None else begun
    ending = done.stderr.decode(errors="replace").strip()[-300:]
    how = f"ended with {done.returncode}"
    if done.returncode < 0:
        how = f"was killed by {signal.Signals(-done.returncode).name}"
    tally.note("crash", f"seed {seed}, case {where}: the reader's process {how}. {ending}")
    return where + 1


def _names(
    place: Path,
    _source: Path,
    _options: TortureOptions,
    tally: Tally,
    on_progress: Callable[[str], None],
) -> None:
    on_progress("names")
    for hostile in HOSTILE_NAMES:
        for kind in ("sample", "folder"):
            with tempfile.TemporaryDirectory(dir=place) as inner:
                problem = _extract_hostile(Path(inner), hostile, kind)
            tally.note(f"{kind}: refused", problem and f"{kind} {hostile!r}: {problem}")


def _extract_hostile(place: Path, hostile: bytes, kind: str) -> str:
    """Extract a pack in which an entry is named `hostile`; return what went wrong."""
    deep = place / "a" / "b" / "c"
    plain = b"z" * len(hostile)
    (deep / "source").mkdir(parents=True)
    (deep / "source" / "good").write_bytes(b"good")
    victim = deep / "source" / os.fsdecode(plain)
    victim.mkdir() if kind == "folder" else victim.write_bytes(b"hostile")
    store.pack(store.Folder(deep / "source"), deep / "pack")
    index = deep / "pack" / "index.pace"
    content = index.read_bytes()
    for number in (9, 11):
        section = parse_sections(content)[number]
        names = content[section.offset : section.end].replace(plain, hostile)
        content = content[: section.offset] + names + content[section.end :]
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
