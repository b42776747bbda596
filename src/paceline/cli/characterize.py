"""``paceline characterize``: a sweep over a program's settings, as a profile and a page."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Self

import click

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.core.plan import CollectivesChoice, EngineChoice
    from paceline.core.scaling_profile import ScalingProfile
    from paceline.studies.characterize.axes import Cell
    from paceline.studies.characterize.log import CellRun
    from paceline.trace.format.header import Status

_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_PAGE = "report.html"
DEFAULT_FOLDER = "paceline-characterize"


def _values(_context: click.Context, _option: click.Parameter, text: str | None) -> tuple[str, ...]:
    return tuple(value.strip() for value in text.split(",")) if text else ()


def _numbers(context: click.Context, option: click.Parameter, text: str | None) -> tuple[int, ...]:
    values = _values(context, option, text)
    for value in values:
        if not value.isdecimal() or (int(value) < 1 and option.name != "loader_workers"):
            raise click.BadParameter(f"{value!r} is not a whole number of at least 1")
    return tuple(map(int, values))


def _seconds(_context: click.Context, _option: click.Parameter, text: str) -> float:
    match = re.fullmatch(r"([0-9.]+) ?(s|m|min|h|)", text)
    try:
        seconds = float(match.group(1)) * _SECONDS[match.group(2)] if match else 0.0
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise click.BadParameter(f"{text!r} is no time, as 90s, 20m or 2h")
    return seconds


def _axis(name: str, text: str, metavar: str = "LIST") -> click.Option:
    return click.Option([f"--{name}"], callback=_values, metavar=metavar, help=text)


_AXIS_OPTIONS = (
    _axis("model", "Built-in models: cnn, mlp, transformer; with --predict a transformer, as for "
          "paceline plan --model."),
    _axis("batch", "Samples of each rank in a step."),
    _axis("storage", "packed, files: how the samples are stored."),
    _axis("loader-workers", "Processes of each rank that prepare batches; 0: the loop does."),
    _axis("optimizer", "sgd, lars."),
    _axis("compression", "none, dgc: what ranks exchange of their gradients."),
    _axis("precision", "float32, bfloat16."),
    _axis("checkpointing", "off, on: activations are kept, or computed again."),
)  # fmt: skip


@click.command(
    context_settings={"allow_interspersed_args": False},  # what follows SCRIPT is the script's
    epilog="""\b
Example: paceline characterize
  chosen axes:   paceline characterize --batch 16,64 --storage packed,files --budget 5m
  your script:   paceline characterize --batch 32,128 train.py --batch-size {batch}
  its own flags: paceline characterize --vary lr=0.1,0.4 train.py --lr {lr} --json {result}
  nothing runs:  paceline characterize --predict --machine summitdev --ranks 1,2,4,8 \\
                   --batch 8,32 --model layers=12,hidden=768,heads=12,vocab=30522,sequence=128
Then: paceline queue simulate jobs.csv --rates paceline-characterize/profile.json --cluster 4x8
      paceline plan FILE.py:FUNCTION --from paceline-characterize
