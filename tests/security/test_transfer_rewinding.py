"""What a party tells about its rows is counted when it leaves, on disk, and no partner decides how often it leaves.

Before, a partner that claimed checkpoint 40, dropped, and then claimed 0 had the other one begin again with new noise:
184 noisy moments for 60 steps, of which the statement counted 60.
"""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import pytest
import torch

from piebald.core.errors import PiebaldError, RunFolderError
from piebald.vertical.channel import Channel, InMemoryChannel, open_channel
from piebald.vertical.disclosure_ledger import DisclosureLedger, plan
from piebald.vertical.party import Party, TransferStep
from piebald.vertical.party_data import load
from piebald.vertical.party_messages import HEADER, MessageKind, PartyEnded
from piebald.vertical.party_secret import PartySecret
from piebald.vertical.party_store import PartyStore
from piebald.vertical.protocol import PartySession, SettingsDiffer
from piebald.vertical.transfer_runs import resume, run, train_party
from piebald.vertical.transfer_settings import TransferSettings
from tests import processes
from tests.vertical.conftest import checkpoint, credentials, small, talk, told

NOISY = {"kind": "smmd", "kernel": "linear", "noise": 3.0}


def settings(**changes: object) -> TransferSettings:
    return small(**{"steps": 12, "checkpoint_every": 4, "method": NOISY} | changes)


def attack(channel: Channel, made: TransferSettings, claim: tuple[int, int], steps: int, secret: PartySecret) -> int:
    """A source that claims these checkpoints, takes so many steps and is gone; returns from where it went on."""
    session = PartySession(channel, "source", 60.0)
    try:
        source = Party("source", load(made.data, made.seed)["source"], made, secret)
        begun = source.done = session.handshake(made.agreed(), claim)
        training = source.train(session)
        for _ in range(steps):
            next(training)
        return begun
    finally:
        channel.close()


def assert_within_plan(folder: Path, made: TransferSettings) -> None:
    party = Party("target", load(made.data, made.seed)["target"], made, PartySecret.fresh())
    allowed = plan(made.steps, len(party.own), len(party.common))
    counted: dict[tuple[str, int], set[str]] = told(folder / "target")._digests
    assert counted
    assert all(len(digests) <= allowed[what] for what, digests in counted.items())


