"""Codecs of packs: how much smaller samples become, and how fast they are decoded again.

Four sets of samples: tiny-shakespeare in single lines and in passages of 64 lines, digits as PNG,
and images of Fashion-MNIST as normalised float32 arrays (.npy). Each is packed with every codec,
and written as tar.gz and as MDS with zstd by their own libraries; MosaicML Streaming runs in an
environment of its own (scripts/peers mds).

The capacity factor is the bytes of samples per stored byte, a dictionary included; the files' one
counts all files of a format, with names, index and padding. Decoding is reading all samples from
the page cache: of a pack in random order on one thread, and on all; of tar.gz and MDS, which
compress whole archives and shards, in their order. MDS writes each shard out decompressed first.

Then `auto` packs larger sets for several rates that a loop requires, and the packs are read from
storage, in blocks, as a loader reads ahead. What is required goes up to what the fastest codec
feeds; no pack may feed less than 0.95 of it.

    python bench/codecs.py --json                  about 2 minutes
    python bench/codecs.py --quick                 smaller sets, fewer repetitions, no MDS
    python bench/codecs.py --data DIR              that has tinyshakespeare and fashion-mnist
"""

from __future__ import annotations

import gzip
import io
import json
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from harness import Report, options, tell
from store_data import environment_python, import_streaming, peer_environment

CODECS = ("none", "lz4", "zstd", "zstd-dict")
PASSAGE_LINES = 64
IMAGES = 4000
BATCH = 256
MIN_FACTOR = 2.0
MIN_FED = 0.95
MDS_SHARD_BYTES = 64 << 20
MDS_REPEATS = 3
SHORT = "about 34 bytes each, whose own entropy a codec that must decode each alone cannot reach"


class Effort(NamedTuple):
    """How much is measured."""

    rate_s: float  # of reading from memory, for a rate
    fed_bytes: int  # of the samples that are read from storage
    repeats: int  # of reading them
    shares: tuple[float, ...]  # of what each codec feeds: what is required of `auto`
    with_mds: bool


FULL = Effort(rate_s=0.4, fed_bytes=64 << 20, repeats=5, shares=(0.3, 0.6, 0.95), with_mds=True)
QUICK = Effort(rate_s=0.1, fed_bytes=16 << 20, repeats=3, shares=(0.95,), with_mds=False)


# --- samples -------------------------------------------------------------------------------------


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def images(data):
    """Return Fashion-MNIST's test images as float32, of mean 0 and deviation 1."""
    with gzip.open(data / "fashion-mnist" / "t10k-images-idx3-ubyte.gz") as file:
        pixels = np.frombuffer(file.read()[16:], np.uint8).reshape(-1, 28, 28)
    return ((pixels[:IMAGES] / np.float32(255) - np.float32(0.286)) / np.float32(0.353)).astype(
        "<f4"
    )


def digits():
    from PIL import Image
    from sklearn.datasets import load_digits

    found = []
    for pixels in load_digits().images:
        file = io.BytesIO()
        Image.fromarray((pixels * 15).astype(np.uint8)).save(file, "png")
        found.append(file.getvalue())
    return found


def make_sets(data):
    """Return the samples of each set."""
    text = (data / "tinyshakespeare" / "input.txt").read_bytes()
    lines = [line for line in text.splitlines(keepends=True) if line.strip()]
    passages = [b"".join(lines[k : k + PASSAGE_LINES]) for k in range(0, len(lines), PASSAGE_LINES)]
    return {
        "lines": lines,
        "passages": passages,
        "digits png": digits(),
        "float arrays": [npy(image) for image in images(data)],
    }


def named(samples, size=0):
    """Yield samples with names, over and over until there are `size` bytes of them."""
    done = number = 0
    while number < len(samples) or done < size:
        body = samples[number % len(samples)]
        yield f"{number:07d}", body
        done += len(body)
        number += 1


# --- formats -------------------------------------------------------------------------------------


def files_bytes(folder):
    return sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())


def timed(read, effort):
    """Return the median rate of `read`, which returns how many bytes it read."""
    rates, begin_s = [], time.perf_counter()
    while len(rates) < 3 or time.perf_counter() - begin_s < effort.rate_s:
        start_s = time.perf_counter()
        size = read()
        rates.append(size / (time.perf_counter() - start_s))
    return statistics.median(rates)


