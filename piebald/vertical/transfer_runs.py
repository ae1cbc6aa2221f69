"""Runs a transfer: two threads of this process, two processes on this machine, or one party that meets the other."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from piebald.errors import PiebaldError, RunFolderError, RuntimeFault, SettingError
from piebald.runtimes.federation.flare_link import SERVER
from piebald.runtimes.federation.local_federation import free_port
from piebald.runtimes.federation.provisioning import Description, provision
from piebald.runtimes.federation.provisioning import read as read_kit
from piebald.vertical import holdings as held
from piebald.vertical import secure_channel as secured
from piebald.vertical import table_files as files
from piebald.vertical.baselines import TransferScore, judge
from piebald.vertical.channel import Channel, InMemoryChannel, connect, listen, parse
from piebald.vertical.holdings import PartyHolding
from piebald.vertical.party import Party, TransferStep
from piebald.vertical.party_messages import PartyEnded
from piebald.vertical.party_store import PartyStore, read, read_settings, read_steps, sample, write_settings
from piebald.vertical.protocol import ROLES, PartySession, Role
from piebald.vertical.transfer_settings import TransferRuntime, TransferSettings

SECRET = "PIEBALD_TRANSFER_SECRET"  # of both parties, 1 to 64 bytes in hexadecimal; messages are then authenticated
Watcher = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class TransferResult:
    """A finished transfer.

    Attributes:
        score: of the target's own predictions on rows nobody trained on; None where this process is the source only,
            or no label of the target's rows is known.
        first: losses at the first step, by name; `mmd2` is MMD^2.
        last: at the last step.
        steps: taken.
        seconds: a step took, the mean.
        bytes_to_target: a step sent from source to target, the mean.  bytes_to_source: the other way.
        statement: about differential privacy.
        folder: the run folder, if one was kept.
    """

    score: TransferScore | None
    first: dict[str, float]
    last: dict[str, float]
    steps: int
    seconds: float
    bytes_to_target: float
    bytes_to_source: float
    statement: str
    folder: Path | None

    def table(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self) | {"folder": None if self.folder is None else str(self.folder)}


def run(
    settings: TransferSettings,
    holdings: Mapping[Role, PartyHolding] | None = None,
    out: str | Path | None = None,
    watch: Watcher | None = None,
) -> TransferResult:
    """Train both parties.

    Args:
        settings: checked already.
        holdings: what each party holds; by default the settings' files, or their data set, divided.  Only with
            runtime "memory".
        out: the run folder; None keeps nothing, which runtime "sockets" does not allow.  A run that stands there
            already is taken up where it stopped.
        watch: called with the record of each step.

    Raises:
        SettingError: something that cannot work.
        RuntimeFault: one party ended, or is gone; with a folder, `resume` goes on.
    """
    folder = None if out is None else Path(out)
    if folder is not None:
        write_settings(folder, settings)
    kind = settings.runtime.kind
    if kind != "memory":
        if folder is None or holdings is not None:
            raise SettingError(f"runtime {kind} needs a run folder (out) and a data set that both processes can load")
        if settings.runtime.credentials is not None:
            raise SettingError("a credentials is one party's: say which with --party source or --party target")
        _two_processes(settings, folder, watch)
        return result(folder)
    return _two_threads(settings, holdings or _both(settings), folder, watch)


def resume(folder: str | Path, watch: Watcher | None = None) -> TransferResult:
    """Go on with a run from its checkpoints: both parties, or the one whose folder is here."""
    folder = Path(folder)
    settings = read_settings(folder)
    here = [role for role in ROLES if (folder / role).is_dir()]
    if len(here) == 1 and settings.runtime.apart:
        return run_party(here[0], settings, folder, watch)
    if settings.runtime.kind != "memory" and all(_finished(settings, folder, role) for role in ROLES):
        return result(folder)
    return run(settings, out=folder, watch=watch)


def run_party(role: Role, settings: TransferSettings, out: str | Path, watch: Watcher | None = None) -> TransferResult:
    """Run one party in this process.

    With an address the target listens there and the source goes there; with credentials the one who has the server's listens.
    The environment variable PIEBALD_TRANSFER_SECRET may hold a secret that both share, in hexadecimal.
    """
    folder = Path(out)
    meet = _meeting(role, settings.runtime)
    secret, holding = _secret(), _one(settings, role)
    holding.check(role, settings)
    write_settings(folder, settings)
    channel = meet()
    with one_thread():
        played = play(role, settings, holding, channel, folder, watch, secret)
    lines = read_steps(folder / role)
    score = _judge(played) if role == "target" else None
    return _result(settings, role, lines, score, folder)


def _meeting(role: Role, where: TransferRuntime) -> Callable[[], Channel]:
    """How a party alone meets the other; what cannot be is said before anything is loaded."""
    if where.credentials is not None:
        credentials = read_kit(Path(where.credentials))
        return lambda: secured.meet(credentials, where.timeout)
    if where.address is None:
        raise SettingError(
            "a party alone needs a place to meet: --set runtime.address=host:port, the same on both sides, or its credentials: "
            "--set runtime.kind=federation --set runtime.credentials=FOLDER"
        )
    address = where.address
    parse(address)
    return lambda: (listen if role == "target" else connect)(address, where.timeout)


def _one(settings: TransferSettings, role: Role) -> PartyHolding:
    """One party's holding; of its own file, where there is one, and of nobody else's."""
    if settings.files is not None:
        return files.load(settings.files, role, settings.data.test, settings.seed)
    return held.load(settings.data, settings.seed)[role]


def _both(settings: TransferSettings) -> Mapping[Role, PartyHolding]:
    if settings.files is not None:
        return files.both(settings.files, settings.data.test, settings.seed)
    return held.load(settings.data, settings.seed)


def play(
    role: Role,
    settings: TransferSettings,
    holding: PartyHolding,
    channel: Channel,
    folder: Path | None,
    watch: Watcher | None = None,
    secret: bytes = b"",
) -> Party:
    """One party, from the greeting to the farewell, over a channel that is there."""
    made = Party(role, holding, settings)
    session = PartySession(channel, role, settings.runtime.timeout, secret)
    with session.farewell():
        store = None if folder is None else PartyStore(folder, role)
        try:
            keys = {"keys": holding.keys} if holding.keys else {}
            made.done = session.greet(settings.agreed() | keys, store.kept() if store else (0, 0))
            if store:
                store.restore(made, made.done)
            if store and made.done == 0:
                store.show("before", {"rows": sample(made.aligned(holding.x))})
            for step in made.train(session, _keeper(settings, store)):
                if store:
                    store.record(step)
                if watch:
                    watch(step.table())
            if store:
                _show(made, store)
        finally:
            if store:
                store.close()
    return made


@contextmanager
def one_thread() -> Iterator[None]:
    """Sums in the same order whatever the number of cores, so that a run is the same in one process and in two.

    Each party has a core to itself that way, too.
    """
    from threadpoolctl import threadpool_limits

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1):
            yield
    finally:
        torch.set_num_threads(before)


def _keeper(settings: TransferSettings, store: PartyStore | None) -> Callable[[Party], None] | None:
    """What writes the checkpoints.  The last step has one too: handing over may fail."""

    def keep(party: Party) -> None:
        assert store is not None
        if party.done % settings.checkpoint_every == 0 or party.done == settings.steps:
            store.keep(party)

    return None if store is None else keep


def _show(party: Party, store: PartyStore) -> None:
    shown = {"rows": sample(party.aligned(party.holding.x))}
    if party.role == "target":
        shown |= {"scores": party.predict(party.holding.test), "labels": party.holding.test_y}
        shown["rate"] = torch.tensor(party.rate, dtype=torch.float64)
    store.show("after", shown)


# ---------------------------------------------------------------------------------------------------------- two threads


def _two_threads(
    settings: TransferSettings, holdings: Mapping[Role, PartyHolding], folder: Path | None, watch: Watcher | None
) -> TransferResult:
    import torch._dynamo  # what optimisers import when first used; two threads had better not do that at once

    ends = dict(zip(ROLES, InMemoryChannel.pair(), strict=True))
    errors: list[BaseException] = []
    lines: list[dict[str, Any]] = []

    def source() -> None:
        torch.set_num_threads(1)  # the number is each thread's own
        try:
            play("source", settings, holdings["source"], ends["source"], folder)
        except BaseException as error:  # it is raised in the thread that waits
            errors.append(error)

    def note(line: dict[str, Any]) -> None:
        lines.append(line)
        if watch:
            watch(line)

    other = threading.Thread(target=source, name="transfer source", daemon=True)
    other.start()
    try:
        with one_thread():
            target = play("target", settings, holdings["target"], ends["target"], folder, note)
    except PartyEnded as ended:
        other.join()
        raise next((error for error in errors if not isinstance(error, PartyEnded)), ended) from None
    finally:
        other.join()
    if errors:
        raise errors[0]
    if folder is not None:
        lines = read_steps(folder / "target")
    made = _result(settings, "target", lines, _judge(target), folder)
    _write_result(made)
    return made


# -------------------------------------------------------------------------------------------------------- two processes


def _two_processes(settings: TransferSettings, folder: Path, watch: Watcher | None) -> None:
    """Start both parties as processes of their own, which share nothing but a connection, and wait for them."""
    with TemporaryDirectory(prefix="piebald-") as credentials:
        places = _places(settings.runtime, Path(credentials))
        environment = os.environ | {SECRET: secrets.token_hex(32)}
        command = [sys.executable, "-m", "piebald.vertical.process", str(folder)]
        begun = {
            role: subprocess.Popen([*command, role, places[role]], env=environment, stderr=subprocess.PIPE, text=True)
            for role in ROLES
        }
        _wait(begun, folder, watch)


def _places(where: TransferRuntime, credentials: Path) -> dict[Role, str]:
    """Where two processes of this machine meet: an address, or a credentials for each."""
    if where.kind == "sockets":
        return dict.fromkeys(ROLES, where.address or f"127.0.0.1:{free_port()}")
    description = Description(name="transfer", host="127.0.0.1", port=free_port(), days=30, sites=["source"])
    provision(description, credentials)
    return {"source": str(credentials / "source"), "target": str(credentials / SERVER)}


def _wait(begun: Mapping[Role, subprocess.Popen[str]], folder: Path, watch: Watcher | None) -> None:
    """Tell of the target's steps until both processes have ended, or end both."""
    try:
        seen = len(read_steps(folder / "target"))
        while any(process.poll() is None for process in begun.values()):
            time.sleep(0.1)
            lines = read_steps(folder / "target")[seen:] if watch else []
            for line in lines:
                if watch:
                    watch(line)
            seen += len(lines)
    except BaseException:
        for process in begun.values():
            process.terminate()
        raise
    finally:
        said = {role: (process.communicate()[1] or "").strip() for role, process in begun.items()}
    codes = {role: process.returncode for role, process in begun.items()}
    if any(codes.values()):
        raise _ended(codes, said, folder)


