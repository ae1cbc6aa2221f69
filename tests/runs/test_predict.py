"""Predictions for raw rows: they reproduce what the run has scored at each client, for every kind of model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn

import piebald
from piebald import models, recipes
from piebald.core.errors import SettingError
from piebald.core.metrics import Concordance
from piebald.data.clients.sites import RowsNotKept
from piebald.runs.finished_run import Run
from piebald.runs.run import read_opened

HERE = piebald.Simulator(engine="sequential")
SITES = ("east", "north", "west")


def table(rows: int = 120) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"dose": rng.normal(size=rows), "age": rng.normal(5, 1, rows), "site": [*SITES] * (rows // 3)})
    score = frame["dose"] * frame["site"].map({"east": 1, "north": -1, "west": 3}) + rng.normal(0, 0.3, rows)
    frame["ill"] = pd.cut(score, [-np.inf, -1, 1, np.inf], labels=["none", "some", "much"]).astype(str)
    frame["cost"] = 5 + 0.9 * score
    return frame


def clients(frame: pd.DataFrame, target: str = "ill", **more: Any) -> Any:
    return piebald.clients_from(
        frame, client="site", target=target, features=["dose", "age"], validation=0.25, test=0.25, **more
    )


def network(outputs: int) -> Any:
    return lambda seed: models.build_model("mlp", (2,), outputs, seed, hidden=[6])


def run(recipe: Any, folder: Path | None = None, **more: Any) -> Run:
    return piebald.run(recipe, clients(table()), network(3), rounds=2, runtime=HERE, measure="none", out=folder, **more)


@pytest.fixture(scope="module")
def plain() -> Run:
    return run(recipes.fedavg(lr=0.1))


@pytest.mark.parametrize(
    ("recipe", "more"),
    [
        ("fedavg", {}),
        ("ifca", {"k": 2}),
        ("ditto", {}),
        ("fedrep", {}),
        ("fedproto", {"inference": "prototypes"}),
        ("fedrod", {}),
        ("local", {}),
        pytest.param("fedbn", {"model": "mlp_bn"}, marks=pytest.mark.full),
        pytest.param("apfl", {}, marks=pytest.mark.full),
        pytest.param("fine_tuned", {}, marks=pytest.mark.full),
        pytest.param("fedavg", {"keep": "best_for_each"}, marks=pytest.mark.full),
        pytest.param("fedavg", {"keep": "knn_per"}, marks=pytest.mark.full),
    ],
)
def test_a_client_is_predicted_for_by_the_model_that_it_was_scored_with(
    recipe: str, more: dict[str, Any], tmp_path: Path
) -> None:
    """Of 30 test rows in three clients, each has the answer that its client's accuracy counts."""
    keep, name = more.pop("keep", "last"), more.pop("model", "mlp")
    held = clients(table())
    network_of = lambda seed: models.build_model(name, (2,), 3, seed, hidden=[6])  # noqa: E731
    method = recipes.make(recipe, lr=0.1, **more)
    with piebald.run(method, held, network_of, rounds=2, runtime=HERE, keep=keep, out=tmp_path / "run") as made:
        for number, site in enumerate(SITES):
            rows = held.rows(number, "test")
            answers = made.predict(pd.DataFrame(rows.x.numpy(), columns=["dose", "age"]), site)
            assert list(answers.columns) == ["much", "none", "some"] == made.meta["classes"]
            np.testing.assert_allclose(answers.sum(axis=1), 1)
            right = (answers.to_numpy().argmax(1) == rows.y.numpy()).mean()
            assert right == pytest.approx(made.per_client[number])


