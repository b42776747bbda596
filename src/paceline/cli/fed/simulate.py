"""``paceline fed simulate``: strategies on simulated clients, side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from paceline.federated.study import FederationResult


@click.command(
    short_help="Train a federation of simulated clients; compare strategies.",
    epilog="""\b
Example: paceline fed simulate federation.toml --strategy all --seeds 3
  the file:     docs/guides/federated.md; without one, 20 clients share the digits of scikit-learn
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
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="HTML page to write; an older report there is replaced.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def simulate(
    config: Path | None,
    strategies: tuple[str, ...],
    seed: int | None,
    seeds: int,
    out: Path | None,
    as_json: bool,
) -> None:
    """Train a federation of simulated clients as CONFIG describes it, on a virtual clock.

    All strategies see the same clients, devices, data and first models; the training is real. Times
    in the table and in JSON are simulated seconds.
    """
    from paceline.federated import study
    from paceline.federated.config import FederationConfig
    from paceline.federated.strategies import STRATEGIES, make_strategy

    if out is not None:  # rather than after minutes of simulating
        from paceline.report.page.document import prepare_page

        prepare_page(out)
    given = FederationConfig.small() if config is None else FederationConfig.from_toml(config)
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
        printed = {"config": given.to_json(), "results": [result.to_json() for result in results]}
        click.echo(json.dumps(printed))
    report = study.to_report(str(config or "20 clients with digits"), given, results)
    if not as_json:
        from rich.console import Console

        from paceline.report.federation.terminal import render_federation

        Console(highlight=False).print(render_federation(report))
    if out is not None:
        from paceline.report.federation.page import write_federation_page

        write_federation_page(report, out)
        click.echo(f"simulate: wrote {out}", err=True)


def _line(result: FederationResult, target: float) -> str:
    reached = (
        f"{target:.0%} after {result.to_target_s:,.0f} s"
        if result.to_target_s is not None
        else f"{target:.0%} not reached"
    )
    return f"{result.strategy}, seed {result.seed}: {reached}, in the end {result.final:.1%}"
