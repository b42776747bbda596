"""Tagged output: whole lines whatever comes in which pieces, and no rank that waits for another."""

import doctest
import os
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.clock import ManualClock, SystemClock
from paceline.launch import output
from paceline.launch.output import MAX_LINE_BYTES, LineTagger, TaggedOutput


def test_examples():
    assert doctest.testmod(output).failed == 0


@given(st.lists(st.binary(max_size=40).map(lambda data: data.replace(b"\r", b"")), max_size=20))
def test_lines_do_not_depend_on_the_pieces_in_which_they_come(pieces):
    tagger = LineTagger(b"[7] ")
    shown = b"".join(tagger.feed(piece, 0.0) for piece in pieces) + tagger.finish()
    whole = b"".join(pieces)
    lines = whole.split(b"\n")
    expected = lines[:-1] + [lines[-1]] * bool(lines[-1])
    assert shown == b"".join(b"[7] " + line + b"\n" for line in expected)


def test_a_very_long_line_is_cut_and_kept():
    tagger = LineTagger(b"[0] ")
    shown = tagger.feed(b"x" * (2 * MAX_LINE_BYTES + 5), 0.0) + tagger.feed(b"y\n", 0.0)
    assert shown == b"".join(
        b"[0] " + part + b"\n" for part in (b"x" * MAX_LINE_BYTES, b"x" * MAX_LINE_BYTES, b"xxxxxy")
    )


def test_of_a_progress_bar_one_state_a_second_is_shown_and_the_last():
    tagger = LineTagger(b"[0] ")
    shown = [tagger.feed(b"\r%3d%%" % percent, percent / 10) for percent in range(25)]
    assert b"".join(shown) == b"[0]   0%\n[0]  10%\n[0]  20%\n"
    assert tagger.feed(b"\r100%\nnext\n", 2.5) == b"[0] 100%\n[0] next\n"


def test_a_bar_whose_last_state_was_shown_is_not_shown_twice():
    tagger = LineTagger(b"[0] ")
    assert tagger.feed(b"\rdone", 0.0) == b"[0] done\n"
    assert tagger.feed(b"\n\n", 0.5) == b"[0] \n"


def test_lines_of_windows_stay_lines():
    tagger = LineTagger(b"[0] ")
    assert tagger.feed(b"a\r\nb\r\n", 0.0) == b"[0] a\n[0] b\n"


def capture(ranks, write, monkeypatch):
    """Return what arrives at stdout when threads write as ranks do."""
    reader, writer = os.pipe()
    received = []
    monkeypatch.setattr(
        output, "write_all", lambda target, data: os.write({1: writer, 2: writer}[target], data)
    )
    with TaggedOutput(SystemClock()) as tagged:
        threads = []
        for rank in range(ranks):
            with tagged.streams(rank) as (out, err):
                streams = (os.dup(out), os.dup(err))
            threads.append(threading.Thread(target=write, args=(rank, *streams)))
        drain = threading.Thread(
            target=lambda: received.extend(iter(lambda: os.read(reader, 1 << 20), b""))
        )
        drain.start()
        tagged.begin()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    os.close(writer)
    drain.join(60)
    os.close(reader)
    return b"".join(received)


def test_lines_of_several_ranks_never_mix(monkeypatch):
    count = 2000

    def write(rank, out, err):
        for number in range(count):
            data = b"rank %d line %d\n" % (rank, number)
            os.write(out, data[:7])  # in two pieces, as an unbuffered print does
            os.write(out, data[7:])
        os.write(err, b"the end")  # without a newline, as of a rank that is killed
        os.close(out)
        os.close(err)

    lines = capture(3, write, monkeypatch).decode().splitlines()
    for rank in range(3):
        own = [line for line in lines if line.startswith(f"[{rank}] ")]
        said = [f"[{rank}] rank {rank} line {number}" for number in range(count)]
        assert [line for line in own if "line" in line] == said
        assert own.count(f"[{rank}] the end") == 1
    assert len(lines) == 3 * (count + 1)


def test_a_process_that_outlives_the_ranks_keeps_nobody_waiting(monkeypatch):
    kept = []

    def write(_rank, out, err):
        os.write(out, b"hello\n")
        kept.extend((out, err))  # as a daemon that a rank has started

    assert capture(1, write, monkeypatch) == b"[0] hello\n"
    for descriptor in kept:
        os.close(descriptor)


def test_what_ranks_said_is_shown_even_if_another_could_not_be_started(monkeypatch):
    """Every second stream was skipped, and nothing was read: the thread had not begun."""
    shown = []
    monkeypatch.setattr(output, "write_all", lambda _, data: shown.append(data))
    with TaggedOutput(ManualClock()) as tagged:
        for rank in range(2):
            with tagged.streams(rank) as (out, err):
                os.write(out, b"hello\n")
                os.write(err, b"loading")
        readers = [stream.reader for stream in tagged._streams]
    assert shown == [b"[0] hello\n", b"[0] loading\n", b"[1] hello\n", b"[1] loading\n"]
    for reader in readers:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(reader)


def test_a_reader_that_leaves_lets_the_ranks_know(monkeypatch):
    def broken(_target, _data):
        raise BrokenPipeError

    monkeypatch.setattr(output, "write_all", broken)
    with TaggedOutput(ManualClock()) as tagged:
        with tagged.streams(0) as (out, _):
            stream = os.dup(out)
        tagged.begin()
        os.write(stream, b"hello\n")
        while True:  # until the pipe has no reader: as when the rank's own stdout is closed
            try:
                os.write(stream, b"hello\n")
            except BrokenPipeError:
                break
        os.close(stream)
