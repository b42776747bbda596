"""One contender of store_read.py, in a process of its own that sleeps until it is its turn.

Each line of stdin asks for one measurement; each line of stdout answers it:

    {"do": "copy", "seed": 3}  ->  {"seconds": 0.11, "samples": 20000, "bytes": 2140000000}

A contender has one or several things to do, each a generator that hands samples out and yields how
many, and their bytes, batch by batch. Whoever can read in a given order gets the same one, drawn
from the seed before the clock starts; the others shuffle as they do. With `limit_s` it starts over
until the time is up. Imports of a contender stand within it: peers run in environments of their
own, without Paceline.

    python bench/store_contenders.py '{"contender": "raw", "files": ..., "batch": 64, "core": 0}'
"""

from __future__ import annotations

import gc
import itertools
import json
import mmap
import os
import queue
import struct
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

PAGE_BYTES = 4096
DIRECT_DEPTH, DIRECT_BYTES = 8, 1 << 20
AHEAD_SAMPLES = 1024  # that the cold reader asks for before it reads them


def shards(pack):
    """Return the shard files of a pack."""
    return sorted(Path(pack).glob("shard-*.pace"))


def batches_of(items, size):
    """Return a list cut into batches."""
    return [items[first : first + size] for first in range(0, len(items), size)]


class Contender:
    """What all have in common: the order in which samples are read."""

    def __init__(self, asked):
        self.asked = asked
        self.batch = asked["batch"]

    def order(self, seed):
        """Return the sample numbers in random order; the first `subset` only, if that is set."""
        count = self.asked["count"]
        return np.random.default_rng(seed).permutation(min(count, self.asked.get("subset", count)))

    def batches(self, seed):
        return batches_of(self.order(seed), self.batch)

    def forget(self):
        """Let go of what would keep pages in memory."""


class Raw(Contender):
    """Files as they are, each opened, read and closed."""

    def __init__(self, asked):
        super().__init__(asked)
        import store_data

        self.paths = store_data.listing(asked["files"])

    def copy(self, seed):
        paths = batches_of([self.paths[number] for number in self.order(seed)], self.batch)

        def read():
            for batch in paths:
                size = 0
                for path in batch:
                    file = os.open(path, os.O_RDONLY)
                    size += len(os.read(file, os.fstat(file).st_size))
                    os.close(file)
                yield len(batch), size

        return read

    def walk(self, _seed):
        def walk():
            for folder, _, names in os.walk(self.asked["files"]):
                size = 0
                for name in names:
                    size += os.stat(f"{folder}/{name}").st_size  # noqa: PTH116  # what is measured
                yield len(names), size

        return walk

    def scandir(self, _seed):
        def walk():
            for folder in os.scandir(self.asked["files"]):
                sizes = [entry.stat().st_size for entry in os.scandir(folder)]
                yield len(sizes), sum(sizes)

        return walk


