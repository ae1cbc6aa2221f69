"""Text that a site wrote, on its way to logs, tables and terminals of others: it is shown, and does nothing else."""

from __future__ import annotations

import json
import logging
import struct
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piebald.cli import main
from piebald.cli.app import print_table
from piebald.contracts import Update
from piebald.core.errors import SettingError
from piebald.core.plain_text import printable
from piebald.core.result_table import ResultTable
from piebald.federation.link.wire_format import Hello, decode, pack_update, unpack_update
from piebald.federation.operate.logs import OneLine
from tests.fakes import few

HOSTILE = "\x1b]0;title\x07\x1b[2J\x9b31m[red]north\u202e[/red]\r\n2026 all is well\x00\u200b"
SHOWN = "[red]north[/red] 2026 all is well"


@pytest.mark.full
@few
@given(text=st.text(max_size=80))
def test_nothing_invisible_is_left(text: str) -> None:
    left = printable(text)
    assert {unicodedata.category(letter) for letter in left}.isdisjoint({"Cc", "Cf", "Cs", "Co", "Zl", "Zp"})
    assert printable(left) == left


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (HOSTILE, SHOWN),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1bPdevice\x9cafter", "after"),
        ("a\u2028b\u0085c\td", "a b c d"),
        ("user\u202etxt.exe", "usertxt.exe"),
        ("\ud800half", "half"),
        ("Zürich 東京", "Zürich 東京"),
    ],
    ids=repr,
)
def test_what_is_left(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_a_hello_arrives_as_plain_text() -> None:
    """Before, version and refusal reached the server's log and status as they came."""
    head = {"protocol": 1, "version": "0\x1b[2J.1", "incarnation": "ab", "refused": HOSTILE}
    text = json.dumps(head).encode()
    hello, _ = decode(Hello, struct.pack("<I", len(text)) + text)
    assert (hello.version, hello.refused) == ("0.1", SHOWN)


def test_a_failure_arrives_as_plain_text() -> None:
    """Before, it was stored in the run folder and printed as it came."""
    assert unpack_update(pack_update(Update({}, 0, 0, {}), HOSTILE)) == (None, SHOWN)


def test_a_table_prints_text_and_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    """Before, `[/red]` raised rich's MarkupError in `piebald status`, and escape sequences reached the terminal."""
    print_table(ResultTable([("north", HOSTILE), ("[/link]", None)], ("site", "[b]refused")))
    out = capsys.readouterr().out
    assert SHOWN in out
    assert "[b]refused" in out
    assert "[/link]" in out
    assert "\x1b" not in out


def test_a_log_line_is_one_line() -> None:
    record = logging.LogRecord("piebald.federation", logging.WARNING, "", 0, "%s says %s", ("north", HOSTILE), None)
    assert OneLine("%(message)s").format(record) == f"north says {SHOWN}"


def test_an_error_of_the_command_line_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise SettingError(f"1 of 1 sites do not take part, north: {HOSTILE}")

    monkeypatch.setattr("piebald.federation.operate.status.read_status", refuse)
    assert main(["status", "somewhere"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("1 of 1 sites do not take part, north: ")
    assert said.count("\n") == 1
    assert said.rstrip("\n").isprintable()
