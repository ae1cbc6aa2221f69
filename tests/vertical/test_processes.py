"""Two real processes over a socket: they agree, one is killed, the other ends clearly, and both go on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from piebald.vertical.party_store import PartyStore, read_steps
from piebald.vertical.transfer_runs import run
from tests import processes

from .conftest import checkpoint, credentials, inject_secrets, small

# 40 steps on chunks of 20 rows tell more than the bound on single rows allows, and say so; it is not tested here
pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore:40 steps tell the:RuntimeWarning")]

STEPS, KILLED_AFTER = 40, 12


def settings(**changes):
    return small(steps=STEPS, checkpoint_every=5, watch_every=10, **changes)


COMMAND = ("-m", "piebald.cli")
# The command, but once 12 steps are recorded it says so and takes no other: so it is killed there on any machine.
HELD = f"""
import signal, sys
from piebald import cli
from piebald.vertical.party_store import PartyStore

record = PartyStore.record

def hold(store, party, step):
    record(store, party, step)
    if step.step == {KILLED_AFTER - 1}:
        print("held", flush=True)
        signal.pause()

PartyStore.record = hold
sys.exit(cli.main(sys.argv[1:]))
"""


def begin(
    folder: Path, role: str, credentials: Path, file: Path, how: tuple[str, str] = COMMAND
) -> subprocess.Popen[str]:
    command = [sys.executable, *how, "transfer", file, "--party", role, "--out", folder, "--quiet"]
    return processes.Popen(
        [*map(str, command), "--set", f"runtime.credentials={credentials}"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def weights(folder: Path) -> dict:
    return checkpoint(folder, STEPS)


def assert_as_undisturbed(found: Path, expected: Path) -> None:
    for role in ("source", "target"):
        one, other = weights(found / role), weights(expected / role)
        assert one.keys() == other.keys()
        assert all(bool((one[name] == other[name]).all()) for name in one)
        losses = [[line["losses"] for line in read_steps(folder / role)] for folder in (found, expected)]
        assert losses[0] == losses[1]
        assert len(losses[0]) == STEPS


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    run(settings(), out=folder)
    return folder


@pytest.mark.long
@pytest.mark.parametrize("killed", ["source", pytest.param("target", marks=pytest.mark.long)])
def test_one_party_is_killed_the_other_ends_clearly_and_both_go_on(killed, tmp_path, undisturbed):
    file = tmp_path / "transfer.toml"
    file.write_text(settings().text())
    folders = {role: tmp_path / f"run of the {role}" for role in ("source", "target")}  # as on two machines
    left = "target" if killed == "source" else "source"
    inject_secrets(folders)

    places = dict(zip(("source", "target"), credentials(tmp_path / "credentials").values(), strict=True))
    running = {
        role: begin(folder, role, places[role].folder, file, ("-c", HELD) if role == killed else COMMAND)
        for role, folder in folders.items()
    }
    assert running[killed].stdout.readline() == "held\n", running[killed].communicate()[1]
    running[killed].send_signal(signal.SIGKILL)
    said = {role: process.communicate(timeout=300) for role, process in running.items()}
    assert running[left].returncode == 1
    assert "the other party is gone: its process ended or the connection broke" in said[left][1]
    lines = [
        line for line in said[left][1].strip().splitlines() if not line.startswith(("warning: ", "connecting to "))
    ]
    assert len(lines) == 1
    assert len(read_steps(folders[killed] / killed)) == KILLED_AFTER

    resumed = [
        processes.Popen(
            processes.command("resume", folder, "--json"),
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for folder in folders.values()
    ]
    outputs = [process.communicate(timeout=300) for process in resumed]
    assert [process.returncode for process in resumed] == [0, 0], outputs
    source, target = (json.loads(out) for out, _ in outputs)
    assert source["score"] is None
    assert target["score"]["auc"] > 0.5
    merged = tmp_path / "merged"
    merged.mkdir()
    for role, folder in folders.items():
        (folder / role).rename(merged / role)
    assert_as_undisturbed(merged, undisturbed)


@pytest.mark.long
def test_parties_with_other_settings_or_secrets_part_with_exit_code_2_and_1(tmp_path):
    file = tmp_path / "transfer.toml"
    file.write_text(settings().text())
    other = tmp_path / "other.toml"
    other.write_text(settings(seed=1).text())
    bank, server = (given.folder for given in credentials(tmp_path / "credentials").values())
    running = [begin(tmp_path / "a", "source", bank, file), begin(tmp_path / "b", "target", server, other)]
    said = [process.communicate(timeout=300)[1] for process in running]
    assert 2 in {process.returncode for process in running}
    assert any("the two parties' settings differ" in line for line in said)
    errors = [
        [line for line in text.splitlines() if not line.startswith(("warning: ", "connecting to "))] for text in said
    ]
    assert [len(lines) for lines in errors] == [1, 1], errors


def test_no_folder_holds_a_key_or_what_the_other_party_sent(tmp_path, undisturbed):
    for role in ("source", "target"):
        names = {path.name for path in (undisturbed / role).iterdir()}
        assert names == {"run.lock", "run.db", "vectors-35.safetensors", "vectors-40.safetensors"}
        kept = {name.split(".")[0] for name in weights(undisturbed / role)}
        assert kept == {"network", "adam"}
        assert set(read_steps(undisturbed / role)[0]) == {"step", "seconds", "sent", "received", "losses"}
        with PartyStore.open_read_only(undisturbed / role) as store:
            told = set(store.meta) - {"id", "created", "status", "finished", "piebald", "label"}
            kinds = {note["axis"] for note in store.rows("note")}
            assert not any(store.rows(name) for name in ("client", "result", "failure"))
        assert told == (set() if role == "source" else {"preparation", "rate", "translator"})
        assert kinds == {"loss", "own", "common"} | ({"whole"} if role == "source" else set())
