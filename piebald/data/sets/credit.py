"""Default of credit card clients (UCI, Taiwan 2005): a table of 23 features, suited for a vertical split."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from piebald.core.errors import SettingError
from piebald.data.sets.dataset import DataSet
from piebald.data.sets.download import is_prepared, official
from piebald.data.sets.encoded_tables import checked, decades, encode, owners, read_csv
from piebald.data.sets.formats import read_xls, read_zip

if TYPE_CHECKING:
    from pandas import DataFrame

URL = "https://archive.ics.uci.edu/static/public/350/default+of+credit+card+clients.zip"
# UCI publishes no checksum; this is what several unrelated public projects have recorded of its archive.
CHECKSUM = "sha256:56c885f84457f6680f8438f02bfcdac9579323d8a94465ee5f26e32baa727602"
INSIDE = "default of credit card clients.xls"

PERSONAL = ("LIMIT_BAL", "SEX", "EDUCATION", "MARRIAGE", "AGE")
HISTORY = ("PAY_0", "PAY_2", "PAY_3", "PAY_4", "PAY_5", "PAY_6")
BILLS = tuple(f"BILL_AMT{month}" for month in range(1, 7))
PAYMENTS = tuple(f"PAY_AMT{month}" for month in range(1, 7))
EDUCATION = {1: "graduate school", 2: "university", 3: "high school", 4: "others"}
SEX = {1: "male", 2: "female"}


def credit() -> DataSet:
    """30,000 people: x [30000, 23] float32, standard scores of all rows; 2 classes; no published test part.

    Owners: "education" (codes 0, 5 and 6 are not documented), "sex" and "age" (by decade).  `PERSONAL`, `HISTORY`,
    `BILLS` and `PAYMENTS` group the features' names.  Without the prepared file, the published Excel file is read,
    which needs `pip install '.[xls]'`.

    Raises:
        SettingError: credit/credit_default.csv.gz is missing and the archive cannot be downloaded, or xlrd is
            missing.
    """
    features = (*PERSONAL, *HISTORY, *BILLS, *PAYMENTS)
    columns = (*features, "default")
    here = is_prepared("credit", "credit_default.csv.gz")
    frame = read_csv("credit", "credit_default.csv.gz", columns) if here else _published(columns)
    x, names = encode(frame, features, (), np.ones(len(frame), dtype=bool))
    named = owners(frame, {"EDUCATION": EDUCATION, "SEX": SEX})
    return DataSet(
        name="credit",
        x=x,
        y=torch.from_numpy(frame["default"].to_numpy(dtype=np.int64).copy()),
        classes=["paid", "default"],
        owners={
            "education": named["EDUCATION"],
            "sex": named["SEX"],
            "age": decades(frame["AGE"].to_numpy(dtype=np.int64)),
        },
        features=names,
        source="UCI Default of Credit Card Clients",
        licence="CC BY 4.0",
        citation="I-C. Yeh, C-h. Lien, The comparisons of data mining techniques for the predictive accuracy of "
        "probability of default of credit card clients, Expert Systems with Applications 36(2), 2009",
    )


def _published(columns: tuple[str, ...]) -> DataFrame:
    """Read the published sheet, whose second line has the names of columns."""
    path = official("credit", URL, CHECKSUM)
    (raw,) = read_zip(path, [INSIDE], str(path))
    place = f"{INSIDE} in {path}"
    frame = read_xls(raw, 1, place).rename(columns={"default payment next month": "default"})
    frame = checked(frame, columns, place)
    try:
        whole = frame[list(columns)].astype(np.int64)
    except (ValueError, TypeError) as error:
        raise SettingError(
            f"{place} must hold numbers in every cell, it may be damaged: replace it ({error})"
        ) from None
    return whole
