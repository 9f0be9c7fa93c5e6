"""The compatibility page is complete and says nothing without a test that shows it.

How a row of its tables is written: ``| W-1 | what vLLM-Omni does | what omni_trio does | why | tests |``. Tests are
given as ``tests/test_runtime.py::test_bad_input``, each between backquotes, with a space between two.
"""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "compatibility.md"
TEXT = PAGE.read_text(encoding="utf-8")
ROWS = {
    row.split(" | ")[0].removeprefix("| "): row.removesuffix(" |").split(" | ")[1:]
    for row in TEXT.splitlines()
    if re.match(r"\| W-\d", row)
}
NUMBERS = [f"W-{number}" for number in range(1, 70)]
TEST = re.compile(r"`((?:tests|property_tests)/test_\w+\.py)::(test_\w+)`")


@functools.cache
def names_in(name: str) -> frozenset[str]:
    """The names of the tests at the top of a file."""
    tree = ast.parse((ROOT / name).read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def test_every_number_has_one_row_and_they_are_in_order():
    assert re.findall(r"^\| (W-\w+)", TEXT, re.MULTILINE) == NUMBERS


@pytest.mark.parametrize("number", NUMBERS)
def test_a_row_says_what_was_what_is_why_and_which_tests_show_it(number: str):
    theirs, ours, why, tests = ROWS[number]
    assert all(cell.strip() for cell in (theirs, ours, why))
    found = TEST.findall(tests)
    assert found, f"{number} names no test"
    assert TEST.sub("", tests).strip() == "", f"{number}: the last cell has something else in it than tests"
    missing = [f"{file}::{name}" for file, name in found if name not in names_in(file)]
    assert not missing


def test_every_test_that_is_named_anywhere_on_the_page_is_found_as_one():
    assert len(TEST.findall(TEXT)) == TEXT.count("::test_")


def test_what_was_written_for_a_row_is_named_in_it():
    written = {name for name in names_in("tests/test_weaknesses.py") if name.startswith("test_")}
    number_of = {name: f"W-{match[1]}" for name in written if (match := re.match(r"test_w(\d+)_", name))}
    assert written == set(number_of)
    assert not [name for name, number in number_of.items() if f"::{name}`" not in ROWS[number][-1]]


def test_its_links_lead_to_pages():
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", TEXT)
    assert len(links) >= 8, "each mode has its how-to"
    assert not [link for link in links if not (PAGE.parent / link).is_file()]
