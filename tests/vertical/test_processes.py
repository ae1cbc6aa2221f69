"""Two real processes over a socket: they agree, one is killed, the other ends clearly, and both go on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file

from piebald.core.errors import RuntimeFault
from piebald.federation.hub.local_federation import free_port
from piebald.vertical import transfer_runs
from piebald.vertical.party_secret import PartySecret
from piebald.vertical.party_store import read_steps
from piebald.vertical.transfer_runs import resume, run
from piebald.vertical.transfer_settings import TransferRuntime
from tests import processes

from .conftest import small

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

def hold(store, step):
    record(store, step)
    if step.step == {KILLED_AFTER - 1}:
        print("held", flush=True)
        signal.pause()

PartyStore.record = hold
sys.exit(cli.main(sys.argv[1:]))
"""


def begin(folder: Path, role: str, address: str, file: Path, how: tuple[str, str] = COMMAND) -> subprocess.Popen[str]:
    command = [sys.executable, *how, "transfer", file, "--party", role, "--out", folder, "--quiet"]
    environment = os.environ | {"PIEBALD_TRANSFER_SECRET": "00ff" * 8, "OMP_NUM_THREADS": "1"}
    return processes.Popen(
        [*map(str, command), "--set", f"runtime.address={address}"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def inject_secrets(folders: dict[str, Path]) -> None:
    """Give parties alone the secrets of a simulation, so that their runs can be compared with one."""
    for role, folder in folders.items():
        (folder / role).mkdir(parents=True)
        (folder / role / "secret").write_bytes(PartySecret.simulated(0, role).key)


def weights(folder: Path) -> dict:
    return load_file(folder / f"checkpoint-{STEPS:08d}.safetensors")


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


@pytest.mark.parametrize("killed", ["source", pytest.param("target", marks=pytest.mark.long)])
def test_one_party_is_killed_the_other_ends_clearly_and_both_go_on(killed, tmp_path, undisturbed):
    file = tmp_path / "transfer.toml"
    file.write_text(settings().text())
    folders = {role: tmp_path / f"run of the {role}" for role in ("source", "target")}  # as on two machines
    left = "target" if killed == "source" else "source"
    inject_secrets(folders)

    address = f"127.0.0.1:{free_port()}"
    running = {
        role: begin(folder, role, address, file, ("-c", HELD) if role == killed else COMMAND)
        for role, folder in folders.items()
    }
    assert running[killed].stdout.readline() == "held\n", running[killed].communicate()[1]
    running[killed].send_signal(signal.SIGKILL)
    said = {role: process.communicate(timeout=300) for role, process in running.items()}
    assert running[left].returncode == 1
    assert "the other party is gone: its process ended or the connection broke" in said[left][1]
    lines = [line for line in said[left][1].strip().splitlines() if not line.startswith("warning: 40 steps tell")]
    assert len(lines) == 1
    assert len(read_steps(folders[killed] / killed)) == KILLED_AFTER

    resumed = [
        processes.Popen(
            processes.command("resume", folder, "--json"),
            env=os.environ | {"PIEBALD_TRANSFER_SECRET": "00ff" * 8, "OMP_NUM_THREADS": "1"},
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


def test_the_front_door_starts_both_processes_and_their_run_is_the_one_in_memory(tmp_path, undisturbed):
    made = run(settings(runtime={"kind": "sockets"}), out=tmp_path / "run")
    assert_as_undisturbed(tmp_path / "run", undisturbed)
    assert made.score is not None
    assert resume(tmp_path / "run").score == made.score  # finished: shown, not run again
    before = json.loads((undisturbed / "result.json").read_text())
    assert before["score"]["auc"] == made.score.auc


@pytest.mark.long
def test_parties_with_other_settings_or_secrets_part_with_exit_code_2_and_1(tmp_path):
    file = tmp_path / "transfer.toml"
    file.write_text(settings().text())
    other = tmp_path / "other.toml"
    other.write_text(settings(seed=1).text())
    address = f"127.0.0.1:{free_port()}"
    running = [begin(tmp_path / "a", "source", address, file), begin(tmp_path / "b", "target", address, other)]
    said = [process.communicate(timeout=300)[1] for process in running]
    assert 2 in {process.returncode for process in running}
    assert any("the two parties' settings differ" in line for line in said)
    errors = [[line for line in text.splitlines() if not line.startswith("warning: ")] for text in said]
    assert [len(lines) for lines in errors] == [1, 1], errors


def test_no_folder_holds_a_key_or_what_the_other_party_sent(tmp_path, undisturbed):
    for role in ("source", "target"):
        names = {path.name for path in (undisturbed / role).iterdir()}
        assert names == {
            "run.lock",
            "steps.jsonl",
            "told.jsonl",
            "before.safetensors",
            "after.safetensors",
            "checkpoint-00000035.safetensors",
            "checkpoint-00000040.safetensors",
        }
        kept = {name.split(".")[0] for name in weights(undisturbed / role)}
        assert kept == {"network", "adam"}
        assert set(read_steps(undisturbed / role)[0]) == {"step", "seconds", "sent", "received", "losses"}
        shown = set(load_file(undisturbed / role / "after.safetensors"))
        assert shown == ({"rows"} if role == "source" else {"rows", "scores", "labels", "rate"})


def test_parties_may_write_more_than_a_pipe_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody reads what they write before both have ended."""
    program = tmp_path / "python"
    program.write_text(
        f"#!{sys.executable}\nimport sys\nsys.stderr.write('x' * 200_000 + '\\nit is over')\nsys.exit(3)\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(transfer_runs.sys, "executable", str(program))
    given = SimpleNamespace(runtime=TransferRuntime(kind="sockets"))
    with pytest.raises(RuntimeFault, match="the source says: it is over; the target says: it is over; continue with"):
        transfer_runs._two_processes(given, tmp_path, None)
