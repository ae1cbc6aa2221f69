"""ComBat from moments, compared with a plain program on pooled rows."""

from __future__ import annotations

import numpy as np
import pandas
import pytest
from numpy.typing import NDArray

from piebald.core.errors import SettingError
from piebald.data.clients.prepared import preparation_of
from piebald.data.partition import clients_from

Floats = NDArray[np.float64]


def plain_combat(rows: dict[str, Floats]) -> dict[str, Floats]:
    """Johnson et al. 2007, section 3, step by step, with all rows in one place."""
    every = np.concatenate([*rows.values()])
    grand = every.mean(0)
    residual = np.concatenate([x - x.mean(0) for x in rows.values()])
    sigma = np.sqrt((residual**2).sum(0) / len(every))
    adjusted = {}
    for name, x in rows.items():
        z, n = (x - grand) / sigma, len(x)
        gamma_hat, delta_hat = z.mean(0), z.var(0, ddof=1)
        gamma_bar, tau = gamma_hat.mean(), gamma_hat.var(ddof=1)
        v, s = delta_hat.mean(), delta_hat.var(ddof=1)
        lam, theta = (v**2 + 2 * s) / s, (v**3 + v * s) / s
        gamma, delta = gamma_hat.copy(), delta_hat.copy()
        for _ in range(2000):
            gamma = (n * tau * gamma_hat + delta * gamma_bar) / (n * tau + delta)
            delta = (theta + 0.5 * ((z - gamma) ** 2).sum(0)) / (n / 2 + lam - 1)
        adjusted[name] = sigma * (z - gamma) / np.sqrt(delta) + grand
    return adjusted


def scans(columns: int) -> pandas.DataFrame:
    """Measurements of three scanners, which have their own zero and scale in each column."""
    rng, frames = np.random.default_rng(5), []
    for name, rows in (("a", 40), ("b", 25), ("c", 60)):
        truth = rng.normal(10, 2, (rows, columns))
        values = truth * rng.uniform(0.6, 1.6, columns) + rng.normal(0, 3, columns)
        frame = pandas.DataFrame(values, columns=[f"v{place}" for place in range(columns)])
        frames.append(frame.assign(scanner=name, ill=rng.choice(["no", "yes"], rows)))
    return pandas.concat(frames, ignore_index=True)


def test_harmonised_numbers_are_those_of_the_plain_program() -> None:
    table = scans(5)
    names = [f"v{place}" for place in range(5)]
    clients = clients_from(table, client="scanner", target="ill", test=0.0, prepare={"harmonise": "combat"})
    wanted = plain_combat({str(name): part[names].to_numpy() for name, part in table.groupby("scanner")})
    pooled = np.concatenate([*wanted.values()])
    for client, name in enumerate("abc"):
        scores = (wanted[name] - pooled.mean(0)) / pooled.std(0)
        assert clients.rows(client, "train").x.numpy() == pytest.approx(scores, abs=1e-5)  # type: ignore[union-attr]
    agreed = preparation_of(clients)
    assert agreed is not None
    ours = agreed.parsed(table[table.scanner == "b"], "b")[names].to_numpy()
    assert ours == pytest.approx(wanted["b"], abs=1e-8)
    assert agreed.parsed(table, "a newcomer")[names].equals(table[names])  # whose effects are not known


def test_one_column_has_its_effects_taken_out_as_they_are() -> None:
    clients = clients_from(scans(1), client="scanner", target="ill", test=0.0, prepare={"harmonise": "combat"})
    for client in range(3):
        x = clients.rows(client, "train").x.double()  # type: ignore[union-attr]
        assert (x.mean(), x.std()) == (pytest.approx(0, abs=1e-5), pytest.approx(1, abs=0.02))


def test_what_cannot_be_harmonised_is_refused() -> None:
    table = scans(2)
    few = table[(table.scanner != "b") | (table.index == 41)]
    for rows, settings, sentence in (
        (few, {}, "needs two numbers of each client in each column, and 'b' has fewer in 'v0'"),
        (table[table.scanner == "a"], {}, "compares clients, and there is one"),
        (table, {"scale": {"v0": "rank"}}, "harmonise is for standard scores, got scale = 'rank' of column 'v0'"),
    ):
        with pytest.raises(SettingError, match=sentence):
            clients_from(rows, client="scanner", target="ill", test=0.0, prepare={"harmonise": "combat", **settings})
