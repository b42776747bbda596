"""Each check of the doctor: facts in, finding out."""

import dataclasses
import json
import os
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from paceline.core.node import Limits
from paceline.probe import doctor
from paceline.probe.doctor import ProgramOutput, TorchAnswer
from paceline.probe.protocol import TorchFacts

NONE = Limits(version=0)
TORCH = TorchFacts(torch="2.13", gpus=0, backends=("gloo",))
ON_CPU = TorchAnswer(facts=TORCH)
ON_GPU = TorchAnswer(facts=dataclasses.replace(TORCH, gpus=2))
WITHOUT_BACKEND = TorchAnswer(facts=dataclasses.replace(TORCH, backends=()))
GPUS = ProgramOutput(out="GPU 0: H100 (UUID: a)\nGPU 1: H100 (UUID: b)\n")


@pytest.mark.parametrize(
    ("finding", "status", "words"),
    [
        (doctor.check_cores(8, 8, NONE), "ok", "8 cores"),
        (doctor.check_cores(8, 4, NONE), "warn", "4 of 8"),
        (doctor.check_cores(8, 8, Limits(version=2, cores=1.5)), "warn", "1.5"),
        (doctor.check_memory(8 << 30, NONE), "ok", "8.0 GiB"),
        (
            doctor.check_memory(8 << 30, Limits(version=1, memory_bytes=2 << 30)),
            "warn",
            "cgroup v1",
        ),
        (doctor.check_memory(8 << 30, Limits(version=2, memory_bytes=1 << 20)), "fail", "GiB"),
        (doctor.check_shared_memory(None), "fail", "not there"),
        (doctor.check_shared_memory(64 << 20), "warn", "0.1 GiB"),
        (doctor.check_shared_memory(4 << 30), "ok", "4.0 GiB"),
        (doctor.check_folder("ext4", Path("/data")), "ok", "ext4"),
        (doctor.check_folder("lustre", Path("/data")), "warn", "Lustre"),
        (doctor.check_folder("gpfs", Path("/data")), "warn", "GPFS"),
        (doctor.check_folder("nfs4", Path("/data")), "warn", "NFS"),
        (
            doctor.check_torch(TorchAnswer(facts=None, problem="not installed")),
            "warn",
            "not installed",
        ),
        (doctor.check_torch(TorchAnswer(facts=None, problem="libgomp")), "fail", "libgomp"),
        (doctor.check_torch(ON_CPU), "ok", "gloo"),
        (doctor.check_torch(WITHOUT_BACKEND), "fail", "no backend"),
        (doctor.check_interface("", "lo"), "ok", "lo can be bound"),
        (doctor.check_interface("", ""), "ok", "the host's name can be bound"),
        (doctor.check_interface("ib0 is not here", "ib0"), "fail", "ib0 is not here"),
        (doctor.check_interface("node1 has no address", ""), "warn", "node1 has no address"),
        (doctor.check_mpi(ProgramOutput(out=None), True), "ok", "not installed"),
        (doctor.check_mpi(ProgramOutput(out="mpirun (Open MPI) 5\nx"), False), "ok", "Open MPI"),
        (
            doctor.check_mpi(
                ProgramOutput(out="HYDRA build details:\n    Version:     5.0.2\n"), True
            ),
            "ok",
            "MPICH (Hydra) 5.0.2, with",
        ),
        (doctor.check_mpi(ProgramOutput(out=""), True), "ok", "mpi4py"),
        (doctor.check_slurm(ProgramOutput(out=None), {}), "ok", "not installed"),
        (doctor.check_slurm(ProgramOutput(out=None), {"SLURM_JOB_ID": "7"}), "ok", "job 7"),
        (doctor.check_slurm(ProgramOutput(out="slurm 24.05\n"), {}), "ok", "outside"),
        (doctor.check_gpu(ProgramOutput(out=None, problem="not found"), ON_CPU), "ok", "none"),
        (doctor.check_gpu(ProgramOutput(out=None, problem="driver"), ON_GPU), "warn", "driver"),
        (doctor.check_gpu(GPUS, ON_GPU), "ok", "2: H100"),
        (doctor.check_gpu(GPUS, ON_CPU), "warn", "2: H100; torch 2.13 sees none of them"),
        (doctor.check_gpu(GPUS, TorchAnswer(facts=None)), "ok", "2: H100"),
        (doctor.check_clock("tsc", ProgramOutput(out="yes\n")), "ok", "tsc, synchronised"),
        (doctor.check_clock("tsc", ProgramOutput(out="no\n")), "warn", "not synchronised"),
        (doctor.check_clock("hpet", ProgramOutput(out=None)), "warn", "hpet"),
    ],
)
def test_check(finding, status, words):
    assert finding.status == status
    assert words in finding.what
    assert bool(finding.fix) == (status != "ok")