def test_columns_are_found_by_name_and_rows_keep_their_labels(plain: Run, tmp_path: Path) -> None:
    frame = table().set_index(np.arange(120)[::-1])
    answers = plain.predict(frame)
    assert list(answers.index) == list(frame.index)
    others = [frame[["age", "dose"]], frame[["dose", "age"]].assign(site=None), frame.assign(ill=np.nan)]
    for same in others:
        pd.testing.assert_frame_equal(plain.predict(same), answers)
    np.savez(tmp_path / "rows.npz", x=frame[["dose", "age"]].to_numpy())
    frame.to_csv(tmp_path / "rows.csv", index=False)
    for unlabelled in (frame[["dose", "age"]].to_numpy(), tmp_path / "rows.npz", tmp_path / "rows.csv"):
        np.testing.assert_array_equal(plain.predict(unlabelled), answers)
    assert plain.predict(frame.head(0)).shape == (0, 3)
    one = plain.predict(frame.iloc[[7]])
    np.testing.assert_allclose(one, answers.iloc[[7]], rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda frame: frame.drop(columns="age"), "there is no column 'age': choose one of: cost, dose, ill, site"),
        (lambda frame: frame.assign(age=np.nan), "column 'age' has no value in 120 of 120 rows"),
        (lambda frame: frame.assign(age="old"), "column 'age' must hold numbers, got .* like 'old'"),
        (lambda frame: pd.concat([frame, frame[["age"]]], axis=1), "column 'age' occurs twice"),
        (lambda frame: np.zeros((4, 3)), r"rows must be float32 rows \[2\], as those of the run, got .*\[3\]"),
        (lambda frame: [["a", "b"]], "inputs must be numbers, got text like 'a'"),
        (lambda frame: np.full((1, 2), np.nan), "must be finite"),
        (lambda frame: Path("rows.txt"), r"rows to predict must be in a table \(\.csv"),
        (lambda frame: Path("rows.csv"), "there is no file rows.csv"),
    ],
)
def test_rows_that_do_not_fit_are_refused_in_one_sentence(plain: Run, change: Any, sentence: str) -> None:
    with pytest.raises(SettingError, match=sentence):
        plain.predict(change(table()))


def test_a_client_that_the_run_does_not_know_is_told_which_models_there_are(plain: Run, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="the run has models of east, north and west and a global one: leave client"):
        plain.predict(table(), "south")
    np.testing.assert_array_equal(  # every client of fedavg uses the global model
        plain.predict(table()), plain.predict(table(), "west")
    )
    with run(recipes.fedrep(lr=0.1), tmp_path / "run") as private:
        with pytest.raises(SettingError, match=r"models of east, north and west and no global one.*piebald adapt"):
            private.predict(table(), "south")
        with pytest.raises(SettingError, match=r"fedrep keeps layers at its clients.*name a client"):
            private.predict(table())


def test_the_model_of_a_cluster(tmp_path: Path) -> None:
    with run(recipes.ifca(k=2, lr=0.3), tmp_path / "run") as made:
        assert sorted(made.cluster_models) == [0, 1]
        answers = [made.predict(table(), cluster=cluster) for cluster in (0, 1)]
        assert not np.allclose(*answers)
        np.testing.assert_array_equal(made.predict(table()), answers[made.main])
        with pytest.raises(SettingError, match="cluster must be one of"):
            made.predict(table(), cluster=2)
        with pytest.raises(SettingError, match="client and cluster both say"):
            made.predict(table(), "east", cluster=1)
        with pytest.raises(SettingError, match="models of east, north and west and of clusters 0 and 1, and a global"):
            made.predict(table(), "south")


@pytest.mark.full
def test_a_temperature_has_the_lowest_loss_on_validation_rows() -> None:
    held = clients(table())
    made = piebald.run(recipes.fedavg(lr=0.3, epochs=20), held, network(3), rounds=2, runtime=HERE)
    for client in (None, "north"):
        chosen = [1] if client else [0, 1, 2]
        rows = [held.rows(number, "validation") for number in chosen]
        x, y = torch.cat([part.x for part in rows]), torch.cat([part.y for part in rows])
        with torch.no_grad():
            scores = made.model(client)(x).double()
        predictor = made.predictor(client, calibrate=True)
        tried = np.exp(np.linspace(np.log(0.05), np.log(20), 4001))
        losses = [float(nn.functional.cross_entropy(scores / temperature, y)) for temperature in tried]
        assert predictor.meaning.temperature == pytest.approx(tried[np.argmin(losses)], rel=2e-3)
        np.testing.assert_allclose(
            predictor.predict(x), nn.functional.softmax(scores / predictor.meaning.temperature, dim=1), rtol=1e-5
        )


@pytest.mark.full
def test_what_cannot_be_calibrated_is_refused(plain: Run) -> None:
    bare = piebald.clients_from(table(), client="site", target="ill", features=["dose", "age"])
    with pytest.raises(SettingError, match="calibrate needs validation rows, and there are none here"):
        piebald.run("fedavg", bare, network(3), rounds=1, runtime=HERE).predict(table(), calibrate=True)
    costs = piebald.run(recipes.fedavg(lr=0.01), clients(table(), "cost"), network(1), rounds=1, runtime=HERE)
    with pytest.raises(SettingError, match="calibrate divides scores of classes"):
        costs.predict(table(), calibrate=True)


