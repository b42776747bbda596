"""Characterization: cells, intervals, the log, the order of runs, profiles, and who reads them."""

import dataclasses
import json
import math
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.clock import ManualClock
from paceline.core.errors import ConfigError, DestinationExists, NotFound, ScriptFailed, UsageError
from paceline.core.machine_file import library_machine
from paceline.core.processes import StopRequested
from paceline.core.scaling_profile import (
    RankPoint,
    RepeatedFigure,
    ScalingCurve,
    ScalingProfile,
    is_profile,
    read_profile,
)
from paceline.launch.program import Program, ProgramKind
from paceline.perf.transformer import Architecture
from paceline.report.characterization.effects import effects
from paceline.report.characterization.page import render_profile_page
from paceline.report.characterization.words import advice, cautions
from paceline.runs.characterized import planned_runs
from paceline.scheduler.formats.queue_csv import read_jobs, read_rates
from paceline.scheduler.local.jobs.rates import read_given
from paceline.scheduler.placement import Shape
from paceline.studies.characterize import sweep
from paceline.studies.characterize.axes import check_placeholders, fill, make_cells
from paceline.studies.characterize.curves import SweepFacts, limit_of, make_profile
from paceline.studies.characterize.figures import agree, pool, repeated
from paceline.studies.characterize.log import CellRun, SweepLog
from paceline.studies.characterize.measure import read_scores
from paceline.studies.characterize.plans import CellPlans
from paceline.studies.characterize.predicted import predict_profile
from paceline.studies.characterize.study import SweepOptions, make_study
from paceline.studies.characterize.sweep import SweepLimits, run_sweep

AXES = {"batch": ("16", "64"), "storage": ("packed", "files"), "checkpointing": ("off", "on")}
FACTS = SweepFacts(
    program="train", machine="node", device="core", device_type="", axes=AXES, epochs=2, repeats=2
)
MODEL = Architecture(layers=12, hidden=768, heads=12, vocab=30522, sequence=128)
COMMON = {"program": "train.py", "epochs": 2}


def run_of(cell, throughput=100.0, *, repeat=1, failure="", run="001", **more):
    return CellRun(
        key=cell.key,
        name=cell.name,
        ranks=cell.ranks,
        settings=dict(cell.settings),
        repeat=repeat,
        run=run,
        elapsed_s=10.0,
        failure=failure,
        throughput=throughput,
        step_s=0.1,
        **more,
    )


def profile_of(*rates, source="measured", **more):
    """A profile of one curve with throughput by ranks."""
    points = tuple(
        RankPoint(
            ranks=ranks,
            throughput=RepeatedFigure(value=rate, repeats=1),
            efficiency=rate / ranks / rates[0],
            step_s=ranks * 32 / rate,
            phases={"forward": 0.1, "transfer": 0.01 * ranks},
            reduced_bytes=1e6,
        )
        for ranks, rate in zip((1, 2, 4, 8), rates, strict=False)
    )
    curve = ScalingCurve(name="cnn", settings={"batch": "32"}, points=points)
    fields = {"axes": {"batch": ("32",)}, **more}
    return ScalingProfile(program="cnn", machine="node", curves=(curve,), source=source, **fields)


