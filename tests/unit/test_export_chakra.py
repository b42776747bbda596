"""Chakra execution traces, read by the protobuf package with the published schema's numbers."""

import collections
import json

import pytest
from support.traces import MS, Event, data_parallel, pipelined, write_run

from paceline.schedules.pipeline import StageCosts, one_forward_one_backward
from paceline.trace.export.chakra import write_chakra
from paceline.trace.format.events import COMMUNICATION, DRAIN, Kind
from paceline.trace.merge import load_run

# mlcommons/chakra, schema/protobuf/et_def.proto: field, number, type; a list if it is repeated.
SCHEMA = {
    "AttributeProto": {
        "name": (1, "string"),
        "int32_val": (7, "int32"),
        "int64_val": (9, "int64"),
        "bool_val": (27, "bool"),
        "string_val": (29, "string"),
    },
    "GlobalMetadata": {"version": (1, "string"), "attr": (2, ["AttributeProto"])},
    "Node": {
        "id": (1, "uint64"),
        "name": (2, "string"),
        "type": (3, "int32"),  # an enumeration
        "ctrl_deps": (4, ["uint64"]),
        "data_deps": (5, ["uint64"]),
        "start_time_micros": (6, "uint64"),
        "duration_micros": (7, "uint64"),
        "attr": (10, ["AttributeProto"]),
    },
}
COMPUTE, SEND, RECV, COLLECTIVE = 4, 5, 6, 7


