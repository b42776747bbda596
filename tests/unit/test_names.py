"""Names and words of the source: one meaning per class name, and the field's own terms."""

import re
from collections import defaultdict
from pathlib import Path

import pytest

import paceline

SOURCE = Path(paceline.__file__).parent
ROOT = Path(__file__).parent.parent.parent
MODULES = sorted(SOURCE.rglob("*.py"))
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
TESTS = sorted(path for folder in ("tests", "bench") for path in (ROOT / folder).rglob("*.py"))
NATIVE = sorted([*ROOT.glob("native/**/*.[ch]pp"), *ROOT.glob("native/**/*.[ch]")])

# Pronouns in place of nouns, and words of our own where the field has one (docs/glossary.md).
# The left side of a pair is what a reader would have to look up.
WORDS = {
    r"for one in": "name the element: for rank in ranks",
    r"whence|whoever|whomever": "name the subject",
    r"litter(ed)?": "stale (orphaned) files",
    r"mend(s|ed|ing)?": "repair, fix",
    r"wary|distrust(s|ed)?": "revalidate, invalidate",
    r"own time": "compute time since the last sync",
    r"lateness": "skew",
    r"(is|are|was|be) told": "log, report, on_progress",
}


@pytest.fixture(scope="module")
def texts():
    return {path: path.read_text() for path in [*MODULES, *PAGES, *NATIVE]}


def test_class_names_are_unique():
    places = defaultdict(list)
    for path in MODULES:
        for name in re.findall(r"^class (\w+)", path.read_text(), re.M):
            places[name].append(str(path.relative_to(SOURCE)))
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


@pytest.mark.parametrize("pattern", WORDS)
def test_the_text_uses_the_terms_of_the_field(pattern, texts):
    used = re.compile(rf"(?<![`'\"])\b(?:{pattern})\b")
    found = [
        f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]}"
        for path, text in texts.items()
        for match in used.finditer(text)
    ]
    assert not found, f"instead: {WORDS[pattern]}"


def test_tests_and_benchmarks_name_the_elements_of_a_loop():
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in TESTS
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(r"\bfor one in\b(?!\")|\blambda one\b(?!\")", line) and path != Path(__file__)
    ]
    assert not found