class TestCells:
    def test_one_axis_is_changed_at_a_time_and_all_with_cross(self):
        cells = make_cells("cnn", AXES, (1, 2))
        names = [cell.name for cell in cells[::2]]
        assert names == [
            *("cnn-batch16", "cnn-batch64", "cnn-batch16-files", "cnn-batch16-checkpointing")
        ]
        assert len(make_cells("cnn", AXES, (1, 2), cross=True)) == 2 * 8

    @given(
        axes=st.dictionaries(
            st.sampled_from(["batch", "storage", "lr", "model", "loader_workers"]),
            st.lists(st.integers(1, 99).map(str), min_size=1, max_size=3, unique=True),
            max_size=4,
        ),
        ranks=st.lists(st.integers(1, 64), min_size=1, max_size=3, unique=True),
        cross=st.booleans(),
    )
    def test_cells_have_keys_of_their_own(self, axes, ranks, cross):
        cells = make_cells("train", axes, ranks, cross=cross)
        assert len({cell.key for cell in cells}) == len(cells)
        assert all(set(cell.settings) == set(axes) for cell in cells)
        changes = sum(len(values) - 1 for values in axes.values())
        expected = math.prod(map(len, axes.values())) if cross else 1 + changes
        assert len(cells) == expected * len(ranks)

    def test_names_are_fit_for_files(self):
        (_, cell) = make_cells("org/model", {"data": ("/scratch/a", "/scratch/b, c")}, (1,))
        assert cell.name == "org_model-data-_scratch_b_c"

    def test_a_value_twice_is_refused(self):
        with pytest.raises(UsageError, match="batch has the values 16, 16"):
            make_cells("cnn", {"batch": ("16", "16")}, (1,))
        with pytest.raises(UsageError, match="both be called cnn-fast"):
            make_cells("cnn", {"storage": ("a", "fast"), "optimizer": ("b", "fast")}, (1,))

    def test_arguments_get_the_values(self):
        args = ["--batch={batch}", "{amp}", "--json", "{result}"]
        values = {"batch": "16", "amp": "", "result": "out.json"}
        assert fill(args, values) == ["--batch=16", "--json", "out.json"]

    def test_an_axis_that_does_not_reach_the_program_is_refused(self):
        check_placeholders(["{batch}"], {"batch": ("1",)}, planned=frozenset())
        with pytest.raises(UsageError, match="axis batch does not reach the program"):
            check_placeholders(["--epochs", "{epochs}"], {"batch": ("1",)}, planned=frozenset())
        with pytest.raises(UsageError, match=r"no axis is named \{bach\}.*Did you mean 'batch'"):
            check_placeholders(["{bach}"], {"batch": ("1",)}, planned=frozenset())

    def test_checkpointing_reaches_a_script_by_its_plan_or_its_arguments(self):
        def study(values, *args):
            program = Program(ProgramKind.SCRIPT, __file__)
            axes = {"checkpointing": values}
            return make_study(SweepOptions(axes=axes, ranks=(1,), program=program, args=args))

        plans = CellPlans(
            threads=1, engine="ddp", collectives="torch", predicted={}, recomputes=True
        )
        cells = study(("off", "on")).cells
        assert [plans.plan(cell).plan.recompute for cell in cells] == ["none", "full"]
        study(("no", "yes"), "{checkpointing}")
        with pytest.raises(UsageError, match="checkpointing is no, yes"):
            study(("no", "yes"))

    def test_the_built_in_models_refuse_what_they_do_not_have(self):
        assert len(make_study(SweepOptions(axes={}, ranks=(1, 2))).cells) == 16
        with pytest.raises(UsageError, match="no axis lr"):
            make_study(SweepOptions(axes={"lr": ("1",)}))
        with pytest.raises(UsageError, match=r"optimizer cannot be 'lasr'.*Did you mean 'lars'"):
            make_study(SweepOptions(axes={"optimizer": ("lasr",)}))
        with pytest.raises(UsageError, match="a batch of '0' samples"):
            make_study(SweepOptions(axes={"batch": ("0",)}))


