"""``paceline demo``: the whole loop on handwritten digits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import click

if TYPE_CHECKING:
    from rich.table import Table

    from paceline.studies.demo import DemoResult, Stage
    from paceline.trace.format.header import Status

_TITLES = {
    "check": "check    whether this machine is fit for training",
    "pack": "pack     the images into one checksummed data set",
    "measure": "measure  this machine",
    "predict": "predict  the run, before it starts",
}


@click.command(epilog="Example: paceline demo --straggler 0,30,compute")
@click.option(
    "--straggler",
    default="1,20",
    show_default=True,
    metavar="RANK,MS[,CAUSE]",
    help="Rank to slow down, by how many ms, and how (data or compute); or none.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed for weights and order.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on stdout.")
def demo(straggler: str, seed: int, as_json: bool) -> None:
    """See the whole loop: check, pack, measure, predict, train, blame, report.

    Trains a small CNN on two ranks and slows down the data loading of one rank on purpose. All
    files are written below ./paceline-demo, which the next demo replaces.
    """
    click.echo("paceline demo: the whole loop on handwritten digits, in ./paceline-demo", err=True)
    from paceline.core.clock import SystemClock
    from paceline.studies.demo import Injection, run_demo

    injection = Injection.parse(straggler)
    clock = SystemClock()
    with _Screen(clock.now_s()) as screen:
        result = run_demo(
            injection,
            seed=seed,
            clock=clock,
            on_stage=screen.show_stage,
            on_status=lambda ranks: screen.show_status(ranks, clock.now_s()),
        )
    screen.show_result(result)
    if as_json:
        click.echo(result.to_text(), nl=False)


class _Screen:
    """Shows the demo's progress: a live table on a terminal, a line every few seconds elsewhere."""

    line_every_s = 3.0

    def __init__(self, now_s: float) -> None:
        from rich.console import Console
        from rich.live import Live

        self.console = Console(stderr=True, highlight=False)
        self.live = Live(console=self.console, auto_refresh=False, transient=True)
        self.trained = False
        self.printed_s = now_s

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.live.stop()

    def show_stage(self, stage: Stage) -> None:
        """Print a stage's title and outcome."""
        self.console.print(f"\n[bold]{_TITLES[stage.name]}[/bold]")
        for line in stage.lines:
            self.console.print(f"  {line}", markup=False, soft_wrap=True)

    def show_status(self, ranks: list[Status], now_s: float) -> None:
        """Show the step and phase of each rank."""
        if not ranks:
            return
        if not self.trained:
            self.trained = True
            self.console.print("\n[bold]train    on two ranks; one may be slowed on purpose[/bold]")
            if self.console.is_terminal:
                self.live.start()
        if self.console.is_terminal:
            self.live.update(_table(ranks), refresh=True)
        elif now_s - self.printed_s >= self.line_every_s:
            self.printed_s = now_s
            steps = ", ".join(f"rank {status.rank} in step {status.step}" for status in ranks)
            self.console.print(f"  {steps}", markup=False)

    def show_result(self, result: DemoResult) -> None:
        """Print the verdict, prediction beside measurement, and where the report is."""
        from rich.table import Table

        self.live.stop()
        out = self.console
        out.print(f"  test accuracy {result.test_accuracy:.3f} after {result.steps} steps")
        out.print("\n[bold]blame    from the traces alone[/bold]")
        out.print(f"  {result.verdict}", markup=False, soft_wrap=True)
        if result.injected:
            did = result.injected
            out.print(
                f"  what was injected: rank {did.rank} slowed down by {did.injected_ms:.1f} ms "
                f"in steps {did.first_step} to {did.last_step} ({did.cause})",
                soft_wrap=True,
            )
        out.print("\n[bold]compare  predicted and measured, ms per step without a late rank[/bold]")
        table = Table("  phase", box=None, pad_edge=False)
        for head in ("predicted", "measured"):
            table.add_column(head, justify="right")
        for phase in result.phases:
            if phase.predicted_s or phase.measured_s > 1e-5:
                predicted = "-" if phase.predicted_s is None else f"{phase.predicted_s * 1e3:.3f}"
                table.add_row(f"  {phase.name}", predicted, f"{phase.measured_s * 1e3:.3f}")
        out.print(table)
        if result.step_time_error is not None:
            out.print(f"  step time predicted within {result.step_time_error:.0%}")
        for disturbed in result.disturbed:
            out.print(f"  disturbed: {disturbed}", markup=False, soft_wrap=True, style="yellow")
        if result.disturbed:
            out.print("  (a prediction assumes that nothing else runs on the machine)")
        out.print(f"\nreport: {result.report}", markup=False, soft_wrap=True)


def _table(ranks: list[Status]) -> Table:
    from rich.table import Table

    table = Table("  rank", "step", "in", "events", "peak memory", box=None, pad_edge=False)
    for status in ranks:
        table.add_row(
            f"  {status.rank}",
            str(status.step),
            status.phase_name,
            str(status.recorded_count),
            f"{status.peak_memory_bytes / 2**20:.0f} MiB",
        )
    return table
