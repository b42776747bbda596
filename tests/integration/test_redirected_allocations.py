"""Torch's allocations in the pool: what comes from it, who frees it, what outlives it."""

import copy
import gc
import io
import json
import queue
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.native import redirect_allocations, use_pool

MIB = 1 << 20
SIZE = 3 * MIB + 17
ROUNDS = 40


class Pool:
    """The pool of this process; other tests of the process may have left blocks in it."""

    def __init__(self):
        self._pool = redirect_allocations("libc10.so")
        assert self._pool is not None
        gc.collect()
        self._before = self._pool.counts()[0]
        self.set_cap = self._pool.set_cap

    @property
    def used(self):
        """Bytes of blocks since the test began."""
        return self._pool.counts()[0] - self._before

    @property
    def kept(self):
        """Bytes of freed memory whose pages are kept."""
        used, resident, *_ = self._pool.counts()
        return resident - used


@pytest.fixture
def pool():
    pool = Pool()
    use_pool(is_used=True)
    yield pool
    use_pool(is_used=False)
    pool.set_cap(0)


def bytes_of(seed, size=SIZE):
    return torch.arange(size, dtype=torch.int64).add_(seed).to(torch.uint8)


def test_large_blocks_come_from_the_pool_and_go_back(pool):
    tensor = torch.empty(SIZE, dtype=torch.uint8)
    assert SIZE <= pool.used < SIZE + 4096
    assert tensor.data_ptr() % 4096 == 0
    small = torch.empty(1000, dtype=torch.uint8)
    assert pool.used < SIZE + 4096
    del tensor, small
    assert pool.used == 0
    assert pool.kept == 0


def test_a_freed_block_serves_the_next_one_below_the_cap(pool):
    pool.set_cap(64 * MIB)
    address = torch.empty(SIZE, dtype=torch.uint8).data_ptr()
    assert pool.kept >= SIZE
    assert torch.empty(SIZE, dtype=torch.uint8).data_ptr() == address


def test_a_tensor_that_grows_keeps_its_values(pool):
    tensor = bytes_of(1)
    expected = tensor.tolist()[:100]
    for factor in (2, 5, 9):
        tensor.resize_(factor * SIZE)
        assert tensor.tolist()[:100] == expected
        assert factor * SIZE <= pool.used < factor * SIZE + 4096
    del tensor
    assert pool.used == 0


def test_threads_free_what_other_threads_allocated(pool):
    pool.set_cap(16 * MIB)
    handed = [queue.SimpleQueue() for _ in range(4)]
    wrong = []

    def work(own):
        for i in range(ROUNDS):
            size = SIZE // 4 + 4096 * ((own + i) % 7)
            handed[(own + 1) % 4].put((own + i, size, bytes_of(own + i, size)))
            seed, size, tensor = handed[own].get(timeout=60)
            if not torch.equal(tensor, bytes_of(seed, size)):
                wrong.append((own, i))

    threads = [threading.Thread(target=work, args=(own,)) for own in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []
    assert pool.used == 0
    assert pool.kept <= 16 * MIB


def test_what_no_machine_has_is_refused_as_torch_refuses_it(pool):
    if Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "1":
        pytest.skip("vm.overcommit_memory is 1 here")
    size = 1 << 41  # less than the addresses of the pool
    found = []
    for is_used in (True, False):
        use_pool(is_used=is_used)
        with pytest.raises(RuntimeError, match="can't allocate memory") as problem:
            torch.empty(size, dtype=torch.uint8)
        found.append(str(problem.value).splitlines()[0])
    assert found[0] == found[1]
    assert pool.used == 0


def test_a_tensor_outlives_the_use_of_the_pool(pool):
    pool.set_cap(64 * MIB)
    tensor = bytes_of(2)
    use_pool(is_used=False)
    pool.set_cap(0)
    other = torch.empty(SIZE, dtype=torch.uint8)
    assert SIZE <= pool.used < SIZE + 4096
    assert torch.equal(tensor, bytes_of(2))
    del tensor, other
    assert pool.used == 0
    assert pool.kept == 0


def test_copies_and_files_have_the_values(pool):
    tensor = bytes_of(3)
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    found = torch.load(file, weights_only=True)
    assert torch.equal(found, tensor)
    assert torch.equal(copy.deepcopy(tensor), tensor)
    shared = bytes_of(3).share_memory_()
    assert torch.equal(shared, tensor)
    assert pool.used < 3 * SIZE  # of `found` and `tensor`: shared memory is a file's
    del tensor, found, shared
    assert pool.used == 0


def test_numpy_holds_a_block_and_lends_its_own(pool):
    array = bytes_of(4).numpy()
    assert SIZE <= pool.used < SIZE + 4096
    assert np.array_equal(array, bytes_of(4).numpy())
    view = array[100:]
    del array
    assert pool.used >= SIZE
    assert view[0] == 104
    del view
    assert pool.used == 0
    lent = torch.from_numpy(np.ones(SIZE, dtype=np.uint8))
    assert pool.used == 0
    assert int(lent.sum()) == SIZE


def test_a_forked_process_has_the_tensors_and_no_pool():
    script = Path(__file__).parent / "scripts" / "forked_pool.py"
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "unknown_library": False, "codes": [0] * 20, "is_whole": True, "left_bytes": 0,
    }  # fmt: skip
