"""Is an LMDB database read faster in place than by LMDB itself, and how long does its index take?

Databases of four kinds, 200 MiB or 300,000 records each, loaded in the order of keys with a commit
every 1,000 records, all in memory: values of 100 bytes (in the leaves), 1,900 bytes (two to a
leaf), 12 KB and 107 KB (in pages of their own). Single values vary around these by a factor of 0.5
to 1.5.

- index: one pass over the B+tree (`paceline.native.LmdbRecords`), which is all that finding the
  records takes, per 10,000 pages of the file. A row says beside it how long the first `open_pack`
  takes, which also writes the side file: sorts names, makes the name table, computes checksums of
  the index.
- read: random batches of 64 records, each record once a round, copied: `Pack.read_batch` against a
  list of what `transaction.get` of py-lmdb returns for each key, in one read transaction; in
  turns, in an order that is drawn anew for each round. A ratio is the median over the rounds of the
  ratio within a round. The pack is opened as it comes: it shares batches of 2 MB and more among a
  thread per core, which py-lmdb cannot, because it copies under the GIL. Without a bar beside it:
  the same with one thread; py-lmdb's values dropped one by one, so that each is copied to where the
  one before was; and zero-copy, a transaction with buffers against `Pack.views`, each page touched.
- A row for each says whether the samples have checksums: without them nothing is compared, as in
  LMDB; with them samples of 8 KB and more are compared when they may have come from storage.

    python bench/in_place.py --json [--quick]
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import lmdb
import numpy as np
from harness import Report, options

from paceline.native import LmdbRecords
from paceline.store import add_checksums, open_pack

KINDS = {"100 B": 100, "1.9 KB": 1_900, "12 KB": 12_000, "107 KB": 107_000}
BATCH = 64
COMMIT = 1_000
MOST_RECORDS = 300_000
PAGE_BYTES = 4096


def make_database(path, mean, total_bytes):
    """Write a database of about `total_bytes` at `path`."""
    random = np.random.default_rng(mean)
    count = min(total_bytes // mean, MOST_RECORDS)
    lengths = random.integers(mean // 2, mean * 3 // 2, count)
    pool = random.bytes(2 * mean + count)
    with lmdb.open(str(path), subdir=False, map_size=8 * total_bytes + (1 << 26)) as environment:
        for first in range(0, count, COMMIT):
            with environment.begin(write=True) as transaction:
                for k in range(first, min(first + COMMIT, count)):
                    transaction.put(b"%08d" % k, pool[k : k + int(lengths[k])], append=True)


def seconds(work):
    """Return how long a call takes."""
    begin_s = time.perf_counter()
    work()
    return time.perf_counter() - begin_s


def walk(path):
    """Find all records, as indexing does."""
    records = LmdbRecords(os.fsencode(path), 0)
    while len(records.next(1 << 19).offsets):
        pass


def first_open(path):
    """Open the database as if it had never been indexed."""
    path.with_name(path.name + ".pace").unlink(missing_ok=True)
    open_pack(path).close()


def index_row(report, kind, path, repeats):
    """Measure how long finding the records takes; return it per 10,000 pages, in ms."""
    pages = path.stat().st_size / PAGE_BYTES
    walk(path)
    walk_s = statistics.median(seconds(lambda: walk(path)) for _ in range(repeats))
    open_s = statistics.median(seconds(lambda: first_open(path)) for _ in range(3))
    again_s = statistics.median(seconds(lambda: open_pack(path).close()) for _ in range(5))
    with open_pack(path) as pack:
        count = len(pack)
    per_10k_ms = walk_s * 1e3 / pages * 1e4
    report.row(
        section="index",
        values=kind,
        pages=int(pages),
        records=count,
        walk_ms=walk_s * 1e3,
        walk_ms_per_10k_pages=per_10k_ms,
        first_open_ms=open_s * 1e3,
        later_open_ms=again_s * 1e3,
    )
    return per_10k_ms


def touch(view):
    """Read a byte of each page."""
    return sum(view[::PAGE_BYTES])


class Round:
    """One epoch over a database in a given order, by each contender."""

    def __init__(self, pack, one_thread, environment, order):
        self.pack = pack
        self.one_thread = one_thread
        self.environment = environment
        self.ids = [order[k : k + BATCH] for k in range(0, len(order), BATCH)]
        self.keys = [[b"%08d" % k for k in batch] for batch in self.ids]
        self.batch = None  # held until the next is there

    def paceline_copy(self):
        for batch in self.ids:
            self.batch = self.pack.read_batch(batch)

    def paceline_alone(self):
        for batch in self.ids:
            self.batch = self.one_thread.read_batch(batch)

    def lmdb_copy(self):
        with self.environment.begin() as transaction:
            for batch in self.keys:
                self.batch = [transaction.get(key) for key in batch]

    def lmdb_drop(self):
        with self.environment.begin() as transaction:
            for batch in self.keys:
                for key in batch:
                    transaction.get(key)

    def paceline_views(self):
        for batch in self.ids:
            for view in self.pack.views(batch):
                touch(view)

    def lmdb_views(self):
        with self.environment.begin(buffers=True) as transaction:
            for batch in self.keys:
                for key in batch:
                    touch(transaction.get(key))


def read_rows(report, kind, path, rounds, checksums):
    """Measure reading; return the ratio of copying."""
    with open_pack(path) as pack:
        if checksums and not pack.is_verified:
            add_checksums(pack)
    contenders = ("paceline_copy", "paceline_alone", "lmdb_copy", "lmdb_drop")
    contenders += ("paceline_views", "lmdb_views")
    times = {name: [] for name in contenders}
    with (
        open_pack(path) as pack,
        open_pack(path, threads=1) as one_thread,
        lmdb.open(str(path), subdir=False, readonly=True, lock=False) as environment,
    ):
        mean_bytes = float(np.mean(pack.lengths))
        for number in range(rounds + 1):
            random = np.random.default_rng(number)
            epoch = Round(pack, one_thread, environment, random.permutation(len(pack)))
            for name in random.permutation(contenders):
                taken_s = seconds(getattr(epoch, name))
                if number:  # the first round brings everything into memory
                    times[name].append(taken_s / len(pack))

    def ratio(ours, theirs):
        rounds = zip(times[f"paceline_{ours}"], times[f"lmdb_{theirs}"], strict=True)
        return statistics.median(lmdb_s / own_s for own_s, lmdb_s in rounds)

    report.row(
        section="read",
        values=kind,
        checksums=checksums,
        copy_us=statistics.median(times["paceline_copy"]) * 1e6,
        lmdb_copy_us=statistics.median(times["lmdb_copy"]) * 1e6,
        lmdb_drop_us=statistics.median(times["lmdb_drop"]) * 1e6,
        copy_gb_per_s=mean_bytes / statistics.median(times["paceline_copy"]) / 1e9,
        copy_ratio=ratio("copy", "copy"),
        one_thread_ratio=ratio("alone", "copy"),
        views_ratio=ratio("views", "views"),
    )
    return ratio("copy", "copy")


def main():
    flags = options(__doc__)
    report = Report("in_place", flags.json)
    total_bytes = (20 if flags.quick else 200) << 20
    per_10k_ms, ratios = [], []
    with tempfile.TemporaryDirectory() as folder:
        for kind, mean in KINDS.items():
            path = Path(folder) / "x.mdb"
            make_database(path, mean, total_bytes)
            per_10k_ms.append(index_row(report, kind, path, 5 if flags.quick else 15))
            for checksums in (False, True):
                rounds = 3 if flags.quick else 7
                ratio = read_rows(report, kind, path, rounds, checksums)
                if not checksums:
                    ratios.append(ratio)
            for file in Path(folder).iterdir():
                file.unlink()
    report.bar("index, ms per 10,000 pages, the slowest kind", max(per_10k_ms), 20.0)
    report.bar(
        "reading in place / py-lmdb, warm, the slowest kind", min(ratios), 1.1, at_least=True
    )
    return report.print()


if __name__ == "__main__":
    sys.exit(main())
