"""Answers that need no model: what they score, by the clients' own training rows, and what they do to verdicts."""

from __future__ import annotations

import html
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.cells import cell_len

import piebald
from piebald import models, partition, recipes
from piebald.cli.comparing import print_comparison
from piebald.core.errors import RunFolderError
from piebald.core.plain_text import printable, visible
from piebald.report.comparison import Comparison
from piebald.report.findings import partly_scored
from piebald.report.page.report_page import render
from piebald.report.row_noise import balanced, imbalance
from piebald.storage.schema import packed_values, unpacked_values

NOISE = np.random.default_rng(0)


def clients_of(labels: dict[str, list[Any]], test: int) -> Any:
    """Clients of noise inputs; the last `test` rows of each are for testing."""
    given = {}
    for name, y in labels.items():
        x = NOISE.normal(size=(len(y), 3)).astype("float32")
        given[name] = {"train": (x[:-test], np.array(y[:-test])), "test": (x[-test:], np.array(y[-test:]))}
    return partition.clients_from(given)


def compared(clients: Any, outputs: int, **options: Any) -> Comparison:
    model = models.build_model("logistic", (3,), outputs)
    return piebald.compare(["local", "fedavg"], clients, model, rounds=1, **options)


def test_the_most_frequent_class_is_that_of_the_clients_own_training_rows_or_of_all() -> None:
    """North has mostly 0 and is tested on one 0 of four; together there are more rows of 1."""
    clients = clients_of({"north": [0] * 5 + [1] + [0, 1, 1, 1], "south": [1] * 9 + [0] + [1, 1, 1, 0]}, 4)
    made = compared(clients, 2)
    own, of_all = made.naive["the most frequent class"], made.naive["all clients' most frequent class"]
    assert own.values.tolist() == [[0.25, 0.75]]
    assert of_all.values.tolist() == [[0.75, 0.75]]
    assert own.rows[0, "south"].tolist() == [1, 1, 1, 0]
    for run in made.runs:
        loss = run.naive("naive", "loss")[0]  # of shares with one row more of each class
        assert loss == pytest.approx(-(np.log(6 / 8) + 3 * np.log(2 / 8)) / 4, rel=1e-5)
        for client, rows in run.values_of_rows().items():
            assert rows.mean() == pytest.approx(run.per_client[client])


def test_of_numbers_it_is_the_median_in_their_own_unit() -> None:
    clients = clients_of({"a": [1.5, 2.5, 9.5, 2.0, 4.0], "b": [5.5, 6.5, 7.5, 0.5, 0.5]}, 2)
    made = compared(clients, 1)
    assert made.metric == "absolute_error"
    assert made.naive["the typical value"].values == pytest.approx(np.array([[(0.5 + 1.5) / 2, 6.0]]))


def test_a_model_that_learned_nothing_is_not_called_better_than_one_class() -> None:
    """Four of five rows are of one class, and inputs are noise: whatever leads, the constant answer is named."""
    rng = np.random.default_rng(3)
    clients = clients_of({f"site {n}": (rng.random(120) < 0.2).astype(int).tolist() for n in range(4)}, 60)
    made = compared(clients, 2, seeds=(0, 1))
    assert made.verdict is not None
    assert made.verdict.beats_naive is False
    said = made.headline()
    assert said.startswith("No method is clearly better than ")
    assert " alone " in said.split(";")[0]  # whichever is the best of those on this noise
    assert "or always the most frequent class" in said
    said = imbalance(made.runs)
    assert said.startswith("One class has over 70% of the judged rows at site 0")
    assert said.endswith("one class for every row at most 50.0%.")


def test_a_star_says_what_the_verdict_says_also_beside_answers_that_need_no_model() -> None:
    """Both count all comparisons that are made: a star at p = 0.03 stood above "no method is clearly better"."""
    rng = np.random.default_rng(3)
    clients = clients_of({f"site {n}": (rng.random(120) < 0.4).astype(int).tolist() for n in range(4)}, 60)
    made = compared(clients, 2)
    assert made.verdict is not None
    assert made.verdict.comparisons == 2
    (row,) = made.paired(made.verdict.leader)
    lead = made.verdict.leads[row["label"]]
    assert lead is not None
    assert (row["p"], row["high"]) == (lead.p, -lead.low)


def test_a_single_client_scores_constant_answers_too() -> None:
    made = compared(clients_of({"alone": [0, 0, 1, 1, 0, 1]}, 3), 2)
    assert made.naive["the most frequent class"].values == pytest.approx(np.array([[1 / 3]]))


def test_clients_without_a_score_by_one_method_are_named() -> None:
    made = compared(clients_of({"a": [0, 1, 0, 1], "b": [0, 1, 0, 1]}, 2), 2)
    assert partly_scored(made) == ""
    made.by_label["fedavg"][0].__dict__["per_client"] = {0: 0.5}
    assert partly_scored(made) == (
        "fedavg has no score at b: methods are ranked and compared by the clients that they share."
    )


