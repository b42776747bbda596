"""Any order of blocks and caps: the pool keeps within its cap, and loses and mixes nothing."""

import ctypes

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule
from support.examples import examples

from paceline.native import TensorPool

PAGE = 4096


class PoolMachine(RuleBasedStateMachine):
    """The pool against the plainest account of what it holds."""

    blocks = Bundle("blocks")

    def __init__(self):
        super().__init__()
        self.pool = TensorPool(1 << 30)
        self.sizes = {}
        self.marks = {}
        self.cap = 0
        self.count = 0

    @rule(target=blocks, size=st.integers(1, 40 * PAGE))
    def allocate(self, size):
        block = self.pool.allocate(size)
        whole = -(-size // PAGE) * PAGE
        assert block % PAGE == 0
        assert all(
            block + whole <= other or other + taken <= block for other, taken in self.sizes.items()
        )
        self.count += 1
        self.sizes[block], self.marks[block] = whole, self.count % 256
        ctypes.memset(block, self.count % 256, whole)
        return block

    @rule(block=consumes(blocks))
    def release(self, block):
        # What other blocks and caps came and went has not changed a byte of it.
        size = self.sizes.pop(block)
        assert ctypes.string_at(block, size) == bytes([self.marks.pop(block)]) * size
        assert self.pool.release(block)
        assert not self.pool.release(block)

    @rule(pages=st.integers(0, 120))
    def set_cap(self, pages):
        self.cap = pages * PAGE
        self.pool.set_cap(self.cap)

    @rule(block=consumes(blocks))
    def exchange(self, block):
        """A block of the same size costs no page where the cap leaves room for it."""
        size = self.sizes.pop(block)
        self.marks.pop(block)
        used, _, cap, fresh, *_ = self.pool.counts()
        self.pool.release(block)
        again = self.pool.allocate(size)
        if used <= cap:
            assert self.pool.counts()[3] == fresh
        self.pool.release(again)

    @invariant()
    def keeps_no_more_than_its_cap(self):
        used, resident, cap, fresh, evicted, peak = self.pool.counts()
        assert used == sum(self.sizes.values())
        assert cap == self.cap
        assert used <= resident <= max(cap, used)
        assert resident == fresh - evicted
        assert peak >= used


PoolMachine.TestCase.settings = settings(
    max_examples=examples(60), stateful_step_count=60, deadline=None
)
test_pool = PoolMachine.TestCase
