"""PyTorch reads packs: with and without workers, forked and spawned, from threads."""

import os
import threading

import pytest
import torch.utils.data

from paceline import store
from paceline.core.errors import CorruptPack
from paceline.store import PackDataset, open_pack

COUNT = 40


@pytest.fixture
def pack_path(tmp_path):
    for k in range(COUNT):
        folder = tmp_path / "source" / f"class{k % 3}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{k:03d}").write_bytes(bytes([k]) * (k * 50))
    store.pack(store.Folder(tmp_path / "source"), tmp_path / "pack")
    return tmp_path / "pack"


def expected(path):
    with open_pack(path) as pack:
        return [(pack.read(k), int(pack.labels[k])) for k in range(COUNT)]


def test_items_and_batches_equal_the_pack(pack_path):
    dataset = PackDataset(pack_path)
    assert len(dataset) == COUNT
    plain = expected(pack_path)
    assert [dataset[k] for k in range(COUNT)] == plain
    assert dataset.__getitems__([5, 0, 5]) == [plain[5], plain[0], plain[5]]
    assert dataset.__getitems__([]) == []
    assert list(dataset) == plain  # stops by IndexError
    lengths = PackDataset(open_pack(pack_path), transform=len)
    assert lengths[7] == (len(plain[7][0]), plain[7][1])


@pytest.mark.parametrize("method", [None, "fork", "spawn"])
def test_a_data_loader_delivers_every_sample(pack_path, method):
    loader = torch.utils.data.DataLoader(
        PackDataset(pack_path),
        batch_size=6,
        shuffle=True,
        collate_fn=list,
        num_workers=0 if method is None else 2,
        multiprocessing_context=method,
    )
    for _ in range(2 if method != "spawn" else 1):
        delivered = [item for batch in loader for item in batch]
        assert sorted(delivered) == sorted(expected(pack_path))


def test_a_forked_child_reads_what_its_parent_opened(pack_path):
    plain = expected(pack_path)
    with open_pack(pack_path) as pack:
        child = os.fork()
        if child == 0:
            same = all(pack.read(k) == plain[k][0] for k in range(COUNT))
            pack.close()
            os._exit(0 if same else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert pack.read(3) == plain[3][0]


def test_threads_share_a_pack_even_while_it_is_closed(pack_path):
    plain = b"".join(body for body, _ in expected(pack_path))
    pack = open_pack(pack_path)
    results = []
    started = threading.Barrier(5, timeout=60)

    def read():
        reader = pack._open()  # as a read that is under way when another thread closes
        started.wait()
        ids = torch.arange(COUNT).numpy()
        results.extend(reader.read_batch(ids)[0].tobytes() == plain for _ in range(50))

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    started.wait()
    pack.close()
    for thread in threads:
        thread.join(60)
    assert results == [True] * 200


def test_a_damaged_sample_stops_the_loader_with_its_name(pack_path):
    shard = pack_path / "shard-00000.pace"
    content = bytearray(shard.read_bytes())
    content[-100] ^= 1
    shard.write_bytes(content)
    dataset = PackDataset(pack_path)
    loader = torch.utils.data.DataLoader(dataset, batch_size=8, num_workers=1, collate_fn=list)
    with pytest.raises(CorruptPack, match="class2/0"):
        list(loader)