class _Stopped(RuntimeFault):
    """A party's process ended with an error."""


def _ended(codes: Mapping[Role, int], said: Mapping[Role, str], folder: Path) -> PiebaldError:
    parts = []
    for role, code in codes.items():
        if code < 0:
            parts.append(f"the {role}'s process was killed by signal {-code}")
        elif code:
            parts.append(f"the {role} says: {said[role].splitlines()[-1] if said[role] else f'exit code {code}'}")
    error = _Stopped(f"{'; '.join(parts)}; go on with: piebald resume {folder}")
    error.exit_code = 2 if 2 in codes.values() else 1
    return error


def _secret() -> bytes:
    text = os.environ.get(SECRET, "")
    with suppress(ValueError):
        if len(secret := bytes.fromhex(text)) <= 64:
            return secret
    raise SettingError(f"{SECRET} must be up to 64 bytes in hexadecimal")


# -------------------------------------------------------------------------------------------------------------- results


def result(folder: str | Path) -> TransferResult:
    """The result of a finished run that has both parties' folders, from what they kept."""
    folder = Path(folder)
    settings = read_settings(folder)
    if not _finished(settings, folder, "target"):
        raise RunFolderError(f"{folder} has not finished: go on with piebald resume {folder}")
    shown = read(folder / "target" / "after.safetensors")
    score = judge(shown["scores"], shown["labels"], float(shown["rate"])) if len(shown["labels"]) else None
    made = _result(settings, "target", read_steps(folder / "target"), score, folder)
    _write_result(made)
    return made


