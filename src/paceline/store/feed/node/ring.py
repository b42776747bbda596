"""The memory that a node's reader shares with the ranks, and who writes what in it.

::

    words    | of the reader | of rank 0 | of rank 1 | ... | of window slot 0 | ...
    config   | JSON: what is read, and for which ranks
    data     | window | window | ...                          a ring of bytes

A *window* holds the samples of the next steps of all local ranks, as one sorted read brought them
from storage. Windows are numbered from 0 through all passes over the loader and published in order;
window w is described in slot w modulo the number of slots. There is no barrier: every word has one
writer (but the two counters that sleepers watch, and the words by which any rank starts a reader),
the reader publishes a window by one store, and a rank says with two numbers which windows it still
needs. So a reader that dies loses only the window
that it was filling: the next one finds here what was published, and goes on behind it.

The segment is a memfd: it has no name that could be left behind. Locks on single bytes of it tell
who is alive: byte 0 is the reader's, byte 1 + r that of local rank r. The kernel drops them with
the process.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import struct
import weakref
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.native import SharedWords

if TYPE_CHECKING:
    from numpy.typing import NDArray

PAGE_BYTES = 4096
SLOTS = 64
_MAGIC = 0x3145444F4E434150  # "PACNODE1"
_FLOCK = struct.Struct("hhqqixxxx")  # struct flock of Linux with 64-bit offsets


class Word:
    """Words of the reader; `MAGIC` to `CONFIG_BYTES` are written once, when it is created.

    Ranks write `READERS`, `STARTED_NS` and `HOPELESS` as well, when they start a reader.
    """

    MAGIC = 0
    RANKS = 1
    DATA_BYTES = 2
    CONFIG_BYTES = 3
    RANKS_CHANGED = 4  # counter: the reader sleeps until it moves
    READER_CHANGED = 5  # counter: ranks sleep until it moves
    READERS = 6  # how many readers were started; a rank that starts one moves it on first
    STARTED_NS = 7  # when the last one was, on the monotonic clock
    READY = 8  # the last one that has taken the reader's lock
    HOPELESS = 9  # no reader can read this pack: every rank reads by itself
    SERVED = 10  # the pass that is read for
    PASS_FIRST = 11  # the window with which it begins
    PUBLISHED = 12  # windows so far
    REFUSED = 13  # the last pass that ranks did not agree upon
    WAITS_FOR_ROOM = 14
    BYTES_READ = 15
    READS = 16
    DEPTH = 17  # reads at a time that brought most bytes a second so far; 0 = not known yet
    WINDOW_BYTES = 18  # of windows, likewise
    MISSED_TURNS = 19  # windows that were read without a turn
    RANGES = 20  # contiguous parts of shards that were read, each in one or more reads
    COUNT = 24


class RankWord:
    """Words of one rank, which alone writes them."""

    RANK = 0  # its global rank + 1; 0 = it has not come yet
    PASS = 1  # written last; 0 while the words of the next one are written
    EPOCH = 2
    POSITION = 3
    NEXT = 4  # windows of its pass that it needs no more
    HELD = 5  # the oldest window of which it holds views, + 1; 0 = none
    LEFT = 6
    PROCESS = 7  # its process id
    COUNT = 8


class SlotWord:
    """Words of a window's slot, which the reader writes before it publishes the window."""

    FIRST_STEP = 0  # of the pass
    STEPS = 1
    BEGIN = 2  # in the data
    BYTES = 3  # 0: the window was not read, for it is larger than the ring
    COUNT = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeConfig:
    """What a node's reader reads; equal on all its ranks.

    Attributes:
        pack: path of the pack, or of the data in place.
        side_file: path of the index of data in place; None of a pack.
        identity: its content digest.
        verify: policy for checksums, of `open_pack`.
        order: the fields of the `SampleOrder`, without the epoch.
        global_batch_size: samples of a step over all ranks of the job.
        world_size: ranks of the job.
        last: how the last batch is treated (`RankBatches`).
        window_bytes: of one window at most, about.
        direct: whether reads go past the page cache.
        turns: address of the job's `TurnServer`; empty: readers take no turns.
    """

    pack: str
    side_file: str | None
    identity: str
    verify: str
    order: dict[str, Any]
    global_batch_size: int
    world_size: int
    last: str
    window_bytes: int
    direct: bool
    turns: str = ""


@dataclass(frozen=True, slots=True)
class Window:
    """A published window: steps of a pass, and where their samples lie in the data."""

    number: int
    first_step: int
    steps: int
    begin: int
    size_bytes: int

    @property
    def end_step(self) -> int:
        """The step behind its last one."""
        return self.first_step + self.steps


