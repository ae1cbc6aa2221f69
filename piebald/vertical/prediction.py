"""Predictions for new rows: of the target from its run folder alone, or of both parties together.

The parties of a split model come with tables that name the same rows by their keys, over the link of their run.  The
source sends its share of each row's score, in the order of keys, and learns how many rows are scored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from piebald.core.arguments import PathLike, checked, checked_class
from piebald.core.errors import RunFolderError, SettingError
from piebald.core.tensor_store import under
from piebald.data.clients.row_identity import Digests
from piebald.data.clients.table_files import read_table
from piebald.data.preparation.preparation import Tell, warn
from piebald.privacy.ledger import TRANSFER
from piebald.vertical.channel import open_channel
from piebald.vertical.disclosure_ledger import counting, ledger_of
from piebald.vertical.kernels import Floats
from piebald.vertical.loss_terms import MOST_SCORE
from piebald.vertical.party_data import Ints, PartyPreparation, Texts, digest_of_keys, keys_in, read_cells, records_in
from piebald.vertical.party_messages import MessageKind
from piebald.vertical.party_network import PartyNetwork
from piebald.vertical.party_store import WEIGHTS, PartyStore, opened, read_settings
from piebald.vertical.protocol import ROLES, PartySession, Role, receive_numbers, send_numbers
from piebald.vertical.split_model import LinearScore
from piebald.vertical.transfer_settings import TransferSettings

if TYPE_CHECKING:
    from pandas import DataFrame

Network = TypeVar("Network", bound=nn.Module)
SHARES = f"{TRANSFER}_shares"  # kind of entry in the ledger of the source's rows: shares of scores were told


@checked_class
@dataclass(frozen=True, eq=False)
class TransferPredictor:
    """The target's trained network and the translator that the source handed over.

    Attributes:
        network: the target's network.
        translator: Phi [d].
        rate: the source's share of positives.
        preparation: how the columns of a table become inputs.
    """

    network: PartyNetwork
    translator: Tensor
    rate: float
    preparation: PartyPreparation

    @classmethod
    def of_run(cls, folder: Path) -> Self:
        """Return the predictor of a finished transfer.

        Raises:
            RunFolderError: the folder holds no target that has finished, or is damaged.
        """
        settings = read_settings(folder)
        shape = settings.network
        with _whole(folder):
            told, preparation, network = _trained(
                folder, "target", settings, lambda features: PartyNetwork(features, shape.hidden, shape.aligned, None)
            )
            translator = torch.tensor(told["translator"], dtype=torch.float64)
            if translator.shape != (shape.aligned[-1],) or not translator.isfinite().all():
                raise ValueError(f"the translator must be {shape.aligned[-1]} numbers")
            return cls(network, translator, float(told["rate"]), preparation)

    def predict(self, rows: DataFrame | PathLike, tell: Tell = warn) -> DataFrame:
        """Return scores of the rows of a table.

        Args:
            rows: a table with the target's columns, in any order, or the path of one.
            tell: takes sentences about how rows are unlike those of training.

        Returns:
            The number of each row, from 1; its key, where the table has the column of keys; and its score, from 0 to 1
            and higher for positives: the sigmoid of a product, and no calibrated probability.

        Raises:
            SettingError: the table cannot be read, a column is missing, or a value cannot be used.
        """
        frame = _table(self.preparation, rows, tell)
        with torch.no_grad():
            scores = torch.sigmoid(self.network(self.preparation.inputs(frame))[-1] @ self.translator)
        return _listed(self.preparation, frame, score=scores.numpy())


@checked
def predict(run: PathLike, rows: Any, source_rows: Any = None, tell: Tell = warn) -> DataFrame:
    """Return scores of new rows.

    Args:
        run: the run folder of a finished transfer, at the target.  Of a split model each party gives its own, at the
            same time, and they meet as in the run.
        rows: a pandas DataFrame with the party's columns, or the path of a CSV or Parquet file.
        source_rows: the source's table, where a simulated split model is in the folder.
        tell: takes sentences about how rows are unlike those of training.

    Returns:
        See `TransferPredictor.predict`.  Of a split model, rows without a key have no score, and at the source the rows
        are those whose shares were sent, without scores.

    Raises:
        SettingError: a table cannot be used, or tables do not have the same keys.
        RuntimeFault: the other party ended, or is not there.
    """
    folder = Path(run)
    settings = read_settings(folder)
    if not settings.method.joint:
        if source_rows is not None:
            raise SettingError("source_rows are for a split model, and the target of this run predicts alone")
        return TransferPredictor.of_run(folder).predict(rows, tell)
    here = [role for role in ROLES if (folder / role).is_dir()]
    if not here or (len(here) == 2) != (source_rows is not None):
        need = "source_rows, the source's table, beside the target's" if len(here) == 2 else "one table, its own"
        raise SettingError(f"{folder} holds {' and '.join(here) or 'no party'} of a split model, which needs {need}")
    if source_rows is None:
        return _meet(folder, settings, here[0], _Shares.of(folder, settings, here[0], rows, tell))
    ours = _Shares.of(folder, settings, "target", rows, tell)
    theirs = _Shares.of(folder, settings, "source", source_rows, tell)
    if ours.digest != theirs.digest:
        raise SettingError("the two tables must have the same keys: leave the key empty in rows of one party only")
    return ours.scored(theirs.in_order())


@dataclass(frozen=True, eq=False)
class _Shares:
    """One party's shares [n] of the scores of its table's rows, and the rows' keys, or numbers where they have none."""

    preparation: PartyPreparation
    frame: DataFrame
    keys: Texts
    place: Ints
    shares: Floats
    records: Digests
    folder: Path | None

    @classmethod
    def of(cls, folder: Path, settings: TransferSettings, role: Role, rows: Any, tell: Tell) -> Self:
        with _whole(folder):
            _, preparation, network = _trained(
                folder, role, settings, lambda features: LinearScore(features, bias=role == "source")
            )
        frame = _table(preparation, rows, tell)
        if preparation.key:
            keys, place = keys_in(frame, preparation.key, "the rows")
        else:
            place = np.arange(len(frame))
            keys = place.astype(np.str_)
        with torch.no_grad():
            shares: Floats = network(preparation.inputs(frame)).numpy()
        lies_in = Path(rows).resolve().parent if isinstance(rows, str | Path) else None
        cleaning = None if preparation.columns is None else preparation.columns.cleaning
        return cls(preparation, frame, keys, place, shares, records_in(rows, role, cleaning), lies_in)

    @property
    def digest(self) -> str:
        """Digest of the keys, the same at both parties."""
        return digest_of_keys(self.keys[self.place])

    def in_order(self) -> Floats:
        """The shares in the order of keys."""
        return self.shares[self.place]

    def scored(self, others: Floats | None) -> DataFrame:
        """Return the rows with their scores; None for `others` leaves the scores out."""
        if others is None:
            return _listed(self.preparation, self.frame)
        scores = np.full(len(self.frame), np.nan)
        scores[self.place] = torch.sigmoid(torch.from_numpy(self.in_order() + others)).numpy()
        return _listed(self.preparation, self.frame, score=scores)


