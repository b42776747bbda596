"""``paceline fed simulate``: strategies on simulated clients, side by side."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.table import Table

    from paceline.federated.study import FederationResult


@click.command(
    short_help="Train a federation of simulated clients; compare strategies.",
    epilog="""\b
Example: paceline fed simulate federation.toml --strategy all --seeds 3
  the file:     docs/guides/federated.md; without one, 100 clients share the digits of scikit-learn
  strategies:   paceline, random, over-selected, power-of-choice, tifl, oort, fedbuff
""",
)
@click.argument("config", type=click.Path(path_type=Path), required=False)
@click.option(
    "--strategy",
    "strategies",
    multiple=True,
    metavar="NAME",
    help="Strategy to simulate, or all; may be given several times [default: the file's].",
)
@click.option("--seed", type=int, help="First seed [default: the file's].")
@click.option(
    "--seeds",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Simulate with so many seeds, one after the other.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def simulate(
    config: Path | None, strategies: tuple[str, ...], seed: int | None, seeds: int, as_json: bool
) -> None:
    """Train a federation of simulated clients as CONFIG describes it, on a virtual clock.

    All strategies see the same clients, devices, data and first models; the training is real. Times
    in the table and in JSON are simulated seconds.
    """
    from paceline.federated import study
    from paceline.federated.config import FederationConfig
    from paceline.federated.strategies import STRATEGIES, make_strategy

    given = FederationConfig() if config is None else FederationConfig.from_toml(config)
    names = STRATEGIES if "all" in strategies else strategies or (given.strategy,)
    for name in names:
        make_strategy(name, given.cohort)  # an unknown one is an error before anything is computed
    data, scores = study.read_data(given)
    first = given.seed if seed is None else seed
    results = []
    for number in range(first, first + seeds):
        for name in names:
            result = study.simulate(given, data, scores, name, number)
            results.append(result)
            click.echo(f"simulate: {_line(result, given.target)}", err=True)
    if as_json:
        click.echo(
            json.dumps({"config": given.to_json(), "results": [r.to_json() for r in results]})
        )
        return
    from rich.console import Console

    Console(highlight=False).print(_table(results, given.target))


def _line(result: FederationResult, target: float) -> str:
    reached = (
        f"{target:.0%} after {result.to_target_s:,.0f} s"
        if result.to_target_s is not None
        else f"{target:.0%} not reached"
    )
    return f"{result.strategy}, seed {result.seed}: {reached}, in the end {result.final:.1%}"


def _table(results: list[FederationResult], target: float) -> Table:
    """Return a row for each strategy, with the medians over the seeds."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("strategy")
    for title in (
        f"s to {target:.0%}",
        "reached",
        "accuracy",
        "worst class",
        "fairness",
        "never used",
        "wasted",
    ):
        table.add_column(title, justify="right")
    by_name: dict[str, list[FederationResult]] = {}
    for result in results:
        by_name.setdefault(result.strategy, []).append(result)
    for name, runs in by_name.items():
        times = [run.to_target_s for run in runs if run.to_target_s is not None]

        def median(field: str, runs: list[FederationResult] = runs) -> float:
            return float(statistics.median(getattr(run, field) for run in runs))

        table.add_row(
            name,
            f"{statistics.median(times):,.0f}" if times else "-",
            f"{len(times)} of {len(runs)}",
            f"{median('final'):.1%}",
            f"{median('worst_class'):.1%}",
            f"{median('fairness'):.2f}",
            f"{median('never_used'):.0%}",
            f"{median('waste'):.0%}",
        )
    return table
