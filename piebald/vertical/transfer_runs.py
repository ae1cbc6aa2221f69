"""Run a transfer: in two threads, in two processes on this machine, or one party of two machines."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from piebald.core.arguments import PathLike, checked
from piebald.core.errors import PiebaldError, RunFolderError, RuntimeFault, SettingError
from piebald.core.plain_text import csv_text
from piebald.federation.credentials.provisioning import Description, provision
from piebald.federation.credentials.provisioning import read as read_credentials
from piebald.federation.hub.local_federation import free_port
from piebald.federation.link.messaging import SERVER
from piebald.federation.link.supervision import at_work
from piebald.federation.link.tls import is_loopback
from piebald.privacy.ledger import FOLDER, TRANSFER, TRANSFER_ABORT, RowLedger
from piebald.vertical import party_data, table_files
from piebald.vertical.channel import Channel, InMemoryChannel, connect, listen, parse
from piebald.vertical.chunks import exposures, warning
from piebald.vertical.disclosure_ledger import DisclosureLedger
from piebald.vertical.party import Party
from piebald.vertical.party_data import PartyHolding
from piebald.vertical.party_messages import PartyEnded
from piebald.vertical.party_preparation import PartyPreparation
from piebald.vertical.party_secret import PartySecret
from piebald.vertical.party_store import (
    PREPARATION,
    SCORES,
    PartyStore,
    read_partner,
    read_settings,
    read_steps,
    sample,
    write_settings,
)
from piebald.vertical.prediction import predict
from piebald.vertical.protocol import ROLES, PartySession, Role
from piebald.vertical.secure_channel import SecureChannel, open_channel
from piebald.vertical.transfer_results import (
    TransferResult,
    is_finished,
    make_result,
    result,
    score_target,
    write_result,
)
from piebald.vertical.transfer_settings import TransferRuntime, TransferSettings

SECRET = "PIEBALD_TRANSFER_SECRET"  # shared by both parties, 1 to 64 bytes in hexadecimal; authenticates messages
Watcher = Callable[[dict[str, Any]], None]
Teller = Callable[[str], None]


def warn(sentence: str) -> None:
    """Warn with a sentence."""
    warnings.warn(sentence, RuntimeWarning, stacklevel=2)


@checked
def run(
    settings: TransferSettings,
    holdings: Mapping[Role, PartyHolding] | None = None,
    out: PathLike | None = None,
    watch: Watcher | None = None,
    tell: Teller = warn,
) -> TransferResult:
    """Train both parties, simulated by one user: their secrets follow from the seed, so the run can be repeated.

    Args:
        settings: settings of the transfer.
        holdings: data of each party; by default the settings' files, or their data set, divided.  Only with runtime
            "memory".
        out: the run folder; None writes nothing, which only runtime "memory" allows.  An unfinished run in this folder
            is continued.
        watch: called with the record of each step.
        tell: called with a sentence if the run goes beyond the bound on disclosures about rows; by default a warning.

    Raises:
        SettingError: the settings cannot work.
        RuntimeFault: one party ended, or is gone; with a run folder, `resume` continues the run.
    """
    folder = None if out is None else Path(out)
    if folder is not None:
        write_settings(folder, settings)
    if not settings.runtime.in_one_process:
        if folder is None or holdings is not None:
            raise SettingError(
                f"runtime {settings.runtime.kind} needs a run folder (out) and a data set that both processes can load"
            )
        if settings.runtime.credentials is not None:
            raise SettingError("credentials belong to one party: choose it with --party source or --party target")
        _tell_exposure(settings, _load_parties(settings), tell)
        _two_processes(settings, folder, watch)
        return result(folder)
    holdings = holdings or _load_parties(settings)
    _tell_exposure(settings, holdings, tell)
    return _two_threads(settings, holdings, folder, watch)


@checked
def resume(folder: PathLike, watch: Watcher | None = None, tell: Teller = warn) -> TransferResult:
    """Continue a run from its checkpoints: both parties, or the one whose folder is here."""
    folder = Path(folder)
    settings = read_settings(folder)
    here = [role for role in ROLES if (folder / role).is_dir()]
    if len(here) == 1 and settings.runtime.is_one_party:
        return run_party(here[0], settings, folder, watch, tell)
    if not settings.runtime.in_one_process and all(is_finished(settings, folder, role) for role in ROLES):
        return result(folder)
    return run(settings, out=folder, watch=watch, tell=tell)


@checked
def run_party(
    role: Role,
    settings: TransferSettings,
    out: PathLike,
    watch: Watcher | None = None,
    tell: Teller = warn,
    simulated: bool = False,
) -> TransferResult:
    """Run one party in this process.

    With an address, the target listens there and the source connects to it; with credentials, the party that has the
    server's credentials listens.  The environment variable PIEBALD_TRANSFER_SECRET may hold a secret that both parties
    share, in hexadecimal.

    Args:
        role: the party.
        settings: settings of the transfer.
        out: the party's run folder.
        watch: called with the record of each step.
        tell: called with a sentence if the run goes beyond the bound on disclosures about rows, and while the other
            party is not there; by default a warning.
        simulated: whether the party's own secret follows from the seed, because one user runs both parties.
    """
    folder = Path(out)
    open_own_channel = _channel_opener(role, settings.runtime, folder)
    shared, data = _secret(), _load_party(settings, role)
    data.check(role, settings)
    write_settings(folder, settings)
    (folder / role).mkdir(mode=0o700, exist_ok=True)  # whose run it is, for `resume`, also if the other never comes
    if not simulated:
        _tell_exposure(settings, {role: data}, tell)
    with at_work("waiting for the other party", tell):
        channel = open_own_channel()
    if isinstance(channel, SecureChannel) and settings.runtime.partner is None and not simulated:
        tell(
            f"the other party is {channel.partner}, by its certificate: this run keeps to it (to name it before, give "
            f"runtime.partner={channel.partner})"
        )
    spend = _spending(role, settings.runtime, data, folder) if not simulated else lambda noise: None
    with one_thread():
        trained = train_party(role, settings, data, channel, folder, watch, shared, simulated, spend)
    lines = read_steps(folder / role)
    score = score_target(trained) if role == "target" else None
    return make_result(settings, {role: trained.ledger}, lines, score, folder, read_partner(folder / role))


def _channel_opener(role: Role, runtime: TransferRuntime, folder: Path) -> Callable[[], Channel]:
    """Return a function that connects one party to the other; refuse wrong settings before data is loaded."""
    if runtime.credentials is not None:
        credentials = read_credentials(Path(runtime.credentials))
        # a run that was begun with one partner must not be finished with another, who would learn of the same rows
        noted = read_partner(folder / role)
        if noted is not None and runtime.partner not in (None, noted):
            partner = f"runtime.partner={runtime.partner}"
            raise SettingError(f"the run in {folder} began with {noted}, got {partner}: start it in a new folder")
        return lambda: open_channel(credentials, runtime.timeout, runtime.partner or noted)
    if runtime.address is None:
        raise SettingError(
            "a party alone needs an address: --set runtime.address=host:port, the same on both sides, "
            "or credentials: --set runtime.kind=federation --set runtime.credentials=FOLDER"
        )
    address = runtime.address
    host, _ = parse(address)
    if not (runtime.allow_unencrypted or is_loopback(host)):
        raise SettingError(
            f"address {address!r} is not on this machine, and sockets are not encrypted, so others can read the losses "
            "and the translator: use credentials (--set runtime.kind=federation --set runtime.credentials=FOLDER), or "
            "accept it with --set runtime.allow_unencrypted=true"
        )
    return lambda: (listen if role == "target" else connect)(address, runtime.timeout)


def _tell_exposure(settings: TransferSettings, data: Mapping[Role, PartyHolding], tell: Teller) -> None:
    """Tell each party whose rows the other one may determine."""
    for role, own_data in data.items():
        own_data.check(role, settings)
        if sentence := warning(role, exposures(role, own_data, settings)):
            tell(sentence)


def _load_party(settings: TransferSettings, role: Role) -> PartyHolding:
    """Load one party's data, without reading the other party's file."""
    if settings.files is not None:
        return table_files.load(settings.files, role, settings.data.test, settings.seed, settings.method.hides_rows)
    return party_data.load(settings.data, settings.seed)[role]


def _spending(role: Role, runtime: TransferRuntime, data: PartyHolding, folder: Path) -> Callable[[float], None]:
    """Return what counts releases in the ledger of a party's rows, beside all else that they are used for.

    Args:
        role: role of the party.
        runtime: with its credentials, if it has some, which have a copy of the ledger.
        data: its rows.
        folder: the run folder.
    """
    if data.place is None:  # a data set of Piebald's, which anybody may download
        return lambda noise: None
    state, name = folder / role, str(role)
    if runtime.credentials is not None:
        state, name = Path(runtime.credentials) / "state", read_credentials(Path(runtime.credentials)).party
    ledger = RowLedger(data.records, [state, data.place / FOLDER], name)

    def spend(noise: float) -> None:
        try:
            if noise:
                ledger.spend(TRANSFER, noise)
            else:
                ledger.count(TRANSFER_ABORT, "abort")
        except OSError as error:
            raise RunFolderError(
                f"the ledger of this party's rows in {state} cannot be written, so nothing is sent: "
                f"{(error.strerror or str(error)).lower()}"
            ) from None

    return spend


def _load_parties(settings: TransferSettings) -> Mapping[Role, PartyHolding]:
    if settings.files is not None:
        return table_files.both(settings.files, settings.data.test, settings.seed, settings.method.hides_rows)
    return party_data.load(settings.data, settings.seed)


def train_party(
    role: Role, settings: TransferSettings, data: PartyHolding, channel: Channel, folder: Path | None,
    watch: Watcher | None = None, shared: bytes = b"", simulated: bool = False,
    spend: Callable[[float], None] = lambda noise: None,
) -> Party:  # fmt: skip
    """Run one party over an open channel, from the handshake to the end.

    Args:
        role: the party.
        settings: settings of the transfer.
        data: the party's data.
        channel: channel to the other party.
        folder: the run folder, or None to write nothing.
        watch: called with the record of each step.
        shared: the secret that both parties share, which authenticates messages.
        simulated: whether the party's own secret follows from the seed.
        spend: counts releases with noise, see `Party`.
    """
    session = PartySession(channel, role, settings.runtime.timeout, shared)
    with session.closing():
        store = None if folder is None else PartyStore(folder, role)
        try:
            secret = PartySecret.simulated(settings.seed, role) if simulated else None
            secret = store.secret(secret) if store else secret or PartySecret.fresh()
            party = Party(role, data, settings, secret, store.ledger_file if store else None, spend)
            party.ledger.check_aborts()
            if store and isinstance(channel, SecureChannel):
                store.keep_to(channel.partner)
            # co-occurring rows are matched by their positions alone, so both tables must have the same keys
            keys = {"keys": data.keys} if data.keys else {}
            party.done = session.handshake(settings.agreed() | keys, store.last_steps() if store else (0, 0))
            if store:
                store.restore(party, party.done)
            if store and party.done == 0:
                store.write("before", {"rows": sample(party.aligned(data.x))})
            with _counting_aborts(party):
                for step in party.train(session, _checkpoint_writer(settings, store)):
                    if store:
                        store.record(step)
                    if watch:
                        watch(step.table())
            if store:
                _write_results(party, store)
        finally:
            if store:
                store.close()
    return party


@contextmanager
def _counting_aborts(party: Party) -> Iterator[None]:
    """Count an error with which this party ends the run, before `PartySession.closing` tells the other one."""
    try:
        yield
    except RuntimeFault as error:
        if not isinstance(error, PartyEnded):
            party.count_abort()
        raise


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute sums in the same order on any number of cores, so that a run is the same in one process and in two.

    Each party also gets a core of its own.
    """
    from threadpoolctl import threadpool_limits

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1):
            yield
    finally:
        torch.set_num_threads(before)


