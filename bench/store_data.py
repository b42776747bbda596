"""Builds the data of store_read.py: sets of files, and each set in the formats that are compared.

A set is made from a fixed seed, so that every machine reads the same bytes: incompressible files
of log-normal or of fixed size, in 100 folders. A format is made of the files, with what its own
project writes it with, in that project's environment (scripts/peers). What is complete has a
marker that names how it was made, and serves again.

    python bench/store_data.py make FORMAT FILES FOLDER     inside the environment of the format
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent
MARKER = "complete.json"
FOLDERS = 100
SIGMA = 0.6  # of the logarithm of a size
SMALLEST_BYTES = 1024
SEED = 1
SHARD_BYTES = 64 << 20  # of the peers' formats, as their users choose it
SETS = {
    "107KB": {"files": 20_000, "mean_bytes": 108_000},
    "2KB": {"files": 100_000, "bytes": 2048},
    "half-107KB": {"files": 10_000, "mean_bytes": 108_000},
    "quick-107KB": {"files": 2_000, "mean_bytes": 108_000},
    "quick-2KB": {"files": 10_000, "bytes": 2048},
}
ENVIRONMENTS = {"lmdb": "io", "webdataset": "io", "litdata": "io", "mds": "mds", "spdl": "spdl"}


# --- by the benchmark ----------------------------------------------------------------------------


def environment_python(kind):
    """Return the interpreter that has a peer, or None: scripts/peers was not run."""
    python = ROOT / "build" / "peers" / ENVIRONMENTS[kind] / "bin" / "python"
    return python if python.exists() else None


def peer_environment(folder):
    """Return the variables that keep a peer's litter in `folder`, and the peer on its own."""
    cache = str(Path(folder) / "cache")
    variables = {
        "WORLD_SIZE": "1",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GLOBAL_RANK": "0",
        "NODE_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29711",
        "HOME": cache,
        "DATA_OPTIMIZER_CACHE_FOLDER": f"{cache}/chunks",
        "DATA_OPTIMIZER_DATA_CACHE_FOLDER": f"{cache}/data",
        "PYTHONWARNINGS": "ignore",
    }
    return {**os.environ, **variables}


def make_files(folder, name):
    """Make the files of a set below `folder`, unless they are there; return where."""
    wanted = {"seed": SEED, "sigma": SIGMA, "folders": FOLDERS, **SETS[name]}
    place = Path(folder) / name / "files"
    if complete(place, wanted):
        return place
    count = wanted["files"]
    rng = np.random.default_rng(SEED)
    if "bytes" in wanted:
        sizes = np.full(count, wanted["bytes"])
    else:
        middle = np.log(wanted["mean_bytes"]) - SIGMA**2 / 2
        sizes = np.maximum(rng.lognormal(middle, SIGMA, count).astype(np.int64), SMALLEST_BYTES)
    for number in range(FOLDERS):
        (place / f"class-{number:03}").mkdir(parents=True)
    per_folder = count // FOLDERS
    for number, size in enumerate(sizes.tolist()):
        path = place / f"class-{number // per_folder:03}" / f"{number % per_folder:06}.bin"
        path.write_bytes(rng.bytes(size))
    os.sync()
    mark(place, wanted)
    return place


def listing(files):
    """Return the paths of all files of a set, sorted: sample k of every format is the k-th."""
    folders = sorted(entry.path for entry in os.scandir(files))
    return [
        path for folder in folders for path in sorted(entry.path for entry in os.scandir(folder))
    ]


def make_pack(folder, name, paceline):
    """Pack a set, unless it was packed in this format; return the pack."""
    from paceline.native import PACK_FORMAT_VERSION

    files = make_files(folder, name)
    place = Path(folder) / name / "pack"
    wanted = {"format": PACK_FORMAT_VERSION, **SETS[name]}
    if not complete(place, wanted):
        subprocess.run([paceline, "pack", files, place], stdout=subprocess.DEVNULL, check=True)
        os.sync()
        mark(place, wanted)
    return place


def make_format(folder, name, kind):
    """Make a set in a peer's format, unless it is there; return where, or None without the peer."""
    files = make_files(folder, name)
    place = Path(folder) / name / kind
    wanted = {"shard_bytes": SHARD_BYTES, **SETS[name]}
    if complete(place, wanted):
        return place
    python = environment_python(kind)
    if python is None:
        return None
    subprocess.run(
        [python, __file__, "make", kind, files, place],
        env=peer_environment(folder),
        stdout=sys.stderr,
        check=True,
    )
    os.sync()
    mark(place, wanted)
    return place


def _marker(place):
    return place.with_name(f"{place.name}.{MARKER}")  # beside: within, it would be a sample


def complete(place, wanted):
    """Return whether `place` holds what is wanted; clear it away otherwise."""
    marker = _marker(place)
    if place.is_dir() and marker.exists() and json.loads(marker.read_text()) == wanted:
        return True
    marker.unlink(missing_ok=True)
    shutil.rmtree(place, ignore_errors=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    return False


def mark(place, wanted):
    _marker(place).write_text(json.dumps(wanted))


# --- in the peers' environments ------------------------------------------------------------------


def content(path):
    """Return the bytes of a file."""
    return Path(path).read_bytes()


def make_lmdb(paths, place):
    import lmdb

    place.mkdir()
    with lmdb.open(str(place), map_size=1 << 36) as store:
        for first in range(0, len(paths), 2000):
            with store.begin(write=True) as transaction:
                for number in range(first, min(first + 2000, len(paths))):
                    key = struct.pack(">Q", number)
                    transaction.put(key, content(paths[number]), append=True)


def make_webdataset(paths, place):
    import webdataset

    place.mkdir()
    pattern = str(place / "shard-%05d.tar")
    with webdataset.ShardWriter(pattern, maxsize=SHARD_BYTES, maxcount=1 << 30, verbose=0) as out:
        for number, path in enumerate(paths):
            out.write({"__key__": f"{number:08d}", "bin": content(path)})


def import_streaming():
    """Import MosaicML Streaming. It imports torchvision, of which its reader uses nothing.

    Torchvision's compiled operators need the torch that they were built for, often with CUDA;
    without them its import asks only that two be declared.
    """
    import torch

    for name in ("nms", "qnms"):
        operator = f"torchvision::{name}"
        torch.library.define(
            operator, "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        )
    import streaming

    return streaming


def make_mds(paths, place):
    streaming = import_streaming()
    with streaming.MDSWriter(out=str(place), columns={"b": "bytes"}, size_limit=SHARD_BYTES) as out:
        for path in paths:
            out.write({"b": content(path)})


def make_litdata(paths, place):
    import litdata

    litdata.optimize(
        fn=content,
        inputs=paths,
        output_dir=str(place),
        num_workers=2,
        chunk_bytes=SHARD_BYTES,
        verbose=False,
    )


def main():
    _, what, kind, files, place = sys.argv
    assert what == "make"
    writers = {
        "lmdb": make_lmdb,
        "webdataset": make_webdataset,
        "mds": make_mds,
        "litdata": make_litdata,
    }
    writers[kind](listing(files), Path(place))


if __name__ == "__main__":
    main()
