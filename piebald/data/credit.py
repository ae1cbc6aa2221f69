"""Default of credit card clients (UCI, Taiwan 2005): a table of 23 features, good for a vertical split."""

from __future__ import annotations

import numpy as np
import torch

from piebald.data.dataset import DataSet
from piebald.data.tables import decades, encode, owners, read_csv

PERSONAL = ("LIMIT_BAL", "SEX", "EDUCATION", "MARRIAGE", "AGE")
HISTORY = ("PAY_0", "PAY_2", "PAY_3", "PAY_4", "PAY_5", "PAY_6")
BILLS = tuple(f"BILL_AMT{month}" for month in range(1, 7))
PAYMENTS = tuple(f"PAY_AMT{month}" for month in range(1, 7))
EDUCATION = {1: "graduate school", 2: "university", 3: "high school", 4: "others"}
SEX = {1: "male", 2: "female"}


def credit() -> DataSet:
    """30,000 people: x [30000, 23] float32, standard scores of all rows; 2 classes; no published test part.

    Owners: "education" (codes 0, 5 and 6 are not documented), "sex" and "age" (by decade).  `PERSONAL`, `HISTORY`,
    `BILLS` and `PAYMENTS` group the features' names.

    Raises:
        SettingError: credit/credit_default.csv.gz is not there.
    """
    features = (*PERSONAL, *HISTORY, *BILLS, *PAYMENTS)
    frame = read_csv("credit", "credit_default.csv.gz", (*features, "default"))
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