def _checkpoint_writer(settings: TransferSettings, store: PartyStore | None) -> Callable[[Party], None] | None:
    """Return a function that writes checkpoints, also after the last step, and deletes passed ones."""

    def write_checkpoint(party: Party) -> None:
        assert store is not None
        # the last step has a checkpoint, from which a lost handover is repeated
        if party.done % settings.checkpoint_every == 0 or party.done == settings.steps:
            store.save(party)
        else:
            store.passed()

    return None if store is None else write_checkpoint


def _write_results(party: Party, store: PartyStore) -> None:
    tensors = {"rows": sample(party.aligned(party.data.x))}
    if party.role == "target":
        tensors |= {"scores": party.predict(party.data.test), "labels": party.data.test_y}
        assert party.phi is not None, "training ends with the translator"
        tensors |= {"translator": party.phi, "rate": torch.tensor(party.rate, dtype=torch.float64)}
        preparation = party.data.preparation or PartyPreparation(features=party.data.features)
        store.write_text(PREPARATION, preparation.model_dump_json(indent=1))
        store.write("after", tensors)
        files = party.settings.files
        if files is not None and files.target is not None:
            store.write_text(SCORES, csv_text(predict(store.folder.parent, files.target.path)))
    else:
        store.write("after", tensors)


# ---------------------------------------------------------------------------------------------------------- two threads