def _meet(folder: Path, settings: TransferSettings, role: Role, own: _Shares) -> DataFrame:
    """Return the target's scores, with the shares that the source sends over the link of the run."""
    runtime = settings.runtime
    credentials = runtime.own_credentials()
    with PartyStore.open_read_only(folder / role) as store:
        partner, last = store.meta.get("partner"), store.steps()[-1]["losses"]
    channel = open_channel(credentials, runtime.timeout, partner)
    session = PartySession(channel, role, runtime.timeout)
    with session.closing():
        # the losses of the last step are known to both, and to no other run
        session.handshake({"predict": settings.agreed(), "losses": last, "keys": own.digest})
        shares = None
        if role == "target":
            shares = receive_numbers(session, MessageKind.HANDOVER, len(own.place), most=MOST_SCORE)
        else:
            ledger = ledger_of(own.records, credentials, own.folder)
            with counting(ledger):  # before anything is sent
                ledger.count(SHARES, channel.partner)
            send_numbers(session, MessageKind.HANDOVER, own.in_order())
        session.finish()
    return own.scored(shares)


def _trained(
    folder: Path, role: Role, settings: TransferSettings, made: Callable[[int], Network]
) -> tuple[dict[str, Any], PartyPreparation, Network]:
    """Return what a party that has finished keeps to predict with, how it prepares columns, and its network.

    Args:
        folder, role, settings: of the run.
        made: makes the network of so many features, whose weights are then the trained ones.
    """
    with opened(folder) as stores:
        if role not in stores or "preparation" not in stores[role].meta:
            raise RunFolderError(
                f"{folder} holds no {role} that has finished: predict where the {role} ran, and continue an "
                f"interrupted run with piebald resume {folder}"
            )
        told, tensors = stores[role].meta, stores[role].server_checkpoint(settings.steps).tensors
    preparation = PartyPreparation.model_validate(told["preparation"])
    with torch.device("meta"):  # without memory: the settings may name another size than the weights have
        network = made(len(preparation.features))
    network.load_state_dict(under(tensors, WEIGHTS), assign=True)
    return told, preparation, network.double()


@contextmanager
def _whole(folder: Path) -> Iterator[None]:
    """Turn what a damaged folder leads to into a sentence."""
    try:
        yield
    except (RuntimeError, KeyError, ValueError, TypeError) as error:
        raise RunFolderError(f"{folder} cannot be read, it may be damaged: {error}") from None


def _table(preparation: PartyPreparation, rows: DataFrame | PathLike, tell: Tell) -> DataFrame:
    import pandas

    columns = preparation.columns
    if isinstance(rows, pandas.DataFrame):
        frame: Any = rows
    elif preparation.as_written:
        frame = read_cells(Path(rows), preparation.key)
    else:  # as `load_one` reads the rows of training, the keys included
        frame = read_table(Path(rows), None, () if columns is None else columns.as_written)
    return frame if columns is None else columns.cleaned(frame, tell=tell)


def _listed(preparation: PartyPreparation, frame: DataFrame, **columns: Floats) -> DataFrame:
    """Return the number of each row, from 1, its key, where the table has the column of keys, and further columns."""
    import pandas

    listed: dict[str, Any] = {"row": range(1, len(frame) + 1)}
    if preparation.key in frame.columns:
        keys = frame[preparation.key].reset_index(drop=True)
        # whole numbers beside gaps are read as 1000.0
        listed[preparation.key] = keys.convert_dtypes() if keys.dtype.kind == "f" else keys
    return pandas.DataFrame(listed | columns)
