"""The status page's token: another one counts at once, and whoever guesses is written down and waits."""

from __future__ import annotations

import asyncio
import base64
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from piebald.core.errors import SettingError
from piebald.core.private_files import write_private
from piebald.federation.operate import page_server
from piebald.federation.operate.page_server import FREE, TOKEN, Token, WrongTokens, token_of

pytest.importorskip("starlette", reason="needs the extra: pip install '.[page]'")


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


async def _fine(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"fine"})


class Page:
    """The page's guard in front of an application that answers everything."""

    def __init__(self, credentials: Path, loopback: bool = False) -> None:
        self.clock = Clock()
        self.guard = page_server.Guarded(_fine, "", Token(credentials, loopback), loopback)
        self.guard._wrong = WrongTokens(self.clock)

    def get(self, token: str | None = None, address: str = "192.0.2.1", path: str = "/") -> tuple[int, dict[str, str]]:
        """The answer's status and headers."""
        headers = [(b"host", b"localhost")]
        if token is not None:
            headers.append((b"authorization", f"Bearer {token}".encode()))
        scope = {"type": "http", "path": path, "headers": headers, "client": (address, 1), "method": "GET"}
        told: list[Any] = []

        async def send(message: Any) -> None:
            told.append(message)

        asyncio.run(self.guard(scope, None, send))
        return told[0]["status"], {name.decode(): value.decode() for name, value in told[0]["headers"]}


def test_another_token_counts_at_once(tmp_path: Path) -> None:
    """Before, it was read once, and one that had leaked could be used until the server was started again."""
    page, first = Page(tmp_path), token_of(tmp_path)
    assert page.get(first)[0] == 200
    write_private(tmp_path / TOKEN, "b" * 40)
    assert page.get(first)[0] == 401
    assert page.get("b" * 40)[0] == 200


@pytest.mark.parametrize("what", ["gone", "short", "readable by others", "a pipe"])
def test_nobody_is_let_in_while_there_is_no_token_that_can_be_used(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    page, token = Page(tmp_path), token_of(tmp_path)
    (tmp_path / TOKEN).unlink()
    if what == "short":
        write_private(tmp_path / TOKEN, "")
    elif what == "readable by others":
        (tmp_path / TOKEN).write_text(token)
        (tmp_path / TOKEN).chmod(0o644)
    elif what == "a pipe":
        os.mkfifo(tmp_path / TOKEN, 0o600)
    for given in (token, "", None):
        assert page.get(given)[0] == 401
    assert caplog.text.count("the status page refuses everybody") == 1
    if what != "gone":
        (tmp_path / TOKEN).unlink()
    write_private(tmp_path / TOKEN, token)
    assert page.get(token)[0] == 200


def test_a_page_on_loopback_needs_a_token_from_when_there_is_one(tmp_path: Path) -> None:
    page = Page(tmp_path, loopback=True)
    assert page.get()[0] == 200
    write_private(tmp_path / TOKEN, "c" * 40)
    assert page.get()[0] == 401
    (tmp_path / TOKEN).unlink()
    assert page.get()[0] == 401  # its removal opens nothing


def test_wrong_tokens_are_written_down_and_wait(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    page, token = Page(tmp_path), token_of(tmp_path)
    with caplog.at_level(logging.WARNING, "piebald.federation"):
        for _ in range(FREE):
            assert page.get("wrong" * 8)[0] == 401
    assert caplog.text.count("192.0.2.1 has asked for the status page with wrong tokens") == 4  # 1, 2, 4 and 8
    assert "wrongwrong" not in caplog.text
    status, headers = page.get(token)  # the right one would tell whoever guesses that it is
    assert (status, headers["retry-after"]) == (429, "1")
    assert page.get(token, "192.0.2.2")[0] == 200  # others do not wait
    assert page.get(path="/healthz")[0] == 200
    assert page.get()[0] == 401  # a browser may ask which token is needed
    page.clock.now += 0.999
    assert page.get(token)[0] == 429
    page.clock.now += 0.001
    assert page.get("wrong" * 8)[0] == 401
    assert page.get(token)[1]["retry-after"] == "2"
    for _ in range(20):
        page.clock.now += 60
        page.get("wrong" * 8)
    assert page.get(token)[1]["retry-after"] == "60"  # and no longer
    page.clock.now += 60
    assert page.get(token)[0] == 200
    assert page.get("wrong" * 8)[0] == 401
    assert page.get(token)[0] == 200  # which was forgiven


def test_requests_without_a_token_are_no_wrong_ones(tmp_path: Path) -> None:
    page, token = Page(tmp_path), token_of(tmp_path)
    for _ in range(3 * FREE):
        assert page.get()[0] == 401
    assert page.get(token)[0] == 200


@pytest.mark.full
def test_few_addresses_are_remembered_and_a_network_counts_as_one() -> None:
    wrong = WrongTokens(Clock())
    for number in range(5000):
        wrong.add(f"198.51.{number // 250}.{number % 250}")
    assert len(wrong._known) == page_server._MOST_ADDRESSES
    for number in range(FREE):
        wrong.add(f"2001:db8::{number:x}")
    assert wrong.wait("2001:db8::ffff") == 1.0
    assert wrong.wait("2001:db8:0:1::1") == 0.0
    wrong.add("no address")


def test_a_password_of_basic_is_a_token_and_what_is_none_is_a_wrong_one(tmp_path: Path) -> None:
    from piebald.federation.operate.page_server import _token_of

    basic = base64.b64encode(b"me:secret").decode()
    assert _token_of({"authorization": f"Basic {basic}"}) == "secret"
    assert _token_of({"authorization": "bearer secret "}) == "secret"
    assert _token_of({}) is None
    for odd in ("Basic ?", "Digest secret", "secret", "Basic /w=="):
        assert _token_of({"authorization": odd}) == ""
    write_private(tmp_path / TOKEN, "short")
    with pytest.raises(SettingError, match="at least 16"):
        Token(tmp_path, loopback=True)
