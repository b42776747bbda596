"""Where the time of a loader goes: in its statistics, in the trace, and in what why says."""

import dataclasses
import io
import json

import numpy as np
import pytest
from PIL import Image
from support.launching import SCRIPTS, paceline

from paceline import store
from paceline.store import Loader, LoaderOptions, open_pack
from paceline.store.feed.options import StageTimes
from paceline.trace.format.events import LOADER_STAGES, Kind
from paceline.trace.merge import load_run


def test_the_trace_has_a_counter_for_each_stage_of_the_statistics():
    assert [f"{stage}_s" for stage in LOADER_STAGES] == [
        field.name for field in dataclasses.fields(StageTimes)
    ]


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_bytes_are_verified_once_and_read_each_time(tmp_path, kind):
    (tmp_path / "source").mkdir()
    for k in range(8):
        (tmp_path / "source" / str(k)).write_bytes(bytes([k]) * 200_000)
    store.pack(store.Folder(tmp_path / "source"), tmp_path / "pack")
    for verify, expected in (("always", True), ("never", False)):
        with open_pack(tmp_path / "pack", verify=verify) as pack:
            options = LoaderOptions(worker_kind=kind, workers=1)
            with Loader(pack, 4, options=options) as loader:
                list(loader)
                stages = loader.stats.stages
            assert stages.read_s > 0
            assert (stages.verify_s > 0) is expected
            assert stages.decode_s == stages.transform_s == stages.collate_s == 0


def test_the_times_of_small_samples_are_extrapolated_from_some_of_them(tmp_path):
    (tmp_path / "source").mkdir()
    for k in range(200):
        (tmp_path / "source" / f"{k:03d}").write_bytes(bytes([k]) * 1000)
    store.pack(store.Folder(tmp_path / "source"), tmp_path / "pack")
    with open_pack(tmp_path / "pack", verify="always", threads=1) as pack:
        assert pack.read_times_s == (0.0, 0.0)
        pack.read_batch(range(200))
        busy_s, verify_s = pack.read_times_s
        assert verify_s > 0
        assert busy_s > 0
        pack.read_batch(range(200))
        assert pack.read_times_s[0] > busy_s
        assert pack.read_times_s[1] > verify_s


def test_why_says_that_decoding_takes_the_loader_s_time(tmp_path):
    coarse = np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8)
    body = io.BytesIO()
    Image.fromarray(coarse).resize((1500, 1000)).save(body, "JPEG", progressive=True)
    (tmp_path / "source").mkdir()
    for k in range(60):
        (tmp_path / "source" / f"{k:02d}").write_bytes(body.getvalue())
    store.pack(store.Folder(tmp_path / "source"), tmp_path / "pack")
    script = (SCRIPTS / "decodes.py", tmp_path / "pack")
    done = paceline(tmp_path, "run", "-n", 1, "--out", "RUN", *script)
    assert done.code == 0, done.err
    said = next(line for line in done.out.splitlines() if line[0].isdigit())
    read_s, decode_s, rest_s = map(float, said.split())

    (rank,) = load_run(tmp_path / "RUN").ranks
    counters = rank.events_of(Kind.COUNTER)
    for stage, name in LOADER_STAGES.items():
        chosen = counters[counters["name"] == rank.names.index(name)]
        assert len(chosen) <= 30, stage  # one for each batch, not for each sample
        if stage == "decode":
            assert len(chosen) == 30
            assert chosen["amount"].sum() / 1e9 == pytest.approx(decode_s, abs=1e-6)

    report = json.loads(paceline(tmp_path, "why", "RUN", "--json").out)
    stages_s = report["loader_stages_s"]
    assert stages_s["decode"] == pytest.approx(decode_s, abs=1e-6)
    assert stages_s["read"] + stages_s.get("verify", 0) == pytest.approx(read_s, abs=1e-6)
    assert stages_s["transform"] + stages_s["collate"] == pytest.approx(rest_s, abs=1e-6)
    (advice,) = (advice for advice in report["advice"] if advice["rule"] == "faster_stage")
    share = f"{100 * decode_s / (read_s + decode_s + rest_s):.0f}"
    assert advice["evidence"].startswith(f"Decode takes {share} % of the loader's time (")
    shown = paceline(tmp_path, "why", "RUN", "--verbose").out
    assert advice["evidence"] in shown
    table = shown[shown.index("of a batch") : shown.index("all stages")]
    assert all(stage in table for stage in stages_s)