def test_numbers_have_the_name_and_the_unit_of_the_target() -> None:
    held = clients(table(), "cost")
    made = piebald.run(recipes.fedavg(lr=0.01), held, network(1), rounds=2, runtime=HERE)
    for number, site in enumerate(SITES):
        rows = held.rows(number, "test")
        answers = made.predict(rows.x, site)
        assert list(answers.columns) == ["cost"]
        assert np.abs(answers["cost"] - rows.y.numpy()).mean() == pytest.approx(made.per_client[number], rel=1e-4)


def pairs(target: Any) -> Any:
    x = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    return piebald.clients_from({"a": (x, target(x)), "b": (-x, target(x))}, test=0.3)


@pytest.mark.full
def test_labels_have_a_probability_each_and_a_risk_orders_rows() -> None:
    labels = pairs(lambda x: (x[:, :2] > 0).float())
    made = piebald.run("fedavg", labels, lambda seed: nn.Linear(4, 2), rounds=1, loss="multilabel", runtime=HERE)
    rows = labels.rows(1, "test")
    answers = made.predict(rows.x, "b")
    assert list(answers.columns) == ["target0", "target1"]
    assert ((answers > 0.5).to_numpy() == rows.y.numpy().astype(bool)).mean() == pytest.approx(made.per_client[1])

    lives = pairs(lambda x: (x[:, 0].exp(), (x[:, 1] > 0).float()))
    made = piebald.run("fedavg", lives, lambda seed: nn.Linear(4, 1), rounds=2, loss="survival", runtime=HERE)
    rows = lives.rows(1, "test")
    risks = made.predict(rows.x, "b")
    assert list(risks.columns) == ["risk"]
    concordance = Concordance()
    concordance.update(torch.tensor(risks.to_numpy()), rows.y)
    assert float(concordance.compute()) == pytest.approx(made.per_client[1])


@pytest.mark.full
def test_places_of_a_sequence_have_the_name_of_a_class_and_tokens_of_a_language_are_refused() -> None:
    class Tagger(nn.Module):
        def __init__(self, classes: int) -> None:
            super().__init__()
            self.table = nn.Embedding(9, classes)

        def forward(self, x: Tensor) -> Tensor:
            return self.table(x)

    rng = np.random.default_rng(0)
    texts = [(x := rng.integers(0, 9, (12, 5)), x % 3) for _ in range(2)]
    held = piebald.clients_from(texts, tokens=True, classes=["noun", "verb", "else"])
    made = piebald.run("fedavg", held, lambda seed: Tagger(3), rounds=1, loss="token_classification", runtime=HERE)
    answers = made.predict(texts[0][0])
    assert answers.shape == (12, 5)
    chosen = made.model()(torch.from_numpy(texts[0][0])).argmax(2)
    assert answers["place 3"].tolist() == [["noun", "verb", "else"][place] for place in chosen[:, 3]]
    spoken = piebald.clients_from([(x, x) for x, _ in texts], tokens=True)
    made = piebald.run("fedavg", spoken, lambda seed: Tagger(9), rounds=1, loss="language_modelling", runtime=HERE)
    with pytest.raises(SettingError, match="a language model's outputs are tokens"):
        made.predict(texts[0][0])


def test_rows_of_a_run_are_read_only_where_its_folder_does_not_suffice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[bool]()

    @contextmanager
    def opened(path: Path, *, plugins: Any, rows: bool) -> Iterator[Any]:
        asked.append(rows)
        yield rows

    def needs_rows(has_rows: Any) -> str:
        if not has_rows:
            raise RowsNotKept("the rows are not kept")
        return "a model made of rows"

    def never(has_rows: Any) -> str:
        raise RowsNotKept("the rows are at their sites")

    monkeypatch.setattr("piebald.runs.run.opened", opened)
    assert read_opened(tmp_path, lambda run: "kept") == "kept"
    assert asked == [False]
    assert read_opened(tmp_path, needs_rows) == "a model made of rows"
    assert asked == [False, False, True]
    with pytest.raises(RowsNotKept, match="at their sites"):  # and not for ever
        read_opened(tmp_path, never)
    assert asked == [False, False, True, False, True]