class Ring:
    """The mapped segment. Any thread and process may use it, within the rules above.

    Args:
        descriptor: of the memfd. It, the locks and the memory last as long as this object, and as
            arrays of its data.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._descriptors = [descriptor]
        weakref.finalize(self, _close, self._descriptors).atexit = False
        size = os.fstat(descriptor).st_size
        self._map = mmap.mmap(descriptor, size)
        self.words = SharedWords(self._map)
        if size < PAGE_BYTES or self.words.load(Word.MAGIC) != _MAGIC:
            raise ValueError("the descriptor leads to another file")
        self.ranks = self.words.load(Word.RANKS)
        self.data_bytes = self.words.load(Word.DATA_BYTES)
        begin = _config_begin(self.ranks)
        config_bytes = self.words.load(Word.CONFIG_BYTES)
        text = self._map[begin : begin + config_bytes]
        self.config = NodeConfig(**json.loads(text))
        self.data: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)[
            _data_begin(self.ranks, config_bytes) :
        ]

    @classmethod
    def create(cls, config: NodeConfig, ranks: int, data_bytes: int) -> Ring:
        """Return a new ring for this many local ranks."""
        text = json.dumps(asdict(config)).encode()
        descriptor = os.memfd_create("paceline-node-reader", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, _data_begin(ranks, len(text)) + data_bytes)
        os.pwrite(descriptor, text, _config_begin(ranks))
        head = struct.pack("<4Q", _MAGIC, ranks, data_bytes, len(text))
        os.pwrite(descriptor, head, 0)
        return cls(descriptor)

    def rank_word(self, local_rank: int, word: int) -> int:
        """Return the index of a rank's word."""
        return Word.COUNT + RankWord.COUNT * local_rank + word

    def rank(self, local_rank: int, word: int) -> int:
        """Return the value of a rank's word."""
        return self.words.load(self.rank_word(local_rank, word))

    def slot_word(self, window: int, word: int) -> int:
        """Return the index of a word of a window's slot."""
        slots = Word.COUNT + RankWord.COUNT * self.ranks
        return slots + SlotWord.COUNT * (window % SLOTS) + word

    def window(self, number: int) -> Window:
        """Return a published window that some rank still needs."""
        at = self.slot_word(number, 0)
        return Window(number, *(self.words.load(at + word) for word in range(SlotWord.COUNT)))

    def still_needed(self, local_rank: int) -> int | None:
        """Return the oldest window that a rank needs; None: it needs none that exists."""
        if self.rank(local_rank, RankWord.LEFT):
            return None
        # In this order: a rank says that it holds a window before it says that it has taken it.
        to_take = self.still_to_take(local_rank)
        held = self.rank(local_rank, RankWord.HELD)
        needed = [held - 1] if held else []
        if to_take is not None:
            needed.append(to_take)
        return min(needed, default=None)

    def still_to_take(self, local_rank: int) -> int | None:
        """Return the oldest window that a rank has not taken all steps of; None: it takes none."""
        if self.rank(local_rank, RankWord.LEFT):
            return None
        # The pass before the number: a rank that begins the next pass sets NEXT to 0 before PASS.
        if self.rank(local_rank, RankWord.PASS) > self.words.load(Word.SERVED):
            return None
        return self.words.load(Word.PASS_FIRST) + self.rank(local_rank, RankWord.NEXT)

    def samples_of(
        self, window: Window, step: int, local_rank: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return where the samples of a rank's step begin in the data, and their lengths.

        A length of -1 says that a sample could not be read whole and verified.
        """
        count = window.steps * self.ranks
        at = self.data[window.begin :]
        firsts = at[: 8 * (count + 1)].view(np.int64)
        part = (step - window.first_step) * self.ranks + local_rank
        first, end = int(firsts[part]), int(firsts[part + 1])
        table = at[8 * (count + 1) :][: 16 * int(firsts[count])].view(np.int64).reshape(2, -1)
        return table[0, first:end], table[1, first:end]

    def lock(self, byte: int) -> bool:
        """Take the lock of a byte; False: it is taken.

        It lasts as long as this object, or a copy of it in a fork.

        The lock belongs to the open file, not to the process: it is on a descriptor of its own, or
        those who inherited this one would hold it as well.
        """
        own = os.open(f"/proc/self/fd/{self.descriptor}", os.O_RDWR | os.O_CLOEXEC)
        request = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
        try:
            fcntl.fcntl(own, fcntl.F_OFD_SETLK, request)
        except OSError:
            os.close(own)
            return False
        self._descriptors.append(own)
        return True

    def is_locked(self, byte: int) -> bool:
        """Return whether a process holds the lock of a byte."""
        probe = os.open(f"/proc/self/fd/{self.descriptor}", os.O_RDWR | os.O_CLOEXEC)
        try:
            request = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
            found = _FLOCK.unpack(fcntl.fcntl(probe, fcntl.F_OFD_GETLK, request))
        finally:
            os.close(probe)
        return bool(found[0] != fcntl.F_UNLCK)


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def index_bytes(steps: int, ranks: int, samples: int) -> int:
    """Return the bytes before a window's samples: where each lies (`Ring.samples_of`)."""
    size = 8 * (steps * ranks + 1) + 16 * samples
    return -(-size // PAGE_BYTES) * PAGE_BYTES


def _config_begin(ranks: int) -> int:
    words = Word.COUNT + RankWord.COUNT * ranks + SlotWord.COUNT * SLOTS
    return -(-8 * words // PAGE_BYTES) * PAGE_BYTES


def _data_begin(ranks: int, config_bytes: int) -> int:
    return _config_begin(ranks) + -(-config_bytes // PAGE_BYTES) * PAGE_BYTES
