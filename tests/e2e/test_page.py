"""The page in a browser: its script runs under its own policy, zooms, and asks for nothing."""

import re
import shutil
import subprocess

import pytest
from support.traces import Late, data_parallel, write_run

from paceline.report.model import gather
from paceline.report.page.document import write_html

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
DEADLINE_S = 120

pytestmark = [
    pytest.mark.campaign("e2e"),
    pytest.mark.skipif(BROWSER is None, reason="neither chromium nor google-chrome is installed"),
]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    run = write_run(folder / "run", data_parallel(2, 700, late=(Late(1, 18, 200, 400),)))
    write_html(gather(run), folder / "report.html")
    return folder / "report.html"


def _shown(page, fragment=""):
    """Return the page as the browser has it after its script has run."""
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    options.append(f"--user-data-dir={page.parent / 'profile'}")
    done = subprocess.run(
        [BROWSER, *options, page.as_uri() + fragment],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _chart(shown, name):
    return re.search(rf'<figure[^>]* id="{name}".*?</figure>', shown, re.DOTALL).group()


def test_the_script_gives_each_chart_its_controls(page):
    shown = _shown(page)
    for name in ("time-by-phase", "skew", "step-time"):
        chart = _chart(shown, name)
        assert chart.count("<button") == 3
        assert 'viewBox="0 0 1000 ' in chart


def test_charts_over_steps_open_on_the_steps_that_are_asked_for(page):
    shown = _shown(page, "#steps=210-230")
    for name in ("skew", "step-time"):
        chart = _chart(shown, name)
        assert "steps 210 to 230 of 700" in chart
        assert 'viewBox="300 0 30' in chart
    # Rank 1 is late in all of these steps, rank 0 in none: the script drew one row of cells.
    cells = re.findall(r"M\d+ (\d)h", _chart(shown, "skew"))
    assert set(cells) == {"1"}
    assert 21 <= len(cells) <= 23
    assert "0 0 1000" in _chart(shown, "time-by-phase")
