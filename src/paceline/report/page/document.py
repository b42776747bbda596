"""HTML files that show a run or a queue: nothing fetched, small whatever the length.

The page's content security policy forbids everything but its own style and its own script, which is
named by its digest, so that even a name that slipped through unescaped could do nothing.
"""

from __future__ import annotations

import base64
import hashlib
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from paceline import __version__
from paceline.core.files import check_replaceable, commit_text
from paceline.report.page import (
    data_nodes,
    efficiency,
    loader,
    memory,
    node_activity,
    out_of_core,
    overview,
    pipeline,
    prediction,
    provenance,
    remedies,
    sampled,
    skew,
    strips,
    times,
    traffic,
)

if TYPE_CHECKING:
    from paceline.report.model import Report

_GENERATOR = '<meta name="generator" content="Paceline'


def write_html(report: Report, path: Path) -> None:
    """Write the page of a run to `path`; an older report there is replaced.

    Raises:
        DestinationExists: something is there that is not a report.
        NotFound: the folder to write to is not there.
        StorageError: the disk is full or the folder not writable.
    """
    prepare_page(path)
    commit_text(path, render_html(report))


def write_page(page: str, path: Path) -> None:
    """Write a page that `render_page` made; errors as `write_html`."""
    prepare_page(path)
    commit_text(path, page)


def prepare_page(path: Path) -> None:
    """See that a page can be written to `path`; errors as `write_html`."""
    check_replaceable(path, _is_report, what="a report", fix="Name another file with --out")


def render_html(report: Report) -> str:
    """Return the page of a run."""
    body = "\n".join(
        [
            overview.head(report),
            "<main>",
            overview.advice(report),
            overview.key_figures(report),
            times.by_phase(report),
            strips.timeline(report),
            skew.skew_by_step(report),
            efficiency.efficiency(report),
            remedies.remedies(report),
            pipeline.batches(report),
            times.by_step(report),
            node_activity.activity(report),
            times.host_work(report),
            sampled.layers(report),
            prediction.typical_step(report),
            traffic.collectives(report),
            efficiency.matrix(report),
            loader.ceilings(report),
            data_nodes.nodes(report),
            memory.peaks(report),
            out_of_core.transfers(report),
            provenance.sources(report),
            "</main>",
        ]
    )
    return render_page(
        report.run.resolve().name,
        body,
        "All times are measured unless they are called predicted or modelled.",
    )


def render_page(title: str, body: str, footer: str) -> str:
    """Return a page with the style, script and policy of all reports.

    Args:
        title: of the window, as text.
        body: markup.
        footer: what to know of all figures, as text.
    """
    folder = Path(__file__).parent
    style = (folder / "page.css").read_text(encoding="utf-8")
    script = (folder / "page.js").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'{_GENERATOR} {escape(__version__)}">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_policy(script)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)} - Paceline report</title>\n<style>\n{style}</style></head>\n"
        f"<body>\n{body}\n<footer>Paceline {escape(__version__)}. {escape(footer)}</footer>\n"
        f"<script>{script}</script>\n</body></html>\n"
    )


def _policy(script: str) -> str:
    """Return the content security policy of a page with this script."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def _is_report(path: Path) -> bool:
    with path.open("rb") as file:
        return _GENERATOR.encode() in file.read(512)
