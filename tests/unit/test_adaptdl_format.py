"""Reader of Pollux's workloads: jobs, profiles, and wrong lines by file, line and field."""

import pytest

from paceline.core.errors import CorruptData, NotFound
from paceline.scheduler.formats.adaptdl import read_adaptdl
from paceline.scheduler.formats.read import detect_format, read_queue
from paceline.scheduler.placement import Shape

WORKLOAD = """\
name,time,application,num_replicas,batch_size
lenet-1,120,lenet,4,32
ncf-0,16,ncf,1,64
"""
FILES = {
    "placements.csv": """\
placement,local_bsz,step_time,sync_time
1,4,0.2,0.0
1,16,0.5,0.0
4,4,0.25,0.05
4,16,0.6,0.1
""",
    "scalability.csv": """\
num_nodes,num_replicas,local_bsz,step_time,sync_time
2,8,4,0.3,0.1
2,8,16,0.7,0.2
""",
    "validation-16.csv": """\
progress,iteration,metric,grad_sqr,grad_var
100.0,100,0.5,1.0,0.0
200.0,200,0.6,0.0,1.0
""",
    "validation-64.csv": """\
progress,iteration,metric,grad_sqr,grad_var
102.5,40,0.5,1.0,0.0
199.0,80,0.6,0.0,1.0
""",
}


@pytest.fixture
def folder(tmp_path):
    for application in ("lenet", "ncf"):
        files = tmp_path / "profiles" / application
        files.mkdir(parents=True)
        for name, text in FILES.items():
            (files / name).write_text(text)
    (tmp_path / "workloads").mkdir()
    (tmp_path / "workloads" / "workload-1.csv").write_text(WORKLOAD)
    return tmp_path


@pytest.fixture
def workload(folder):
    return folder / "workloads" / "workload-1.csv"


def test_jobs_are_elastic_within_the_limits_of_their_application(workload):
    assert detect_format(workload) == "adaptdl"
    ncf, lenet = read_queue(workload).jobs
    assert (lenet.name, lenet.submitted_s, lenet.profile) == ("lenet-1", 120.0, "lenet")
    assert (lenet.devices, lenet.limits, ncf.limits) == (4, (1, 16), (1, 1))
    assert lenet.start_s == lenet.restart_s == 30.0
    assert lenet.work == 199.0  # the least progress of all batch sizes


def test_a_fixed_batch_size_names_the_profile_and_limits_the_devices(workload):
    queue = read_adaptdl(workload, adaptive=False)
    lenet = queue.jobs[1]
    assert (lenet.profile, lenet.limits) == ("lenet batch 32", (1, 8))
    # 32 samples on 4 devices are 8 each, a third of the way from 4 to 16: 0.25 + 0.35 / 3 s a step;
    # the gradient has no noise in epoch 0 and nothing else in epoch 1.
    step_s = 0.25 + 0.35 / 3
    for done, gain in ((0.0, 1.0), (99.0, 1.0), (100.0, 2.0), (150.0, 2.0)):
        rate = queue.rates.alone(lenet, Shape("gpu", (4,), 0), done)
        assert rate == pytest.approx(gain / step_s)
    assert queue.rates.constant_until(lenet, 50.0) == 100.0


def test_an_adaptive_batch_size_is_never_slower(workload):
    fixed, adaptive = (read_adaptdl(workload, adaptive=choice) for choice in (False, True))
    for per_node in ((1,), (4,), (4, 4)):
        for done in (0.0, 150.0):
            shape = Shape("gpu", per_node, len(per_node) - 1)
            best = adaptive.rates.alone(adaptive.jobs[1], shape, done)
            # The batches it tries are 3 % apart.
            assert best >= fixed.rates.alone(fixed.jobs[1], shape, done) * 0.97
    shape = Shape("gpu", (4,), 0)
    assert adaptive.rates.alone(adaptive.jobs[1], shape, 0.0) == pytest.approx(1 / 0.25)
    assert adaptive.rates.alone(adaptive.jobs[1], shape, 150.0) == pytest.approx(4 / 0.6)


