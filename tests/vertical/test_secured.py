"""Two parties of a federation: the connection is encrypted, and nobody else can be one of them."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from piebald.core.errors import RuntimeFault, SettingError
from piebald.federation.credentials.provisioning import Credentials, Description, provision, read
from piebald.federation.credentials.revocation import write_revoked
from piebald.federation.hub.local_federation import free_port
from piebald.federation.link import supervision
from piebald.federation.link.messaging import Link
from piebald.federation.link.tls import context
from piebald.vertical import transfer_runs
from piebald.vertical.channel import GONE, SecureChannel, open_channel
from piebald.vertical.party_messages import HEADER, MessageKind, PartyEnded, pack_frame
from piebald.vertical.party_store import PartyStore, read_steps
from piebald.vertical.transfer_results import is_simulated
from piebald.vertical.transfer_runs import run, run_party
from tests import processes

from .conftest import credentials, inject_secrets
from .test_processes import HELD, KILLED_AFTER, assert_as_undisturbed, settings

pytestmark = pytest.mark.filterwarnings("ignore:40 steps tell the:RuntimeWarning")  # see there


def met(found: dict[str, Credentials]) -> list[SecureChannel]:
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda credentials: open_channel(credentials, 30.0), found.values()))


def frame(number: int, size: int) -> bytes:
    return pack_frame(MessageKind.MASKED, 1, bytes(16), number, [bytes([number % 256]) * size])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    run(settings(), out=folder)
    return folder


def test_both_may_send_long_frames_at_once_in_both_directions(tmp_path) -> None:
    ends = met(credentials(tmp_path))
    sizes = [1, 3_000_000, 17, 5_000_000, 70_000]
    frames = [frame(number, size) for number, size in enumerate(sizes)]

    def talk(end: SecureChannel) -> list[bytes]:
        for one in frames:
            end.send(one)
        return [end.receive(10_000_000, 30.0) for _ in frames]

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(talk, ends)) == [frames, frames]
    assert [end.sent for end in ends] == [end.received for end in ends] == [sum(map(len, frames))] * 2
    ends[0].close()
    with pytest.raises(PartyEnded, match=GONE):
        ends[1].receive(100, 10.0)
    ends[1].close()


def test_silence_ends_after_the_timeout(tmp_path) -> None:
    one, other = met(credentials(tmp_path))
    with pytest.raises(PartyEnded, match="silent for 0"):
        one.receive(100, 0.2)
    one.close()
    other.close()


def test_nothing_on_the_wire_can_be_read(tmp_path) -> None:
    """A listener in between hands on what it hears: no frame of ours, and no word of one, is among it."""
    found = credentials(tmp_path)
    here, heard = free_port(), bytearray()

    def carry(taken: socket.socket, given: socket.socket) -> None:
        while data := taken.recv(1 << 16):
            heard.extend(data)
            given.sendall(data)
        given.shutdown(socket.SHUT_WR)

    with socket.create_server(("127.0.0.1", here)) as tap:

        def between() -> None:
            came, _ = tap.accept()
            with came, connected(found["server"].port) as on:
                ways = [threading.Thread(target=carry, args=way) for way in ((came, on), (on, came))]
                for way in ways:
                    way.start()
                for way in ways:
                    way.join()

        with ThreadPoolExecutor(3) as pool:
            tapped = pool.submit(between)
            bank = pool.submit(open_channel, replace(found["bank"], port=here), 30.0)
            server = pool.submit(open_channel, found["server"], 30.0).result()
            secret = pack_frame(MessageKind.MASKED, 1, bytes(16), 1, [b"moments of hidden rows" * 50])
            server.send(secret)
            assert bank.result().receive(10_000, 30.0) == secret
            server.close()
            bank.result().close()
            tapped.result(timeout=300)
    assert len(heard) > len(secret)
    assert b"moments" not in heard
    assert secret[: HEADER.size] not in heard


def other_federation(folder: Path, port: int) -> Credentials:
    return credentials(folder / "other", port)["bank"]


def unlisted(folder: Path, port: int) -> Credentials:
    """A credentials of the same authority, of a party that the server does not know."""
    described = Description(name="two", host="127.0.0.1", port=port, days=2, sites=["bank", "thief"])
    listed = (folder / "credentials" / "server" / "sites.json").read_text()
    provision(described, folder / "credentials")
    (folder / "credentials" / "server" / "sites.json").write_text(listed)
    return read(folder / "credentials" / "thief")


@pytest.mark.parametrize(
    ("stranger", "said"),
    [
        (other_federation, "did not prove that it belongs"),
        (unlisted, "thief was refused a connection"),
    ],
)
def test_strangers_are_refused_and_the_right_party_is_served_after_them(tmp_path, caplog, stranger, said: str) -> None:
    found = credentials(tmp_path / "credentials")
    thief = stranger(tmp_path, found["server"].port)
    made = context(thief.folder, server=False)
    made.check_hostname, made.verify_mode = False, ssl.CERT_NONE  # a thief need not check anybody
    with caplog.at_level(logging.WARNING), ThreadPoolExecutor(1) as pool:
        server = pool.submit(open_channel, found["server"], 30.0)
        plain = connected(thief.port)
        with plain, made.wrap_socket(plain) as broken:
            assert turned_away(broken)
        bank = open_channel(found["bank"], 30.0)
        server.result().send(frame(1, 10))
        assert bank.receive(100, 30.0) == frame(1, 10)
        bank.close()
        server.result().close()
    assert said in caplog.text


def connected(port: int) -> socket.socket:
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=300)
        except ConnectionRefusedError:  # it does not listen yet
            continue


def turned_away(connection: ssl.SSLSocket) -> bool:
    try:
        return not connection.recv(1)
    except OSError:  # an alert, since TLS 1.3 tells a client afterwards
        return True


def test_a_silent_stranger_holds_up_nobody(tmp_path) -> None:
    found = credentials(tmp_path)
    with ThreadPoolExecutor(1) as pool:
        server = pool.submit(open_channel, found["server"], 30.0)
        with connected(found["server"].port):
            bank = open_channel(found["bank"], 5.0)  # less than a handshake may take
            bank.close()
            server.result().close()


def several(folder: Path, sites: list[str]) -> dict[str, Credentials]:
    provision(Description(name="two", host="127.0.0.1", port=free_port(), days=2, sites=sites), folder)
    return {party: read(folder / party) for party in ("server", *sites)}


def test_the_named_party_is_waited_for_although_another_listed_one_comes_first(tmp_path, caplog) -> None:
    """Before, whichever listed site connected first was taken."""
    found = several(tmp_path, ["bank", "rival"])
    with caplog.at_level(logging.INFO, "piebald"), ThreadPoolExecutor(2) as pool:
        server = pool.submit(open_channel, found["server"], 30.0, "bank")
        with pytest.raises(
            RuntimeFault, match=r"took no connection in 3 seconds; when it was last asked, it was at work with another"
        ):
            open_channel(found["rival"], 3.0)
        bank = open_channel(found["bank"], 30.0)
        assert server.result().partner == "bank"
        assert bank.partner == "server"
        bank.close()
        server.result().close()
    assert "rival was refused a connection: it is that of bank" in caplog.text
    assert "the other party is bank, by its certificate" in caplog.text
    with pytest.raises(SettingError, match="called 'bnak': did you mean 'bank'"):
        open_channel(found["server"], 1.0, "bnak")


def test_a_second_process_with_the_same_credentials_is_told_that_its_own_name_is_at_work(tmp_path) -> None:
    """No other party was there: before, the sentence said so."""
    found = credentials(tmp_path)
    server, bank = met(found)
    with pytest.raises(RuntimeFault, match=r"it had a connection already by a certificate of this party's name"):
        open_channel(found["bank"], 3.0)
    for end in (server, bank):
        end.close()


def test_of_one_that_ends_without_a_word_nothing_is_said_that_nobody_knows(tmp_path) -> None:
    """A listening party whose process ends between the handshake and its first byte has had no partner."""
    found = credentials(tmp_path)
    server = found["server"]
    address = (server.host, server.port)
    link = Link("server", address, server.folder, bool, lambda _: None, carry=lambda connection: None)
    link.start()
    with pytest.raises(RuntimeFault, match="was not at"):
        open_channel(found["bank"], 2.0)
    link.stop()


@pytest.mark.parametrize("after", ["revoked", "listed"])
def test_a_party_that_is_revoked_ends_the_transfer_with_a_sentence(tmp_path, caplog, after) -> None:
    """Before, a connection was looked at once, when it was made."""
    found = several(tmp_path, ["bank", "other"])
    server, bank = met({party: found[party] for party in ("server", "bank")})
    write_revoked(found["server"].folder, ["bank" if after == "revoked" else "other"])
    with pytest.raises(PartyEnded) as ended:
        server.receive(100, 30.0 if after == "revoked" else 2.5)
    if after == "revoked":
        assert re.fullmatch(
            r"the other party, bank, is not admitted any more: its certificate was revoked on [\d-]+ at [\d:]+ UTC",
            str(ended.value),
        )
        with pytest.raises(PartyEnded, match=GONE):
            bank.receive(100, 30.0)
    else:
        assert "silent" in str(ended.value)
    for end in (server, bank):
        end.close()
    with socket.create_server(("127.0.0.1", found["server"].port)):  # nobody listens there any more
        pass


@pytest.mark.long
def test_in_processes_a_run_keeps_to_its_party_says_who_it_is_and_ends_when_that_one_is_revoked(tmp_path) -> None:
    found = several(tmp_path / "credentials", ["bank", "rival"])
    file = tmp_path / "transfer.toml"
    file.write_text(settings().text())

    def begin(
        role: str, party: str, out: str, how: tuple[str, str] = ("-m", "piebald.cli"), more: Sequence[str] = ()
    ) -> subprocess.Popen[str]:
        words = [sys.executable, *how, "transfer", file, "--party", role, "--out", tmp_path / out, *more]
        return process([*words, "--set", f"runtime.credentials={found[party].folder}"])

    source, target = begin("source", "server", "shop"), begin("target", "bank", "bank", ("-c", HELD))
    for line in target.stdout:
        if line == "held\n":
            break
    write_revoked(found["server"].folder, ["bank"])
    said = source.communicate(timeout=300)[1]
    assert source.returncode == 1
    assert "warning: the other party is bank, by its certificate: this run keeps to it" in said
    assert said.strip().splitlines()[-1].startswith("the other party, bank, is not admitted any more: its certificate")
    target.kill()
    target.communicate(timeout=300)
    with PartyStore.open_read_only(tmp_path / "shop" / "source") as store:
        assert store.meta["partner"] == "bank"
    # Another listed party is not taken in its place.
    again, rival = (
        process([sys.executable, "-m", "piebald.cli", "resume", tmp_path / "shop"]),
        begin("target", "rival", "rival", more=["--set", "runtime.timeout=15"]),
    )
    said = [one.communicate(timeout=300)[1] for one in (rival,)]
    assert rival.returncode == 1
    assert re.search("the other party (was not at|at .* took no connection in)", said[0])
    again.kill()
    again.communicate(timeout=300)


@pytest.mark.long
def test_killed_with_a_kit_and_resumed_without_naming_it(tmp_path, undisturbed) -> None:
    """The source has the server's credentials here: who listens is no matter of roles."""
    found = credentials(tmp_path / "credentials")
    file = tmp_path / "transfer.toml"
    file.write_text(settings().text())
    begun = {}
    inject_secrets({role: tmp_path / role for role in ("source", "target")})
    for role, party in (("source", "server"), ("target", "bank")):
        how = ("-c", HELD) if role == "target" else ("-m", "piebald.cli")
        words = [sys.executable, *how, "transfer", file, "--quiet", "--party", role, "--out", tmp_path / role]
        sets = ["--set", f"runtime.credentials={found[party].folder}"]
        begun[role] = process([*words, *sets])
    assert begun["target"].stdout.readline() == "held\n", begun["target"].communicate()[1]
    begun["target"].send_signal(signal.SIGKILL)
    said = {role: one.communicate(timeout=300) for role, one in begun.items()}
    assert begun["source"].returncode == 1
    assert GONE in said["source"][1]
    assert len(read_steps(tmp_path / "target" / "target")) == KILLED_AFTER
    again = [process([sys.executable, "-m", "piebald.cli", "resume", tmp_path / role]) for role in begun]
    said = [one.communicate(timeout=300) for one in again]
    assert [one.returncode for one in again] == [0, 0], said
    (tmp_path / "source" / "source").rename(tmp_path / "target" / "source")
    assert_as_undisturbed(tmp_path / "target", undisturbed)


