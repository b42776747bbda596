"""Tags each line that a rank prints with the rank: ``paceline run --tag-output``.

::

    rank 0  stdout --pipe--+                     +--> our stdout   [0] loss 0.31
            stderr --pipe--+--> one thread  -----+
    rank 1  stdout --pipe--+    LineTagger each  +--> our stderr   [1] warning: ...

One thread reads all pipes and writes whole lines, so that lines of two ranks never mix. A rank
blocks only where it would block without a tag, too: when nobody reads our own output. What a killed
rank has written is still in its pipe, and is read to the end.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from paceline.core.files import write_all

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.core.clock import Clock

MAX_LINE_BYTES = 1 << 20  # a longer line is cut
_READ_BYTES = 1 << 16
_UPDATE_INTERVAL_S = 1.0  # between two states of a progress bar


class LineTagger:
    r"""Cuts a stream of bytes into lines and puts a tag before each; no I/O, bytes stay bytes.

    A line ends with a newline. Progress bars write over a line again and again, each time after a
    carriage return: of such a line the state of each second is shown, and the last one.

    >>> tagger = LineTagger(b"[1] ")
    >>> tagger.feed(b"loss 0.5\nlo", now_s=0.0), tagger.feed(b"ss 0.4\n", now_s=9.0)
    (b'[1] loss 0.5\n', b'[1] loss 0.4\n')
    """

    def __init__(self, tag: bytes) -> None:
        self._tag = tag
        self._rest = b""  # of a line that has not ended
        self._shown = b""  # the state of the progress bar that was shown last
        self._shown_s = float("-inf")

    def feed(self, data: bytes, now_s: float) -> bytes:
        """Return what is to be shown once `data` has come."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        shown = [self._end_line(line) for line in lines]
        while len(self._rest) >= MAX_LINE_BYTES:
            shown.append(self._tag + self._rest[:MAX_LINE_BYTES] + b"\n")
            self._rest = self._rest[MAX_LINE_BYTES:]
        if b"\r" in self._rest:
            self._rest = b"\r" + _last_state(self._rest)
            shown.append(self._update(now_s))
        return b"".join(shown)

    def finish(self) -> bytes:
        """Return what is left when the stream has ended: a line without its newline."""
        rest, self._rest = self._rest, b""
        return self._end_line(rest) if rest else b""

    def _end_line(self, line: bytes) -> bytes:
        state = _last_state(line) if b"\r" in line else line
        repeated = state == self._shown and bool(state)
        self._shown = b""
        return b"" if repeated else self._tag + state + b"\n"

    def _update(self, now_s: float) -> bytes:
        state = self._rest[1:]
        if now_s - self._shown_s < _UPDATE_INTERVAL_S or state in (b"", self._shown):
            return b""
        self._shown, self._shown_s = state, now_s
        return self._tag + state + b"\n"


def _last_state(line: bytes) -> bytes:
    r"""Return what a terminal shows of a line that was written over.

    >>> _last_state(b"\r10%\r20%"), _last_state(b"20%\r"), _last_state(b"\r\r")
    (b'20%', b'20%', b'')
    """
    return next((state for state in reversed(line.split(b"\r")) if state), b"")


@dataclass(slots=True)
class _Stream:
    """A pipe from a rank, and the descriptor of ours that its lines go to."""

    reader: int
    target: int
    tagger: LineTagger


class TaggedOutput:
    """The ranks' output, tagged: make `streams` for each rank, then `begin`; leave when all ended.

    The main thread makes the pipes; from `begin` until leaving they belong to the reading thread.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = os.pipe()
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._streams: list[_Stream] = []
        self._thread = threading.Thread(target=self._run, name="paceline-output", daemon=True)

    def __enter__(self) -> Self:
        return self

    @contextlib.contextmanager
    def streams(self, rank: int) -> Iterator[tuple[int, int]]:
        """Give the descriptors that a rank writes stdout and stderr to; closed on leaving."""
        writers = []
        for target in (1, 2):
            reader, writer = os.pipe()
            os.set_blocking(reader, False)
            stream = _Stream(reader, target, LineTagger(f"[{rank}] ".encode()))
            self._streams.append(stream)
            self._selector.register(reader, selectors.EVENT_READ, stream)
            writers.append(writer)
        try:
            yield writers[0], writers[1]
        finally:
            for writer in writers:
                os.close(writer)

    def begin(self) -> None:
        """Begin to read: all ranks have their streams."""
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        """Read what the ranks have left in their pipes, and end."""
        os.close(self._wake_writer)
        if self._thread.ident is not None:
            self._thread.join()
        for stream in list(self._streams):  # the thread ended, or a rank could not be started
            while stream in self._streams and self._read(stream):
                pass
            if stream in self._streams:
                self._finish(stream)
        self._selector.close()
        os.close(self._wake_reader)

    def _run(self) -> None:
        left = False  # whether all ranks have ended; then what is in the pipes is all there will be
        while self._streams and not left:
            ready = self._selector.select()
            left = any(key.data is None for key, _ in ready)
            for key, _ in ready:
                if key.data is not None:
                    self._read(key.data)

    def _read(self, stream: _Stream) -> bool:
        """Read once and write whole lines; return whether there may be more."""
        try:
            data = os.read(stream.reader, _READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._finish(stream)
            return False
        self._write(stream, stream.tagger.feed(data, self._clock.now_s()))
        return True

    def _finish(self, stream: _Stream) -> None:
        self._streams.remove(stream)
        self._selector.unregister(stream.reader)
        os.close(stream.reader)  # a rank that still writes learns that nobody reads
        self._write(stream, stream.tagger.finish())

    def _write(self, stream: _Stream, lines: bytes) -> None:
        if not lines:
            return
        try:
            write_all(stream.target, lines)
        except OSError:  # our reader has left: so have the ranks' readers
            if stream in self._streams:
                self._finish(stream)
