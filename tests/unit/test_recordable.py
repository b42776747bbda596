"""Which commands start ranks that cannot be recorded from outside, and what is said then."""

import doctest

import pytest

from paceline.core.errors import NotFound, UsageError
from paceline.launch import recordable
from paceline.launch.recordable import check_recordable, find_obstacle


def test_examples():
    assert doctest.testmod(recordable).failed == 0


@pytest.mark.parametrize(
    ("command", "word"),
    [
        ("docker run --rm image torchrun train.py", "docker"),
        ("/usr/bin/podman run image", "podman"),
        ("singularity exec image.sif python train.py", "singularity"),
        ("apptainer exec image.sif python train.py", "apptainer"),
        ("ssh node1 torchrun train.py", "ssh"),
        ("pdsh -w node[0-1] torchrun train.py", "pdsh"),
        ("nice -n 5 docker run image", "docker"),
        ("env A=b C=d docker run image", "docker"),
        ("taskset -c 0-1 timeout -k 5s 10m docker run image", "docker"),
        ("env -i PATH=/bin torchrun train.py", "env -i"),
        ("sudo torchrun train.py", "sudo"),
        ("python -I train.py", "-I"),
        ("python3.11 -uE train.py", "-uE"),
        ("python -u -S -m torch.distributed.run train.py", "-S"),
    ],
)
def test_what_does_not_inherit_the_environment_is_refused(command, word):
    assert word in find_obstacle(command.split()).what


@pytest.mark.parametrize(
    "command",
    [
        "torchrun --nproc-per-node 2 train.py --image docker",
        "python train.py -I -E -S",
        "python -u -O train.py",
        "python -m pkg.train -S",
        "python -c print() -I",
        "python -W error train.py -I",
        "taskset -c 0 python train.py",
        "env -u HOME A=b python train.py ssh",
        "env A=b torchrun train.py -i data",
        "env A=b torchrun train.py -",
        "bash train.sh",
        "env",
    ],
)
def test_what_inherits_it_is_not(command):
    assert find_obstacle(command.split()) is None


def test_an_interpreter_in_the_first_line_that_ignores_its_environment_is_seen(tmp_path):
    path = tmp_path / "launcher"
    for line, seen in [
        (b"#!/usr/bin/python3 -I", True),
        (b"#!/usr/bin/env -S python3 -u -E", True),
        (b"#!/usr/bin/python3", False),
        (b"#!/bin/sh -E", False),
        (b"\x7fELF", False),
    ]:
        path.write_bytes(line + b"\nimport sys\n")
        path.chmod(0o755)
        assert (find_obstacle([str(path), "train.py"]) is not None) == seen, line


def test_the_error_has_the_line_for_the_script(tmp_path, monkeypatch):
    (tmp_path / "docker").write_text("#!/bin/sh\n")
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(UsageError, match="docker starts containers") as caught:
        check_recordable(["docker", "run", "image"], tmp_path / "RUN")
    assert f"import paceline; paceline.record('{tmp_path}/RUN')" in caught.value.fix
    with pytest.raises(NotFound, match="no such program"):
        check_recordable(["torchrnu", "train.py"], tmp_path / "RUN")
