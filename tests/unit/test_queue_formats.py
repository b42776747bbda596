"""Readers of traces: right lines, wrong lines by file, line and field, and how formats are told."""

import itertools
import math
import re

import pytest
from support import queues

from paceline.core.errors import CorruptData, NotFound, UsageError
from paceline.scheduler.formats.gavel import read_rates as read_gavel_rates
from paceline.scheduler.formats.queue_csv import COLUMNS
from paceline.scheduler.formats.read import FORMATS, detect_format, read_queue
from paceline.scheduler.job import Job
from paceline.scheduler.placement import Shape
from paceline.scheduler.rates.muri import ALONE, SLOWDOWN, LockstepSharing, period_s

TRACES = {
    "csv": queues.OWN,
    "philly": queues.PHILLY,
    "gavel": queues.GAVEL,
    "muri": queues.MURI,
    "sacct": queues.SACCT,
}


@pytest.fixture
def write(tmp_path):
    (tmp_path / "simulation_throughputs.json").write_text(queues.GAVEL_RATES)

    def write_file(text, name="trace"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write_file


@pytest.mark.parametrize("name", ["csv", "philly", "muri"])
@pytest.mark.parametrize("separator", [";", "\t"])
def test_a_table_as_a_spreadsheet_writes_it_is_read(write, name, separator):
    """With a byte order mark, and what separates fields where the comma is a decimal one."""
    plain = read_queue(write(TRACES[name]))
    text = TRACES[name].replace(",", separator)
    path = write("\ufeff" + text, "spreadsheet")
    assert detect_format(path) == name
    assert read_queue(path).jobs == plain.jobs


def test_jobs_of_no_time_are_left_out_and_counted(write):
    own = write("name,devices,duration_s\na,1,0\nb,2,5\nc,1,0\n")
    queue = read_queue(own)
    assert [job.name for job in queue.jobs] == ["b"]
    assert queue.notes == ("left out: 2 jobs of 0 s",)
    lines = queues.PHILLY.splitlines()
    column = lines[0].split(",").index("duration")
    fields = lines[1].split(",")
    fields[column] = "0"
    queue = read_queue(write("\n".join([*lines, ",".join(fields)]), "philly"))
    assert len(queue.jobs) == len(lines) - 1
    assert queue.notes == ("left out: 1 job of 0 s",)


@pytest.mark.parametrize("name", TRACES)
def test_a_format_is_told_by_its_first_line(write, name):
    path = write(TRACES[name])
    assert detect_format(path) == name
    assert len(read_queue(path).jobs) >= 2


def test_every_format_has_a_trace_here():
    assert set(FORMATS) <= {*TRACES, "adaptdl"}


@pytest.mark.parametrize("text", ["", "a,b,c\n1,2,3\n", "a\tb\tc\n"])
def test_a_file_of_no_format_is_refused(write, text):
    with pytest.raises(UsageError, match="first line"):
        read_queue(write(text))


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(NotFound) as caught:
        read_queue(tmp_path / "none.csv")
    assert str(tmp_path / "none.csv") in caught.value.where


def test_philly(write):
    jobs = read_queue(write(queues.PHILLY)).jobs
    assert [(job.name, job.submitted_s, job.devices, job.work) for job in jobs] == [
        ("1", 0.0, 2, 64.0),
        ("0", 74.0, 1, 66.0),
        ("2", 86400.0, 16, 3600.0),
    ]
    assert jobs[0].tenant == "6214e9"


def test_muri_counts_iterations_and_charges_the_start(write):
    queue = read_queue(write(queues.MURI))
    gpt2, bert, dqn = queue.jobs
    assert (gpt2.work, gpt2.profile, bert.submitted_s) == (1000, "gpt2 x4", 5.0)
    assert (gpt2.restart_s, dqn.start_s) == (10.0, 6.0)
    assert queue.rates.alone(gpt2, Shape("any", (4,), 0)) == pytest.approx(1 / (0.433 * ALONE))
    shape = Shape("any", (4,), 0)
    period = period_s(((0.0005, 0.163, 0.018), (0.0006, 0.413, 0.020)))
    kept = queue.rates.kept(gpt2, [bert], shape)
    assert kept == pytest.approx(0.433 * ALONE / (period * SLOWDOWN[2]))
    # In lockstep the short step of bert waits for the long one of gpt2.
    assert queue.rates.kept(bert, [gpt2], shape) == pytest.approx(kept * 190 / 433)


def test_muri_jobs_of_one_model_and_size_have_one_profile(write):
    wrong = queues.MURI.replace("2,8,6000,100,dqn,128,50900,1000,509", "2,4,6000,1,bert,1,1,1,191")
    with pytest.raises(CorruptData) as caught:
        read_queue(write(wrong))
    assert "line 4" in caught.value.where


def test_a_period_is_never_shorter_than_a_stage_of_any_job():
    stages = [(0.4, 0.1, 0.05), (0.0005, 0.4, 0.02), (0.08, 0.08, 0.07), (0.7, 0.06, 0.0)]
    for size in (2, 3, 4):
        for group in itertools.combinations_with_replacement(stages, size):
            period = period_s(tuple(sorted(group)))
            assert period >= max(map(max, group)) * (1 - 1e-9)
            # A device stage and a network stage have one slot each.
            for stage in (1, 2):
                total = math.fsum(job[stage] for job in group)
                assert period >= total * (1 - 2e-3)


def test_jobs_that_do_not_overlap_gain_nothing_and_complementary_ones_do():
    device_bound = (0.0, 1.0, 0.0)
    assert period_s((device_bound, device_bound)) == pytest.approx(2.0)
    assert period_s(((1.0, 0.0, 0.0), (0.0, 1.0, 0.0))) == pytest.approx(1.0)


def test_a_bounded_period_lets_no_two_jobs_use_one_resource():
    stages, step_s = {"dqn": (0.435, 0.008, 0.0005)}, {"dqn": 0.509}
    job, shape = Job(name="job", work=1.0, profile="dqn"), Shape("gpu", (8,), 0)
    free, bounded = (
        LockstepSharing(stages, step_s, bounded=bounded).kept(job, [job], shape)
        for bounded in (False, True)
    )
    assert free > 0.85  # both put their inputs into one slot
    assert bounded == pytest.approx(0.509 / (0.87 * SLOWDOWN[2]))
    slowed = LockstepSharing(stages, step_s, interference=0.3).kept(job, [job], shape)
    assert slowed == pytest.approx(free / 1.3)


def test_gavel_reads_both_forms_and_the_table_above_the_trace(write):
    queue = read_queue(write(queues.GAVEL))
    a3c, lm = queue.jobs
    assert (a3c.devices, a3c.work, lm.submitted_s) == (2, 1000, 10)
    assert queue.rates.alone(a3c, Shape("v100", (2,), 0)) == 5.0
    assert queue.rates.alone(a3c, Shape("v100", (1, 1), 1)) == 2.5
    old = "A3C\tpython main.py\t--steps\t1\t1000\t30\t2\n"
    assert read_queue(write(old)).jobs[0].submitted_s == 30


def test_gavel_without_its_table_is_an_error_that_names_the_option(tmp_path):
    path = tmp_path / "a" / "b" / "c" / "d" / "e.trace"
    path.parent.mkdir(parents=True)
    path.write_text(queues.GAVEL)
    with pytest.raises(NotFound, match="--rates"):
        read_queue(path)


def test_a_table_of_gavel_that_is_not_there_is_named(tmp_path):
    with pytest.raises(NotFound) as caught:
        read_gavel_rates(tmp_path / "none.json")
    assert str(tmp_path / "none.json") in caught.value.where


def test_sacct_reads_devices_times_and_tenants_and_counts_what_it_leaves_out(write):
    queue = read_queue(write(queues.SACCT))
    assert [(j.name, j.submitted_s, j.devices, j.work, j.tenant) for j in queue.jobs] == [
        ("101", 0.0, 1, 90.0, "bob"),
        ("100", 30.0, 2, 90000.0, "physics"),
        ("100#2", 172830.0, 4, 10.0, "physics"),
    ]
    assert [job.device_types for job in queue.jobs] == [(), ("a100",), ("a100",)]
    assert sorted(queue.notes) == [
        "left out: 1 job that never ran (CANCELLED)",
        "left out: 1 job without GPUs",
        "left out: 1 step of jobs",
    ]


def test_sacct_counts_cpus_where_no_job_has_gpus_and_takes_the_columns_that_are_there(write):
    text = "JobID|ElapsedRaw|Submit|ReqCPUS|\n7_1|60|2024-03-01T10:00:00|16|\n"
    queue = read_queue(write(text))
    assert [(job.name, job.devices, job.work) for job in queue.jobs] == [("7_1", 16, 60.0)]


def test_our_own_csv(write):
    rates = write(queues.OWN_RATES, "rates.csv")
    queue = read_queue(write(queues.OWN), rates=rates)
    train, tune = queue.jobs
    assert (train.work, train.device_types, train.shares) == (1000.0, ("v100", "p100"), False)
    assert (tune.work, tune.devices, tune.submitted_s, tune.shares) == (300.0, 1, 60.0, True)
    assert queue.rates.alone(train, Shape("v100", (2,), 0)) == 4.8
    assert queue.rates.alone(train, Shape("v100", (1, 1), 1)) == pytest.approx(4.8 * 0.7)
    assert queue.rates.alone(train, Shape("p100", (1,), 0)) == 1.0
    assert queue.rates.alone(tune, Shape("p100", (1,), 0)) == 1.0


WRONG = {
    "philly": [
        ("66.0,1,66.0", "soon,1,66.0", "line 2, duration"),
        ("07:01:55", "25:01:55", "line 2, timestamp"),
        ("64.0,2,128.0", "64.0,1.5,128.0", "line 3, num_gpus"),
        ("64.0,2,128.0", "-1,2,0", "line 3, duration"),
        ("64.0,2,128.0,", "64.0,2,", "line 3"),
    ],
    "muri": [
        ("5000,2000,", "5000,,", "line 3, iterations"),
        ("1,4,5000", "1,-4,5000", "line 3, num_gpu"),
        ("433,0.6,413,20", "433,0,0,0", "line 2, resource_time_0"),
    ],
    "gavel": [
        ("\t600\t", "\tmany\t", "line 1, total steps"),
        ("\t-1.0\t0\n", "\t-1.0\n", "line 2"),
        ("1000\t2\t", "1000\t0\t", "line 2, scale factor"),
    ],
    "sacct": [
        ("1-01:00:00|COMPLETED|b", "1 day|COMPLETED|b", "line 2, Elapsed"),
        ("2024-03-01T09:59:30", "Unknown", "line 3, Submit"),
        ("gres/gpu=1", "gres/gpu=x", "line 3, AllocTRES"),
        ("|4||bob", "|4|bob", "line 3"),
    ],
    "csv": [
        ("tune,60", "tune,sixty", "line 5, submitted_s"),
        ("tune,60,1", "train,60,1", "line 5, name"),
        ("tune,60,1,,,300", "tune,60,1,,,", "line 5, work and duration_s"),
        ("tune,60,1,,,300", "tune,60,1,,,-3", "line 5, duration_s"),
        ("tune,60,1", "tune,60,0", "line 5, devices"),
        ("p100,no", "p100,perhaps", "line 4, shares"),
        ("devices,profile", "device,profile", "line 2, header"),
        ("devices,profile", "profile,profile", "line 2, header"),
        ("name,", "jobs,", "line 2, header"),
        ("train,0", ",0", "line 4, name"),
    ],
}


@pytest.mark.parametrize(
    ("name", "right", "wrong", "where"),
    [(name, *case) for name, cases in WRONG.items() for case in cases],
)
def test_a_wrong_line_is_an_error_with_file_line_and_field(write, name, right, wrong, where):
    assert TRACES[name].count(right) == 1
    path = write(TRACES[name].replace(right, wrong))
    with pytest.raises(CorruptData) as caught:
        read_queue(path, file_format=name)
    assert caught.value.where.startswith(f"{path}, {where}")
    assert caught.value.fix


def test_an_unknown_column_is_an_error_with_the_nearest_names(write):
    with pytest.raises(CorruptData, match="submitted_s"):
        read_queue(write("name,submited_s,work\na,0,1\n"), file_format="csv")


@pytest.mark.parametrize(
    ("right", "wrong", "where"),
    [
        ("resnet,v100,1,2.5", "resnet,v100,1,0", "line 2, rate"),
        ("resnet,v100,2", ",v100,2", "line 3, profile"),
        ("resnet,v100,2", "resnet,v100,0", "line 3, devices"),
        ("spread", "spred", "line 1, header"),
    ],
)
def test_a_wrong_line_of_rates_is_an_error_as_well(write, right, wrong, where):
    path = write(queues.OWN_RATES.replace(right, wrong), "rates.csv")
    with pytest.raises(CorruptData) as caught:
        read_queue(write(queues.OWN), rates=path)
    assert caught.value.where.startswith(f"{path}, {where}")


@pytest.mark.parametrize(
    ("row", "where"),
    [("train,0,2,resnt,1000,,,", "profile"), ("train,0,2,resnet,,60,,", "duration_s")],
)
def test_a_job_must_fit_its_rates(write, row, where):
    text = queues.OWN.replace("train,0,2,resnet,1000,,v100 p100,no", row)
    with pytest.raises(CorruptData, match=where):
        read_queue(write(text), rates=write(queues.OWN_RATES, "rates.csv"))


def test_rates_of_a_format_without_them_are_refused(write):
    with pytest.raises(UsageError, match="--rates"):
        read_queue(write(queues.PHILLY), rates=write(queues.OWN_RATES, "rates.csv"))


def test_a_trace_without_a_job_that_ran_says_why(write):
    text = "JobID|Submit|Elapsed|State\n1|2024-03-01T10:00:00|00:00:00|PENDING\n"
    with pytest.raises(UsageError, match=r"never ran \(PENDING\)"):
        read_queue(write(text))


def test_the_page_of_the_csv_names_every_column(root):
    text = (root / "docs" / "reference" / "queue-csv.md").read_text()
    assert [column for column in COLUMNS if f"| `{column}` |" not in text] == []


def test_the_examples_of_that_page_are_read(root, write):
    text = (root / "docs" / "reference" / "queue-csv.md").read_text()
    blocks = re.findall(r"(?:^    .+\n)+", text, re.MULTILINE)
    jobs, rates = ("".join(line[4:] + "\n" for line in b.splitlines()) for b in blocks)
    queue = read_queue(write(jobs), rates=write(rates, "rates.csv"))
    assert [job.name for job in queue.jobs] == ["resnet50-0", "debug-1"]
    assert queue.rates.alone(queue.jobs[0], Shape("v100", (1,), 0)) == 380


@pytest.mark.parametrize(
    ("parts", "name", "jobs"),
    [
        (("philly", "philly_shared.csv"), "philly", 28442),
        (("muri", "trace3.csv"), "muri", 992),
        (("muri", "trace1.csv"), "muri", 1494),
    ],
)
def test_published_traces_are_read_whole(parts, name, jobs):
    path = queues.published(*parts)
    assert detect_format(path) == name
    assert len(read_queue(path).jobs) == jobs


def test_all_published_traces_of_gavel_are_read(tmp_path):
    traces = sorted(queues.published("gavel", "traces").rglob("*.trace"))
    assert traces
    rates = read_gavel_rates(queues.published("gavel", "simulation_throughputs.json"))
    assert rates.profiles
    for path in traces:
        assert detect_format(path) == "gavel"
        assert read_queue(path).jobs
