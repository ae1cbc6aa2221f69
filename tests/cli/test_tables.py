"""Tables of the command line at several widths."""

from __future__ import annotations

import pytest

from piebald.cli.printing import print_table

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


def lines(capsys: pytest.CaptureFixture[str], width: int, wide: bool) -> list[str]:
    print_table(HEADING, ROWS, wide, width)
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("width", [20, 60, 80, 120])
def test_a_table_fits_and_says_what_it_leaves_out(width: int, capsys: pytest.CaptureFixture[str]) -> None:
    found = lines(capsys, width, wide=False)
    table, note = (found[:3], found[-1]) if "not shown" in found[-1] else (found, "")
    assert len(table) == 3  # no row goes on below
    assert all(len(line.rstrip()) <= width for line in table)
    shown = table[0].split()
    assert shown[0] == "site"
    assert "nothing" not in shown  # it has no value
    for name in HEADING:
        assert (name in shown) != (name in note)
    if width == 80:
        assert shown == ["site", "state", "heard", "refused"]  # a time is whole, or not shown
        assert table[2].rstrip().endswith("\N{HORIZONTAL ELLIPSIS}")
    if width == 120:
        assert shown == ["site", "state", "heard", "added", "refused"]
        assert "2026-11-23T03:19:28+00:00" in table[2]


def test_a_wide_table_has_all_columns_and_all_letters(capsys: pytest.CaptureFixture[str]) -> None:
    found = lines(capsys, 250, wide=True)
    assert found[0].split() == list(HEADING)
    assert LONG.strip() in found[2]
    assert "not shown" not in "".join(found)


def test_output_that_is_no_terminal_is_whole_for_grep(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    print_table(HEADING, ROWS, wide=False)
    assert LONG.strip() in capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", "60")
    print_table(HEADING, ROWS, wide=False)
    assert LONG.strip() not in capsys.readouterr().out