class TestIntervals:
    @given(
        values=st.lists(st.floats(1, 1e6), min_size=2, max_size=6),
        factor=st.floats(0.1, 10),
    )
    def test_an_interval_holds_its_mean_and_scales_with_the_figure(self, values, factor):
        figure = repeated(values)
        assert figure.low <= figure.value * (1 + 1e-9)
        assert figure.value <= figure.high * (1 + 1e-9)
        scaled = repeated([value * factor for value in values])
        assert math.isclose(scaled.low, figure.low * factor, rel_tol=1e-6)
        assert agree(figure, figure)

    def test_repeats_that_happen_to_agree_borrow_the_spread_of_others(self):
        cells = [[100.0, 100.0, 100.0], [90.0, 100.0, 111.0], [80.0, 100.0, 125.0]]
        alone, beside = repeated(cells[0]), repeated(cells[0], pool(cells))
        assert alone.low == alone.high == pytest.approx(100)
        assert beside.low < 90 < 110 < beside.high

    def test_a_single_run_has_no_interval(self):
        assert repeated([5.0], pool([[5.0]])) == RepeatedFigure(value=5.0, repeats=1)

    def test_two_sweeps_of_the_same_machine_agree_as_often_as_stated(self):
        from paceline.core.randomness import make_generator

        rng = make_generator(7, "agreement")
        agreed = total = 0
        for _ in range(60):
            sweeps = []
            for _ in range(2):
                logs = rng.normal(0, 0.05, size=(8, 3))
                pooled = pool(cells := [[math.exp(v) for v in row] for row in logs])
                sweeps.append([repeated(cell, pooled) for cell in cells])
            agreed += sum(agree(a, b) for a, b in zip(*sweeps, strict=True))
            total += 8
        assert agreed / total > 0.95


class TestLog:
    def test_a_line_that_a_kill_cut_short_counts_as_not_written(self, tmp_path):
        first, second = make_cells("cnn", {"batch": ("16",)}, (1, 2))
        with SweepLog(tmp_path, COMMON) as log:
            log.add(run_of(first))
            log.add(run_of(second))
        path = tmp_path / "cells.jsonl"
        path.write_bytes(path.read_bytes()[:-20])
        with SweepLog(tmp_path, COMMON) as log:
            assert [run.key for run in log.runs] == [first.key]
            log.add(run_of(second))
        with SweepLog(tmp_path, COMMON) as log:
            assert log.ended(first)
            assert log.ended(second)

    def test_a_damaged_line_in_between_is_an_error_that_names_it(self, tmp_path):
        with SweepLog(tmp_path, COMMON) as log:
            log.add(run_of(make_cells("cnn", {}, (1,))[0]))
        path = tmp_path / "cells.jsonl"
        path.write_text("{not json}\n" + path.read_text())
        with pytest.raises(ConfigError, match=r"cells.jsonl:1"):
            SweepLog(tmp_path, COMMON)

    def test_two_processes_do_not_share_a_sweep(self, tmp_path):
        with SweepLog(tmp_path, COMMON), pytest.raises(UsageError, match="another process"):
            SweepLog(tmp_path, COMMON)
        SweepLog(tmp_path, COMMON).close()

    def test_another_sweep_and_other_files_are_refused(self, tmp_path):
        SweepLog(tmp_path / "a", COMMON).close()
        with pytest.raises(DestinationExists, match="another epochs") as problem:
            SweepLog(tmp_path / "a", {**COMMON, "epochs": 3})
        assert "epochs was 2, and is now 3" in problem.value.why
        (tmp_path / "b").mkdir()
        (tmp_path / "b" / "thesis.tex").touch()
        with pytest.raises(DestinationExists, match="holds no sweep"):
            SweepLog(tmp_path / "b", COMMON)

    def test_settings_decide_and_not_names_what_has_ended(self, tmp_path):
        (alone,) = make_cells("cnn", {"batch": ("16",)}, (1,))
        more = make_cells("cnn", {"batch": ("16", "64")}, (1,))
        assert alone.name != more[0].name
        with SweepLog(tmp_path, COMMON) as log:
            log.add(run_of(alone))
            assert log.ended(more[0])
            assert not log.ended(more[1])


class _Seen:
    """Progress that is kept."""

    def __init__(self):
        self.ended = []

    def on_begin(self, cell, repeat, left, left_s):
        pass

    def on_status(self, ranks):
        pass

    def on_end(self, run):
        self.ended.append((run.key, run.repeat))