def process(words: list[object]) -> subprocess.Popen[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return processes.Popen(
        [str(word) for word in words], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize(
    ("runtime", "message"),
    [
        ({"timeout": 0}, "must be above 0, got 0"),
        ({"partner": "bank"}, "partner is the name in the other party's certificate"),
    ],
)
def test_what_cannot_be_is_one_sentence(runtime: dict[str, str], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        settings(runtime=runtime)


def test_credentials_belong_to_one_party(tmp_path) -> None:
    runtime = {"credentials": str(credentials(tmp_path)["bank"].folder)}
    with pytest.raises(SettingError, match="credentials belong to one party: choose it with --party"):
        run(settings(runtime=runtime), out=tmp_path / "run")
    with pytest.raises(SettingError, match="holds no credentials"):
        run_party("source", settings(runtime={**runtime, "credentials": "nowhere"}), tmp_path / "run")


@pytest.mark.parametrize(("party", "message"), [("bank", "was not at"), ("server", "did not come to")])
def test_nobody_there(tmp_path, party: str, message: str) -> None:
    with pytest.raises(RuntimeFault, match=message):
        open_channel(credentials(tmp_path)[party], 0.3)


def test_a_party_that_waits_says_so_and_is_resumed_as_one_party(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_runs, "at_work", partial(supervision.at_work, every=0.05))
    monkeypatch.setattr(supervision, "_TICK", 0.01)
    runtime = {"credentials": str(credentials(tmp_path)["bank"].folder), "timeout": 0.5}
    for train in (partial(run_party, "source", settings(runtime=runtime)), transfer_runs.resume):
        said: list[str] = []
        with pytest.raises(RuntimeFault, match="was not at"):
            train(tmp_path / "run", tell=said.append)
        assert "waiting for the other party for 0 s" in said
        assert not is_simulated(tmp_path / "run")


def test_two_cannot_listen_at_one_place(tmp_path) -> None:
    found = credentials(tmp_path)
    with (
        socket.create_server(("127.0.0.1", found["server"].port)),
        pytest.raises(SettingError, match="be listened on"),
    ):
        open_channel(found["server"], 5.0)
