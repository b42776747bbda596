"""Tables of the terminal for any names, numbers and widths: nothing is cut, and sums are sums."""

import io
import re

from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from support.examples import examples

from paceline.report.columns import divided, fitted, total_width, widths, wrapped
from paceline.report.fitting_table import FittingTable
from paceline.report.units import (
    rounded_parts,
    seconds_that_add_up,
    shares_that_add_up,
    shown_parts,
)

FEW = settings(max_examples=examples(20))  # each prints a table
NUMBER = st.from_regex(r"[0-9]{1,3}(,[0-9]{3})?(\.[0-9]{1,2})? (ms|%|GB/s)", fullmatch=True)
WORD = st.text("abcdefghijklmnopqrstuvwxyz", min_size=1, max_size=11)
NAME = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=90)
PARTS = st.lists(st.floats(0, 1e5, allow_subnormal=False), min_size=1, max_size=11)


@st.composite
def tables(draw):
    names, numbers = draw(st.integers(1, 2)), draw(st.integers(1, 9))
    head = st.lists(WORD, min_size=1, max_size=3).map(" ".join)
    heads = draw(st.lists(head, min_size=names + numbers, max_size=names + numbers))
    row = st.tuples(*[NAME] * names, *[NUMBER] * numbers)
    rows = draw(st.lists(row, min_size=1, max_size=5))
    # Headings of names are one word here: what wraps is a script's own text.
    heads[:names] = [head.split(" ")[0] for head in heads[:names]]
    return FittingTable(heads=tuple(heads), rows=tuple(rows), names=names)


def _printed(table, width, encoding="utf-8"):
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="replace")
    Console(width=width, file=file, highlight=False).print(table)
    file.flush()
    return file.buffer.getvalue().decode(encoding)


@FEW
@given(tables(), st.integers(80, 200))
def test_tables_fit_and_hold_all_headings_and_numbers(table, width):
    shown = _printed(table, width)
    lines = shown.splitlines()
    assert max(map(cell_len, lines)) <= width
    assert "…" not in shown
    for head in table.heads:
        assert any(head in line for line in lines)
    for row in table.rows:
        for number in row[table.names :]:
            assert any(re.search(rf"(^|\s){re.escape(number)}", line) for line in lines)


@FEW
@given(tables())
def test_an_ascii_terminal_gets_ascii_rules(table):
    assert "─" not in _printed(table, 80, encoding="ascii")


def test_a_letter_without_width_is_kept():
    assert wrapped("\ud7b0", 12) == ["\ud7b0"]


@FEW
@given(tables())
def test_names_are_wrapped_without_loss(table):
    for row in table.rows:
        for name in row[: table.names]:
            lines = wrapped(name, 12)
            assert "".join(lines) == name
            assert max(map(cell_len, lines)) <= 12


@given(st.lists(st.integers(1, 40), min_size=2, max_size=12), st.integers(20, 120))
def test_each_column_is_in_one_of_the_tables(sizes, limit):
    parts = divided(sizes, limit, names=1)
    assert [column for part in parts for column in part[1:]] == list(range(1, len(sizes)))
    for part in parts:
        assert part[0] == 0
        assert total_width([sizes[column] for column in part]) <= limit or len(part) == 2


@FEW
@given(tables(), st.integers(60, 120))
def test_shortened_names_leave_room_for_the_widest_number(table, limit):
    sizes = fitted(widths(table.heads, table.rows), limit, names=table.names)
    fixed = total_width(sizes[: table.names])
    assert all(fixed + 2 + size <= limit for size in sizes[table.names :])


@given(PARTS)
def test_rounded_parts_add_up(parts):
    found = rounded_parts(parts)
    assert abs(sum(found) - sum(parts)) <= 0.5 + 1e-6 * sum(parts)
    assert all(abs(whole - part) < 1 for whole, part in zip(found, parts, strict=True))


@given(PARTS)
def test_shown_seconds_add_up_to_the_shown_sum(parts):
    *shown, total = seconds_that_add_up(parts)
    assert len({text.split(" ")[1] for text in (*shown, total)}) == 1
    numbers = [float(text.split(" ")[0].replace(",", "")) for text in (*shown, total)]
    assert abs(sum(numbers[:-1]) - numbers[-1]) < 1e-6 * max(1.0, numbers[-1])


@given(PARTS)
def test_shown_shares_add_up_to_all(parts):
    shares = [float(text.removesuffix(" %")) for text in shares_that_add_up(parts)]
    assert round(sum(shares), 6) == (100 if sum(parts) > 0 else 0)


@given(PARTS)
def test_what_is_left_out_would_be_shown_as_nothing(parts):
    whole = {str(i): part for i, part in enumerate(parts)}
    shown = shown_parts(tuple(whole), [whole])
    left_out = sum(part for name, part in whole.items() if name not in shown)
    assert left_out <= 0.0005 * len(parts) * sum(parts) + 1e-12
