"""Each check of the doctor: facts in, finding out."""

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from paceline.probe import doctor
from paceline.probe.doctor import Answer
from paceline.probe.node import Limits

NONE = Limits(version=0)
TORCH = {"version": "2.13", "gpus": 0, "backends": ["gloo"]}
ON_CPU, ON_GPU = Answer(out=json.dumps(TORCH)), Answer(out=json.dumps(TORCH | {"gpus": 2}))
GPUS = Answer(out="GPU 0: H100 (UUID: a)\nGPU 1: H100 (UUID: b)\n")


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
        (doctor.check_torch(Answer(out=None, problem="not installed")), "warn", "not installed"),
        (doctor.check_torch(Answer(out=None, problem="libgomp")), "fail", "libgomp"),
        (doctor.check_torch(Answer(out=json.dumps(TORCH))), "ok", "gloo"),
        (
            doctor.check_torch(Answer(out=json.dumps(TORCH | {"backends": []}))),
            "fail",
            "no backend",
        ),
        (doctor.check_mpi(Answer(out=None), True), "ok", "none"),
        (doctor.check_mpi(Answer(out="mpirun (Open MPI) 5\nx"), False), "ok", "Open MPI"),
        (
            doctor.check_mpi(Answer(out="HYDRA build details:\n    Version:     5.0.2\n"), True),
            "ok",
            "MPICH (Hydra) 5.0.2, with",
        ),
        (doctor.check_mpi(Answer(out=""), True), "ok", "mpi4py"),
        (doctor.check_slurm(Answer(out=None), {}), "ok", "none"),
        (doctor.check_slurm(Answer(out=None), {"SLURM_JOB_ID": "7"}), "ok", "job 7"),
        (doctor.check_slurm(Answer(out="slurm 24.05\n"), {}), "ok", "outside"),
        (doctor.check_gpu(Answer(out=None, problem="not found"), ON_CPU), "ok", "none"),
        (doctor.check_gpu(Answer(out=None, problem="driver"), ON_GPU), "warn", "driver"),
        (doctor.check_gpu(GPUS, ON_GPU), "ok", "2: H100"),
        (doctor.check_gpu(GPUS, ON_CPU), "warn", "2: H100; torch 2.13 sees none of them"),
        (doctor.check_gpu(GPUS, Answer(out=None)), "ok", "2: H100"),
        (doctor.check_clock("tsc", Answer(out="yes\n")), "ok", "tsc, synchronised"),
        (doctor.check_clock("tsc", Answer(out="no\n")), "warn", "not synchronised"),
        (doctor.check_clock("hpet", Answer(out=None)), "warn", "hpet"),
    ],
)
def test_check(finding, status, words):
    assert finding.status == status
    assert words in finding.what
    assert bool(finding.fix) == (status != "ok")


def test_programs_that_are_not_here_fail_or_hang():
    assert doctor.ask(["no-such-program"], 1.0).problem == "not found"
    assert doctor.ask([sys.executable, "-c", "print(1)"], 30.0).out == "1\n"
    failed = doctor.ask([sys.executable, "-c", "raise SystemExit('broken')"], 30.0)
    assert (failed.out, failed.problem) == (None, "broken")
    hung = doctor.ask([sys.executable, "-c", "input()"], 0.05)
    assert hung.out is None


def test_diagnose_asks_once_about_each_topic(tmp_path):
    asked = []

    def run(command, deadline_s):
        asked.append(command[0])
        assert deadline_s > 0
        return Answer(out=json.dumps(TORCH)) if "-c" in command else Answer(out=None, problem="x")

    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 8388608 kB\n")
    (tmp_path / "dev/shm").mkdir(parents=True)
    findings = doctor.diagnose(tmp_path, root=tmp_path, run=run, environ={})
    topics = [one.topic for one in findings]
    assert len(set(topics)) == len(topics) == 9
    assert len(asked) == 5
    assert not [one for one in findings if one.status == "fail"]


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("warn", 0), ("fail", 1)])
def test_verb_fails_only_on_fail(monkeypatch, status, code):
    from paceline.cli.doctor import doctor as verb

    finding = doctor.Finding(topic="memory", status=status, what="w", fix="f")
    monkeypatch.setattr(doctor, "diagnose", lambda folder: (finding,))
    runner = CliRunner()
    plain, data = runner.invoke(verb, []), runner.invoke(verb, ["--json"])
    assert plain.exit_code == data.exit_code == code
    assert "do: f" in plain.stdout
    found = json.loads(data.stdout)
    assert found == {
        "version": 1,
        "findings": [{"topic": "memory", "status": status, "what": "w", "fix": "f"}],
    }


def test_a_banner_before_the_answer_is_passed_over():
    answer = json.dumps({"version": "2", "cuda": False, "gpus": 0, "backends": ["gloo"]})
    assert doctor.check_torch(doctor.Answer(out=f"welcome!\n{answer}\n")).status == "ok"
    found = doctor.check_torch(doctor.Answer(out="welcome!\n"))
    assert found.status == "fail"
    assert found.fix
