"""Advice for clients of every kind: few, many, without rows of a kind, with odd names; and with hardly any budget."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from piebald import models, partition
from piebald.advice import Advice, advise
from piebald.advice.evidence import ClientGain, Loser
from piebald.cli import main
from piebald.core.errors import SettingError

Parts = Mapping[str, tuple[Any, Any]]
ODD = ["<script>alert(1)</script>", "a, b", 'the "north"', "it's", "Zürich 東京", "=1+1", "\x1b[31mred", "last"]


def parts(rng: np.random.Generator, **rows: int) -> Parts:
    """Rows of two classes that a line separates, so many in each part."""
    made = {}
    for split, count in rows.items():
        x = rng.normal(size=(count, 4)).astype("float32")
        made[split] = x, (x.sum(1) + 0.3 * rng.normal(size=len(x)) > 0).astype("int64")
    return made


def clients_of(sizes: Sequence[Mapping[str, int]], names: Sequence[str] | None = None) -> Any:
    rng = np.random.default_rng(3)
    named = names or [f"site {number}" for number in range(len(sizes))]
    return partition.clients_from({name: parts(rng, **own) for name, own in zip(named, sizes, strict=True)})


def line(outputs: int = 2) -> Any:
    return models.build_model("logistic", (4,), outputs)


def advised(clients: Any, model: Any = None, **options: Any) -> Advice:
    """Local and FedAvg, tried with hardly any budget; what is said has no gaps."""
    asked: dict[str, Any] = {"rounds": 2, "families": [], "seeds": (0,), "budget": 8, "more_data": False}
    found = advise(clients, line() if model is None else model, **(asked | options))
    assert max(len(row) for row in (found.text() + found.details()).splitlines()) <= 80
    assert len(found.text().splitlines()) <= 24
    assert " nan" not in found.text() + found.details()
    json.dumps(found.plain(), allow_nan=False)
    assert "<script" not in found.page()
    return found


def test_one_client_has_nobody_to_train_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "one.toml").write_text(
        'data = { name = "digits" }\nmodel = { name = "logistic" }\n'
        'partition = { kind = "iid", clients = 1, limit = 60, validation = 0.3 }\n'
    )
    assert main(["advise", str(tmp_path / "one.toml"), "--out", str(tmp_path / "out")]) == 2
    assert "there is one client, which has nobody to train with" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.full
def test_two_clients_have_no_half_to_learn_from() -> None:
    sizes = {"train": 60, "validation": 30, "test": 30}
    found = advised(clients_of([sizes] * 2), budget=16, more_data=True, look=True)
    assert {"local", "fedavg"} == {row["method"] for row in found.tried}
    assert [one.client for one in found.clients] == ["site 0", "site 1"]
    assert "2 clients with 60 to 60 training rows" in (found.look or "")
    alone = "every client trains alone" if found.recommended == "local" else "there are 2 clients"
    assert f"What more clients would change was not tried: {alone}." in " ".join(found.details().split())


@pytest.mark.full
def test_clients_without_validation_rows_are_trained_with_and_do_not_vote() -> None:
    """Two of five clients have no validation rows, and one of these no test rows either."""
    some = {"train": 40, "validation": 20, "test": 20}
    found = advised(clients_of([some, some, some, {"train": 40, "test": 20}, {"train": 40}]), seeds=(0, 1), budget=20)
    assert [one.rows for one in found.clients] == [20, 20, 20, 20, 0]
    assert found.clients[4].gain is None
    assert found.gain_together is None or found.gain_together.clients == 3
    assert not {one.client for one in found.losers} & {"site 3", "site 4"}


@pytest.mark.full
def test_a_client_with_one_row_trains_with_it() -> None:
    """A fifth of each client's rows is held out, and none of the only row."""
    found = advised(clients_of([{"train": 50, "test": 20}] * 3 + [{"train": 1}]), look=True)
    assert len(found.clients) == 4
    assert found.clients[3].gain is None


@pytest.mark.full
def test_a_budget_for_not_even_one_rung_still_trains_the_measure_of_the_others() -> None:
    some = {"train": 40, "validation": 20, "test": 20}
    found = advised(clients_of([some] * 3), rounds=4, budget=1, more_data=True)
    assert {row["method"] for row in found.tried if row["rounds"] == 4} == {"local", "fedavg"}
    assert "What more rows would change was not tried: the budget was used up." in " ".join(found.details().split())