def _finished(settings: TransferSettings, folder: Path, role: Role) -> bool:
    return (folder / role / "after.safetensors").exists() and len(read_steps(folder / role)) == settings.steps


def _judge(target: Party) -> TransferScore | None:
    if not len(target.holding.test_y):  # nobody knows labels of the target's rows
        return None
    return judge(target.predict(target.holding.test), target.holding.test_y, target.rate)


def _result(
    settings: TransferSettings,
    role: Role,
    lines: list[dict[str, Any]],
    score: TransferScore | None,
    folder: Path | None,
) -> TransferResult:
    watched = [line["losses"] for line in lines if line["losses"]]
    count = max(len(lines), 1)
    mean = {name: sum(line[name] for line in lines) / count for name in ("seconds", "sent", "received")}
    to_target, to_source = ("received", "sent") if role == "target" else ("sent", "received")
    return TransferResult(
        score=score,
        first=watched[0] if watched else {},
        last=watched[-1] if watched else {},
        steps=len(lines),
        seconds=mean["seconds"],
        bytes_to_target=mean[to_target],
        bytes_to_source=mean[to_source],
        statement=settings.method.statement(settings.network.aligned, settings.batch, settings.steps),
        folder=folder,
    )


def _write_result(made: TransferResult) -> None:
    if made.folder is not None:
        (made.folder / "result.json").write_text(json.dumps(made.table(), indent=1) + "\n", encoding="utf-8")


__all__ = ["TransferResult", "TransferStep", "play", "result", "resume", "run", "run_party"]