def random_rate(path, threads, effort):
    """Return how many bytes of samples a second a pack is read in random order, from memory."""
    from paceline.store import open_pack

    with open_pack(path, threads=threads) as pack:
        order = np.random.default_rng(1).permutation(len(pack))
        batches = [order[k : k + BATCH] for k in range(0, len(order), BATCH)]
        return timed(lambda: sum(len(pack.read_batch(batch)[0]) for batch in batches), effort)


def measure_packs(report, name, samples, folder, effort):
    """Pack with each codec; return the capacity factors."""
    from paceline import store

    total = sum(map(len, samples))
    factors = {}
    for codec in (*CODECS, "auto"):
        path = folder / name / codec
        start_s = time.perf_counter()
        choice = store.PackOptions(codec=codec)
        summary = store.pack(store.Samples(named(samples)), path, options=choice)
        pack_s = time.perf_counter() - start_s
        check(path, samples)
        factors[codec] = summary.capacity_factor
        report.row(
            set=name,
            format=f"pack, {codec}",
            chosen=summary.choice.codec if summary.choice else "none",
            capacity_factor=summary.capacity_factor,
            file_capacity_factor=total / files_bytes(path),
            decode_bytes_per_s=random_rate(path, 1, effort),
            decode_all_threads_bytes_per_s=random_rate(path, None, effort),
            pack_bytes_per_s=total / pack_s,
        )
    return factors


