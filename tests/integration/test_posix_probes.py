"""Libraries in a mount, by library or kernel: each probe finds what it finds in the tree."""

import json
import os
import sys
from pathlib import Path

import pytest
from support.mounts import WAYS, twins_by

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


def make(twins):
    twins.plain.mkdir()
    made = twins.run([sys.executable, SCRIPT, "make", "data"], is_mounted=False)
    assert made.returncode == 0, made.stderr


@pytest.fixture(scope="module", params=WAYS)
def results(tmp_path_factory, request):
    """What all probes find in the tree, and in the mount."""
    found = []
    top = tmp_path_factory.mktemp(f"probes-{request.param}")
    with twins_by(request.param, top, make) as twins:
        for is_mounted in (False, True):
            done = twins.run([sys.executable, SCRIPT, "read", "data"], is_mounted=is_mounted)
            assert done.returncode == 0, done.stderr.decode()
            found.append(json.loads(done.stdout))
    return found


@pytest.mark.parametrize("name", PROBES)
def test_probe(results, name):
    in_tree, in_mount = (found[name] for found in results)
    if in_tree is None:
        pytest.skip("no library here of which `make test` has no other use")
    assert "Error" not in str(in_tree)
    assert in_mount == in_tree


def test_all_probes_are_named(results):
    assert sorted(results[0]) == sorted(PROBES)
