"""The whole loop on handwritten digits, in about a minute.

Check the machine, pack the images, measure the machine, predict the run, train on two ranks of
which one is slowed on purpose, find out which and why from the traces alone, and set prediction
beside measurement. Every figure is measured or computed in this very run.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from paceline import store
from paceline.core.affinity import allowed_cores, core_binding
from paceline.core.config import Resolved, environment
from paceline.core.errors import UsageError
from paceline.core.files import commit_text, read_text
from paceline.core.foreign_cpu import cpu_use
from paceline.core.record import Record
from paceline.launch.options import RunConfig
from paceline.launch.prepare import claim_folder, prepare
from paceline.launch.program import Program, ProgramKind
from paceline.launch.run import execute
from paceline.probe.doctor import diagnose
from paceline.probe.measure import measure, summary
from paceline.report.compare import PhaseComparison
from paceline.report.model import gather
from paceline.report.page.document import write_html
from paceline.store import PackOptions
from paceline.studies.demo_files import FOLDER, IMAGES, PACK, make_folder, write_images
from paceline.studies.predict import predict

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.core.clock import Clock
    from paceline.core.estimate import Estimate
    from paceline.core.machine import Machine
    from paceline.core.plan_file import PlanFile
    from paceline.probe.doctor import Finding
    from paceline.report.model import Report
    from paceline.trace.format.header import Status

RANKS = 2
EPOCHS = 30
STEPS = EPOCHS * 23  # 1437 training images over two ranks, 32 each
# A process that gets a core takes a slice of about 4 ms, and both ranks wait for it: with a tenth
# of a core every fourth step is longer by that, and the median step just not.
QUIET_RUN_CORES = 0.1
SCRIPT = Path(__file__).with_name("demo_train.py")


@dataclass(frozen=True, kw_only=True, slots=True)
class Injection(Record):
    """The slow-down that the demo injects into one rank; the analysis does not get it.

    Attributes:
        rank: to slow.
        late_ms: by how much in each step of the window.
        cause: data waits in the loader, compute keeps the core busy in the model.
    """

    rank: int = 1
    late_ms: float = 20.0
    cause: Literal["data", "compute"] = "data"

    def __post_init__(self) -> None:
        if not 0 <= self.rank < RANKS:
            raise UsageError(
                f"there is no rank {self.rank}", fix=f"The demo has ranks 0 to {RANKS - 1}"
            )
        if not 0 < self.late_ms <= 1000:
            raise UsageError(f"cannot slow a rank by {self.late_ms:g} ms", fix="Give 1 to 1000 ms")

    @classmethod
    def parse(cls, text: str) -> Injection | None:
        """Return the injection that ``rank,ms``, ``rank,ms,cause`` or ``none`` asks for.

        Raises:
            UsageError: it is none of these.
        """
        if text == "none":
            return None
        parts = text.split(",")
        try:
            rank, late_ms = int(parts[0]), float(parts[1])
            (cause,) = parts[2:] or ["data"]
            if cause not in ("data", "compute"):
                raise ValueError(cause)
        except (ValueError, IndexError):
            raise UsageError(
                f"'{text}' does not say how to slow a rank",
                where="--straggler",
                fix="For example 1,20 or 0,30,compute or none",
            ) from None
        return cls(rank=rank, late_ms=late_ms, cause="data" if cause == "data" else "compute")

    @property
    def window(self) -> tuple[int, int]:
        """First and last step to slow."""
        return STEPS * 2 // 5, STEPS * 7 // 10 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundStraggler(Record):
    """The straggler that the traces show, beside the delay that the slowed rank measured."""

    rank: int
    cause: str
    late_ms: float
    injected_ms: float | None
    first_step: int
    last_step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Injected(Record):
    """The slow-down that the script injected, as the slowed rank measured it."""

    rank: int
    cause: str
    injected_ms: float
    first_step: int
    last_step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoResult(Record):
    """The content of ``paceline-demo/result.json``.

    Attributes:
        test_accuracy: on the fifth of the images that was not trained on.
        images: that were packed.
        steps: that each rank trained.
        straggler: found in the traces; None when no rank was late. `injected_ms` stands beside it
            only if it is the rank that was slowed.
        injected: the rank that the script slowed; None for none.
        phases: seconds per undisturbed step, predicted and measured.
        step_time_error: |predicted / measured - 1| of undisturbed steps.
        foreign_cores: cores that other processes used while it trained, on average; None where the
            kernel does not say.
        disturbed: what other work disturbed, in words: parts of the measurement of the machine, or
            the training. Prediction and measurement then differ for no fault of either.
        report: path of the page.
        verdict: in words.
    """

    kind: Literal["demo"] = "demo"
    test_accuracy: float
    images: int
    steps: int
    straggler: FoundStraggler | None
    injected: Injected | None
    phases: tuple[PhaseComparison, ...]
    step_time_error: float | None
    foreign_cores: float | None = None
    disturbed: tuple[str, ...] = ()
    report: str
    verdict: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """A finished stage of the demo: its name, and its outcome in one or more lines."""

    name: str
    lines: tuple[str, ...]


def run_demo(
    injection: Injection | None,
    *,
    seed: int,
    clock: Clock,
    on_stage: Callable[[Stage], None],
    on_status: Callable[[list[Status]], None],
) -> DemoResult:
    """Run the demo in ``./paceline-demo`` and return its result.

    Args:
        injection: which rank to slow; None for none.
        seed: of the weights and the sample order.
        clock: for waits.
        on_stage: called after each stage.
        on_status: called while it trains, with the ranks' live status.

    Raises:
        PacelineError: of whatever stage fails.
    """
    make_folder()
    on_stage(Stage(name="check", lines=_check_lines(diagnose(Path.cwd()))))
    images = write_images()
    packed = store.pack(store.Folder(IMAGES), PACK, options=PackOptions())
    line = (
        f"{packed.sample_count} images in {packed.class_count} classes: "
        f"files to open per epoch {packed.opens_before} -> {packed.opens_after}"
    )
    on_stage(Stage(name="pack", lines=(line,)))
    machine_path = FOLDER / "machine.json"
    machine = measure(folder=FOLDER, quick=True)
    commit_text(machine_path, machine.to_text())
    on_stage(Stage(name="measure", lines=tuple(summary(machine)[:1])))
    threads = core_binding(allowed_cores(), 0, RANKS, environment()).threads
    target = f"{SCRIPT}:training_step"
    plan = predict(target, ranks=RANKS, threads=threads, machine_path=machine_path)
    commit_text(FOLDER / "plan.json", plan.to_text())
    assert plan.estimate is not None
    on_stage(Stage(name="predict", lines=(_predict_line(plan.estimate),)))
    run = FOLDER / "run"
    before = cpu_use()
    trained = _train(run, injection, seed, machine, plan, clock, on_status)
    after = cpu_use()
    foreign_cores = after.foreign_cores(before) if before and after else None
    report = gather(run, in_detail=True)
    page = run / "report.html"
    write_html(report, page)
    result = dataclasses.replace(
        _result(report, trained, images, page),
        foreign_cores=foreign_cores,
        disturbed=disturbances(machine, foreign_cores),
    )
    commit_text(FOLDER / "result.json", result.to_text())
    return result


def _check_lines(findings: tuple[Finding, ...]) -> tuple[str, ...]:
    return tuple(f"{finding.status:4} {finding.topic:11} {finding.what}" for finding in findings)


def _predict_line(estimate: Estimate) -> str:
    return (
        f"{estimate.step_time_s * 1e3:.2f} ms per step on {RANKS} ranks, "
        f"limited by {estimate.limit}; saved, to be checked below"
    )


def _train(
    run: Path,
    injection: Injection | None,
    seed: int,
    machine: Machine,
    plan: PlanFile,
    clock: Clock,
    on_status: Callable[[list[Status]], None],
) -> dict[str, object]:
    """Train, and return the output of the script: accuracy and the injected slow-down."""
    answer = FOLDER / "trained.json"
    args = ["--result", str(answer), "--epochs", str(EPOCHS), "--seed", str(seed)]
    if injection is not None:
        first, last = injection.window
        args += ["--slow-rank", str(injection.rank), "--slow-ms", str(injection.late_ms)]
        args += ["--slow-cause", injection.cause, "--slow-steps", str(first), str(last)]
    config = RunConfig(ranks=RANKS)
    names = [field.name for field in dataclasses.fields(config)]
    provenance = {**dict.fromkeys(names, "default"), "ranks": "demo"}
    resolved = Resolved(config=config, provenance=provenance)
    program = Program(ProgramKind.SCRIPT, str(SCRIPT))
    job = prepare(program, args, resolved, run, clock, plan=plan)
    execute(
        claim_folder(job),
        machine=machine,
        clock=clock,
        on_status=on_status,
    )
    trained: dict[str, object] = json.loads(read_text(answer))
    return trained


def disturbances(machine: Machine, foreign_cores: float | None) -> tuple[str, ...]:
    """Return in words what other processes disturbed.

    Args:
        machine: as the demo measured it.
        foreign_cores: that other processes used while it trained; None if that is not known.
    """
    found = []
    if machine.disturbed:
        worst = max(machine.disturbed, key=lambda part: part.foreign_cores)
        found.append(
            f"the measurement of this machine, in {len(machine.disturbed)} parts "
            f"({worst.where}, {worst.part}: {worst.why})"
        )
    if foreign_cores is not None and foreign_cores > QUIET_RUN_CORES:
        found.append(f"the training: other processes used {foreign_cores:.2f} cores")
    return tuple(found)


def _result(report: Report, trained: dict[str, object], images: int, page: Path) -> DemoResult:
    injected = Injected.from_json(trained["injected"]) if trained["injected"] else None
    found = None
    if report.stragglers:
        late = report.stragglers[0]
        found = FoundStraggler(
            rank=late.rank,
            cause=late.cause,
            late_ms=late.late_ms,
            injected_ms=injected.injected_ms if injected and injected.rank == late.rank else None,
            first_step=late.first_step,
            last_step=late.last_step,
        )
    accuracy = trained["test_accuracy"]
    assert isinstance(accuracy, float)
    return DemoResult(
        test_accuracy=accuracy,
        images=images,
        steps=report.steps,
        straggler=found,
        injected=injected,
        phases=report.comparison.phases,
        step_time_error=report.comparison.step_time_error,
        report=str(page),
        verdict=report.words,
    )
