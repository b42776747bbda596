"""Damages a pack at random and checks that its reader notices: the first fault campaign.

Runs as a process of its own, so that a crash (SIGBUS, SIGSEGV) is an outcome and not the end of the
campaign. A case: bytes of one file are flipped, zeroed, swapped or cut off, in every other case
after a pack that stays open has read all samples well and has dropped its pages; then every sample
is read. A sample whose bytes were changed must be refused by its name, any other must come back as
it was. ::

    parent  --case numbers-->  this process  --a JSON line a case-->  parent
"""

from __future__ import annotations

import json
import os
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.core.errors import CorruptData, PacelineError, StorageError
from paceline.store import open_pack
from paceline.store.care.damage import verify_files
from paceline.store.care.repair import repair_pack
from paceline.store.format.header import head_bytes, parse_sections
from paceline.store.format.index import IndexFile

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paceline.store import Pack

KINDS = ("bit flip", "bit flips", "zeroed block", "swapped blocks", "truncation")
_BLOCKS = (1, 16, 64, 512, 4096)
_INDEX = "index.pace"
_REPAIR_EVERY = 8
_DIRECT_SHARE = 0.15  # of packs that are read past the page cache
_POLICIES = ("first", "first", "always")


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The outcome of one case; `problem` describes a wrong outcome."""

    case: int
    kind: str
    file: str
    result: str  # detected, or why there was nothing for a reader to detect
    problem: str = ""
    repaired: bool = False


class Victim:
    """The pack to damage: the original content of its files, and the samples' locations."""

    def __init__(self, path: Path, source: Path) -> None:
        self.path = path
        self.source = source
        self.files = {file.name: file.read_bytes() for file in sorted(path.iterdir())}
        # Mapped from a copy: the campaign damages the index itself, too.
        copy = path.with_name(path.name + "-index")
        copy.mkdir(exist_ok=True)
        (copy / _INDEX).write_bytes(self.files[_INDEX])
        self.index = IndexFile.open(copy)
        with open_pack(path) as pack:
            self.bodies = [pack.read(k) for k in range(len(pack))]
            self.names = list(pack.names)
        self.takes_direct = _takes_direct(path)

    def write(self, name: str, content: bytes) -> None:
        """Make `content` that of a file, in place and on storage."""
        descriptor = os.open(self.path / name, os.O_RDWR)
        try:
            old = os.fstat(descriptor).st_size
            if old != len(content):
                os.ftruncate(descriptor, len(content))
            os.pwrite(descriptor, content, 0)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def harmed(self, name: str, content: bytes) -> set[int]:
        """Return the samples of which bytes differ when a shard has this `content`."""
        before = np.frombuffer(self.files[name], np.uint8)
        after = np.frombuffer(content, np.uint8)
        common = min(len(before), len(after))
        changed = np.flatnonzero(before[:common] != after[:common])
        index = self.index
        shard = int(name[6:-5])
        samples = set()
        for extent in np.flatnonzero(index.shards == shard).tolist():
            begin = int(index.offsets[extent])
            end = begin + int(index.stored_lengths[extent])
            first = int(np.searchsorted(changed, begin))
            is_changed = first < len(changed) and int(changed[first]) < end
            if end > begin and (is_changed or end > common):
                samples.add(index.sample_of(extent))
        return samples

    def is_refused(self, name: str, content: bytes) -> bool:
        """Return whether opening a pack with this file must fail, or verifying its index."""
        before = self.files[name]
        if name.startswith("parity"):
            return False
        if len(content) != len(before):
            return True
        if name != _INDEX:
            return content[:64] != before[:64]
        ranges = [(0, head_bytes(before))]
        ranges += [(place.offset, place.end) for place in parse_sections(before).values()]
        return any(content[begin:end] != before[begin:end] for begin, end in ranges)


