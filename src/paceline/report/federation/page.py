"""The page of a federation: strategies side by side, accuracy over time, participation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.report.federation.curves import (
    accuracy_by_class,
    accuracy_by_cluster,
    accuracy_by_group,
    accuracy_over_time,
    participation,
)
from paceline.report.federation.figures import (
    by_class,
    by_cluster,
    by_group,
    comparison,
    time_to_accuracy,
    unpaid,
    verdict,
)
from paceline.report.federation.payments import balances, conservation, flows, pay_by_client
from paceline.report.page.chart import render
from paceline.report.page.document import render_page, write_page
from paceline.report.page.markup import details, header, section, table

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.report.federation.model import FederationReport

_STRATEGIES = (
    "Medians over the seeds. Fairness is Jain's index of the used updates per client: 1 if all "
    "took part equally. Clients that were never online could not be used by any strategy. Wasted "
    "is the share of the clients' working time whose results were thrown away."
)


_CLASSES = "Shares of the test samples of each class that the model gets right, in the end."
_GROUPS = (
    "Clients in thirds by the seconds that a round takes them. A client's accuracy is that of the "
    "model on samples with the client's mix of classes; a tenth of the clients lie below the "
    "poorest tenth's figure."
)
_CLUSTERS = (
    "Clients whose updates are alike, the poorest cluster first: found from the updates alone, so "
    "that it needs no labels. Accuracies are what clients reported last, of the models that they "
    "were sent, on their own samples; those of the first seed."
)
_UNPAID = (
    "Updates that were not used or did not come, and so were not paid. Lost: the client's work "
    "did not arrive. Deadline: no answer within four times the expected seconds. Memory: the "
    "client's did not suffice."
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
        )
    )
    if report.pay is not None and not report.pay.is_sound:
        cautions.append(report.pay.verification)
    body = [
        header(report.title, cautions, verdict(report), report.summary),
        "<main>",
        section("Strategies", _STRATEGIES, table(*comparison(report))),
        section(
            "Accuracy",
            "Seconds to an accuracy are medians over the seeds; a dash: half of them did not reach "
            "it. The accuracy is the mean of three evaluations.",
            render(accuracy_over_time(report)),
            table(*time_to_accuracy(report)),
        ),
        *_accuracy_of_parts(report),
        section(
            "Participation",
            "Clients in the order of their used updates, with the first seed. A flat line is even "
            "participation.",
            render(participation(report)),
        ),
        *_unpaid(report),
        *_pay(report),
        "</main>",
    ]
    return render_page(report.title, "\n".join(body), "All times are simulated.")


def _accuracy_of_parts(report: FederationReport) -> list[str]:
    """Return the sections on classes, groups and clusters of clients."""
    first = next((run for run in report.runs if run.by_class.size), None)
    if first is None:
        return []
    shown = f" The curves are those of {first.strategy} with seed {first.seed}."
    classes = section(
        "Classes", _CLASSES + shown, render(accuracy_by_class(first)), table(*by_class(report))
    )
    groups = section(
        "Groups of clients",
        _GROUPS + shown,
        render(accuracy_by_group(first)),
        table(*by_group(report)),
    )
    return [classes, groups, *_clusters(report)]


def _clusters(report: FederationReport) -> list[str]:
    first = next((run for run in report.runs if run.by_cluster.size), None)
    if first is None:
        return []
    shown = f" The curves are those of {first.strategy} with seed {first.seed}."
    chart = render(accuracy_by_cluster(first))
    return [section("Clusters of clients", _CLUSTERS + shown, chart, table(*by_cluster(report)))]


def _unpaid(report: FederationReport) -> list[str]:
    heads, rows = unpaid(report)
    return [section("Unpaid", _UNPAID, table(heads, rows, names=len(heads) - 1))] if rows else []


def _pay(report: FederationReport) -> list[str]:
    pay = report.pay
    if pay is None:
        return []
    return [
        section(
            "Tokens",
            conservation(pay),
            table(*flows(pay), total=True),
            render(pay_by_client(pay)),
            details(f"The {len(pay.by_client)} clients that were paid", table(*balances(pay))),
        )
    ]
