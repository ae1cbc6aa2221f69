"""Tables at several widths."""

from __future__ import annotations

import json

import pandas
import pytest
from rich.cells import cell_len

from piebald.cli.app import print_table
from piebald.core.result_table import ResultTable

LONG = "its policy has no such recipe, " * 3
HEADING = ("site", "state", "heard", "nothing", "added", "refused", "megabytes")
ROWS = [
    ["north", "training", "2 s ago", None, "2026-11-23", None, 12.5],
    [
        "a-very-long-name-of-a-hospital",
        "waiting for the server",
        "7 s ago",
        None,
        "2026-11-23T03:19:28+00:00",
        LONG,
        3.25,
    ],
]
TABLE = ResultTable(ROWS, HEADING)


@pytest.mark.parametrize("width", [60, 80, 120, 250])
def test_a_table_fits_any_width_and_cuts_no_word(width: int) -> None:
    text = TABLE.text(width)
    assert max(map(cell_len, text.splitlines())) <= width
    words = text.split()
    for cell in [*HEADING, *(str(cell) for row in ROWS for cell in row if cell is not None)]:
        assert {*cell.split()} <= {*words}
    if width == 250:
        assert len(text.splitlines()) == 3


@pytest.mark.parametrize("width", [20, 60, 80, 120])
def test_a_narrow_table_says_what_it_leaves_out(width: int, capsys: pytest.CaptureFixture[str]) -> None:
    print_table(TABLE, wide=False, width=width)
    head, *lines = capsys.readouterr().out.splitlines()
    shown, note = head.split(), lines[-1] if "not shown" in lines[-1] else ""
    assert cell_len(head) <= width
    assert shown[0] == "site"
    assert "nothing" not in shown  # it has no value
    for name in HEADING:
        assert (name in shown) != (name in note)


def test_output_that_is_no_terminal_is_whole_for_grep(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    print_table(TABLE, wide=False)
    printed = capsys.readouterr().out
    assert LONG.strip() in printed
    assert printed.split()[: len(HEADING)] == list(HEADING)  # columns without a value, too
    monkeypatch.setenv("COLUMNS", "60")
    print_table(TABLE, wide=False)
    assert LONG.strip() not in capsys.readouterr().out


def test_letters_of_two_columns_are_counted_as_two() -> None:
    table = ResultTable([["東京都立病院 " * 4, 0.5]], ("site", "score"))
    assert max(map(cell_len, table.text(30).splitlines())) <= 30


def test_the_same_rows_in_every_format() -> None:
    table = ResultTable(
        [["a|<b>", float("nan"), 2], ["=cmd", 0.25, None]], ("site", "score", "MB"), title="Two.", notes=["Out: c."]
    )
    assert table.html().startswith("<p><strong>Two.</strong></p><table><thead>")
    assert "<td>a|&lt;b&gt;</td>" in table.html()
    assert table.html().endswith("<p>Out: c.</p>")
    assert table.markdown().splitlines()[2] == "| a\\|<b> | nan | 2 |"
    assert json.loads(table.json())[0] == {"site": "a|<b>", "score": None, "MB": 2}
    assert table.csv().splitlines() == ["site,score,MB", "a|<b>,,2.0", "'=cmd,0.25,"]
    pandas.testing.assert_frame_equal(table.frame(), pandas.DataFrame(table))
    assert table.text().splitlines()[0] == "Two."
    units = ResultTable([[1]], ("sent",), units={"sent": "MB"})
    assert units.text().splitlines()[0] == "sent (MB)"


def test_an_empty_table_has_its_heading() -> None:
    assert ResultTable([], ("site", "score")).text() == "site  score"
    assert ResultTable().text() == ""
