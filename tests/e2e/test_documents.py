"""The documents hold: links lead somewhere, verbs exist, and what a reader is told to run runs."""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli.app import VERBS
from paceline.launch.options import RunConfig
from paceline.store import LoaderConfig, PackOptions
from paceline.training.options import TrainingConfig

ROOT = Path(__file__).parent.parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
DEADLINE_S = 240


def _blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere_and_verbs_exist(page):
    text = page.read_text()
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text)]
    inside = [link for link in links if link and "://" not in link]
    assert not [link for link in inside if not (page.parent / link).exists()]
    verbs = re.findall(r"(?:`|\$ |^ {4}|&& )paceline ([a-z]+)", text, re.MULTILINE)
    assert not [verb for verb in verbs if verb not in VERBS]


def test_every_page_can_be_found_from_the_readme():
    seen, ahead = set(), [ROOT / "README.md"]
    while ahead:
        page = ahead.pop()
        if page in seen or page.suffix != ".md" or not page.exists():
            continue
        seen.add(page)
        links = re.findall(r"\]\(([^)\s#]+)", page.read_text())
        ahead += [(page.parent / link).resolve() for link in links if "://" not in link]
    assert not [str(page.relative_to(ROOT)) for page in PAGES if page not in seen]


@pytest.mark.campaign("guides")
@pytest.mark.parametrize(
    "name",
    [
        *("tutorial/late-rank.md", "guides/trust.md", "guides/predict.md", "guides/scale.md"),
        *("guides/load.md", "guides/node-reader.md", "guides/start.md", "guides/collectives.md"),
        *("guides/wait-states.md", "guides/rebalancing.md"),
        "guides/remedies.md",
        "guides/tune.md",
        "guides/export.md",
        "guides/data-parallel.md",
        "guides/pacing.md",
        "guides/pipeline.md",
        "guides/tensor-parallel.md",
        "guides/decoding.md",
        "guides/compression.md",
        "guides/characterize.md",
        "guides/cpu-budget.md",
        "guides/queue-local.md",
        "guides/queue.md",
        "guides/large-batch.md",
        "guides/mixed-precision.md",
        "guides/in-place.md",
        "guides/codecs.md",
        "guides/posix.md",
        "guides/pipeline-schedules.md",
        "guides/out-of-core.md",
        "guides/store-nodes.md",
        "guides/federated.md",
        "guides/federated-contribution.md",
        "guides/federated-ledger.md",
    ],
)
def test_what_a_page_tells_to_run_runs(tmp_path, name):
    pytest.importorskip("torch")
    page = ROOT / "docs" / name
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for block in _blocks(page, "python"):
        file = re.match(r"# (\w+\.py)\n", block)
        assert file, f"a block of {name} does not name its file"
        (tmp_path / file.group(1)).write_text(block)
    environ = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    done = subprocess.run(
        ["bash", "-e", "-c", "".join(_blocks(page, "sh"))],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    if name.startswith("tutorial"):
        assert re.search(r"Rank 1 arrives \d\d ms late .*because of data loading", done.stdout)


@pytest.mark.parametrize(
    ("verb", "options"),
    [
        *(("run", RunConfig), ("loader", LoaderConfig)),
        *(("training", TrainingConfig), ("pack", PackOptions)),
    ],
)
def test_the_page_of_configuration_lists_each_key(verb, options):
    text = (ROOT / "docs/reference/configuration.md").read_text()
    keys = re.findall(rf"^\| `{verb}` \| `(\w+)`", text, re.MULTILINE)
    assert keys == [field.name for field in dataclasses.fields(options)]
