"""Whatever a tree holds, its pack gives back: by index, by name, in batches, to plain Python."""

import os
import pickle
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from paceline import store
from paceline.core.errors import NotFound
from paceline.native import crc32c
from paceline.store import PackOptions, open_pack

names = st.one_of(
    st.sampled_from([b"a", b"a-", b"a.", b"a0", b"b", b" ", b"\n", b"\\", b"\xff\xfe", b"-rf"]),
    st.binary(min_size=1, max_size=40).filter(lambda name: name not in (b".", b"..")),
).map(lambda name: name.replace(b"\0", b"0").replace(b"/", b"_"))
bodies = st.one_of(st.binary(max_size=300), st.integers(0, 5000).map(lambda size: b"x" * size))
# A file is bytes, a folder is a dict.
trees = st.dictionaries(
    names,
    st.recursive(bodies, lambda below: st.dictionaries(names, below, max_size=4), max_leaves=12),
    max_size=6,
)


def write_tree(folder, tree):
    folder.mkdir()
    for name, content in tree.items():
        path = folder / os.fsdecode(name)
        if isinstance(content, dict):
            write_tree(path, content)
        else:
            path.write_bytes(content)


def flatten(tree, above=b""):
    """Return the files and the folders of `tree` by relative path: the plain reference."""
    files, folders = {}, []
    for name, content in tree.items():
        path = above + name
        if isinstance(content, dict):
            folders.append(path)
            more_files, more_folders = flatten(content, path + b"/")
            files.update(more_files)
            folders += more_folders
        else:
            files[path] = content
    return files, folders


@settings(max_examples=examples(60), deadline=None)
@given(tree=trees, shard_bytes=st.sampled_from([128, 640, 1 << 20]), data=st.data())
def test_a_pack_holds_exactly_its_tree(tree, shard_bytes, data):
    files, folders = flatten(tree)
    order = sorted(files)
    classes = sorted(name for name, content in tree.items() if isinstance(content, dict))
    with tempfile.TemporaryDirectory() as temporary:
        source, destination = Path(temporary, "source"), Path(temporary, "pack")
        write_tree(source, tree)
        options = PackOptions(shard_bytes=shard_bytes)
        planned = store.plan_pack(store.Folder(source), destination, options=options)
        summary = store.pack(store.Folder(source), destination, options=options)
        assert planned.pack_bytes == summary.pack_bytes
        assert planned.shard_count == summary.shard_count
        with open_pack(destination) as pack:
            assert [os.fsencode(name) for name in pack.names] == order
            assert [os.fsencode(name) for name in pack.folder_names] == sorted(
                folders, key=lambda name: name + b"/"
            )
            assert [os.fsencode(name) for name in pack.class_names] == classes
            assert pack.lengths.tolist() == [len(files[name]) for name in order]
            for k, name in enumerate(order):
                top = name.split(b"/")[0] if b"/" in name else None
                assert pack.labels[k] == (-1 if top is None else classes.index(top))
                assert pack.find(name) == k
                assert pack.find(os.fsdecode(name)) == k
                assert pack.read(k) == files[name]
                missing = name + b"/x"
                with pytest.raises(NotFound):
                    pack.find(missing)
            ids = data.draw(
                st.lists(st.integers(0, len(order) - 1), max_size=20) if order else st.just([])
            )
            buffer, offsets = pack.read_batch(ids)
            assert (buffer.dtype, offsets.dtype) == (np.uint8, np.int64)
            assert buffer.tobytes() == b"".join(files[order[k]] for k in ids)
            assert np.diff(offsets).tolist() == [len(files[order[k]]) for k in ids]
            assert list(pack.verify()) == []
            again = pickle.loads(pickle.dumps(pack))
            assert len(again) == len(order)
            again.close()


@settings(max_examples=examples(50))
@given(data=st.binary(max_size=4000), cut=st.integers(0, 4000), seed=st.integers(0, 2**32 - 1))
def test_crc32c_equals_the_bitwise_definition(data, cut, seed):
    crc = ~seed & 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    assert crc32c(data, seed) == ~crc & 0xFFFFFFFF
    assert crc32c(data[cut:], crc32c(data[:cut], seed)) == ~crc & 0xFFFFFFFF
