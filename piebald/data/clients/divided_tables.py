"""The rows of a table divided as those of clients are, for what reads tables as they are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from piebald.contracts import Split
from piebald.core.arguments import checked
from piebald.core.errors import SettingError, shown, unknown
from piebald.data.clients.client_tables import known, owners_in, read_table
from piebald.data.clients.lists import Lists
from piebald.data.partition.leakage import with_suspects
from piebald.data.partition.row_keys import RowKeys
from piebald.data.partition.split import Ints
from piebald.data.partition.split_settings import SplitSettings
from piebald.data.partition.three_way_split import SPLITS, three_ways
from piebald.data.preparation.columns import classes_of, factorized


@checked
def train_validation_test_split(
    table: Any,
    split: SplitSettings | Mapping[str, Any] | str | None = None,
    *,
    client: str | None = None,
    target: str | None = None,
    regression: bool = False,
) -> dict[Split, Any]:
    """Divide the rows of a table into one table for each split, as `clients_from` and `[split]` divide them.

    Args:
        table: a pandas DataFrame, or the path of a table; gaps and text are left as they are.
        split: `SplitSettings`, or a table of them, or the name of a column of parts.
        client: the column that names the client of each row; None where all are of one.
        target: the column by whose classes rows are stratified, if it has classes.
        regression: the target has numbers to predict, also where all of them are whole.

    Returns:
        pandas DataFrames of the rows "train", "validation" and "test".

    Raises:
        SettingError: there is no such column, or settings do not fit the table.

    Examples:
        >>> import pandas
        >>> visits = pandas.DataFrame({"patient": list("aabbccdd"), "dose": range(8), "ill": list("yynnyynn")})
        >>> parts = train_validation_test_split(visits, {"group": "patient", "test": 0.5}, target="ill")
        >>> {name: len(part) for name, part in parts.items()}
        {'train': 4, 'validation': 0, 'test': 4}
    """
    frame = read_table(Path(table), client) if isinstance(table, str | Path) else table
    if not hasattr(frame, "columns"):
        raise SettingError(f"table must be a pandas DataFrame or the path of a table, got {shown(table)}")
    parts = parts_of(frame, SplitSettings.of(split), client, target, regression)
    return {name: frame[parts == place] for place, name in enumerate(SPLITS)}


def parts_of(
    frame: Any, split: SplitSettings, client: str | None, target: str | None, regression: bool = False
) -> Ints:
    """Return the place of each row's part [n] in `SPLITS`, -1 for none; see `train_validation_test_split`."""
    names = [str(name) for name in frame.columns]
    for column in (client, target):
        if column is not None and column not in names:
            raise unknown("column", column, names)
    kept = frame.reset_index(drop=True)
    for column, what in ((client, "clients"), (target, "targets")):
        kept = kept if column is None else known(kept, column, what)
    codes, own = owners_in(kept[client]) if client is not None else (np.zeros(len(kept), dtype=np.int64), [""])
    keys = RowKeys.of_table(names, kept.__getitem__, split, client)
    keys = with_suspects(keys, kept, target, (client, *split.columns))
    label = None if target is None or regression else _classes(kept[target])
    parts = np.full(len(frame), -1, dtype=np.int64)
    for place, rows in enumerate(three_ways(Lists.of(codes, len(own)), label, split, keys, names=own).values()):
        parts[kept.index.to_numpy()[rows.values]] = place
    return parts


def _classes(series: Any) -> Ints | None:
    """Return the class [n] of each target, -1 where it is missing, None of amounts."""
    classes = classes_of(series)
    if classes is None:
        return None
    codes, words = factorized(series.astype(int) if series.dtype == bool else series)
    return np.array([*map(classes.index, words), -1])[codes]
