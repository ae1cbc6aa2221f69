"""Run a transfer: both parties in two threads, or one party that meets the other over a federation's link."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from threadpoolctl import threadpool_limits

from piebald.core.arguments import PathLike, Seeds, checked
from piebald.core.errors import RunFolderError, SettingError, unknown
from piebald.core.machine import one_thread
from piebald.core.plain_text import csv_text
from piebald.core.private_files import write_private
from piebald.federation.credentials.provisioning import Credentials
from piebald.federation.link.supervision import at_work
from piebald.privacy.ledger import TRANSFER
from piebald.vertical import baselines, party_data
from piebald.vertical.channel import Channel, InMemoryChannel, open_channel, partners_of
from piebald.vertical.chunks import exposures, warning
from piebald.vertical.disclosure_ledger import DisclosureKind, Spend, counting, ledger_of
from piebald.vertical.encryption import FixedBackend
from piebald.vertical.party import Party
from piebald.vertical.party_data import PartyHolding, PartyPreparation
from piebald.vertical.party_messages import PartyEnded
from piebald.vertical.party_secret import PartySecret
from piebald.vertical.party_store import SCORES, PartyStore, private_folder, read_settings, write_settings
from piebald.vertical.prediction import predict
from piebald.vertical.protocol import ROLES, PartySession, Role
from piebald.vertical.raw_tables import RawTable, both_named, was_raw
from piebald.vertical.split_model import party_class
from piebald.vertical.transfer_methods import Ftl, Method, Smmd
from piebald.vertical.transfer_results import TransferComparison, TransferResult, result_of, score_rows
from piebald.vertical.transfer_settings import TransferSettings

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
        holdings: data of each party; by default the settings' files, or their data set, divided.
        out: the run folder; None writes nothing.  An unfinished run in this folder is continued.
        watch: called with the record of each step.
        tell: called with a sentence if the run goes beyond the bound on disclosures about rows; by default a warning.

    Raises:
        SettingError: the settings cannot work.
        RuntimeFault: one party ended, or is gone; with a run folder, `resume` continues the run.
    """
    return _trained(_simulated(settings), holdings, None if out is None else Path(out), watch, tell)[0]


def _simulated(settings: TransferSettings) -> TransferSettings:
    """Return settings of a simulation; those of one party of two processes are refused."""
    if settings.runtime.credentials is not None:
        raise SettingError("credentials belong to one party: choose it with --party source or --party target")
    return settings


def _trained(
    settings: TransferSettings,
    holdings: Mapping[Role, PartyHolding] | None,
    folder: Path | None,
    watch: Watcher | None,
    tell: Teller,
) -> tuple[TransferResult, list[dict[str, Any]]]:
    """Return the result of a simulation, and the scores of its models with those of single rows."""
    if folder is not None:
        write_settings(folder, settings)
    holdings = holdings or _load(settings, ROLES)
    _tell_exposure(settings, holdings, tell)
    with ExitStack() as opened:
        stores: dict[Role, PartyStore] = {role: opened.enter_context(PartyStore.of(folder, role)) for role in ROLES}
        target = _two_threads(settings, holdings, stores, watch)
        _compare(target, {role: holdings[role] for role in ROLES}, stores["target"])
        return result_of(settings, stores, folder), stores["target"].rows("row_score")


@checked
def compare(
    settings: TransferSettings,
    seeds: Seeds = (0, 1, 2),
    out: PathLike | None = None,
    watch: Watcher | None = None,
    tell: Teller = warn,
) -> TransferComparison:
    """Simulate a transfer with several seeds, each with other held-out rows, and say over all of them whether it pays.

    One run says nothing of another split of the same people; from three seeds on the verdict holds for others.

    Args:
        settings: settings of the transfer, in which the seed is replaced.
        seeds: of the runs; they must differ.
        out: a folder for the run folders; finished runs in it are not repeated, interrupted ones are continued.
        watch, tell: see `run`, for each run.

    Raises:
        SettingError: the settings cannot work, or belong to one party of two processes.
    """
    folder = None if out is None else Path(out)
    results, judged = [], {}
    for seed in seeds:
        run_folder = None if folder is None else folder / f"seed-{seed}"
        of_seed = settings.model_copy(update={"seed": seed, "out": None})
        finished, judged[seed] = _trained(_simulated(of_seed), None, run_folder, watch, tell)
        results.append(finished)
    tables = baselines.tables_of(judged)
    return TransferComparison(results, tables, baselines.says_of(tables), folder)


@checked
def resume(folder: PathLike, watch: Watcher | None = None, tell: Teller = warn) -> TransferResult:
    """Continue a run from its checkpoints: both parties, or the one whose folder is here."""
    folder = Path(folder)
    settings = read_settings(folder)
    here = [role for role in ROLES if (folder / role).is_dir()]
    if len(here) == 1:
        return run_party(here[0], settings, folder, watch, tell)
    return run(settings, out=folder, watch=watch, tell=tell)