@pytest.mark.full
def test_a_site_of_twenty_rows_that_contradicts_is_named_by_its_training_rows_as_well() -> None:
    rng = np.random.default_rng(4)
    given = {f"site {number}": parts(rng, train=100, validation=40, test=20) for number in range(5)}
    turned = {split: (x, 1 - y) for split, (x, y) in parts(rng, train=10, validation=5, test=5).items()}
    found = advised(partition.clients_from({**given, "tiny": turned}), rounds=4, budget=16)
    assert any(re.match(r"One model for all fails at tiny \([0-4] of 15 rows right\),", said) for said in found.odd)
    assert "tiny" in found.text()


@pytest.mark.full
def test_names_are_shown_as_they_are_and_run_nothing(tmp_path: Path) -> None:
    some = {"train": 40, "validation": 20, "test": 20}
    found = advised(clients_of([some] * len(ODD), ODD), out=tmp_path / "advice")
    assert [one.client for one in found.clients] == ODD
    page = (tmp_path / "advice" / "answer.html").read_text("utf-8")
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "<script" not in page
    assert "Zürich 東京" in page
    gains = [ClientGain(name, 20, {"fedavg": 0.9, "local": 0.8}, 0.1, 0.02, 0.1, 0.06, 0.14) for name in ODD]
    text = " ".join(replace(found, clients=gains).text().split())
    assert "\x1b" not in text
    assert all(name in text for name in ODD[:4])
    kept = json.loads((tmp_path / "advice" / "answer.json").read_text("utf-8"))
    assert [one["client"] for one in kept["clients"]] == ODD


@pytest.mark.full
def test_of_many_clients_that_lose_few_are_named() -> None:
    some = {"train": 40, "validation": 20, "test": 20}
    found = advised(clients_of([some] * 3))
    lost = [Loser(f"site {number}", 0.3, 0.1, "local", 0.9) for number in range(40)]
    lines = replace(found, losers=lost).paragraphs()
    assert sum("by joining" in line and "give it local" in line for line in lines) == 12
    assert f"{40 - 12} more clients lose by joining: `losers` of answer.json has them." in lines


@pytest.mark.long
def test_three_hundred_clients() -> None:
    """Every third client has labels of its own, so that no shared model is right for all."""
    rng = np.random.default_rng(5)
    made = {f"site {number}": parts(rng, train=24, validation=24, test=8) for number in range(300)}
    given = {
        name: {split: (x, 1 - y if number % 3 == 0 else y) for split, (x, y) in own.items()}
        for number, (name, own) in enumerate(made.items())
    }
    found = advised(partition.clients_from(given), budget=6)
    assert len(found.clients) == 300


@pytest.mark.full
def test_survival_is_judged_by_concordance_whose_noise_is_known_of_each_client() -> None:
    rng = np.random.default_rng(2)
    given = {}
    for number in range(4):
        x = rng.normal(size=(60, 4)).astype("float32")
        hazard = np.exp(x @ np.array([1.0, -0.5, 0.5, 0.0]))
        lives, ends = rng.exponential(1 / hazard), rng.exponential(2.0, size=60)
        y = np.stack([np.minimum(lives, ends), lives <= ends], axis=1).astype("float32")
        given[f"site {number}"] = (x, y)
    clients = partition.clients_from(given, validation=0.3, test=0.3)
    found = advised(clients, line(1), loss="survival")
    assert (found.metric, found.higher_is_better) == ("concordance", True)
    assert "always the Kaplan-Meier curve 0.5" in " ".join(found.text().split())  # one for all rows ranks nobody
    assert all(0 <= row["score"] <= 1 for row in found.tried)
    assert found.losers == []
    assert all(client.error for client in found.clients if client.gain)


def test_clients_without_enough_rows_are_refused_in_one_sentence() -> None:
    with pytest.raises(SettingError, match="no client has enough rows to hold some out for validation"):
        advise(clients_of([{"train": 1, "test": 5}] * 3), line(), rounds=2)