def _two_threads(
    settings: TransferSettings, data: Mapping[Role, PartyHolding], folder: Path | None, watch: Watcher | None
) -> TransferResult:
    import torch._dynamo  # optimizers import it when first used, which two threads must not do at once

    ends = dict(zip(ROLES, InMemoryChannel.pair(), strict=True))
    ledgers: dict[Role, DisclosureLedger] = {}
    errors: list[BaseException] = []
    lines: list[dict[str, Any]] = []

    def train_source() -> None:
        torch.set_num_threads(1)  # the setting is per thread
        try:
            source = train_party("source", settings, data["source"], ends["source"], folder, simulated=True)
            ledgers["source"] = source.ledger
        except BaseException as error:  # raised in the waiting thread
            errors.append(error)

    def note(line: dict[str, Any]) -> None:
        lines.append(line)
        if watch:
            watch(line)

    thread = threading.Thread(target=train_source, name="transfer source", daemon=True)
    thread.start()
    try:
        with one_thread():
            target = train_party("target", settings, data["target"], ends["target"], folder, note, simulated=True)
    except PartyEnded as ended:
        thread.join()
        # the target knows only that the source has ended; the source's own error says why
        raise next((error for error in errors if not isinstance(error, PartyEnded)), ended) from None
    finally:
        thread.join()
    if errors:
        raise errors[0]
    if folder is not None:
        lines = read_steps(folder / "target")
    ledgers["target"] = target.ledger
    finished = make_result(settings, ledgers, lines, score_target(target), folder)
    write_result(finished)
    return finished


