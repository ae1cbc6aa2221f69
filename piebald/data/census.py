"""Adult / Census Income (UCI, 1994): people by country, work, education, race, sex and age."""

from __future__ import annotations

import numpy as np
import torch

from piebald.data.dataset import DataSet
from piebald.data.tables import decades, encode, owners, read_csv

NUMBERS = ("age", "fnlwgt", "education-num", "capital-gain", "capital-loss", "hours-per-week")
WORDS = (
    "workclass",
    "education",
    "marital-status",
    "occupation",
    "relationship",
    "race",
    "sex",
    "native-country",
)


def census() -> DataSet:
    """48,842 people: x [48842, 108] float32, 2 classes of income; the published 16,281 are for testing.

    Numbers are standard scores by the training rows, words one 0/1 feature a value; a missing value is the value "?".
    Owners: "age" (by decade) and the columns "workclass", "education", "race", "sex" and "native-country".

    Raises:
        SettingError: adult/adult.csv.gz is not there.
    """
    frame = read_csv("adult", "adult.csv.gz", ("split", *NUMBERS, *WORDS, "income"))
    train = (frame["split"] == "train").to_numpy(dtype=bool)
    x, names = encode(frame, NUMBERS, WORDS, train)
    by = ("workclass", "education", "race", "sex", "native-country")
    return DataSet(
        name="census",
        x=x,
        y=torch.from_numpy((frame["income"] == ">50K").to_numpy(dtype=np.int64)),
        classes=["<=50K", ">50K"],
        owners={
            **owners(frame, dict.fromkeys(by)),
            "age": decades(frame["age"].to_numpy(dtype=np.int64)),
        },
        train=np.flatnonzero(train),
        test=np.flatnonzero(~train),
        features=names,
        source="UCI Adult (Census Income)",
        licence="CC BY 4.0",
        citation="B. Becker, R. Kohavi, Adult, UCI repository, 1996, https://doi.org/10.24432/C5XW20",
    )