def test_balanced_accuracy_is_the_mean_over_classes_that_occur() -> None:
    matrix = np.array([[29, 0, 0], [2, 0, 0], [0, 0, 0]])  # Switzerland: "yes" to everybody
    assert balanced(matrix) == 0.5
    assert balanced(np.zeros((2, 2), np.int64)) is None


def test_an_extra_question_that_fails_does_not_end_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("piebald.methods.queries.row_scores.RowScores.answer", lambda *_: 1 / 0)
    made = compared(clients_of({"a": [0, 1, 0, 1], "b": [0, 1, 0, 1]}, 2), 2)
    assert made.naive == {}
    assert made.scores["local"].values.shape == (1, 2)


def test_rows_are_packed_and_nonsense_is_refused() -> None:
    for values in ([], [1.0], [0.0] * 9 + [1.0] * 8, [0.25, 3.5]):
        assert unpacked_values(packed_values(values)).tolist() == values
    for text in ("9:oA==", "x:oA==", "oA", "-1:oA=="):
        with pytest.raises(RunFolderError, match="row_score"):
            unpacked_values(text)


@pytest.mark.full
def test_a_client_that_is_worse_by_chance_alone_is_said_to_be_so(capsys: pytest.CaptureFixture[str]) -> None:
    """Inputs are noise, and labels are balanced: whoever scores worse with FedAvg does so by few rows."""
    rng, given = np.random.default_rng(5), {}
    for n in range(4):
        x, y = rng.normal(size=(120, 3)).astype("float32"), rng.integers(0, 2, 120)
        given[f"site {n}"] = {"train": (x[60:], y[60:]), "test": (x[:60], y[:60])}
    methods = [piebald.recipes.local(lr=1.0, epochs=5), piebald.recipes.fedavg(lr=1.0, epochs=5)]
    made = piebald.compare(methods, partition.clients_from(given), models.build_model("logistic", (3,), 2), rounds=3)
    print_comparison(made, False)
    printed = " ".join(capsys.readouterr().out.split())
    best = next(label for label in made.ranking() if label != "local")
    behind = [name for name, gain in made.gain_of_each(best, "local").items() if gain < 0]
    assert behind
    assert f"Worse with {best} than with local: {behind[0]} (" in printed
    assert ", none beyond the chance of its rows." in printed
    assert "* differs clearly" not in printed  # there is no star to explain


def test_a_site_of_one_row_neither_raises_balanced_accuracy_nor_is_called_imbalanced() -> None:
    def counts(**sites: list[list[int]]) -> Any:
        names = dict(enumerate(sites))
        return [SimpleNamespace(class_counts=dict(enumerate(map(np.array, sites.values()))), names=names, label="x")]

    assert imbalance(counts(tiny=[[1, 0], [0, 0]], big=[[30, 20], [20, 30]])) == ""
    said = imbalance(counts(tiny=[[1, 0], [0, 0]], big=[[80, 0], [20, 0]]))
    assert "at big, so look at balanced accuracy: x 52.4%" in said  # (0.5 + 0.05 * 1) / 1.05
    assert said.endswith("one class for every row at most 52.4%.")


ODD = ["<b>a & 'b'</b> [red]x[/red]", "東京都立広域医療センター" * 3, "50 %\tof\x1b[31m{0}"]


@pytest.mark.parametrize("clients", [1, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize("rate", [1e-9, 0.5])  # the smaller one ties all methods
def test_the_sentence_is_the_same_in_every_place_whatever_methods_are_called(
    clients: int, rate: float, capsys: pytest.CaptureFixture[str]
) -> None:
    draw = np.random.default_rng(0)
    parts = {
        f"site <{n}>": {
            split: (x := draw.normal(size=(30, 3)).astype("float32"), (x[:, 0] > 0).astype("int64"))
            for split in ("train", "test")
        }
        for n in range(clients)
    }
    methods = {
        ODD[0]: recipes.fedavg(lr=rate), ODD[1]: recipes.fedprox(lr=rate, mu=0.0), ODD[2]: recipes.local(lr=rate),
        "failed & gone": recipes.fedavg(lr=rate),
    }  # fmt: skip
    made = piebald.compare(methods, partition.clients_from(parts), models.build_model("logistic", (3,), 2), rounds=2)
    made.by_label["failed & gone"][0].__dict__["per_client"] = {}
    sentence, title = made.headline(), made.title()
    assert sentence.endswith("; failed & gone has no score")
    assert made.verdict is not None
    assert made.verdict.plain()["sentence"] == sentence
    assert sentence in repr(made)
    assert html.escape(visible(sentence)) in made._repr_html_()
    print_comparison(made, wide=False)
    printed = capsys.readouterr().out
    assert max(cell_len(line) for line in printed.splitlines()) <= 80
    without_spaces = "".join(printed.split())
    assert "".join(printable(sentence).split()) in without_spaces
    page = "".join(html.unescape(re.sub(r"<[^>]*>", " ", render(made))).split())
    rest = sentence.removeprefix(title).removeprefix("; ")
    assert all("".join(visible(text).split()) in page for text in (title, rest))