@pytest.fixture(scope="module")
def messages():
    """Return the classes of the schema."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="et_def.proto", package="p", syntax="proto3")
    types = descriptor_pb2.FieldDescriptorProto
    for name, fields in SCHEMA.items():
        message = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            word = kind[0] if isinstance(kind, list) else kind
            made = message.field.add(name=field, number=number)
            made.label = types.LABEL_REPEATED if isinstance(kind, list) else types.LABEL_OPTIONAL
            if word in SCHEMA:
                made.type, made.type_name = types.TYPE_MESSAGE, f".p.{word}"
            else:
                made.type = getattr(types, f"TYPE_{word.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"p.{name}"))
        for name in SCHEMA
    }


def delimited(data):
    """Yield the messages of a file: a varint of the length before each."""
    at = 0
    while at < len(data):
        length = shift = 0
        while True:
            byte = data[at]
            at += 1
            length |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        assert at + length <= len(data)
        yield data[at : at + length]
        at += length


@pytest.fixture
def read(messages):
    from google.protobuf.unknown_fields import UnknownFieldSet

    def read(folder, rank):
        first, *others = delimited((folder / f"trace.{rank}.et").read_bytes())
        metadata = messages["GlobalMetadata"].FromString(first)
        assert metadata.version == "0.0.4"
        assert {item.name: item.int64_val for item in metadata.attr}["rank"] == rank
        nodes = [messages["Node"].FromString(data) for data in others]
        assert [node.id for node in nodes] == list(range(len(nodes)))
        for node in nodes:  # a graph without cycles, written before it is referred to
            assert not any(len(UnknownFieldSet(part)) for part in (node, *node.attr))
            assert all(dependency < node.id for dependency in node.data_deps)
        return nodes

    return read


def values(node):
    found = {}
    for item in node.attr:
        (field,) = [field for field, _ in item.ListFields() if field.name != "name"] or [None]
        found[item.name] = getattr(item, field.name) if field else 0
    return found


def export(folder, by_rank):
    trace = load_run(write_run(folder, by_rank))
    return trace, write_chakra(trace, folder / "chakra")


def test_a_training_is_a_chain_with_an_all_reduce_beside_it(tmp_path, read):
    _, done = export(tmp_path, data_parallel(2, 3, amount=4096))
    nodes = read(done.path, 1)
    assert [node.name for node in nodes[:5]] == [
        *("loader", "forward", "backward", "all_reduce", "optimizer")
    ]
    loader, forward, backward, reduced, optimizer = nodes[:5]
    assert list(forward.data_deps) == [loader.id]
    assert list(reduced.data_deps) == [backward.id]
    assert set(optimizer.data_deps) == {backward.id, reduced.id}
    assert [node.duration_micros for node in nodes[:5]] == [1000, 3000, 4000, 1000, 1000]
    assert [node.type for node in nodes[:5]] == [COMPUTE] * 3 + [COLLECTIVE, COMPUTE]
    found = values(reduced)
    assert (found["comm_type"], found["comm_size"]) == (0, 4096)
    assert json.loads((done.path / "comm_groups.json").read_text())[found["pg_name"]] == [0, 1]
    assert done.events == 2 * len(nodes) == 2 * 3 * 5


def test_the_nodes_take_the_time_that_the_rank_computes(tmp_path, read):
    trace, done = export(tmp_path, data_parallel(3, 20))
    for rank in trace.ranks:
        nodes = read(done.path, rank.rank)
        waits = rank.events[rank.events["kind"] == Kind.WAIT]
        waited = int((waits["end_ns"] - waits["begin_ns"]).sum())
        whole = int(rank.events["end_ns"].max() - rank.events["begin_ns"].min())
        computed = sum(node.duration_micros for node in nodes if node.type == COMPUTE)
        assert computed == (whole - waited) // 1000


def test_sends_and_receives_of_a_pipeline_match(tmp_path, read):
    costs = StageCosts(forward_s=(0.002,) * 3, backward_s=(0.004,) * 3)
    trace, done = export(tmp_path, pipelined(one_forward_one_backward(3, 4), costs, steps=3))
    sides = collections.defaultdict(collections.Counter)
    for rank in range(3):
        for node in read(done.path, rank):
            if node.type in (SEND, RECV):
                found = values(node)
                message = tuple(found[f"comm_{key}"] for key in ("src", "dst", "tag", "size"))
                assert message[0 if node.type == SEND else 1] == rank
                sides[node.type][message] += 1
    assert sides[SEND] == sides[RECV]
    assert sum(sides[SEND].values()) == int(trace.matches.messages["sends"].sum())
    assert done.cautions == ()


def test_a_drain_joins_what_completed_in_it(tmp_path, read):
    def collective(begin, end, sequence):
        fields = {"group": "g", "sequence": sequence, "location": COMMUNICATION}
        return Event(Kind.COLLECTIVE, begin * MS, end * MS, "all_reduce", 0, 64, **fields)

    events = [
        Event(Kind.BACKWARD, 0, 20 * MS, "backward"),
        collective(5, 14, 1),
        collective(8, 18, 2),
        Event(Kind.WAIT, 12 * MS, 18 * MS, DRAIN),
        Event(Kind.OPTIMIZER, 20 * MS, 21 * MS, "optimizer"),
    ]
    _, done = export(tmp_path, [events])
    nodes = read(done.path, 0)
    assert [node.name for node in nodes] == [
        *("backward", "all_reduce", "backward", "all_reduce", "backward", "backward", "optimizer")
    ]
    assert list(nodes[3].data_deps) == [2]  # the second is issued after another piece
    assert set(nodes[5].data_deps) == {4, 1, 3}
    assert list(nodes[6].data_deps) == [5]


def test_what_the_format_does_not_have_is_said(tmp_path, read):
    fields = {"group": "w", "members": (0, 1), "location": COMMUNICATION, "sequence": 1}
    events = [
        Event(Kind.COLLECTIVE, 1 * MS, 2 * MS, "scan", 0, 64, **fields),
        Event(Kind.SEND, 3 * MS, 4 * MS, "put", 0, 8, peer=1, tag=1, **fields),
    ]
    _, done = export(tmp_path, [events, []])
    assert done.cautions == (
        "1 collectives scan were written as all_reduce",
        "1 messages were left out: they have one side only",
    )
    node, _ = read(done.path, 0)
    assert values(node)["comm_type"] == 0


def test_an_empty_run_has_files_without_nodes(tmp_path, read):
    _, done = export(tmp_path, [[]])
    assert (read(done.path, 0), done.events) == ([], 0)