def check(path, samples):
    from paceline.store import open_pack

    with open_pack(path) as pack:
        step = max(len(samples) // 500, 1)
        assert all(pack.read(k) == samples[k] for k in range(0, len(samples), step))


def measure_tar(report, name, samples, folder, effort):
    path = folder / name / "samples.tar.gz"
    total = sum(map(len, samples))
    start_s = time.perf_counter()
    with tarfile.open(path, "w:gz", compresslevel=6) as archive:
        for member, body in named(samples):
            entry = tarfile.TarInfo(member)
            entry.size = len(body)
            archive.addfile(entry, io.BytesIO(body))
    pack_s = time.perf_counter() - start_s

    def read():
        with tarfile.open(path, "r|gz") as archive:
            return sum(len(archive.extractfile(entry).read()) for entry in archive)

    assert read() == total
    report.row(
        set=name,
        format="tar.gz",
        capacity_factor=total / path.stat().st_size,
        file_capacity_factor=total / path.stat().st_size,
        decode_bytes_per_s=timed(read, effort),
        pack_bytes_per_s=total / pack_s,
    )


def measure_mds(report, name, samples, folder):
    python = environment_python("mds")
    if python is None:
        tell("no MDS: `scripts/peers mds` makes its environment")
        return
    place = folder / name / "mds"
    place.mkdir()
    np.save(place / "lengths.npy", [len(body) for body in samples])
    (place / "bodies").write_bytes(b"".join(samples))
    done = subprocess.run(
        [python, __file__, "--mds", place],
        env={**peer_environment(folder), "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    if done.returncode != 0:
        tell(f"no MDS: {done.stderr[-500:]}")
        return
    report.row(set=name, format="MDS, zstd", **json.loads(done.stdout.splitlines()[-1]))


def peer_mds(place):
    """Write and read samples as MDS with zstd, in the environment that has it; print its row."""
    streaming = import_streaming()
    ends = np.cumsum(np.load(place / "lengths.npy")).tolist()
    data = (place / "bodies").read_bytes()
    bodies = [data[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
    start_s = time.perf_counter()
    with streaming.MDSWriter(
        out=str(place / "data"),
        columns={"b": "bytes"},
        compression="zstd",
        size_limit=MDS_SHARD_BYTES,
    ) as out:
        for body in bodies:
            out.write({"b": body})
    pack_s = time.perf_counter() - start_s
    stored = files_bytes(place / "data")
    rates = []
    for number in range(MDS_REPEATS):  # each time as it was written: shards are kept decompressed
        copy = place / f"copy{number}"
        shutil.copytree(place / "data", copy)
        streaming.base.util.clean_stale_shared_memory()
        dataset = streaming.StreamingDataset(local=str(copy), batch_size=BATCH)
        start_s = time.perf_counter()
        size = sum(len(dataset[k]["b"]) for k in range(len(bodies)))
        rates.append(size / (time.perf_counter() - start_s))
        assert size == len(data)
    print(
        json.dumps(
            {
                "capacity_factor": len(data) / stored,
                "file_capacity_factor": len(data) / stored,
                "decode_bytes_per_s": statistics.median(rates),
                "pack_bytes_per_s": len(data) / pack_s,
            }
        )
    )


# --- auto ----------------------------------------------------------------------------------------


def fed_rates(path, repeats):
    """Return how many bytes of samples a second are read from storage in blocks, each time."""
    from paceline.store import open_pack

    rates = []
    with open_pack(path) as pack:
        count = len(pack)
        size = max(int(count * (1 << 20) / int(pack.lengths.sum())), 1)  # a block of a MiB
        blocks = [np.arange(k, min(k + size, count)) for k in range(0, count, size)]
        for _ in range(repeats):
            pack.evict()
            start_s = time.perf_counter()
            done = 0
            for k, block in enumerate(blocks):
                for later in blocks[k + 1 : k + 5]:
                    pack.prefetch(later)
                done += len(pack.read_batch(block)[0])
            rates.append(done / (time.perf_counter() - start_s))
    return rates


def measure_auto(report, name, samples, folder, effort):
    """Pack with `auto` for several required rates; return the least part of them that is fed."""
    from paceline import store

    samples = [body for _, body in named(samples, effort.fed_bytes)]
    fed = {}
    for codec in CODECS:
        path = folder / name / f"fed {codec}"
        store.pack(store.Samples(named(samples)), path, options=store.PackOptions(codec=codec))
        fed[codec] = statistics.median(fed_rates(path, effort.repeats))
        report.row(set=name, what="fed from storage", codec=codec, bytes_per_s=fed[codec])
        shutil.rmtree(path)
    worst = None
    for codec, share in [(codec, share) for codec in CODECS[1:] for share in effort.shares]:
        required = share * fed[codec]
        if required > max(fed.values()):
            continue
        path = folder / name / "auto fed"
        chosen = store.PackOptions(codec="auto", feed_bytes_per_s=int(required))
        summary = store.pack(store.Samples(named(samples)), path, options=chosen)
        rate = statistics.median(fed_rates(path, effort.repeats))
        shutil.rmtree(path)
        worst = min(worst or 1e9, rate / required)
        report.row(
            set=name,
            what="auto",
            required_bytes_per_s=required,
            chosen=summary.choice.codec,
            capacity_factor=summary.capacity_factor,
            fed_bytes_per_s=rate,
            fed_over_required=rate / required,
        )
    return worst


def main():
    given = options(__doc__, "--data", "--mds")
    if given.mds:
        return peer_mds(Path(given.mds[0]))
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    data = Path(given.data[0]) if given.data else default
    report = Report("codecs", given.json)
    if not (data / "tinyshakespeare").is_dir() or not (data / "fashion-mnist").is_dir():
        tell(f"skipped: no tinyshakespeare and fashion-mnist in {data}; give it with --data DIR")
        return 0
    effort = QUICK if given.quick else FULL
    sets = make_sets(data)
    factors = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for kind, samples in sets.items():
            (folder / kind).mkdir()
            factors[kind] = measure_packs(report, kind, samples, folder, effort)
            measure_tar(report, kind, samples, folder, effort)
            if effort.with_mds:
                measure_mds(report, kind, samples, folder)
        worst = {
            kind: measure_auto(report, kind, sets[kind], folder, effort)
            for kind in ("passages", "float arrays")
        }
    best = {kind: max(found[codec] for codec in CODECS) for kind, found in factors.items()}
    report.bar(
        "capacity factor, text in passages of 64 lines", best["passages"], MIN_FACTOR, at_least=True
    )
    report.bar(
        "capacity factor, text in single lines",
        best["lines"],
        MIN_FACTOR,
        at_least=True,
        reason=SHORT,
    )
    report.bar("capacity factor, float arrays", best["float arrays"], MIN_FACTOR, at_least=True)
    for kind, value in worst.items():
        report.bar(f"auto, {kind}: fed / required, at least", value, MIN_FED, at_least=True)
    return report.print()


if __name__ == "__main__":
    sys.exit(main())
