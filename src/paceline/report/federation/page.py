"""The page of a federation: strategies side by side, accuracy over time, participation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.report.federation.curves import accuracy_over_time, participation
from paceline.report.federation.figures import comparison, verdict
from paceline.report.page.chart import render
from paceline.report.page.document import render_page, write_page
from paceline.report.page.markup import header, section, table

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.report.federation.model import FederationReport

_STRATEGIES = (
    "Medians over the seeds. Fairness is Jain's index of the used updates per client: 1 if all "
    "took part equally. Clients that were never online could not be used by any strategy. Wasted "
    "is the share of the clients' working time whose results were thrown away."
)


def write_federation_page(report: FederationReport, path: Path) -> None:
    """Write the page to `path`; an older report there is replaced. Errors as `write_page`."""
    write_page(render_federation_page(report), path)


def render_federation_page(report: FederationReport) -> str:
    """Return the page."""
    cautions = list(
        dict.fromkeys(
            f"{run.strategy}, seed {run.seed}: {alarm}"
            for run in report.runs
            for alarm in run.alarms
            if "diverges" in alarm
        )
    )
    body = [
        header(report.title, cautions, verdict(report), report.summary),
        "<main>",
        section("Strategies", _STRATEGIES, table(*comparison(report))),
        section("Accuracy", "", render(accuracy_over_time(report))),
        section(
            "Participation",
            "Clients in the order of their used updates, with the first seed. A flat line is even "
            "participation.",
            render(participation(report)),
        ),
        "</main>",
    ]
    return render_page(report.title, "\n".join(body), "All times are simulated.")
