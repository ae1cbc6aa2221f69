"""A table on this machine is a federation in the simulator, which gets the questions that sites get."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas
import pytest
import torch

import piebald
from piebald.contracts import Rows
from piebald.engines.row_loader import RowLoader
from piebald.inference.columns import ClientColumns
from piebald.inference.queries import columns
from piebald.inference.simulated import TableClients, simulated
from piebald.runtimes.simulation.simulation import Simulation


@pytest.fixture
def table() -> pandas.DataFrame:
    rng = np.random.default_rng(4)
    frame = pandas.DataFrame({"who": np.repeat(list("abcd"), 40), "x": rng.normal(size=160).round(3)})
    frame["arm"] = rng.choice(["old", "new"], 160)
    frame["y"] = (rng.random(160) < 1 / (1 + np.exp(-frame.x))).astype(int)
    frame["months"], frame["died"] = rng.exponential(9, 160).round(1) + 0.1, rng.integers(0, 2, 160)
    return frame


CALLS: dict[str, tuple[set[str], Callable[[Any], Any]]] = {
    "statistics": ({"statistics"}, lambda rows: piebald.statistics(rows, client="who")),
    "tables": (
        {"statistics", "masked_sums"},
        lambda rows: piebald.statistics(rows, client="who", columns=["arm", "y"], tables=[("arm", "y")]),
    ),
    "noisy": (
        {"noisy_sums"},
        lambda rows: piebald.statistics(
            rows, client="who", columns=["x"], bounds={"x": (-5, 5)}, quantiles=(), epsilon=1.0, delta=1e-6,
            noise_at="client",
        ),
    ),
    "glm": ({"model_sums"}, lambda rows: piebald.glm(rows, client="who", target="y", family="binomial")),
    "cox": (
        {"model_sums"},
        lambda rows: piebald.cox(rows, client="who", time="months", event="died", columns=["x"], stratified=False),
    ),
    "survival": (
        {"model_sums"},
        lambda rows: piebald.survival(rows, client="who", time="months", event="died", group="arm"),
    ),
    "trees": (
        {"trees"},
        lambda rows: piebald.trees(rows, client="who", target="y", rounds=2, max_depth=2, compare=False),
    ),
    "sums": (
        {"masked_tree_sums", "tree_scores"},
        lambda rows: piebald.trees(
            rows, client="who", target="y", rounds=1, max_depth=2, form="histogram", max_bin=8, compare=False
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
def test_every_question_about_a_table_is_a_query_that_sites_know(
    call: str, table: pandas.DataFrame, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds, submit = set[str](), Simulation.submit

    def seen(self: Simulation, tasks: Any, sum_request: Any = None) -> None:
        kinds.update(task.kind for task in tasks)
        submit(self, tasks, sum_request)

    monkeypatch.setattr(Simulation, "submit", seen)
    expected, ask = CALLS[call]
    ask(table)
    assert kinds == expected


def test_a_fit_prepares_the_rows_of_a_client_once(table: pandas.DataFrame, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared, model_rows = list[str](), columns.model_rows
    monkeypatch.setattr(columns, "model_rows", lambda plan, rows: prepared.append(rows.name) or model_rows(plan, rows))
    fit = piebald.glm(table, client="who", target="y", columns=["x"], family="binomial", robust=True)
    assert fit.iterations > 4
    assert sorted(prepared) == list("abcd")  # in threads, in any order


def test_what_follows_from_rows_is_computed_anew_from_other_rows_or_by_another_key() -> None:
    clients = TableClients.of([ClientColumns("a", 3, {"x": np.arange(3.0)}, {})])
    loader, calls = RowLoader(clients, torch.device("cpu")), list[Any]()
    count = lambda rows, name: calls.append(rows) or len(calls)  # noqa: E731
    assert [loader.cached(0, "train", key, count, "a") for key in ("one", "one", "two", "one")] == [1, 1, 2, 3]
    # the rows of a table are not copied on their way to a question
    assert calls[0].x.data_ptr() == clients.rows(0, "train").x.data_ptr()  # type: ignore[union-attr]
    clients._rows = [{"train": Rows(torch.ones(2, 1), torch.zeros(2, 0))}]
    assert loader.cached(0, "train", "one", count, "a") == 4
    clients.rows(0, "train").x[0] = 9.0  # type: ignore[index]
    assert [loader.cached(0, "train", "one", count, "a") for _ in range(2)] == [5, 5]
    # of another client or split it is another value, and the same one afterwards
    assert [loader.cached(0, split, "one", count, "a") for split in ("test", "train")] == [6, 5]


def test_noise_of_clients_is_new_in_each_call(table: pandas.DataFrame) -> None:
    counts = {CALLS["noisy"][1](table)["x"].present for _ in range(3)}
    assert len(counts) == 3


def test_numbers_reach_a_question_to_the_bit() -> None:
    x = np.array([0.1, 1e300, 5e-324, np.nan, np.inf])
    clients = TableClients.of([ClientColumns("a", 5, {"x": x}, {"word": np.array(["b", None, "a", "b", "c"], object)})],
                              {"word": ["c"]}, most=9)  # fmt: skip
    with simulated(clients) as (runtime, _):
        held = runtime.federation.rows(0, "train").x.numpy()  # type: ignore[union-attr]
    assert held[:, 0].tobytes() == x.tobytes()
    assert clients.coded == {"word": ["c", "a", "b"]}
    assert held[:, 1].tolist() == pytest.approx([2, np.nan, 1, 2, 0], nan_ok=True)


def test_rows_that_do_not_fit_a_question_end_the_call_with_the_name_of_their_client(table: pandas.DataFrame) -> None:
    table.loc[table.who == "c", "y"] = -1
    with pytest.raises(piebald.core.errors.SettingError, match="must be counts, and client 'c' has other numbers"):
        piebald.glm(table, client="who", target="y", columns=["x"], family="poisson")