@pytest.fixture
def instant_runs(monkeypatch):
    """Replace runs by entries that take 10 s of a clock each; returns cells that fail."""
    failing = {}

    class Instant:
        def __init__(self, subject, cell, repeat, log, clock, deadline_s):
            self.cell, self.repeat, self.clock = cell, repeat, clock

        def execute(self, progress):
            self.clock.advance(10.0)
            failure = failing.get(self.cell.key, "")
            return run_of(self.cell, repeat=self.repeat, failure=failure)

    monkeypatch.setattr(sweep, "_Run", Instant)
    return failing


class TestSweep:
    CELLS = make_cells("cnn", {"batch": ("16", "64")}, (1, 2))

    def sweep(self, folder, **limits):
        seen = _Seen()
        with SweepLog(folder, COMMON) as log:
            left_out = run_sweep(None, self.CELLS, SweepLimits(**limits), log, ManualClock(), seen)
            return seen.ended, left_out, make_profile(FACTS, self.CELLS, log)

    def test_all_cells_come_before_any_is_repeated(self, tmp_path, instant_runs):
        ended, left_out, _ = self.sweep(tmp_path, repeats=3)
        assert not left_out
        assert [key for key, _ in ended[:4]] == [cell.key for cell in self.CELLS]
        for turn in (ended[4:8], ended[8:]):
            assert sorted(turn) == sorted((cell.key, turn[0][1]) for cell in self.CELLS)

    def test_a_budget_leaves_fewer_repeats_and_says_so(self, tmp_path, instant_runs):
        ended, left_out, profile = self.sweep(tmp_path, repeats=2, budget_s=55)
        assert (len(ended), left_out) == (5, 3)
        assert (len(profile.curves), len(profile.left_out)) == (2, 3)
        assert "left out 3 cells" in " ".join(cautions(profile))
        ended, left_out, profile = self.sweep(tmp_path, repeats=2, budget_s=55)
        assert (len(ended), left_out, profile.left_out) == (3, 0, ())

    def test_what_fails_twice_is_not_run_again_and_is_named(self, tmp_path, instant_runs):
        instant_runs[self.CELLS[3].key] = "out of memory"
        ended, _, profile = self.sweep(tmp_path, repeats=5, budget_s=1000)
        assert sum(key == self.CELLS[3].key for key, _ in ended) == 2
        assert [(cell.ranks, cell.why) for cell in profile.failed] == [(2, "out of memory")]
        assert "Did not run to the end" in cautions(profile)[0]
        instant_runs.clear()
        _, _, profile = self.sweep(tmp_path, repeats=1)
        assert not profile.failed

    def test_a_baseline_that_fails_ends_the_sweep(self, tmp_path, instant_runs):
        instant_runs[self.CELLS[0].key] = "no module named torhc"
        with pytest.raises(ScriptFailed, match="no module named torhc"):
            self.sweep(tmp_path, repeats=3)

    def test_a_run_that_takes_too_long_is_stopped_by_a_signal(self):
        with pytest.raises(StopRequested), sweep._RunDeadline(0.01) as deadline:
            threading.Event().wait(60)
        assert deadline.is_over
        with sweep._RunDeadline(60) as deadline:
            pass
        assert not deadline.is_over