# -------------------------------------------------------------------------------------------------------- two processes


def _two_processes(settings: TransferSettings, folder: Path, watch: Watcher | None) -> None:
    """Start both parties as separate processes, which share nothing but a connection, and wait for them."""
    with TemporaryDirectory(prefix="piebald-") as folder_of_credentials:
        places = _places(settings.runtime, Path(folder_of_credentials))
        environment = os.environ | {SECRET: secrets.token_hex(32)}
        # a new interpreter for each party: the two share no memory, only a connection
        command = [sys.executable, "-P", "-m", "piebald.vertical.process", str(folder)]
        # in files, since a party would wait for somebody to read a pipe that is full
        errors = {role: Path(folder_of_credentials) / f"{role}.log" for role in ROLES}
        begun = dict[Role, subprocess.Popen[bytes]]()
        for role in ROLES:
            with errors[role].open("wb") as log:
                begun[role] = subprocess.Popen([*command, role, places[role]], env=environment, stderr=log)
        _wait(begun, errors, folder, watch)


def _places(runtime: TransferRuntime, credentials: Path) -> dict[Role, str]:
    """Return the place of each process of this machine: an address, or a folder of credentials."""
    if not runtime.has_credentials:
        return dict.fromkeys(ROLES, runtime.address or f"127.0.0.1:{free_port()}")
    description = Description(name="transfer", host="127.0.0.1", port=free_port(), days=30, sites=["source"])
    provision(description, credentials)
    return {"source": str(credentials / "source"), "target": str(credentials / SERVER)}


def _wait(
    begun: Mapping[Role, subprocess.Popen[bytes]], errors: Mapping[Role, Path], folder: Path, watch: Watcher | None
) -> None:
    """Report the target's steps until both processes have ended; terminate both on an error."""
    try:
        reported = len(read_steps(folder / "target"))
        while any(process.poll() is None for process in begun.values()):
            time.sleep(0.1)
            lines = read_steps(folder / "target")[reported:] if watch else []
            for line in lines:
                if watch:
                    watch(line)
            reported += len(lines)
    except BaseException:
        for process in begun.values():
            # either party alone would wait for the other one's messages until its timeout
            process.terminate()
        raise
    finally:
        codes = {role: process.wait() for role, process in begun.items()}
        messages = {role: path.read_text(encoding="utf-8", errors="replace").strip() for role, path in errors.items()}
    if any(codes.values()):
        raise _error(codes, messages, folder)


class _Stopped(RuntimeFault):
    """A party's process ended with an error."""


def _error(codes: Mapping[Role, int], messages: Mapping[Role, str], folder: Path) -> PiebaldError:
    parts = []
    for role, code in codes.items():
        if code < 0:
            parts.append(f"the {role}'s process was killed by signal {-code}")
        elif code:
            message = messages[role].splitlines()[-1] if messages[role] else f"exit code {code}"
            parts.append(f"the {role} says: {message}")
    error = _Stopped(f"{'; '.join(parts)}; continue with: piebald resume {folder}")
    error.exit_code = 2 if 2 in codes.values() else 1
    return error


def _secret() -> bytes:
    # no variable is an empty secret: tags then find damage, but prove nothing about the sender
    text = os.environ.get(SECRET, "")
    with suppress(ValueError):
        # BLAKE2b takes keys of up to 64 bytes
        if len(secret := bytes.fromhex(text)) <= 64:
            return secret
    raise SettingError(f"{SECRET} must be up to 64 bytes in hexadecimal")