@checked
def run_party(
    role: Role, settings: TransferSettings, out: PathLike, watch: Watcher | None = None, tell: Teller = warn,
    key: Sequence[str] = (), kinds: Sequence[str] = (),
) -> TransferResult:  # fmt: skip
    """Run one party, over a connection to the other one; the one that has the server's credentials listens.

    Args:
        role: the party.
        settings: settings of the transfer, with the party's credentials.
        out: the party's run folder.
        watch: called with the record of each step.
        tell: called with a sentence if the run goes beyond the bound on disclosures about rows, and while the other
            party is not there; by default a warning.
        key, kinds: columns of the key of a raw table and how each is written alike, as of `match`: the rows that both
            parties have are matched first.  By default the table's rows have their names already.
    """
    folder, runtime = Path(out), settings.runtime
    credentials = runtime.own_credentials()
    raw = RawTable(settings, role, key, kinds, credentials, folder, tell) if key else None
    settings = settings if raw is None else raw.settings

    def loaded() -> PartyHolding:
        data = _load(settings, [role])[role]
        _tell_exposure(settings, {role: data}, tell)
        write_settings(folder, settings)
        return data

    # before anybody is met, where the table is there
    data = loaded() if raw is None or raw.is_named else None
    private_folder(folder)
    with PartyStore.of(folder, role) as store:
        noted = store.meta.get("partner")
        # a run that was begun with one partner must not be finished with another, who would learn of the same rows
        if noted is not None and runtime.partner not in (None, noted):
            partner = f"runtime.partner={runtime.partner}"
            raise SettingError(f"the run in {folder} began with {noted}, got {partner}: start it in a new folder")
        secret = store.secret()
        with at_work("waiting for the other party", tell):
            channel = open_channel(credentials, runtime.timeout, runtime.partner or noted)
        session = PartySession(channel, role, runtime.timeout)
        with session.closing(stays=True):
            if runtime.partner is None:
                tell(
                    f"the other party is {channel.partner}, by its certificate: this run keeps to it (to name it "
                    f"before, give runtime.partner={channel.partner})"
                )
            store.set_meta(partner=channel.partner)
            # in one connection with the training, so that both parties begin again after an end at any message
            if raw is not None:
                raw.match(session)
            elif was_raw(settings, role, folder):
                both_named(session, settings)
            data = loaded() if data is None else data
            if raw is not None:
                raw.end()
            spend = _spending(credentials, data, channel.partner)
        # sums in the same order on any number of cores: a run is the same in one process and in two
        with one_thread(), threadpool_limits(1):
            party = train_party(role, settings, data, channel, store, secret, watch, spend)
        if role == "target":
            _compare(party, {role: data}, store)
        return result_of(settings, {role: store}, folder)


def with_partners(settings: TransferSettings, partners: Sequence[str]) -> dict[str, TransferSettings]:
    """Return a party's settings with each of several others, by the names in their certificates, for `run_party`.

    What is told of the party's rows adds up over all pairs in their ledger, with noise and without.

    Raises:
        SettingError: there are no credentials, or they do not list a name, or a name comes twice.
    """
    runtime = settings.runtime
    given = runtime.own_credentials()
    known = partners_of(given)
    for name in partners:
        if name not in known:
            raise unknown(f"party in {given.folder} called", name, known)
    if len({*partners}) < len(partners):
        raise SettingError(f"each partner is met once, got {', '.join(partners)}")
    return {
        name: settings.model_copy(update={"runtime": runtime.model_copy(update={"partner": name})}) for name in partners
    }


def _tell_exposure(settings: TransferSettings, data: Mapping[Role, PartyHolding], tell: Teller) -> None:
    """Tell each party whose rows the other one may determine."""
    for role, own_data in data.items():
        own_data.check(role, settings)
        if sentence := warning(role, exposures(role, own_data, settings)):
            tell(sentence)


def _load(settings: TransferSettings, roles: Sequence[Role]) -> Mapping[Role, PartyHolding]:
    """Load the data of parties; of files, those of these parties alone."""
    if settings.files is None:
        return party_data.load(settings.data, settings.seed)
    method, test = settings.method, settings.data.test
    return party_data.load_files(settings.files, roles, test, settings.seed, method.hides_rows, method.joint)


def _spending(credentials: Credentials, data: PartyHolding, partner: str) -> Spend:
    """Return what counts disclosures in the ledger of a party's rows, beside all else that they are used for.

    Args:
        credentials: the party's, which have a copy of the ledger.
        data: its rows.
        partner: the name in the certificate of whom they are told.
    """
    if data.place is None:  # a data set of Piebald's, which anybody may download
        return lambda kind, noise: None
    ledger = ledger_of(data.records, credentials, data.place)

    def spend(kind: DisclosureKind, noise: float) -> None:
        with counting(ledger):
            if noise:
                ledger.spend(TRANSFER, noise)
            else:
                ledger.count(f"{TRANSFER}_{kind}", partner)

    return spend


