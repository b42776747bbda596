"""Letters that a stream's encoding lacks are written in ASCII."""

import contextlib
import io
import os
import select
import sys
import termios

import click
import pytest

from paceline.cli.streams import accept_any_text, terminal


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


@contextlib.contextmanager
def on_terminal():
    """Have stdout and stderr be a terminal; yield what returns what it got."""
    controller, device = os.openpty()
    attributes = termios.tcgetattr(device)
    attributes[1] &= ~termios.OPOST  # line breaks stay as they are
    termios.tcsetattr(device, termios.TCSANOW, attributes)

    def read():
        sys.stdout.flush()
        sys.stderr.flush()
        assert select.select([controller], [], [], 30)[0]
        return os.read(controller, 1 << 16).decode()

    out, err = os.fdopen(os.dup(device), "w"), os.fdopen(device, "w")
    # Not by a fixture: pytest puts its own streams in place before each phase of a test.
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        accept_any_text()
        yield read
        sys.stdout.close()
        sys.stderr.close()
    os.close(controller)


def test_control_characters_of_others_do_not_reach_a_terminal():
    text = "job \x1b]0;title\x07 \x1b[2Ahidden\r\x9b31m \u202egnp.exe \x1b[31mred\x1b[0m\ta\nb"
    with on_terminal() as read:
        print(text)
        assert read() == (
            r"job \x1b]0;title\x07 \x1b[2Ahidden\r\x9b31m \u202egnp.exe "
            "\x1b[31mred\x1b[0m\ta\nb\n"
        )
        click.echo("a name\x1b[K", err=True)
        assert read() == "a name\\x1b[K\n"
        click.secho("red", fg="red")
        assert read() == "\x1b[31mred\x1b[0m\n"


def test_bars_of_progress_move_the_cursor():
    with on_terminal() as read:
        click.echo("\r\x1b[Kblock 1", nl=False, file=terminal())
        assert read() == "\r\x1b[Kblock 1"


def test_what_is_no_terminal_gets_every_byte(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), "utf-8")
    monkeypatch.setattr(sys, "stdout", stream)
    accept_any_text()
    print("\x1b]0;title\x07", flush=True)
    assert stream.buffer.getvalue() == b"\x1b]0;title\x07\n"