@pytest.mark.long
@pytest.mark.parametrize(
    "method",
    [NOISY, pytest.param({"kind": "smmd", "kernel": "linear"}, marks=pytest.mark.long)],
    ids=["noise", "none"],
)
def test_no_partner_has_a_process_go_back_to_a_checkpoint_that_was_passed(tmp_path, method):
    made = settings(method=method)
    file, folder = tmp_path / "transfer.toml", tmp_path / "run"
    file.write_text(made.text())
    given = credentials(tmp_path / "credentials")
    secret = PartySecret.fresh()

    def target(*words: object) -> subprocess.Popen[str]:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        return processes.Popen(
            [sys.executable, "-m", "piebald.cli", *map(str, words)],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    place = f"runtime.credentials={given['server'].folder}"
    begin = ("transfer", file, "--party", "target", "--out", folder, "--quiet", "--set", place)
    first = target(*begin)
    assert attack(open_channel(given["bank"], 60.0), made, (0, 0), 10, secret) == 0
    first.communicate(timeout=300)
    assert first.returncode == 1
    before = told(folder / "target")._digests
    assert [path.name for path in (folder / "target").glob("vectors-*")] == ["vectors-8.safetensors"]

    # It goes on from step 8 with a partner that drops at once, and not at all with one that claims to be at the start.
    second = target("resume", folder, "--quiet")
    assert attack(open_channel(given["bank"], 60.0), made, (8, 8), 0, secret) == 8
    second.communicate(timeout=300)
    assert second.returncode == 1
    third = target("resume", folder, "--quiet")
    with pytest.raises((PartyEnded, SettingsDiffer)):
        attack(open_channel(given["bank"], 60.0), made, (0, 0), 10, secret)
    said = third.communicate(timeout=300)[1]
    assert third.returncode == 2
    assert "this one goes on from step 8 and the other one from step 0" in said
    assert (
        len([line for line in said.strip().splitlines() if not line.startswith(("warning: ", "connecting to "))]) == 1
    )
    assert told(folder / "target")._digests == before
    assert_within_plan(folder, made)


def target_against(folder: Path, made: TransferSettings, act: Callable[[Channel], object]) -> PiebaldError | None:
    """An honest target with a run folder, and a source that attacks; the error with which the target ends."""
    ends = InMemoryChannel.pair()
    errors: dict[str, PiebaldError] = {}

    def honest() -> None:
        torch.set_num_threads(1)
        try:
            with PartyStore.of(folder, "target") as store:
                train_party("target", made, load(made.data, made.seed)["target"], ends[0], store, store.secret())
        except PiebaldError as error:
            errors["target"] = error

    import torch._dynamo  # as in `run`

    thread = threading.Thread(target=honest)
    thread.start()
    with suppress(PiebaldError):
        act(ends[1])
    thread.join()
    return errors.get("target")


@pytest.mark.parametrize("method", [NOISY, {"kind": "smmd", "kernel": "linear"}], ids=["noise", "none"])
def test_a_partner_that_comes_back_as_another_one_is_told_no_more_than_the_plan(tmp_path, method):
    """Again and again from the same checkpoint, each time with other messages."""
    made = settings(method=method, checkpoint_every=100)
    ends = []
    for _ in range(4):
        act = lambda channel: attack(channel, made, (0, 0), made.steps - 1, PartySecret.fresh())  # noqa: E731
        ends.append(target_against(tmp_path, made, act))
    assert isinstance(ends[0], PartyEnded)
    for error in ends[1:]:
        assert isinstance(error, RunFolderError)
        assert "would tell about the same rows once more than the" in str(error)
    assert_within_plan(tmp_path, made)


@pytest.mark.full
@pytest.mark.parametrize("method", [NOISY, {"kind": "smmd", "kernel": "linear"}], ids=["noise", "none"])
def test_ten_interruptions_tell_nothing_more_and_end_with_the_same_weights(tmp_path, method):
    """Before, ten interruptions of 20 steps made 220 releases; a repeated step now tells the very same numbers."""
    made = settings(method=method)
    folder, undisturbed = tmp_path / "run", tmp_path / "undisturbed"
    stops = [1, 2, 3, 5, 5, 6, 7, 9, 10, 10]

    def stop_at(step: int) -> Callable[[dict[str, object]], None]:
        def watch(line: dict[str, object]) -> None:
            if line["step"] == step:
                raise RunFolderError("interrupted")

        return watch

    for step in stops:
        with pytest.raises(PiebaldError):
            run(made, out=folder, watch=stop_at(step), tell=lambda _: None)
    whole = resume(folder, tell=lambda _: None)
    expected = run(made, out=undisturbed, tell=lambda _: None)
    assert whole.statement == expected.statement
    for role in ("source", "target"):
        one, other = (checkpoint(at / role, 12) for at in (folder, undisturbed))
        assert all(torch.equal(one[name], other[name]) for name in other)
        assert told(folder / role)._digests == told(undisturbed / role)._digests


def test_nothing_leaves_that_is_not_on_disk(tmp_path, monkeypatch):
    made = settings()
    sent: list[int] = []

    def full(store: PartyStore, rows: object, durable: bool) -> None:
        assert durable
        raise RunFolderError("the run cannot be written: no space left on device")

    monkeypatch.setattr(PartyStore, "add_notes", full)
    send = InMemoryChannel.send
    monkeypatch.setattr(
        InMemoryChannel,
        "send",
        lambda end, frame: (sent.append(HEADER.unpack(frame[: HEADER.size])[1]), send(end, frame)),
    )
    with pytest.raises(RunFolderError, match="no space left"):
        run(made, out=tmp_path / "run", tell=lambda _: None)
    assert MessageKind.KEY in sent
    assert MessageKind.STATISTICS not in sent


def changed(path: Path, sql: str) -> None:
    with closing(sqlite3.connect(path)) as db, db:
        db.execute(sql)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: path.unlink(), "is not empty and holds no run"),
        (lambda path: path.write_text("nonsense\n"), "damaged"),
        (lambda path: (path.unlink(), os.mkfifo(path)), "is no file"),  # which would wait for its writer
        (lambda path: changed(path, "UPDATE note SET cluster = 'first'"), "holds a value of another type"),
        (lambda path: changed(path, "DROP TABLE note"), "note"),
    ],
)
def test_a_ledger_that_cannot_be_read_ends_the_run(tmp_path, damage, said):
    made = settings(steps=4)
    run(made, out=tmp_path / "run", tell=lambda _: None)
    damage(tmp_path / "run" / "source" / "run.db")
    with pytest.raises(RunFolderError, match=said):
        resume(tmp_path / "run", tell=lambda _: None)


