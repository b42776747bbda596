"""``paceline fed run``: one federation, trained, scored and paid."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from paceline.federated.paid_run import PaidRun


@click.command(
    short_help="Train one federation; score and pay its clients.",
    epilog="Example: paceline fed run federation.toml --out my-federation",
)
@click.argument("config", type=click.Path(path_type=Path), required=False)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("paceline-federation"),
    show_default=True,
    help="New folder for ledger, result and page.",
)
@click.option("--seed", type=int, help="Of everything that is drawn [default: the file's].")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def run(config: Path | None, out: Path, seed: int | None, as_json: bool) -> None:
    """Train the federation that CONFIG describes, with simulated clients on a virtual clock.

    Each new model's updates are scored on samples that the server keeps, and paid from a budget
    that is fixed in advance; what passes no gate is not paid and not used. The ledger is
    in the folder: see `paceline fed ledger`.
    """
    from dataclasses import replace

    from paceline.federated import paid_run, study
    from paceline.federated.config import FederationConfig
    from paceline.report.federation.page import write_federation_page

    given = FederationConfig.small() if config is None else FederationConfig.from_toml(config)
    given = given if seed is None else replace(given, seed=seed)
    done = paid_run.run(given, *study.read_data(given), out)
    report = study.to_report(
        str(config or "20 clients with digits"), given, [done.result], done.pay
    )
    write_federation_page(report, out / "report.html")
    if as_json:
        printed = {
            "config": given.to_json(),
            "result": done.result.to_json(),
            "balances": done.balances,
            "signed": done.is_signed,
        }
        click.echo(json.dumps(printed))
        return
    from rich.console import Console

    from paceline.report.federation.terminal import render_federation

    console = Console(highlight=False)
    console.print(render_federation(report))
    for line in _pay_lines(done, given.clients):
        console.print(line)
    click.echo(f"run: wrote {out}", err=True)


def _pay_lines(done: PaidRun, clients: int) -> list[str]:
    """Return what was paid to whom, in sentences."""
    from paceline.report.federation.payments import conservation, tokens

    pays = sorted(done.pay.by_client.values(), reverse=True)
    middle = pays[len(pays) // 2] if pays else 0
    most = pays[0] if pays else 0
    flows = dict(done.pay.flows)
    lines = [
        "",
        f"Paid: {tokens(sum(pays))} tokens to {len(pays)} of {clients} clients, "
        f"{tokens(middle)} to the median one, {tokens(most)} at most; "
        f"infrastructure {tokens(flows.get('infrastructure', 0))}; "
        f"reimbursed {tokens(flows.get('consumer, reimbursed', 0))}.",
        conservation(done.pay),
    ]
    if not done.is_signed:
        lines.append("The ledger is not signed: pip install 'paceline[ledger]'.")
    return lines