def test_profiles_may_lie_elsewhere(folder, workload):
    (folder / "profiles").rename(folder / "measured")
    assert len(read_queue(workload, rates=folder / "measured").jobs) == 2
    with pytest.raises(NotFound, match="profiles"):
        read_queue(workload)


WRONG_JOBS = {
    "time": ("lenet-1,-1,lenet,4,32", "'-1' is not a number"),
    "application": ("lenet-1,120,lenett,4,32", "no profile of 'lenett'"),
    "num_replicas": ("lenet-1,120,lenet,2.5,32", "not a whole number"),
    "batch_size": ("lenet-1,120,lenet,4,65", "65 is more than 64"),
}


@pytest.mark.parametrize("field", WRONG_JOBS)
def test_a_wrong_job_is_named_by_file_line_and_field(workload, field):
    line, what = WRONG_JOBS[field]
    workload.write_text(WORKLOAD.replace("lenet-1,120,lenet,4,32", line))
    with pytest.raises(CorruptData, match=what) as caught:
        read_adaptdl(workload)
    assert caught.value.where == f"{workload}, line 2, {field}"


def test_a_job_on_more_devices_than_its_batch_can_be_divided_into_is_named(workload):
    workload.write_text(WORKLOAD.replace("lenet,4,32", "lenet,9,32"))
    with pytest.raises(CorruptData, match="9 devices are more than 8"):
        read_adaptdl(workload, adaptive=False)
    assert read_adaptdl(workload).jobs[1].devices == 9


WRONG_PROFILES = [
    ("placements.csv", "4,4,0.25,0.05", "4 2,4,0.25,0.05", "line 4, placement"),
    ("placements.csv", "4,4,0.25,0.05", "40,4,0.25,0.05", "line 4, placement"),
    ("placements.csv", "4,4,0.25,0.05", "4,x,0.25,0.05", "line 4, local_bsz"),
    ("placements.csv", "4,4,0.25,0.05", "4,4,0,0.05", "line 4, step_time"),
    ("placements.csv", "4,4,0.25,0.05", "4,4,0.25,0.25", "line 4, sync_time"),
    ("scalability.csv", "2,8,4,0.3,0.1", "0,8,4,0.3,0.1", "line 2, num_nodes"),
    ("scalability.csv", "2,8,4,0.3,0.1", "2,1,4,0.3,0.1", "line 2, num_replicas"),
    ("validation-16.csv", "200.0,200,0.6,0.0,1.0", "200.0,200,0.6,0.0,0.0", "line 3, grad_sqr"),
    ("validation-16.csv", "200.0,200,0.6,0.0,1.0", "200.0,200,0.6,0.0,nan", "line 3, grad_var"),
    ("validation-16.csv", "200.0,200,0.6,0.0,1.0", "90.0,200,0.6,0.0,1.0", "progress"),
    ("validation-64.csv", "199.0,80,0.6,0.0,1.0\n", "", "validation-64.csv"),
]


@pytest.mark.parametrize(("name", "line", "wrong", "where"), WRONG_PROFILES)
def test_a_wrong_line_of_a_profile_is_named(folder, workload, name, line, wrong, where):
    path = folder / "profiles" / "lenet" / name
    path.write_text(FILES[name].replace(line, wrong))
    with pytest.raises(CorruptData) as caught:
        read_adaptdl(workload)
    assert str(path.parent) in caught.value.where
    assert caught.value.where.endswith(where)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_of_a_profile_is_named(folder, workload, name):
    (folder / "profiles" / "lenet" / name).unlink()
    with pytest.raises(NotFound) as caught:
        read_adaptdl(workload)
    assert str(folder / "profiles" / "lenet") in caught.value.where
