"""The page of a queue: policies side by side, cumulative curves, waiting, devices over time."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from paceline.report.page.chart import render
from paceline.report.page.document import render_page, write_page
from paceline.report.page.markup import details, header, section, table
from paceline.report.queue.curves import completion_times, jobs_done
from paceline.report.queue.figures import comparison, verdict, waiting
from paceline.report.queue.gantt import colours_of, gantt

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.report.queue.model import QueueReport

_POLICIES = (
    "JCT is the completion time of a job, from its submission to its end. rho is its finish-time "
    "fairness: above 1 the job did worse than with an equal share of the cluster all the time. "
    "Allocated and useful are shares of the devices' time until the makespan: held by jobs, and as "
    "much as their work takes alone at its best. The lower bound is every job alone, at once."
)


def write_queue_page(report: QueueReport, path: Path) -> None:
    """Write the page to `path`; an older report there is replaced. Errors as `write_page`."""
    write_page(render_queue_page(report), path)


def render_queue_page(report: QueueReport) -> str:
    """Return the page."""
    figures = [run.figures for run in report.runs]
    body = [
        header(
            report.title,
            report.cautions,
            verdict([run.figures for run in report.runs]),
            report.summary,
        ),
        "<main>",
        section("Policies", _POLICIES, table(*comparison(figures))),
        section("Jobs done", "", render(jobs_done(report.runs))),
        section(
            "Completion times",
            "A line that is lower everywhere is a policy that is better for short and long jobs.",
            render(completion_times(report.runs)),
        ),
        section(
            "Waiting",
            "Before the first start, by devices of the job: the mean and the 99th percentile.",
            table(*waiting(figures)),
        ),
        _devices(report),
        "</main>",
    ]
    return render_page(report.title, "\n".join(body), "All times are simulated.")


def _devices(report: QueueReport) -> str:
    """Return devices over time, for the first policy open and for the others folded away."""
    parts: list[str] = []
    colours = colours_of(report.runs)
    end_s = max((held.end_s for run in report.runs for held in run.held), default=0.0)
    for i, run in enumerate(report.runs):
        if not run.held:
            continue
        chart, note = gantt(run, report.nodes, name=f"devices-{i}", end_s=end_s, colours=colours)
        shown = f'<p class="note">{escape(note)}</p>{render(chart)}'
        parts.append(
            f"<h3>{escape(run.figures.policy)}</h3>{shown}"
            if not parts
            else details(run.figures.policy, shown)
        )
    return section("Devices over time", "", *parts) if parts else ""
