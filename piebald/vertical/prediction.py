"""Predictions of the target for new rows, from its run folder alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from piebald.core.arguments import PathLike, checked, checked_class
from piebald.core.errors import RunFolderError
from piebald.data.clients.table_files import read_table
from piebald.data.preparation.preparation import Tell, warn
from piebald.vertical.party_data import PartyPreparation
from piebald.vertical.party_network import PartyNetwork
from piebald.vertical.party_store import opened, read_settings, weights_in

if TYPE_CHECKING:
    from pandas import DataFrame


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
        store = opened(folder, ("target",)).get("target")
        if store is None or "translator" not in store.meta:
            raise RunFolderError(
                f"{folder} holds no target that has finished: predict where the target ran, and continue an "
                f"interrupted run with piebald resume {folder}"
            )
        with store:
            told, tensors = store.meta, store.server_checkpoint(settings.steps).tensors
        try:
            preparation = PartyPreparation.model_validate(told["preparation"])
            shape = settings.network
            with torch.device("meta"):  # without memory: the settings may name another size than the weights have
                network = PartyNetwork(len(preparation.features), shape.hidden, shape.aligned, None)
            network.load_state_dict(weights_in(tensors), assign=True)
            network.double()
            translator = torch.tensor(told["translator"], dtype=torch.float64)
            if translator.shape != (shape.aligned[-1],) or not translator.isfinite().all():
                raise ValueError(f"the translator must be {shape.aligned[-1]} numbers")
            return cls(network, translator, float(told["rate"]), preparation)
        except (RuntimeError, KeyError, ValueError, TypeError) as error:
            raise RunFolderError(f"{folder} cannot be read, it may be damaged: {error}") from None

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
        import pandas

        key = self.preparation.key
        frame: Any = rows if isinstance(rows, pandas.DataFrame) else read_table(Path(rows), key or None)
        if self.preparation.columns is not None:
            frame = self.preparation.columns.cleaned(frame, tell=tell)
        with torch.no_grad():
            scores = torch.sigmoid(self.network(self.preparation.inputs(frame))[-1] @ self.translator)
        columns: dict[str, Any] = {"row": range(1, len(frame) + 1)}
        if key in frame.columns:
            columns[key] = frame[key].to_numpy()
        return pandas.DataFrame(columns | {"score": scores.numpy()})


@checked
def predict(run: PathLike, rows: Any) -> DataFrame:
    """Return the target's scores of new rows.

    Args:
        run: the run folder of a finished transfer, at the target.
        rows: a pandas DataFrame with the target's columns, or the path of a CSV or Parquet file.

    Returns:
        See `TransferPredictor.predict`.
    """
    return TransferPredictor.of_run(Path(run)).predict(rows)
