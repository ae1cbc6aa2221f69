"""Three hospitals that write the same patients in ways of their own, and what was planted among them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

PLANTED = {"age": 0.06, "glucose": 0.5, "weight": 0.02, "sex=male": 0.4}  # log odds of being ill
SITES = ("berlin", "graz", "lyon")


def truth(rows: int = 240, seed: int = 5) -> dict[str, Any]:
    """Return the rows of each hospital as they should be."""
    import pandas

    rng, tables = np.random.default_rng(seed), {}
    for number, site in enumerate(SITES):
        table = pandas.DataFrame({
            "patient": [f"{site[0]}{row:04d}" for row in range(rows)], "age": rng.integers(35, 85, rows),
            "glucose": rng.normal(6 + 0.3 * number, 1.3, rows).round(2), "weight": rng.normal(76, 12, rows).round(1),
            "sex": rng.choice(["female", "male"], rows), "lab": rng.normal(1, 0.2, rows).round(3),
            "seen": pandas.to_datetime("2023-01-01") + pandas.to_timedelta(rng.integers(0, 600, rows), unit="D"),
        })  # fmt: skip
        odds = sum(slope * table[name] for name, slope in PLANTED.items() if name in table)
        table["ill"] = (rng.random(rows) < 1 / (1 + np.exp(9 - odds - 0.4 * (table.sex == "male")))).astype(int)
        tables[site] = table
    return tables


def write_raw(folder: Path, tables: Mapping[str, Any], separators: str = ",\t;") -> None:
    """Write the rows as each hospital has them, as patients.csv in a folder of its name.

    Units, spellings, decimal commas, dates and codes of classes differ, there are words and codes for gaps, copies of
    rows, and one column less.
    """
    import pandas

    berlin, graz, lyon = (tables[site].copy() for site in SITES)
    berlin["glucose"] = (berlin.glucose * 18.016).round(4)
    berlin["ill"] += 1
    berlin["sex"] = berlin.sex.map({"female": "weiblich", "male": "m"})
    berlin["seen"] = berlin.seen.dt.strftime("%d.%m.%Y")
    berlin["weight"] = [f"{kg} kg" if row % 7 else "unbekannt" for row, kg in enumerate(berlin.weight)]
    graz["weight"] = [f"{kg / 0.45359237:.4f} lb" for kg in graz.weight]
    graz["sex"] = graz.sex.map({"female": "F", "male": "Male "})
    graz["seen"] = graz.seen.dt.strftime("%Y-%m-%d")
    graz["age"] = graz.age.mask(np.arange(len(graz)) % 60 == 5, -9)
    graz = pandas.concat([graz, graz.head(12)])
    for name, form in (("weight", "{:.1f}"), ("glucose", "{:.2f}")):
        lyon[name] = [form.format(number).replace(".", ",") for number in lyon[name]]
    lyon["seen"] = lyon.seen.dt.strftime("%d/%m/%Y")
    raw = (berlin, graz, lyon.drop(columns="lab"))
    for site, table, separator in zip(SITES, raw, separators, strict=True):
        (folder / site).mkdir()
        table.to_csv(folder / site / "patients.csv", index=False, sep=separator)
