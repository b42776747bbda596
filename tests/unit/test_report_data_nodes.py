"""What a report says of nodes that serve a run's data: tiers, headroom, and the bottleneck."""

import dataclasses

import pytest
from rich.console import Console
from support.traces import data_parallel, write_run

from paceline.core.breakdown import Breakdown
from paceline.core.errors import CorruptData
from paceline.report.data_nodes import data_use, data_words
from paceline.report.model import gather, to_json
from paceline.report.page.document import render_html
from paceline.report.terminal import render_details, render_terminal
from paceline.runs.data_report import DataReport
from paceline.runs.folder import RunFolder

MIB = 1 << 20
NODE = DataReport(
    node="10.0.0.1:7420",
    pack="/shared/train.pack",
    source_bytes=40 * MIB,
    peer_bytes=20 * MIB,
    sent_bytes=15 * MIB,
    local_reads=600,
    local_bytes=60 * MIB,
    remote_reads=200,
    read_s=2.0,
    shard_count=8,
    held_shards=5,
    peak_queue=7,
    server_starts=2,
)


def write(run, *nodes):
    (run / "data").mkdir()
    for number, node in enumerate(nodes):
        (run / "data" / f"train.pack-{number:05}.json").write_text(node.to_text())
    return run


def use_of(folder, *nodes, input_s=0.0, workers=None):
    total = Breakdown(input=input_s, forward=10.0 - input_s)
    return data_use(RunFolder(write(folder, *nodes)), total, 2, workers)


def test_headroom_is_supply_over_demand(tmp_path):
    # Two ranks read 80 MiB in 2 s of their time: 80 MiB/s of supply; the loop takes them in 10 s.
    use = use_of(tmp_path, NODE)
    supply, demand = 2 * NODE.read_bytes / NODE.read_s, NODE.read_bytes / 10.0
    assert use.headroom == pytest.approx(supply / demand) == 10.0
    assert NODE.hit_share == 0.75
    assert data_words(use) == (
        "Of 80.0 MiB that programs read from nodes, 75 % lay on their node, 25 % came from other "
        "nodes. Headroom of the data: supply was 10 times the demand."
    )


def test_workers_read_beside_each_other(tmp_path):
    assert use_of(tmp_path, NODE, workers=4).headroom == pytest.approx(40.0)


@pytest.mark.parametrize(("input_s", "is_bottleneck"), [(5.0, True), (0.5, False)])
def test_data_is_the_bottleneck_if_the_loop_waits_and_readers_cannot_keep_up(
    tmp_path, input_s, is_bottleneck
):
    slow = dataclasses.replace(NODE, read_s=30.0, program_source_bytes=20 * MIB)
    use = use_of(tmp_path, slow, input_s=input_s)
    assert use.headroom < 1
    assert use.is_bottleneck is is_bottleneck
    assert ("Data was the bottleneck" in data_words(use)) is is_bottleneck
    assert "20 % from the source" in data_words(use)


def test_a_run_without_loop_or_reads_has_no_headroom(tmp_path):
    unread = dataclasses.replace(
        NODE, local_reads=0, local_bytes=0, remote_reads=0, peer_bytes=0, read_s=0.0
    )
    use = use_of(tmp_path, unread)
    assert use.headroom is None
    assert unread.hit_share == 1.0
    assert data_words(use) == ""


def test_page_terminal_and_json_show_the_nodes(tmp_path):
    run = write_run(tmp_path, data_parallel(2, 40))
    fast = dataclasses.replace(NODE, read_s=0.01)
    other = dataclasses.replace(fast, node="10.0.0.2:7420", peak_queue=9)
    report = gather(write(run, fast, other))
    assert "Headroom of the data" in report.verdict
    page = render_html(report)
    assert "Data nodes" in page
    assert "<title>10.0.0.2:7420, from other nodes: 20.0 MiB, 25 %</title>" in page
    for render in (render_terminal, render_details):
        console = Console(width=200)
        with console.capture() as shown:
            console.print(render(report))
        assert "10.0.0.2:7420  5 of 8" in shown.get()
    found = to_json(report)["data"]
    assert [node["peak_queue"] for node in found["nodes"]] == [7, 9]
    assert found["headroom"] > 0


def test_without_nodes_nothing_is_said(tmp_path):
    report = gather(write_run(tmp_path, data_parallel(2, 40)))
    assert report.data is None
    assert "Data nodes" not in render_html(report)


def test_a_damaged_report_is_named(tmp_path):
    run = write(tmp_path, NODE)
    (run / "data" / "train.pack-00000.json").write_text("{}")
    with pytest.raises(CorruptData, match=r"train\.pack-00000\.json"):
        data_use(RunFolder(run), Breakdown(), 1, None)