class TestProfile:
    def test_curves_have_efficiency_against_the_fewest_ranks(self, tmp_path):
        cells = make_cells("train", AXES, (1, 2))
        with SweepLog(tmp_path, COMMON) as log:
            for cell in cells[:4]:
                for repeat, noise in ((1, 0.99), (2, 1.01)):
                    rate = 100.0 * noise * (1.5 if cell.ranks == 2 else 1.0)
                    log.add(run_of(cell, rate, repeat=repeat, run=f"{len(log.runs) + 1:03d}",
                                   is_planned=True, scores={"accuracy": 0.9}))  # fmt: skip
            profile = make_profile(FACTS, cells, log)
        assert [curve.name for curve in profile.curves] == ["train-batch16", "train-batch64"]
        first = profile.curves[0]
        assert [point.efficiency for point in first.points] == [1.0, pytest.approx(0.75, rel=1e-3)]
        assert first.efficient_ranks == 1
        assert first.points[0].run == "runs/001"
        assert first.points[0].scores["accuracy"].value == pytest.approx(0.9)
        assert len(profile.left_out) == 4

    def test_advice_says_how_many_ranks_pay_and_what_the_others_wait_for(self):
        words = advice(profile_of(100, 195, 380, 530))
        assert words[0].startswith("More than 4 ranks per job waste 34 % here: on 8 a rank does 66")
        assert "communication takes 70.0 ms more" in words[0]
        assert advice(profile_of(100, 195))[0].startswith("Up to 2 ranks per job none is wasted")
        assert "nothing is known of scaling" in advice(profile_of(100))[0]

    def test_a_change_is_compared_with_the_baseline_alone(self):
        def figure(value):
            return RepeatedFigure(value=value, low=value * 0.98, high=value * 1.02, repeats=3)

        def curve(name, rate, **settings):
            scores = {"accuracy": RepeatedFigure(value=0.5 if rate == 99 else 0.9, repeats=1)}
            point = RankPoint(
                ranks=2, throughput=figure(rate), efficiency=1.0, step_s=0.1, scores=scores
            )
            return ScalingCurve(
                name=name,
                settings={"model": "cnn", "batch": "16", "storage": "packed", **settings},
                points=(point,),
            )

        profile = dataclasses.replace(
            profile_of(100),
            axes={"model": ("cnn", "mlp"), "batch": ("16", "64"), "storage": ("packed", "files")},
            curves=(
                curve("cnn", 100),
                curve("cnn-batch64", 180, batch="64"),
                curve("cnn-files", 99, storage="files"),
                curve("cnn-batch64-files", 150, batch="64", storage="files"),
                curve("mlp", 300, model="mlp"),
                curve("mlp-files", 150, model="mlp", storage="files"),
            ),
        )
        found = {(change.axis, change.value, change.point.throughput.value): change.ratio
                 for change in effects(profile)}  # fmt: skip
        assert found == {
            ("model", "mlp", 300): 3.0,
            ("batch", "64", 180): 1.8,
            ("storage", "files", 99): 0.99,
            ("storage", "files", 150): 0.5,
        }
        words = advice(profile)
        assert any(sentence.startswith("Batch 64 in place of 16: 1.80 times") for sentence in words)
        assert (
            "Storage files in place of packed: no clear difference in throughput; at equal epochs "
            "accuracy 0.500 against 0.900." in words
        )

    def test_the_page_shows_names_as_text(self):
        page = render_profile_page(
            dataclasses.replace(profile_of(100, 195, 380, 530), program="<script>alert(1)")
        )
        assert "<script>alert" not in page
        assert "&lt;script&gt;alert(1)" in page
        assert "More than 4 ranks per job waste 34 %" in page

    def test_what_a_step_goes_to(self):
        assert limit_of({"input": 0.5, "forward": 0.2}) == "data loading"
        assert limit_of({}) == ""

    def test_a_profile_is_known_by_its_content(self, tmp_path):
        (tmp_path / "profile.json").write_text(profile_of(100).to_text())
        assert is_profile(tmp_path)
        assert is_profile(tmp_path / "profile.json")
        assert read_profile(tmp_path) == profile_of(100)
        (tmp_path / "rates.csv").write_text("profile,rate\ncnn,1\n")
        assert not is_profile(tmp_path / "rates.csv")
        assert not is_profile(tmp_path / "none")
        empty = dataclasses.replace(profile_of(100), curves=())
        (tmp_path / "empty.json").write_text(empty.to_text())
        with pytest.raises(ConfigError, match="no measured throughput"):
            read_profile(tmp_path / "empty.json")

    def test_scores_are_the_numbers_of_an_object(self, tmp_path):
        path = tmp_path / "result.json"
        assert read_scores(path) == {}
        path.write_text('{"accuracy": 0.9, "name": "x", "ok": true, "loss": NaN}')
        assert read_scores(path) == {"accuracy": 0.9}


