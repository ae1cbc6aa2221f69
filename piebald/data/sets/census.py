"""Adult / Census Income (UCI, 1994): people by country, work, education, race, sex and age."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import numpy as np
import torch

from piebald.core.errors import SettingError
from piebald.data.sets.dataset import DataSet
from piebald.data.sets.download import is_prepared, official
from piebald.data.sets.encoded_tables import decades, encode, owners, read_csv
from piebald.data.sets.formats import read_zip

if TYPE_CHECKING:
    from pandas import DataFrame

URL = "https://archive.ics.uci.edu/static/public/2/adult.zip"
# UCI publishes no checksum; this is what several unrelated public projects have recorded of its archive.
CHECKSUM = "sha256:7537312dd56c2b98035880805ce99e68183a30ee468aa5329d6df0fbb3cc21bb"
COLUMNS = (  # in the order of the published files, which do not name them
    "age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation", "relationship", "race",
    "sex", "capital-gain", "capital-loss", "hours-per-week", "native-country", "income",
)  # fmt: skip

NUMBERS = ("age", "fnlwgt", "education-num", "capital-gain", "capital-loss", "hours-per-week")
TEXTS = ("workclass", "education", "marital-status", "occupation", "relationship", "race", "sex", "native-country")


def census() -> DataSet:
    """48,842 people: x [48842, 108] float32, 2 classes of income; the published 16,281 are for testing.

    Numbers are standard scores by the training rows, text columns one 0/1 feature per value; a missing value is "?".
    Owners: "age" (by decade) and the columns "workclass", "education", "race", "sex" and "native-country".
    Without the prepared file, the published archive is read.

    Raises:
        SettingError: adult/adult.csv.gz is missing and the archive cannot be downloaded, or a file is damaged.
    """
    here = is_prepared("adult", "adult.csv.gz")
    frame = read_csv("adult", "adult.csv.gz", ("split", *NUMBERS, *TEXTS, "income")) if here else _published()
    train = (frame["split"] == "train").to_numpy(dtype=bool)
    x, names = encode(frame, NUMBERS, TEXTS, train)
    by = ("workclass", "education", "race", "sex", "native-country")
    return DataSet(
        name="census",
        x=x,
        y=torch.from_numpy((frame["income"] == ">50K").to_numpy(dtype=np.int64)),
        classes=["<=50K", ">50K"],
        owners={**owners(frame, dict.fromkeys(by)), "age": decades(frame["age"].to_numpy(dtype=np.int64))},
        train=np.flatnonzero(train),
        test=np.flatnonzero(~train),
        features=names,
        source="UCI Adult (Census Income)",
        licence="CC BY 4.0",
        citation="B. Becker, R. Kohavi, Adult, UCI repository, 1996, https://doi.org/10.24432/C5XW20",
    )


def _published() -> DataFrame:
    """The published training and test rows; adult.test begins with a comment line and its labels end with a stop."""
    import pandas

    path = official("adult", URL, CHECKSUM)
    parts = []
    for split, raw in zip(("train", "test"), read_zip(path, ["adult.data", "adult.test"], str(path)), strict=True):
        try:
            frame = pandas.read_csv(
                io.BytesIO(raw), names=list(COLUMNS), index_col=False, skipinitialspace=True,
                skiprows=int(split == "test"), dtype=dict.fromkeys(NUMBERS, np.int64), keep_default_na=False,
            )  # fmt: skip
        except ValueError as error:
            raise SettingError(f"adult files in {path} are not as published: replace it ({error})") from None
        frame["income"] = frame["income"].str.removesuffix(".")
        if not frame["income"].isin(["<=50K", ">50K"]).all():
            raise SettingError(f"adult files in {path} must have <=50K or >50K at each line's end: replace it")
        parts.append(frame.assign(split=split))
    return pandas.concat(parts, ignore_index=True)
