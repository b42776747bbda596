"""One HTML file that shows a run: no scripts, nothing fetched, small whatever the run's length.

The page's content security policy forbids everything but its own style, so that even a name that
slipped through unescaped could do nothing.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from paceline import __version__
from paceline.core.errors import DestinationExists, NotFound
from paceline.core.files import commit_text
from paceline.report import sections
from paceline.report.units import plural

if TYPE_CHECKING:
    from paceline.report.model import Report

_GENERATOR = '<meta name="generator" content="Paceline'
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def write_html(report: Report, path: Path) -> None:
    """Write the page to `path`; an older report there is replaced.

    Raises:
        DestinationExists: something is there that is not a report.
        NotFound: the folder to write to is not there.
        StorageError: the disk is full or the folder not writable.
    """
    if path.is_dir() or (path.exists() and not _is_report(path)):
        raise DestinationExists(
            "will not overwrite what is not a report",
            where=str(path),
            fix="Name another file with --out",
        )
    if not path.parent.is_dir():
        raise NotFound("no such folder", where=str(path.parent), fix="Make it first")
    commit_text(path, render_html(report))


def render_html(report: Report) -> str:
    """Return the page."""
    style = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")
    name = escape(report.run.resolve().name)
    body = "\n".join(
        [
            _head(report),
            sections.key_figures(report),
            sections.time_by_phase(report),
            sections.skew(report),
            sections.step_times(report),
            sections.prediction(report),
            sections.collectives(report),
            sections.memory(report),
            sections.provenance(report),
        ]
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'{_GENERATOR} {escape(__version__)}">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{name} - Paceline report</title>\n<style>\n{style}</style></head>\n"
        f"<body>\n{body}\n<footer>Paceline {escape(__version__)}. All times are measured unless "
        "they are called predicted or modelled.</footer>\n</body></html>\n"
    )


def _head(report: Report) -> str:
    """Return the verdict, and how the run ended."""
    script = escape(str(report.config.get("script", report.run)))
    dropped = ""
    if report.dropped_count:
        dropped = (
            f'<p class="warning">{plural(report.dropped_count, "event")} could not be recorded: '
            "sums of phases may be too small.</p>"
        )
    return (
        f"<header><h1>{script}</h1>"
        f'<p class="verdict">{escape(report.words)}</p>'
        f'<p class="state">{_state(report)}</p>{dropped}</header>'
    )


def _state(report: Report) -> str:
    ranks = plural(report.world_size, "rank")
    if report.result is None:
        return f'<span class="bad">not finished</span>: no result.json. {ranks}.'
    code = report.result.exit_code
    if code == 0:
        return f'<span class="good">finished</span> on {ranks}, exit code 0.'
    return f'<span class="bad">failed</span> on {ranks}, exit code {code}.'


def _is_report(path: Path) -> bool:
    with path.open("rb") as file:
        return _GENERATOR.encode() in file.read(512)
