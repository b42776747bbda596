"""Which file took the late rank longest, and what tables of files leave out."""

from support.traces import MS, Event, write_run

from paceline.report.files import file_rows, file_words, shown_files
from paceline.trace.analysis.blame import Straggler
from paceline.trace.analysis.files import FileUse
from paceline.trace.format.events import Kind
from paceline.trace.merge import load_run


def counters(path, **amounts):
    return [
        Event(Kind.COUNTER, 5 * MS, 5 * MS, name, amount=amount, tag_name=path)
        for name, amount in amounts.items()
    ]


def late(rank, cause):
    return Straggler(
        rank=rank, cause=cause, late_ms=5.0, first_step=0, last_step=9, others_wait=0.2
    )


def test_the_file_of_the_late_rank_is_named(tmp_path):
    step = Event(Kind.STEP, 0, 10 * MS, "step")
    slow = counters("/data/slow", io_read=3, io_read_ns=90 * MS, io_open=1, io_open_ns=MS)
    fast = counters("/data/fast", io_read=9, io_read_ns=200 * MS)
    program = counters("(program files)", io_read=9, io_read_ns=900 * MS)
    trace = load_run(write_run(tmp_path, [[step, *fast], [step, *slow, *program]]))
    words = file_words(trace, [late(1, "data")])
    assert words == (
        "Of its files /data/slow took rank 1 longest: 3 read calls of 90.0 ms together, "
        "1 open call of 1.00 ms together."
    )
    assert file_words(trace, [late(1, "compute")]) == ""
    assert file_words(trace, []) == ""


def test_files_that_were_only_looked_at_are_left_out_unless_that_took_long():
    def use(path, calls, seconds):
        return FileUse(
            path=path,
            ranks=(0, 1, 2, 3, 4),
            calls=calls,
            seconds=seconds,
            read_bytes=2048,
            written_bytes=0,
            at_once=1,
        )

    read = use("/a", {"read": 1200}, {"read": 1.0})
    looked = use("/", {"stat": 5}, {"stat": 0.001})
    searched = use("/many", {"stat": 90_000}, {"stat": 0.9})
    assert shown_files([read, searched, looked]) == [read, searched]
    names, rows = file_rows([read])
    assert names == ["/a"]
    assert rows == [["0, 1, 2, 3...", "1,200", "1.00 s", "2.00 KiB", "0 B", "1"]]
