"""The reference pages say what the code does."""

import re
from pathlib import Path

from paceline.core import errors
from paceline.trace.format.events import EVENT_DTYPE, FORMAT_VERSION, IDLE, Kind, LocationType
from paceline.trace.format.files import BLOCK, LOCATION
from paceline.trace.format.header import FIXED_CHECKSUM_AT, FIXED_END, HEADER, LIVE_END
from paceline.trace.format.progress import PROGRESS
from paceline.trace.format.version1 import EVENT_DTYPE_V1

DOCS = Path(__file__).parents[2] / "docs"
SIZES = {
    "u8": 1,
    "u16": 2,
    "u32": 4,
    "i32": 4,
    "u64": 8,
    "6 bytes": 6,
    "8 bytes": 8,
    "16 bytes": 16,
    "40 bytes": 40,
}


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


def _page():
    return (DOCS / "reference/trace-format.md").read_text()


def test_the_trace_pages_byte_layouts_are_the_codes():
    header, progress, block, group, location, event, event_v1 = _layouts(_page())
    for layout in (header, progress, block, group, location, event, event_v1):
        at = 0
        for offset, size, _ in layout:
            assert offset == at
            at += size
    structs = (HEADER, PROGRESS, BLOCK, LOCATION)
    for layout, struct in zip((header, progress, block, location), structs, strict=True):
        assert layout[-1][0] + layout[-1][1] == struct.size
    for layout, dtype in ((event, EVENT_DTYPE), (event_v1, EVENT_DTYPE_V1)):
        fields = {field: (offset, size) for offset, size, field in layout}
        assert dtype.fields is not None
        assert fields == {
            name: (offset, kind.itemsize) for name, (kind, offset, *_) in dtype.fields.items()
        }


def test_the_trace_page_says_what_the_headers_checksums_are_of():
    page = _page()
    (header, *_) = _layouts(page)
    at = {field: offset for offset, _, field in header}
    assert f"# The trace format, version {FORMAT_VERSION}\n" in page
    assert at["fixed_checksum"] == FIXED_CHECKSUM_AT
    assert at["step"] == FIXED_END
    assert at["live_checksum"] == LIVE_END
    assert f"of bytes 0 to {FIXED_CHECKSUM_AT - 1}, then {FIXED_CHECKSUM_AT + 4} to 79" in page
    assert f"of bytes {FIXED_END} to {LIVE_END - 1} of the closed file" in page


def test_the_trace_page_lists_every_kind_and_type_of_location():
    page = _page()
    listed = {int(row[0]): row[1] for row in re.findall(r"^\| (\d+) \| (\w+) \|", page, re.M)}
    assert listed == {int(kind): kind.name.lower() for kind in Kind}
    assert IDLE not in listed
    (types,) = re.findall(r"u32       type +(1 process.*)", page)
    words = {int(number): word for number, word in re.findall(r"(\d) (\w+)", types)}
    assert words == {int(kind): kind.name.lower() for kind in LocationType}


def test_every_exit_code_is_explained():
    page = (DOCS / "reference/exit-codes.md").read_text()
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", page, re.M)}
    raised = {
        error.exit_code
        for error in vars(errors).values()
        if isinstance(error, type) and issubclass(error, errors.PacelineError)
    }
    assert raised <= listed
