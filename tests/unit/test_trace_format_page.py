"""The reference pages say what the code does."""

import re
from pathlib import Path

from paceline.core import errors
from paceline.trace.events import EVENT_DTYPE, Kind
from paceline.trace.files import _BLOCK, _HEADER

DOCS = Path(__file__).parents[2] / "docs"
SIZES = {"u8": 1, "u16": 2, "u32": 4, "i32": 4, "u64": 8, "8 bytes": 8, "40 bytes": 40}


def _layouts(page):
    """Return each table of bytes as (offset, size, field)."""
    layouts = []
    for line in page.splitlines():
        if re.match(r" +byte +type +field", line):
            layouts.append([])
        row = re.match(r" +(\d+)  (u\d+|i32|\d+ bytes) +(\w+)", line)
        if row:
            layouts[-1].append((int(row[1]), SIZES[row[2]], row[3]))
    return layouts


def test_the_trace_pages_byte_layouts_are_the_codes():
    header, block, event = _layouts((DOCS / "reference/trace-format.md").read_text())
    for layout in (header, block, event):
        at = 0
        for offset, size, _ in layout:
            assert offset == at
            at += size
    assert header[-1][0] + header[-1][1] == _HEADER.size
    assert block[-1][0] + block[-1][1] == _BLOCK.size
    fields = {field: (offset, size) for offset, size, field in event}
    assert EVENT_DTYPE.fields is not None
    for name, (dtype, offset, *_) in EVENT_DTYPE.fields.items():
        assert fields[name] == (offset, dtype.itemsize)


def test_the_trace_page_lists_every_kind():
    page = (DOCS / "reference/trace-format.md").read_text()
    listed = {int(row[0]): row[1] for row in re.findall(r"^\| (\d+) \| (\w+) \|", page, re.M)}
    assert listed == {int(kind): kind.name.lower() for kind in Kind}


def test_every_exit_code_is_explained():
    page = (DOCS / "reference/exit-codes.md").read_text()
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", page, re.M)}
    raised = {
        one.exit_code
        for one in vars(errors).values()
        if isinstance(one, type) and issubclass(one, errors.PacelineError)
    }
    assert raised <= listed