class Packed(Contender):
    """A pack, read by what a user calls."""

    def __init__(self, asked):
        super().__init__(asked)
        from paceline.store import open_pack

        self.open = lambda: open_pack(asked["pack"], threads=asked.get("threads"))
        self.pack = None if asked.get("cold") else self.open()

    def forget(self):
        if self.pack is not None:
            self.pack.close()
        self.pack = None
        gc.collect()

    def copy(self, seed):
        batches = self.batches(seed)

        def read():
            for batch in batches:
                # Let go of at once, as the bytes of a file are: it serves again.
                yield len(batch), len(self.pack.read_batch(batch)[0])

        return read

    def single(self, seed):
        """Read sample by sample."""
        batches = [batch.tolist() for batch in self.batches(seed)]

        def read():
            get = self.pack.read
            for batch in batches:
                yield len(batch), sum(len(get(number)) for number in batch)

        return read

    def views(self, seed):
        """Hand views out: the call itself touches each page, or verifies it."""
        batches = self.batches(seed)

        def read():
            for batch in batches:
                yield len(batch), sum(map(len, self.pack.views(batch)))

        return read

    def touched_views(self, seed):
        """As `views`, and the user reads a byte of each page as well."""
        batches = self.batches(seed)

        def read():
            for batch in batches:
                size = 0
                for view in self.pack.views(batch):
                    view[::PAGE_BYTES].tobytes()
                    size += len(view)
                yield len(batch), size

        return read

    def ahead(self, seed):
        """Open the pack and read it, asking for the next batches while these are read."""
        batches = self.batches(seed)
        depth = max(AHEAD_SAMPLES // self.batch, 1)

        def read():
            self.pack = self.open()
            for batch in batches[:depth]:
                self.pack.prefetch(batch)
            for batch, later in itertools.zip_longest(batches, batches[depth:]):
                if later is not None:
                    self.pack.prefetch(later)
                buffer, _ = self.pack.read_batch(batch)
                yield len(batch), len(buffer)

        return read

    def walk(self, _seed):
        def walk():
            for _, entries in self.pack.walk():
                files = [entry.size for entry in entries if not entry.is_folder]
                yield len(files), sum(files)

        return walk


class Memory(Contender):
    """The limit: memcpy of samples as long as the set's, from memory into a buffer in the cache."""

    def __init__(self, asked):
        super().__init__(asked)
        import store_data

        subset = store_data.listing(asked["files"])[: asked["subset"]]
        sizes = [Path(path).stat().st_size for path in subset]
        self.samples = self.pieces(sizes)
        self.buffer = np.empty(max(sizes) * self.batch, np.uint8)

    def pieces(self, sizes):
        """Return arrays of these sizes that lie one after another."""
        return np.split(np.ones(sum(sizes), np.uint8), np.cumsum(sizes)[:-1])

    def copy(self, seed):
        batches = [[self.samples[number] for number in batch] for batch in self.batches(seed)]
        totals = [sum(map(len, batch)) for batch in batches]

        def read():
            for batch, total in zip(batches, totals, strict=True):
                np.concatenate(batch, out=self.buffer[:total])
                yield len(batch), total

        return read


class Mapping(Memory):
    """The same from files in the page cache, where pages are smaller: a pack's own shards."""

    def pieces(self, sizes):
        rest = iter(shards(self.asked["pack"]))
        source, at, pieces = np.empty(0, np.uint8), 0, []
        for size in sizes:
            if at + size > len(source):
                source, at = np.asarray(np.memmap(next(rest), np.uint8, "r")), 0
            pieces.append(source[at : at + size])
            at += size
        return pieces


class Slices(Contender):
    """The limit of Python: bytes that are sliced out of a pack's mapped shards, unverified."""

    def __init__(self, asked):
        super().__init__(asked)
        from paceline.store import open_pack

        maps = []
        for path in shards(asked["pack"]):
            with path.open("rb") as file:
                maps.append(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
        with open_pack(asked["pack"], index_only=True) as pack:
            index = pack.index
            columns = (index.shards, index.offsets, index.offsets + index.lengths)
            found = zip(*(column.tolist() for column in columns), strict=True)
        self.places = [(maps[shard], begin, end) for shard, begin, end in found]

    def copy(self, seed):
        batches = [[self.places[number] for number in batch] for batch in self.batches(seed)]

        def read():
            for batch in batches:
                yield len(batch), sum(len(mapped[begin:end]) for mapped, begin, end in batch)

        return read


class Disk(Contender):
    """The limit when nothing is in memory: a pack's shards from end to end."""

    def _whole(self, read_file):
        def read():
            for path in shards(self.asked["pack"]):
                read_file(path)
            yield self.asked["count"], self.asked["bytes"]

        return read

    def buffered(self, _seed):
        memory = memoryview(bytearray(8 << 20))

        def read_file(path):
            with path.open("rb", buffering=0) as file:
                while file.readinto(memory):
                    pass

        return self._whole(read_file)

    def direct(self, _seed):
        pool = ThreadPoolExecutor(DIRECT_DEPTH)
        memories = queue.SimpleQueue()
        for _ in range(DIRECT_DEPTH):
            memories.put(mmap.mmap(-1, DIRECT_BYTES))  # aligned to a page

        def read_file(path):
            file = os.open(path, os.O_RDONLY | os.O_DIRECT)

            def read_block(at):
                memory = memories.get()
                os.preadv(file, [memory], at)
                memories.put(memory)

            list(pool.map(read_block, range(0, os.fstat(file).st_size, DIRECT_BYTES)))
            os.close(file)

        return self._whole(read_file)


class Lmdb(Contender):
    def __init__(self, asked):
        super().__init__(asked)
        import lmdb

        self.store = lmdb.open(asked["lmdb"], readonly=True, lock=False)

    def copy(self, seed):
        keys = [[struct.pack(">Q", number) for number in batch] for batch in self.batches(seed)]

        def read():
            with self.store.begin() as transaction:
                get = transaction.get
                for batch in keys:
                    yield len(batch), sum(len(get(key)) for key in batch)

        return read


class WebDataset(Contender):
    def iterate(self, seed):
        import webdataset

        shards = sorted(str(path) for path in Path(self.asked["webdataset"]).glob("*.tar"))
        data = webdataset.WebDataset(shards, shardshuffle=len(shards), seed=seed, empty_check=False)
        data = data.shuffle(1000)

        def read():
            for sample in data:
                yield 1, len(sample["bin"])

        return read


class Mds(Contender):
    def __init__(self, asked):
        super().__init__(asked)
        import store_data

        streaming = store_data.import_streaming()
        streaming.base.util.clean_stale_shared_memory()
        self.data = streaming.StreamingDataset(
            local=asked["mds"], shuffle=True, shuffle_seed=1, batch_size=self.batch
        )

    def iterate(self, _seed):
        def read():
            for sample in self.data:
                yield 1, len(sample["b"])

        return read

    def index(self, seed):
        order = self.order(seed).tolist()

        def read():
            for number in order:
                yield 1, len(self.data[number]["b"])

        return read


class LitData(Contender):
    def __init__(self, asked):
        super().__init__(asked)
        import litdata

        self.data = litdata.StreamingDataset(asked["litdata"], shuffle=True, seed=1)

    def iterate(self, _seed):
        def read():
            for sample in self.data:
                yield 1, len(sample)

        return read


class Files:
    """The data set of a `DataLoader` over files: as bytes, or as tensors."""

    def __init__(self, paths, as_tensors):
        self.paths = paths
        self.as_tensors = as_tensors

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, number):
        file = os.open(self.paths[number], os.O_RDONLY)
        try:
            size = os.fstat(file).st_size
            if not self.as_tensors:
                return os.read(file, size)
            import torch

            sample = torch.empty(size, dtype=torch.uint8)
            os.readv(file, [sample.numpy()])
            return sample
        finally:
            os.close(file)


class DataLoader(Contender):
    """Torch's `DataLoader` with two workers that stay up; a batch is a list."""

    def __init__(self, asked):
        super().__init__(asked)
        import store_data

        self.paths = store_data.listing(asked["files"])
        self.made = {}

    def _loader(self, seed, *, as_tensors):
        from torch.utils.data import DataLoader

        if as_tensors not in self.made:
            order = []
            loader = DataLoader(
                Files(self.paths, as_tensors),
                batch_size=self.batch,
                sampler=order,
                num_workers=2,
                collate_fn=list,
                persistent_workers=True,
            )
            self.made[as_tensors] = loader, order
        loader, order = self.made[as_tensors]
        order[:] = self.order(seed).tolist()

        def read():
            for batch in loader:
                yield len(batch), sum(map(len, batch))

        return read

    def tensors(self, seed):
        return self._loader(seed, as_tensors=True)

    def bytes(self, seed):
        return self._loader(seed, as_tensors=False)


class PacelineLoader(Contender):
    """`store.Loader`; a batch is a list of tensors, and the last one is smaller, as torch's."""

    def __init__(self, asked):
        super().__init__(asked)
        from paceline.store import Loader, LoaderOptions

        self.loader = Loader(asked["pack"], self.batch, options=LoaderOptions(last="join"))

    def tensors(self, _seed):
        def read():
            for samples, *_ in self.loader:
                batch = samples.tensors()
                yield len(batch), sum(map(len, batch))

        return read


CONTENDERS = {
    "raw": Raw,
    "pack": Packed,
    "slices": Slices,
    "memory": Memory,
    "mapping": Mapping,
    "disk": Disk,
    "lmdb": Lmdb,
    "webdataset": WebDataset,
    "mds": Mds,
    "litdata": LitData,
    "dataloader": DataLoader,
    "loader": PacelineLoader,
}


def measure(contender, request):
    """Do what is asked for once, or for `limit_s`; return how long it took, and how much it was."""
    run = getattr(contender, request["do"])(request["seed"])
    limit_s = request.get("limit_s", 0.0)
    samples = size = 0
    gc.collect()
    begin = time.perf_counter()
    seconds = -1.0
    while seconds < limit_s:
        for count, read_bytes in run():
            samples += count
            size += read_bytes
            if limit_s and time.perf_counter() - begin >= limit_s:
                break
        seconds = time.perf_counter() - begin
    return {"seconds": seconds, "samples": samples, "bytes": size}


def main():
    asked = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    if "core" in asked:
        os.sched_setaffinity(0, {asked["core"]})
    contender = CONTENDERS[asked["contender"]](asked)
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "forget":
            contender.forget()
            answer = {}
        else:
            answer = measure(contender, request)
        print(json.dumps(answer), file=answers, flush=True)
    answers.close()


if __name__ == "__main__":
    main()