def train_party(
    role: Role, settings: TransferSettings, data: PartyHolding, channel: Channel, store: PartyStore,
    secret: PartySecret | None = None, watch: Watcher | None = None,
    spend: Spend = lambda kind, noise: None,
) -> Party:  # fmt: skip
    """Run one party over an open channel, from the handshake to the end.

    Args:
        role: the party.
        settings: settings of the transfer.
        data: the party's data.
        channel: channel to the other party.
        store: its run folder.
        secret: the party's own; None for that of a simulation, which follows from the seed.
        watch: called with the record of each step.
        spend: counts disclosures, see `Party`.
    """
    session = PartySession(channel, role, settings.runtime.timeout)
    with session.closing():
        secret = secret or PartySecret.simulated(settings.seed, role)
        party = party_class(settings.method)(role, data, settings, secret, store, spend)
        party.ledger.check_aborts()
        # co-occurring rows are matched by their positions alone, so both tables must have the same keys
        keys = {"keys": data.keys} if data.keys else {}
        store.restore(party, session.handshake(settings.agreed() | keys, store.last_steps()))
        with _counting_aborts(party):
            for step in party.train(session):
                store.record(party, step)
                if watch:
                    watch(step.table())
        _finish(party, store)
    return party


@contextmanager
def _counting_aborts(party: Party) -> Iterator[None]:
    """Count an error with which this party ends the run, before `PartySession.closing` tells the other one."""
    try:
        yield
    except (PartyEnded, RunFolderError):
        raise  # the other party has ended already, or the ledger or the disk ends the run, whatever the rows are
    except Exception:
        party.count_abort()
        raise


def _finish(party: Party, store: PartyStore) -> None:
    """Record what remains of a finished run: all that a party predicts with, and at the target scores of its rows."""
    joint = party.settings.method.joint
    if party.phi is not None and (joint or party.role == "target"):
        preparation = party.data.preparation or PartyPreparation(features=party.data.features)
        told = {} if joint else {"translator": party.phi.tolist(), "rate": party.rate}
        store.set_meta(preparation=preparation.model_dump(mode="json"), **told)
    if party.phi is not None and party.role == "target":
        store.scores(score_rows(party))
        files = party.settings.files
        if store.path is not None and files is not None and files.target is not None and not joint:
            scores = csv_text(predict(store.path.parent, files.target.path))
            write_private(store.path / SCORES, scores)
    store.finish("finished")


def _compare(target: Party, data: Mapping[Role, PartyHolding], store: PartyStore) -> None:
    """Record what the transfer must beat: models of the data at hand, and in a simulation runs without alignment."""
    judged = store.rows("row_score")
    # those of a run that was finished before are not trained again
    if not len(labels := target.data.test_y) or any(row["version"] == target.done for row in judged):
        return
    found = {baselines.TRANSFER: target.test_scores()} | baselines.plain_models(data)
    others = target.settings.runtime.compare and len(data) == len(ROLES)
    # a split model needs no rows of a party's own, which all others need
    others = others and all(len(one.alone) >= target.settings.batch for one in data.values())
    for name, method in _other_methods(target.settings.method).items() if others else ():
        # the same bits as under encryption, and nobody watches
        changes = {"method": method, "backend": FixedBackend(), "watch_every": target.settings.steps}
        stores = {role: PartyStore.of(None, role) for role in ROLES}
        again = _two_threads(target.settings.model_copy(update=changes), data, stores, None)
        found[name] = again.test_scores()
    store.row_scores(baselines.scored(found, labels, target.done))


def _other_methods(method: Method) -> dict[str, Method]:
    others: dict[str, Method] = {} if isinstance(method, Ftl) else {"FTL": Ftl()}
    aligning = Smmd() if method.joint else method
    if isinstance(aligning, Smmd) and aligning.alpha:
        others |= {"SMMD": aligning} if method.joint else {}
        others["alpha = 0"] = aligning.model_copy(update={"alpha": 0.0})
    return others


def _two_threads(
    settings: TransferSettings, data: Mapping[Role, PartyHolding], stores: Mapping[Role, PartyStore],
    watch: Watcher | None,
) -> Party:  # fmt: skip
    import torch._dynamo  # optimizers import it when first used, which two threads must not do at once

    ends = dict(zip(ROLES, InMemoryChannel.pair(), strict=True))
    errors: list[BaseException] = []

    def train_source() -> None:
        torch.set_num_threads(1)  # the setting is per thread
        try:
            train_party("source", settings, data["source"], ends["source"], stores["source"])
        except BaseException as error:  # raised in the waiting thread
            errors.append(error)

    thread = threading.Thread(target=train_source, name="transfer source", daemon=True)
    thread.start()
    try:
        with one_thread(), threadpool_limits(1):  # as in two processes, and each party has a core of its own
            target = train_party("target", settings, data["target"], ends["target"], stores["target"], watch=watch)
    except PartyEnded as ended:
        thread.join()
        # the target knows only that the source has ended; the source's own error says why
        raise next((error for error in errors if not isinstance(error, PartyEnded)), ended) from None
    finally:
        thread.join()
    if errors:
        raise errors[0]
    return target
