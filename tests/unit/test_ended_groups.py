"""A process group that a script destroys is not destroyed by what holds the GIL."""

import pytest

dist = pytest.importorskip("torch.distributed")
ended_groups = pytest.importorskip("paceline.launch.worker.ended_groups")


def test_a_group_that_was_destroyed_is_held_until_the_next(monkeypatch, tmp_path):
    for module in (dist, dist.distributed_c10d):  # torch's own is put back after the test
        monkeypatch.setattr(module, "destroy_process_group", dist.destroy_process_group)
    ended_groups.hold_ended_groups()
    ended = []
    for name in ("first", "second"):
        dist.init_process_group(
            "gloo", init_method=f"file://{tmp_path / name}", rank=0, world_size=1
        )
        ended.append(dist.group.WORLD)
        dist.destroy_process_group()
        assert not dist.is_initialized()
        assert ended_groups._held == ended[-1:]
    ended_groups._held.clear()
