"""Libraries in a mount, by library or kernel: each probe finds what it finds in the tree."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from support.mounts import WAYS, Twins, twins_by

SCRIPT = Path(__file__).parent / "scripts" / "posix_probes.py"
PROBES = (
    """
open and read text|os.listdir|os.scandir and stat|os.walk|pathlib.glob|os.access|numpy.load
numpy.load mapped|numpy.load npz|numpy.fromfile|numpy.memmap|seek and readinto|exists, isdir, isfile
os.dup shares the position|mmap|PIL of JPEG|PIL of PNG|h5py|cv2.imread|torch.load|torch.load mapped
torch.from_file|pyarrow of Parquet|pyarrow.memory_map|shutil.copy|os.sendfile|import of a module
cat in a subprocess|stdin of a subprocess|descriptor inherited by exec
eight threads and four forked children|working folder|select.poll|statvfs and lockf
the C library's glob and nftw
""".strip()
    .replace("\n", "|")
    .split("|")
)

pytestmark = pytest.mark.skipif(
    not os.confstr("CS_GNU_LIBC_VERSION"), reason="no glibc here: the library is for it"
)


def read(twins, *, is_mounted):
    done = twins.run([sys.executable, SCRIPT, "read", "data"], is_mounted=is_mounted)
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A folder with what the probes read."""
    made = Twins(tmp_path_factory.mktemp("probes"))
    made.plain.mkdir()
    done = made.run([sys.executable, SCRIPT, "make", "data"], is_mounted=False)
    assert done.returncode == 0, done.stderr
    return made


@pytest.fixture(scope="module")
def in_tree(tree):
    """What all probes find in the folder."""
    return read(tree, is_mounted=False)


@pytest.fixture(scope="module", params=WAYS)
def in_mount(tmp_path_factory, request, tree):
    """What all probes find in a mount of its pack."""
    top = tmp_path_factory.mktemp(f"probes-{request.param}")
    with twins_by(request.param, top, lambda made: shutil.copytree(tree.plain, made.plain)) as made:
        return read(made, is_mounted=True)


@pytest.mark.parametrize("name", PROBES)
def test_probe(in_tree, in_mount, name):
    if in_tree[name] is None:
        pytest.skip("no library here of which `make test` has no other use")
    assert "Error" not in str(in_tree[name])
    assert in_mount[name] == in_tree[name]


def test_all_probes_are_named(in_tree, in_mount):
    assert sorted(in_tree) == sorted(in_mount) == sorted(PROBES)