class TestReaders:
    def test_the_scheduler_takes_the_rates_as_they_are(self, tmp_path):
        profile = profile_of(100, 195, 380, 530, device_type="v100")
        (tmp_path / "profile.json").write_text(profile.to_text())
        profiles = read_rates(tmp_path)
        assert profiles["cnn"].alone == {"v100": {1: 100, 2: 195, 4: 380, 8: 530}}
        assert profiles["cnn"].exchange["v100"].message_bytes == 1e6
        jobs = tmp_path / "jobs.csv"
        jobs.write_text("name,devices,profile,work\na,4,cnn,3800\n")
        queue = read_jobs(jobs, tmp_path)
        shape = Shape(device_type="v100", per_node=(4,), level=0)
        assert queue.rates.alone(queue.jobs[0], shape) == 380
        assert read_given([tmp_path], "")[0] == "cnn"

    def test_the_planner_takes_the_runs_that_followed_a_plan(self, tmp_path):
        profile = profile_of(100, 195)
        (tmp_path / "profile.json").write_text(profile.to_text())
        with pytest.raises(NotFound, match="no run of the sweep followed a plan"):
            planned_runs([tmp_path])
        curve = profile.curves[0]
        points = tuple(dataclasses.replace(p, run=f"runs/{p.ranks}") for p in curve.points)
        planned = dataclasses.replace(
            profile, curves=(dataclasses.replace(curve, points=points[::-1]),)
        )
        (tmp_path / "profile.json").write_text(planned.to_text())
        other = tmp_path / "run"
        found = planned_runs([other, tmp_path / "profile.json"])
        assert found == (other, tmp_path / "runs" / "1", tmp_path / "runs" / "2")

    def test_without_a_probe_runs_follow_plans_without_prediction(self, tmp_path, monkeypatch):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        (cell,) = make_cells("train", {"batch": ("16",), "precision": ("bfloat16",)}, (2,))
        plans = CellPlans(
            threads=3, engine="ddp", collectives="torch", predicted={}, target="train.py:step"
        )
        planned = plans.plan(cell)
        assert "paceline probe" in plans.why_not
        assert (planned.estimate, planned.plan.mesh.data, planned.plan.threads) == (None, 2, 3)
        assert planned.plan.precision == "bfloat16"


class TestPredicted:
    """What the study of CLUSTER 2019 found of Summitdev, by the machine files."""

    def profile(self, machine):
        axes = {"batch": ("8", "32")}
        cells = make_cells("bert", axes, (1, 2, 4, 8, 16))
        return predict_profile(library_machine(machine), MODEL, cells, axes)

    def test_batch_and_place_matter_on_shared_pcie_and_not_on_nvlink(self):
        changes = {}
        for machine in ("summitdev", "gtx1080ti-cluster"):
            small, large = self.profile(machine).curves
            node = [curve.point(4).throughput.value for curve in (small, large)]
            changes[machine] = (node[1] / node[0] - 1, abs(small.point(4).spread - 1))
            assert small.points[-1].efficiency < 0.95
        assert max(changes["summitdev"]) < 0.101
        assert min(changes["gtx1080ti-cluster"]) > 0.25

    def test_what_has_to_be_measured_is_refused(self):
        axes = {"batch": ("8",), "storage": ("packed", "files")}
        with pytest.raises(UsageError, match="the effect of storage cannot be predicted"):
            predict_profile(library_machine("summitdev"), MODEL, make_cells("b", axes, (1,)), axes)

    def test_a_predicted_profile_says_so(self):
        profile = self.profile("summitdev")
        assert json.loads(profile.to_text())["source"] == "predicted"
        assert cautions(profile)[0].startswith("Nothing was run")
        assert any("On nodes of their own" in sentence for sentence in advice(profile))
