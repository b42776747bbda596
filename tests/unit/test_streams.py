"""Letters that a stream's encoding lacks are written in ASCII."""

import io
import os
import sys

import pytest

from paceline.cli.streams import accept_any_text


@pytest.mark.parametrize(
    ("encoding", "written"),
    [
        ("ascii", b"1.50 us --- \\xfc\\u4e2d"),
        ("latin-1", b"1.50 \xb5s --- \xfc\\u4e2d"),
        ("utf-8", "1.50 µs ─── ü中".encode()),
    ],
)
def test_what_an_encoding_lacks_is_written_in_ascii(monkeypatch, encoding, written):
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", stream)
    accept_any_text()
    stream.write("1.50 µs ─── ü中")
    stream.flush()
    assert stream.buffer.getvalue() == written


def test_a_byte_of_a_path_that_is_not_text_is_written_as_its_number(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    monkeypatch.setattr(sys, "stderr", stream)
    accept_any_text()
    stream.write(os.fsdecode(b"run-\xff"))
    stream.flush()
    assert stream.buffer.getvalue() == b"run-\\udcff"
