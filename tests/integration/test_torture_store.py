"""The fault campaigns at a small size, and that they would see what they look for."""

import json
import os
import random
import subprocess
import sys

import pytest

from paceline import store
from paceline.core.errors import NotFound
from paceline.store import PackOptions, open_pack
from paceline.studies import torture_corruption, torture_store
from paceline.studies.faults import Faults
from paceline.studies.torture_interruptions import compare, stale_files
from paceline.studies.torture_parts import Tally, TortureOptions, make_source, pack_options


def test_nothing_goes_unnoticed(tmp_path):
    options = TortureOptions(corruptions=160, kills=8, fault_limit=6, seed=3)
    lines = []
    report = torture_store.torture_store(tmp_path, options, on_progress=lines.append)
    for campaign in report.campaigns:
        assert campaign.failures == (), campaign.name
    assert report.ok
    counts = {campaign.name: campaign for campaign in report.campaigns}
    assert counts["corruptions"].cases == 160
    assert counts["corruptions"].counts["after a good read and eviction"] > 50
    assert counts["kills"].cases == 8
    assert counts["faults"].cases >= 3 * 3 * 6
    assert counts["names"].cases == 2 * len(torture_store.HOSTILE_NAMES)
    assert lines
    assert list(tmp_path.iterdir()) == []
    again = torture_store.TortureReport.from_json(json.loads(report.to_text()))
    assert again == report


@pytest.fixture
def victim(tmp_path):
    make_source(tmp_path / "source", 1, "class")
    store.pack(store.Folder(tmp_path / "source"), tmp_path / "pack", options=pack_options())
    return torture_corruption.Victim(tmp_path / "pack", tmp_path / "source")


def test_a_reader_that_does_not_verify_is_found_out(victim, monkeypatch):
    monkeypatch.setattr(torture_corruption, "_POLICIES", ("never",))
    problems = [torture_corruption.run_case(victim, 1, case).problem for case in range(40)]
    assert any("came back wrong" in problem for problem in problems)


def test_a_reader_that_names_the_wrong_sample_is_found_out(victim, monkeypatch):
    monkeypatch.setattr(victim, "names", ["another"] * len(victim.names))
    problems = [torture_corruption.run_case(victim, 1, case).problem for case in range(40)]
    assert any("was refused" in problem for problem in problems)


def test_a_repair_that_does_nothing_is_noticed(victim, monkeypatch, tmp_path):
    (tmp_path / "empty").mkdir()
    store.pack(
        store.Folder(victim.source), tmp_path / "plain", options=PackOptions(shard_bytes=60_000)
    )
    plain = torture_corruption.Victim(tmp_path / "plain", tmp_path / "empty")
    monkeypatch.setattr(torture_corruption, "_REPAIR_EVERY", 1)
    problems = [torture_corruption.run_case(plain, 1, case).problem for case in range(40)]
    assert any("not repaired" in problem for problem in problems)


def test_a_case_is_the_same_each_time(victim):
    outcomes = [torture_corruption.run_case(victim, 7, case) for case in range(10)]
    assert outcomes == [torture_corruption.run_case(victim, 7, case) for case in range(10)]
    assert {outcome.problem for outcome in outcomes} == {""}
    with open_pack(victim.path) as pack:  # put back as it was
        assert list(pack.verify()) == []


def test_damage_is_of_its_kind():
    generator = random.Random(1)
    content = bytes(range(1, 256)) * 40
    for kind in torture_corruption.KINDS:
        new = torture_corruption.damaged(content, kind, generator)
        changed = sum(a != b for a, b in zip(content, new, strict=False))
        if kind == "truncation":
            assert content.startswith(new)
            assert len(new) < len(content)
        else:
            assert len(new) == len(content)
        assert kind != "bit flip" or changed == 1


def test_a_crash_of_the_reader_is_a_failure_and_not_the_end(tmp_path, monkeypatch):
    script = tmp_path / "crashes"
    script.write_text("#!/bin/sh\necho '{\"begun\": 3}'\nkill -BUS $$\n")
    script.chmod(0o755)
    monkeypatch.setattr(torture_store.sys, "executable", str(script))
    tally = Tally()
    arguments = (tmp_path / "pack", tmp_path / "source", 1, range(10), tally)
    assert torture_store._corrupt_in_child(*arguments) == 4
    assert "SIGBUS" in tally.failures[0]


def test_what_is_lost_or_left_is_found(victim, tmp_path):
    source, pack = tmp_path / "source", victim.path
    assert compare(source, pack) == ""
    assert stale_files(pack) == ""
    (source / "class0" / "new").write_bytes(b"new")
    assert "lost or changed" in compare(source, pack)
    (pack / "shard-00099.pace").write_bytes(b"")
    assert "shard-00099.pace" in stale_files(pack)
    content = victim.files["shard-00000.pace"]
    victim.write("shard-00000.pace", content[:80] + b"\0\1\2\3" + content[84:])
    assert "cannot be read" in compare(source, pack)
    victim.write("shard-00000.pace", content[:80])
    assert "cannot be read" in compare(source, pack)


def test_faults_count_and_strike_once(tmp_path):
    strike = Faults(1, lambda *_: 0, ("write",))
    with (tmp_path / "file").open("wb", buffering=0) as file, strike as faults:
        assert [os.write(file.fileno(), b"x") for _ in range(3)] == [1, 0, 1]
    assert faults.struck
    assert [name for name, _ in faults.seen] == ["write"] * 3
    assert os.write is not None


@pytest.mark.campaign("faults")
def test_the_verb(tmp_path):
    command = [sys.executable, "-m", "paceline", "torture", "store"]
    small = ["--corruptions", "20", "--kills", "2", "--faults", "1"]
    options = {"capture_output": True, "timeout": 120, "check": False, "cwd": tmp_path}
    done = subprocess.run([*command, *small], **options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode().count("all as expected") == 4
    command += ["--dir", str(tmp_path)]
    done = subprocess.run([*command, *small, "--json"], capture_output=True, check=True)
    assert json.loads(done.stdout)["ok"]
    bad = subprocess.run([*command, "--faults", "some"], capture_output=True, check=False)
    assert bad.returncode == 2
    with pytest.raises(NotFound):
        torture_store.torture_store(tmp_path / "nowhere")