def test_programs_that_are_not_installed_fail_or_hang():
    assert doctor.run_program(["no-such-program"], 1.0).problem == "not found"
    assert doctor.run_program([sys.executable, "-c", "print(1)"], 30.0).out == "1\n"
    failed = doctor.run_program([sys.executable, "-c", "raise SystemExit('broken')"], 30.0)
    assert (failed.out, failed.problem) == (None, "broken")
    hung = doctor.run_program([sys.executable, "-c", "input()"], 0.05)
    assert hung.out is None


def test_diagnose_asks_once_about_each_topic(tmp_path):
    asked = []

    def run(command, deadline_s):
        asked.append(command[0])
        assert deadline_s > 0
        return ProgramOutput(out=None, problem="x")

    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 8388608 kB\n")
    (tmp_path / "dev/shm").mkdir(parents=True)
    findings = doctor.diagnose(
        tmp_path, root=tmp_path, run=run, ask_torch=lambda: ON_CPU, environ={}
    )
    topics = [finding.topic for finding in findings]
    assert len(set(topics)) == len(topics) == 10
    assert len(asked) == len(set(asked)) == 4
    assert not [finding for finding in findings if finding.status == "fail"]


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("warn", 0), ("fail", 1)])
def test_verb_fails_only_on_fail(monkeypatch, status, code):
    from paceline.cli.doctor import doctor as verb

    finding = doctor.Finding(topic="memory", status=status, what="w", fix="f")
    monkeypatch.setattr(doctor, "diagnose", lambda folder: (finding,))
    monkeypatch.setattr(sys.modules[verb.callback.__module__], "_cores_of_ranks", lambda _: ())
    runner = CliRunner()
    plain, data = runner.invoke(verb, []), runner.invoke(verb, ["--json"])
    assert plain.exit_code == data.exit_code == code
    assert "fix: f" in plain.stdout
    found = json.loads(data.stdout)
    assert found == {
        "version": 1,
        "findings": [{"topic": "memory", "status": status, "what": "w", "fix": "f"}],
    }


def test_the_verb_shows_what_cores_would_be_for(monkeypatch):
    from paceline.cli.doctor import doctor as verb

    monkeypatch.setattr(doctor, "diagnose", lambda folder: ())
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    many = str(10 * len(os.sched_getaffinity(0)))
    for ranks, status in (("1", "ok"), (many, "warn")):
        done = CliRunner().invoke(verb, ["--json", "-n", ranks])
        found = {row["topic"]: row for row in json.loads(done.stdout)["findings"]}
        assert found["budget"]["status"] == status
        assert f"{ranks} rank" in found["budget"]["what"]


def test_torch_is_asked_in_a_process_of_its_own():
    pytest.importorskip("torch")
    facts = doctor.ask_torch_worker().facts
    assert facts.torch.startswith("2.")
    assert "gloo" in facts.backends


def test_a_torch_that_does_not_import_or_hangs_is_told_as_such(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text(
        "print('welcome')\nraise ImportError('libgomp is missing')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = doctor.check_torch(doctor.ask_torch_worker())
    assert found.status == "fail"
    assert "libgomp is missing" in found.what
    (tmp_path / "torch.py").write_text("import threading\nthreading.Event().wait()\n")
    monkeypatch.setattr(doctor, "TORCH_DEADLINE_S", 0.5)
    found = doctor.check_torch(doctor.ask_torch_worker())
    assert found.status == "fail"
    assert "0.5 s passed" in found.what
