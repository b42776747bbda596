"""One epoch over a data set as it is: an LMDB database, tar shards, TFRecord files or a folder.

    python examples/read_in_place.py               a tar archive of handwritten digits, made here
    python examples/read_in_place.py train.mdb     your own
    python examples/read_in_place.py 'shards/train-{000..147}.tar'

Nothing is converted: an index is made beside the data, once. The last line of output is one JSON
object.
"""

import io
import json
import sys
import tarfile
import tempfile
from pathlib import Path

from paceline.store import Loader, LoaderOptions, open_pack


def make_archive(folder):
    """Return the path of a new tar archive: each digit's 64 pixels as a file, below its class."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    path = folder / "digits.tar"
    with tarfile.open(path, "w") as archive:
        for number, (pixels, digit) in enumerate(zip(digits.images, digits.target, strict=True)):
            entry = tarfile.TarInfo(f"{digit}/{number:04d}.bin")
            body = pixels.astype("uint8").tobytes()
            entry.size = len(body)
            archive.addfile(entry, io.BytesIO(body))
    return path


def read(path):
    """Read all of a data set in a shuffled epoch; return what there was."""
    with open_pack(path) as pack, Loader(pack, 64, options=LoaderOptions(seed=7)) as loader:
        print(f"{path}: {len(pack):,} samples, the first is {pack.names[0]!r}")
        print(f"the index: {pack.side_file}")
        total_bytes = batches = 0
        for samples, _ in loader:
            total_bytes += sum(len(sample) for sample in samples)
            batches += 1
        return {
            "samples": len(pack),
            "classes": len(pack.class_names),
            "batches": batches,
            "bytes": total_bytes,
            "verified": pack.is_verified,
        }


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(read(sys.argv[1])))
    else:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(read(make_archive(Path(folder)))))
