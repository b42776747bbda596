"""The hooks of rebalancing in libraries that may change."""

import sys
from types import ModuleType

from torch.utils.data import BatchSampler, SequentialSampler

from paceline.training.balance.batches import ACCELERATE
from paceline.training.balance.script import ScriptBalance


def test_a_library_that_has_changed_is_left_alone_and_said(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, ACCELERATE, ModuleType(ACCELERATE))
    balance = ScriptBalance(tmp_path)
    balance.install()
    try:
        batches = list(BatchSampler(SequentialSampler(range(4)), 2, drop_last=False))
    finally:
        balance.hooks.remove()
    assert batches == [[0, 1], [2, 3]]
    (said,) = caplog.messages
    assert "batches of accelerate's loaders are not divided" in said
    assert "BatchSamplerShard" in said