def damaged(content: bytes, kind: str, generator: random.Random) -> bytes:
    """Return `content` with damage of that kind."""
    new = bytearray(content)
    size = min(generator.choice(_BLOCKS), len(new) // 2)
    if kind == "truncation":
        del new[generator.randrange(len(new)) :]
    elif kind == "zeroed block":
        at = generator.randrange(len(new) - size + 1)
        new[at : at + size] = bytes(size)
    elif kind == "swapped blocks":
        first, second = (generator.randrange(len(new) // size) * size for _ in range(2))
        new[first : first + size], new[second : second + size] = (
            new[second : second + size],
            new[first : first + size],
        )
    else:
        for _ in range(1 if kind == "bit flip" else generator.randint(2, 40)):
            new[generator.randrange(len(new))] ^= 1 << generator.randrange(8)
    return bytes(new)


def run_case(victim: Victim, seed: int, case: int) -> Outcome:
    """Damage the pack, look at it, and put it back as it was."""
    generator = random.Random(f"{seed}:{case}")
    shards = [name for name in victim.files if name.startswith("shard")]
    others = [name for name in victim.files if name not in shards]
    name = generator.choice(shards if generator.random() < 0.75 else others)
    kind = generator.choice(KINDS)
    content = damaged(victim.files[name], kind, generator)
    is_direct = victim.takes_direct and generator.random() < _DIRECT_SHARE
    how: dict[str, Any] = {"verify": generator.choice(_POLICIES), "direct": is_direct, "threads": 1}
    after_good_read = (
        case % 2 == 1 and name != _INDEX
    )  # an open reader keeps the index that it mapped
    open_before = open_pack(victim.path, **how) if after_good_read else None
    try:
        if open_before is not None:
            problem = _first_read(victim, open_before)
            open_before.evict()
        else:
            problem = ""
        victim.write(name, content)
        result = "changed nothing" if content == victim.files[name] else _unseen_by_readers(name)
        found = _look(victim, name, content, open_before, how)
        problem = problem or found[1]
        result = found[0] or result
        repaired = False
        if case % _REPAIR_EVERY == 0 and name != _INDEX:
            problem = problem or _repair(victim)
            repaired = True
    finally:
        if open_before is not None:
            open_before.close()
        victim.write(name, victim.files[name])
    return Outcome(
        case=case, kind=kind, file=name, result=result, problem=problem, repaired=repaired
    )


def _takes_direct(path: Path) -> bool:
    """Return whether this file system can be read past the page cache."""
    try:
        with open_pack(path, direct=True) as pack:
            pack.read_batch(range(len(pack)))
    except StorageError:
        return False
    return True


def _unseen_by_readers(name: str) -> str:
    """Say how damage that no reader meets is detected all the same."""
    return "seen by the file's digest" if name != _INDEX else "between sections"


def _first_read(victim: Victim, pack: Pack) -> str:
    buffer, offsets = pack.read_batch(range(len(pack)))
    for k, body in enumerate(victim.bodies):
        if buffer[offsets[k] : offsets[k + 1]].tobytes() != body:
            return f"sample {k} was wrong before anything was damaged"
    return ""


def _look(
    victim: Victim, name: str, content: bytes, open_before: Pack | None, how: dict[str, Any]
) -> tuple[str, str]:
    """Return the outcome of the damage ("" = none is visible), and what is wrong with it."""
    refused = victim.is_refused(name, content)
    harmed = victim.harmed(name, content) if name.startswith("shard") else set()
    wrong = _files_wrong(victim, name, content)
    if wrong:
        return "", wrong
    if open_before is None:
        try:
            pack = open_pack(victim.path, **how)
        except CorruptData as problem:
            if not refused:
                return "", f"refused although nothing that counts was changed: {problem}"
            if problem.where != str(victim.path / name):
                return "", f"named {problem.where}"
            return "detected", ""
        if refused:
            with pack:
                if name != _INDEX:
                    return "", "opened although its files are damaged"
                return "detected", _read_beside_damage(victim, pack)
    else:
        pack = open_before
    with pack:
        shard_gone = refused and name.startswith("shard")
        seen = _read_all(victim, pack, harmed, victim.path / name if shard_gone else None)
    if seen[1]:
        return seen
    return ("detected" if harmed or refused or seen[0] else "", "")


def _read_beside_damage(victim: Victim, pack: Pack) -> str:
    """Read a pack of which the index is damaged where opening it does not look."""
    index = str(victim.path / _INDEX)
    named = [problem.where for problem in pack.verify()]
    if named != [index]:
        return f"verify named {named}, the index was damaged"
    for k, body in enumerate(victim.bodies):
        try:
            found = pack.read(k)
        except CorruptData as problem:
            if problem.where != index:
                return f"sample {k} was refused: {problem}"
        else:
            if found != body:
                return f"sample {k} came back wrong from behind a damaged index"
    return ""


def _files_wrong(victim: Victim, name: str, content: bytes) -> str:
    """Compare files with their digests: exactly the file that was changed must differ."""
    if name == _INDEX or not victim.index.shard_digests:
        return ""
    _, found = verify_files(victim.path)
    named = [Path(problem.where).name for problem in found]
    expected = [name] if content != victim.files[name] else []
    return "" if named == expected else f"digests differ for {named}, changed was {expected}"


def _read_all(
    victim: Victim, pack: Pack, harmed: set[int], shard_gone: Path | None
) -> tuple[str, str]:
    """Read each sample in every way; `shard_gone` may be refused for all samples."""
    for k, body in enumerate(victim.bodies):
        for read in (_read_one, _view_one, _read_in_batch):
            try:
                got = read(pack, k)
            except CorruptData as problem:
                is_named = repr(victim.names[k]) in problem.what and f"sample {k} " in problem.what
                if k in harmed and (is_named or shard_gone is not None):
                    continue
                if shard_gone is not None and problem.where == str(shard_gone):
                    continue
                return "", f"sample {k} was refused: {problem}"
            if got != body:
                return "", f"sample {k} came back wrong, by {read.__name__}"
            if k in harmed and not victim.index.codecs[_first_extent(victim, k)]:
                return "", f"sample {k} was changed, and came back as before"
    if shard_gone is None:
        bad = {int(problem.what.split()[1]) for problem in pack.verify()}
        if not bad <= harmed or {k for k in harmed - bad if not _is_encoded(victim, k)}:
            return "", f"verify named {sorted(bad)}, harmed were {sorted(harmed)}"
    return "", ""


def _first_extent(victim: Victim, sample: int) -> int:
    first = victim.index.first_extents
    return int(first[sample]) if len(first) else sample


def _is_encoded(victim: Victim, sample: int) -> bool:
    return bool(victim.index.codecs[_first_extent(victim, sample)])


def _read_one(pack: Pack, sample: int) -> bytes:
    return pack.read(sample)


def _view_one(pack: Pack, sample: int) -> bytes:
    return bytes(pack.view(sample))


def _read_in_batch(pack: Pack, sample: int) -> bytes:
    buffer, offsets = pack.read_batch([sample, sample])
    return buffer[offsets[1] :].tobytes()


def _repair(victim: Victim) -> str:
    """Repair the damage, from parity where there is some, and compare every byte."""
    source = None if victim.index.parity_group else victim.source
    report = repair_pack(victim.path, source=source)
    if not report.ok:
        return f"not repaired: {report.lost[0].what}"
    for name, content in victim.files.items():
        if (victim.path / name).read_bytes() != content:
            return f"{name} is not as before after the repair"
    return ""


def run_cases(path: Path, source: Path, seed: int, cases: Iterable[int]) -> None:
    """Run these cases on the pack at `path`; write a JSON line before and after each."""
    victim = Victim(path, source)
    for case in cases:
        _send({"begun": case})
        try:
            outcome = run_case(victim, seed, case)
        except PacelineError as problem:
            outcome = Outcome(case=case, kind="?", file="?", result="", problem=str(problem))
        except Exception as problem:  # noqa: BLE001  # whatever it is, the case has failed
            text = f"{type(problem).__name__}: {problem}"
            outcome = Outcome(case=case, kind="?", file="?", result="", problem=text)
        fields = {key: getattr(outcome, key) for key in Outcome.__slots__}
        _send(fields)


def _send(fields: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    run_cases(
        Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), range(*map(int, sys.argv[4:6]))
    )