""",
)
@click.option(
    "--ranks",
    callback=_numbers,
    metavar="LIST",
    help="Numbers of ranks [default: 1, 2, 4, ... up to the cores].",
)
@click.option(
    "--vary",
    multiple=True,
    metavar="NAME=LIST",
    help="An axis of the script's own; it gets the value where its arguments have {NAME}.",
)
@click.option("--cross", is_flag=True, help="Combine all values, not one change at a time.")
@click.option(
    "--repeats", type=click.IntRange(1), default=3, show_default=True, help="Runs of each cell."
)
@click.option(
    "--budget",
    callback=_seconds,
    default="10m",
    show_default=True,
    metavar="TIME",
    help="Time for all runs of this call, as 90s, 20m, 2h.",
)
@click.option(
    "--limit",
    callback=_seconds,
    default="10m",
    show_default=True,
    metavar="TIME",
    help="Longest time of a single run, which has failed then.",
)
@click.option(
    "--epochs",
    type=click.IntRange(1),
    default=3,
    show_default=True,
    help="Of each run, for the built-in models and where arguments have {epochs}.",
)
@click.option(
    "--threads", type=click.IntRange(1), help="Threads of each rank [default: cores / most ranks]."
)
@click.option(
    "--engine",
    type=click.Choice(["ddp", "fsdp2", "allreduce", "sharded"]),
    default="ddp",
    help="What reduces gradients in a script that calls paceline.training.prepare [default: ddp].",
)
@click.option(
    "--collectives",
    type=click.Choice(["torch", "paceline"]),
    default="torch",
    help="Backend of the ranks' collectives [default: torch].",
)
@click.option("--global-batch", is_flag=True, help="--batch counts the samples of all ranks.")
@click.option(
    "--step",
    "target",
    default="",
    metavar="FILE.py:FUNCTION",
    help="The script's training step, as for paceline plan: runs are predicted, and can then "
    "correct predictions.",
)
@click.option(
    "--machine",
    type=click.Path(path_type=Path),
    help="Machine file, with --predict also a name of the library [default: this host's probe].",
)
@click.option("--predict", is_flag=True, help="Predict the cells on --machine; run nothing.")
@click.option(
    "--jitter",
    type=click.FloatRange(0, 1),
    default=0.0,
    help="With --predict: standard deviation of a rank's step over its mean [default: 0].",
)
@click.option(
    "--device-type",
    default="",
    metavar="NAME",
    help="Type of the devices in the scheduler's clusters [default: any].",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=DEFAULT_FOLDER,
    show_default=True,
    help="Folder of the sweep; one that was interrupted there goes on.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the profile as JSON on stdout.")
@click.option("--dry-run", is_flag=True, help="Print the cells; run nothing.")
@click.argument("script", required=False)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def characterize(  # a flag for each axis and each part of a sweep
    ranks: tuple[int, ...],
    vary: tuple[str, ...],
    cross: bool,
    repeats: int,
    budget: float,
    limit: float,
    epochs: int,
    threads: int | None,
    engine: EngineChoice,
    collectives: CollectivesChoice,
    global_batch: bool,
    target: str,
    machine: Path | None,
    predict: bool,
    jitter: float,
    device_type: str,
    out: Path,
    as_json: bool,
    dry_run: bool,
    script: str | None,
    args: tuple[str, ...],
    **named: tuple[str, ...],
) -> None:
    """Find how a program scales on this machine, and which settings pay.

    Runs SCRIPT, or built-in models on handwritten digits, with each combination of settings on each
    number of ranks, repeated by turns. Lists are separated by commas; the first value is the
    baseline, and one axis is changed at a time. Without any axis a default study runs, in some ten
    minutes. The folder gets profile.json, which queue simulate --rates and plan --from read, and
    report.html with advice. Runs are recorded, see paceline report.
    """
    click.echo(
        f"paceline characterize: {script or _subject_words(predict)}, writing {out}", err=True
    )
    from paceline.core.clock import SystemClock
    from paceline.core.errors import Interrupted, UsageError
    from paceline.launch.program import find_program
    from paceline.studies.characterize.study import SweepOptions, make_study
    from paceline.studies.characterize.sweep import SweepLimits

    axes = {name: values for name, values in named.items() if values} | dict(map(_own_axis, vary))
    if predict:
        if script is not None:
            raise UsageError(
                "a script cannot be predicted: nothing runs",
                where="paceline characterize --predict",
                fix="Leave it out and give --model, as for paceline plan --model",
            )
        _refuse_sweep(out)
        profile = _predicted(axes, ranks, machine, cross=cross, jitter=jitter, kind=device_type)
        _write(profile, out, as_json=as_json, is_new=True)
        return
    options = SweepOptions(
        axes=axes,
        ranks=ranks,
        cross=cross,
        program=find_program(script, is_module=False) if script is not None else None,
        args=args,
        epochs=epochs,
        threads=threads,
        engine=engine,
        collectives=collectives,
        is_global_batch=global_batch,
        target=target,
        machine_path=machine,
        device_type=device_type,
    )
    study = make_study(options)
    for note in study.notes:
        click.echo(f"warning: {note}", err=True)
    click.echo(f"{len(study.cells)} cells, {repeats} runs of each", err=True)
    if dry_run:
        click.echo("\n".join(cell.words for cell in study.cells))
        return
    limits = SweepLimits(repeats=repeats, budget_s=budget, cell_s=limit)
    clock = SystemClock()
    with _SweepScreen(len(study.cells) * repeats) as screen:
        try:
            profile = study.run(out, limits, clock, screen)
        except (Interrupted, KeyboardInterrupt):
            click.echo("characterize: the same command goes on where it was", err=True)
            raise
    _write(profile, out, as_json=as_json)


def _refuse_sweep(out: Path) -> None:
    """Refuse to replace what runs measured by a prediction."""
    from paceline.core.errors import DestinationExists
    from paceline.core.scaling_profile import PROFILE_NAME, is_profile

    is_taken = (out / PROFILE_NAME).exists() and not is_profile(out)
    if is_taken or (out / "sweep.json").exists():
        raise DestinationExists(
            "the folder holds a profile that was measured, or another file of its name",
            where=str(out / PROFILE_NAME),
            fix="Name another folder with --out",
        )


def _subject_words(predict: bool) -> str:
    return "a prediction" if predict else "built-in models"


def _own_axis(text: str) -> tuple[str, tuple[str, ...]]:
    """Return the axis that ``NAME=LIST`` describes; an empty value is one."""
    from paceline.core.errors import UsageError

    name, equals, values = text.partition("=")
    if not equals or not name.isidentifier():
        raise UsageError(
            f"'{text}' is no axis of a sweep",
            where="paceline characterize --vary",
            fix="Give NAME=VALUE,VALUE, as lr=0.1,0.4",
        )
    return name, tuple(value.strip() for value in values.split(","))


def _predicted(
    axes: Mapping[str, tuple[str, ...]],
    ranks: tuple[int, ...],
    machine: Path | None,
    *,
    cross: bool,
    jitter: float,
    kind: str,
) -> ScalingProfile:
    from paceline.core.errors import UsageError
    from paceline.perf.transformer.options import make_architecture
    from paceline.probe.machine_file import load_machine
    from paceline.studies.characterize.axes import make_cells
    from paceline.studies.characterize.predicted import predict_profile

    text = ",".join(axes.get("model", ()))
    if not text or "batch" not in axes:
        raise UsageError(
            "a prediction needs a model and batches",
            where="paceline characterize --predict",
            fix="Give --model, as for paceline plan --model, and --batch",
        )
    varied = {name: values for name, values in axes.items() if name != "model"}
    model = make_architecture(text)
    described = load_machine(machine)
    cells = make_cells(model.name, varied, ranks or (1, 2, 4, 8), cross=cross)
    return predict_profile(described, model, cells, varied, jitter=jitter, device_type=kind)


def _write(profile: ScalingProfile, out: Path, *, as_json: bool, is_new: bool = False) -> None:
    """Write the page, and a profile that no sweep has written; show what follows from it."""
    from rich.console import Console

    from paceline.core.files import commit_text
    from paceline.core.scaling_profile import PROFILE_NAME
    from paceline.report.characterization.page import write_profile_page
    from paceline.report.characterization.terminal import render_profile

    if is_new:
        out.mkdir(parents=True, exist_ok=True)
        commit_text(out / PROFILE_NAME, profile.to_text())
    write_profile_page(profile, out / _PAGE)
    if as_json:
        click.echo(profile.to_text(), nl=False)
    else:
        Console(highlight=False).print(render_profile(profile))
    click.echo(f"characterize: wrote {out / PROFILE_NAME} and {out / _PAGE}", err=True)


class _SweepScreen:
    """Shows the sweep's progress: a live line on a terminal, and a line for each run."""

    def __init__(self, runs: int) -> None:
        import os

        from rich.console import Console
        from rich.live import Live

        # Ranks print into files: what is shown goes to what stderr is before that.
        self._stderr = os.fdopen(os.dup(sys.stderr.fileno()), "w", buffering=1)
        self._console = Console(file=self._stderr, highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._runs = runs
        self._line = ""

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()
        self._stderr.close()

    def on_begin(self, cell: Cell, repeat: int, left: int, left_s: float) -> None:
        """Show which run begins, and what is left of runs and budget."""
        budget = f"{left_s / 60:.1f} min of the budget left"
        self._line = f"run {self._runs - left + 1} of {self._runs}: {cell.words}, {budget}"
        self._show("")

    def on_status(self, ranks: list[Status]) -> None:
        """Show the step of the slowest rank."""
        if ranks:
            self._show(f", step {min(status.step for status in ranks)}")

    def on_end(self, run: CellRun) -> None:
        """Print what a run came to."""
        words = (
            f"failed: {run.failure}"
            if run.failure
            else f"{run.throughput:,.4g} per s in {run.steps:,} steps"
        )
        self._console.print(
            f"{self._line.partition(',')[0]}: {words} ({run.elapsed_s:.1f} s)",
            markup=False,
            soft_wrap=True,
        )

    def _show(self, step: str) -> None:
        if self._console.is_terminal:
            from rich.text import Text

            self._live.update(Text(self._line + step, no_wrap=True), refresh=True)


for _option in reversed(_AXIS_OPTIONS):
    characterize.params.insert(0, _option)