def test_what_was_told_is_counted_whenever_the_folder_is_opened_and_however_often_a_step_is_repeated(tmp_path):
    def ledger() -> DisclosureLedger:
        return DisclosureLedger({("own", 0): 2}, store)

    with PartyStore.of(tmp_path, "source") as store:
        ledger().count("own", 0, 0, b"a")
    with PartyStore.of(tmp_path, "source") as store:
        assert ledger().uses("own") == 1
        ledger().count("own", 0, 1, b"b")
        for version in (1, 2, 1):
            store.commit({"version": version}, [])
        store.go_back(0)
        assert ledger().uses("own") == 2
        with pytest.raises(RunFolderError, match="step 3 would tell about the same rows once more than the 2 times"):
            ledger().count("own", 0, 2, b"c")
        ledger().count("own", 0, 0, b"a")  # the very same


def test_what_is_not_planned_is_not_told():
    with pytest.raises(RunFolderError, match="than the 0 times"):
        DisclosureLedger(plan(4, 2, 2)).count("own", 2, 0, b"")


@pytest.mark.parametrize(("steps", "own", "common"), [(1, 1, 1), (7, 3, 2), (2, 5, 1)])
def test_the_plan_is_what_the_steps_use(steps, own, common):
    made = plan(steps, own, common)
    assert sum(made["own", chunk] for chunk in range(own)) == steps
    assert sum(made["common", chunk] for chunk in range(common)) == steps
    assert all(made["own", c] == sum(step % own == c for step in range(steps)) for c in range(own))


def test_checkpoints_are_passed_once_a_later_step_is_done(tmp_path):
    """The parties' newest ones are at most one apart, so until then the other party may still need the one before."""
    made = settings(steps=10)
    held = load(made.data, made.seed)["target"]
    store = PartyStore.of(tmp_path, "target")
    party = Party("target", held, made, PartySecret.fresh())
    store.restore(party, 0)
    assert store.last_steps() == (0, 0)
    for done, steps in ((4, (4, 0)), (5, (4, 4)), (8, (8, 4)), (9, (8, 8))):
        party.done = done
        store.record(party, TransferStep(done - 1, 0.5, 1, 1))
        assert store.last_steps() == steps
        assert len(list(store.path.glob("vectors-*"))) == len({*steps})
    store.close()


def test_two_parties_of_which_one_has_passed_what_the_other_claims_say_so():
    errors = talk(lambda role, session: session.handshake({}, (8, 8) if role == "source" else (4, 0)))
    for role, own, other in (("source", 8, 4), ("target", 4, 8)):
        assert f"this one goes on from step {own} and the other one from step {other}" in str(errors[role])
