"""Boosted trees over clients: plain xgboost where there is one, plain bagging where there are several."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from sklearn.datasets import load_breast_cancer

import piebald
from piebald.core.errors import RunFolderError, SettingError
from piebald.data.partition import clients_from
from piebald.inference.trees.client_rows import margins_of
from piebald.inference.trees.encoding import tree_data
from piebald.inference.trees.forest import Forest, nodes, reject_reason

xgboost = pytest.importorskip("xgboost", reason="needs the extra: pip install '.[trees]'")

Objective = Any
KINDS = {"binary": "binary:logistic", "multiclass": "multi:softprob", "regression": "reg:squarederror"}


def rows(objective: str, n: int = 120) -> pandas.DataFrame:
    """Numbers with gaps, and a target of each kind."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(n, 3))
    y = x[:, 0] + x[:, 1] ** 2 + rng.normal(0, 0.5, n)
    x[rng.random(x.shape) < 0.1] = np.nan
    table = pandas.DataFrame(x, columns=["a", "b", "c"])
    table["y"] = {"binary": (y > 1).astype(int), "multiclass": np.digitize(y, [0, 1]), "regression": y}[objective]
    return table


def inputs(table: pandas.DataFrame) -> Any:
    return xgboost.DMatrix(table[["a", "b", "c"]].to_numpy(np.float32), feature_names=["a", "b", "c"], nthread=1)


@pytest.mark.parametrize("objective", KINDS)
def test_one_client_grows_the_trees_of_plain_xgboost(objective: Objective, tmp_path: Path) -> None:
    table = rows(objective)
    found = piebald.trees({"alone": table}, target="y", objective=objective, rounds=3, max_depth=4, test=0.0,
                          compare=False, subsample=1.0)  # fmt: skip
    start = found.target.base_score(found.boosted.start.margins)
    settings = {"objective": KINDS[objective], "max_depth": 4, "nthread": 1, "learning_rate": 0.3}
    settings |= {"num_class": 3, "base_score": start} if objective == "multiclass" else {"base_score": start[0]}
    labelled = inputs(table)
    labelled.set_label(table["y"].to_numpy())
    plain = xgboost.train(settings, labelled, 3)
    loaded = xgboost.Booster(model_file=found.save(tmp_path / "trees.json"))
    ours, theirs = (
        json.loads(bytes(one.save_raw("json")))["learner"]["gradient_booster"]["model"]["trees"]
        for one in (loaded, plain)
    )
    assert len(ours) == len(theirs) == (9 if objective == "multiclass" else 3)
    for mine, other in zip(ours, theirs, strict=True):
        for part in ("split_indices", "default_left", "left_children", "right_children", "parents"):
            assert mine[part] == other[part]
        for part in ("split_conditions", "loss_changes"):
            assert mine[part] == pytest.approx(other[part], rel=1e-4, abs=1e-6)
    # the file predicts what Piebald does
    margins = loaded.predict(inputs(table), output_margin=True).reshape(len(table), -1)
    ours_margins = margins_of(table[["a", "b", "c"]].to_numpy(np.float32), found.boosted.forest, found.boosted.start)
    assert margins == pytest.approx(ours_margins, abs=1e-6)
    known = plain.predict(inputs(table))
    predicted = found.predict(table)
    assert (predicted[:, 1] if objective == "binary" else predicted) == pytest.approx(known, abs=1e-5)
    used = loaded.get_score(importance_type="total_gain")
    assert found.importances[max(used, key=used.get)] == max(found.importances.values())


def test_bagging_is_what_a_plain_program_of_it_computes() -> None:
    """Each client's tree from the model so far, times its share of the rows, with nothing of Piebald's."""
    table = rows("binary", 150)
    parts = {"a": table[:30], "b": table[30:80], "c": table[80:]}
    shares = {name: len(part) / len(table) for name, part in parts.items()}
    settings = {"objective": "binary:logistic", "max_depth": 3, "learning_rate": 0.5, "nthread": 1, "base_score": 0.5}
    mean = table["y"].mean()
    margins = np.full(len(table), math.log(mean / (1 - mean)))
    for _ in range(4):
        change = np.zeros(len(table))
        for name, part in parts.items():
            own = inputs(part)
            own.set_label(part["y"].to_numpy())
            own.set_base_margin(margins[part.index])
            tree = xgboost.train(settings, own, 1)
            nothing = inputs(table)
            nothing.set_base_margin(np.zeros(len(table)))
            change += shares[name] * tree.predict(nothing, output_margin=True)
        margins += change
    found = piebald.trees(parts, target="y", rounds=4, max_depth=3, learning_rate=0.5, test=0.0, compare=False)
    ours = margins_of(table[["a", "b", "c"]].to_numpy(np.float32), found.boosted.forest, found.boosted.start)
    assert ours[:, 0] == pytest.approx(margins, abs=1e-4)
    assert found.boosted.ends == (3, 6, 9, 12)
    cyclic = piebald.trees(parts, target="y", rounds=4, form="cyclic", test=0.0, compare=False)
    assert cyclic.boosted.ends == (1, 2, 3, 4)
    roots = [int(one) for one in cyclic.boosted.forest.table[:, 0, 3]]
    assert roots == [30, 50, 70, 30]  # the rows of whose turn it was


def wards(gaps: float = 0.1) -> pandas.DataFrame:
    """A real table whose rows are those of ten wards, with gaps and a column of text."""
    loaded = load_breast_cancer(as_frame=True)
    rng = np.random.default_rng(0)
    table = loaded.data[["mean radius", "mean texture", "mean smoothness", "mean concavity"]].copy()
    table = table.mask(rng.random(table.shape) < gaps)
    table["size"] = np.where(loaded.data["mean area"] > 600, "large", "small")
    table["diagnosis"] = np.where(loaded.target == 1, "benign", "malignant")
    table["ward"] = rng.integers(0, 10, len(table))
    return table


@pytest.mark.full
def test_trees_together_are_better_than_alone() -> None:
    found = piebald.trees(wards(), client="ward", target="diagnosis", rounds=12, max_depth=3, test=0.3)
    auc = found.plain()["mean"]
    assert auc["together"] > auc["alone"]
    assert found.encoding.columns[-2:] == ["size=large", "size=small"]
    assert sum(found.importances.values()) == pytest.approx(1)
    assert [row["client"] for row in found.table()] == [*map(str, range(10)), "(mean)"]


@pytest.mark.full
def test_an_interrupted_call_goes_on_to_the_same_trees(tmp_path: Path) -> None:
    def call(out: Path, done: Any = None, **more: Any) -> Any:
        options: dict[str, Any] = {"rounds": 5, "max_depth": 2, "subsample": 0.7, "seed": 4, "compare": False}
        return piebald.trees(wards(), client="ward", target="diagnosis", out=out, done=done, validation=0.2,
                             patience=4, **{**options, **more})  # fmt: skip

    def interrupt(state: Any) -> None:
        if len(state.ends) == 3:
            raise KeyboardInterrupt

    call(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        call(tmp_path / "broken", interrupt)
    assert not (tmp_path / "broken" / "trees.json").exists()
    rounds: list[int] = []
    call(tmp_path / "broken", lambda state: rounds.append(len(state.ends)))
    assert rounds == [4, 5]
    for name in ("trees.json", "result.json"):
        assert (tmp_path / "broken" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    other = piebald.trees(wards(), client="ward", target="diagnosis", rounds=5, max_depth=2, subsample=0.7, seed=5,
                          compare=False, validation=0.2, patience=4)  # fmt: skip
    assert other.xgboost_model() != (tmp_path / "whole" / "trees.json").read_bytes()  # subsampling has the seed
    with pytest.raises(RunFolderError, match="has trees of other settings: choose another folder"):
        call(tmp_path / "whole", max_depth=3)
    with pytest.raises(RunFolderError, match="has trees of other seed"):
        call(tmp_path / "whole", seed=5)
    state = tmp_path / "whole" / "state.safetensors"
    state.write_bytes(state.read_bytes()[:-50])
    with pytest.raises(RunFolderError, match=r"state.safetensors"):
        call(tmp_path / "whole")


def test_leaves_are_about_as_many_rows_as_demanded() -> None:
    table = wards()
    found = piebald.trees(table, client="ward", target="diagnosis", rounds=2, least_rows=9, test=0.0, compare=False)
    forest = found.boosted.forest.table
    leaves = forest[:, :, 0] == -1
    assert forest[:, :, 3][leaves].min() >= 9
    assert leaves.sum() > len(forest)  # some splits are left
    free = piebald.trees(table, client="ward", target="diagnosis", rounds=2, test=0.0, compare=False)
    assert free.boosted.forest.table[:, :, 3][free.boosted.forest.table[:, :, 0] == -1].min() < 9


def test_patience_and_balanced_classes() -> None:
    table = wards()
    table["diagnosis"] = np.random.default_rng(1).permutation(table["diagnosis"])  # nothing can be learned
    found = piebald.trees(table, client="ward", target="diagnosis", rounds=40, patience=2, validation=0.2,
                          balanced=True, compare=False)  # fmt: skip
    losses = found.boosted.losses
    assert len(losses) == found.rounds + 2  # two rounds later it was over
    assert min(losses) == losses[found.rounds - 1]
    assert found.boosted.start.margins.tolist() == pytest.approx([0.0], abs=1e-6)  # of balanced classes


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"max_depth": 11}, "boosting 'trees': max_depth must be at most 10, got 11"),
        ({"max_dept": 3}, "did you mean 'max_depth'"),
        ({"target": "diagnosi"}, "did you mean 'diagnosis'"),
        ({"target": None}, r"name the column to predict, target \(--target\): there are "),
        ({"columns": ["diagnosis"]}, "columns must not include the target"),
        ({"columns": ()}, "columns must name at least one column"),
        ({"objective": "regression"}, "regression needs targets of numbers, got text"),
        ({"patience": 3}, "patience needs validation rows"),
        ({"rounds": 2000, "local_rounds": 16}, "rounds would make 320,000 trees"),
        ({"test": 0.9, "validation": 0.2}, "leave no rows to train on"),
    ],
)
def test_bad_arguments_are_one_sentence(change: dict[str, Any], sentence: str) -> None:
    arguments = {"client": "ward", "target": "diagnosis", "compare": False, **change}
    with pytest.raises(SettingError, match=sentence):
        piebald.trees(wards(), **arguments)


@pytest.mark.full
def test_infinite_numbers_are_refused_and_a_number_can_stand_for_gaps() -> None:
    table = wards(gaps=0.1)
    coded = table.fillna({name: -9.0 for name in table.select_dtypes("number")})
    arguments: dict[str, Any] = {"client": "ward", "target": "diagnosis", "rounds": 2, "compare": False}
    same = [piebald.trees(one, missing=-9.0, **arguments).xgboost_model() for one in (table, coded)]
    assert same[0] == same[1]
    table.loc[7, "mean radius"] = np.inf
    with pytest.raises(
        SettingError, match="column 'mean radius' must have a finite number in each row, got inf in row 8"
    ):
        piebald.trees(table, **arguments)


def honest() -> np.ndarray[Any, Any]:
    """The trees of a client of 40 rows."""
    found = piebald.trees({"a": rows("binary", 40)}, target="y", rounds=3, max_depth=3, test=0.0, compare=False)
    return found.boosted.forest.table


@pytest.mark.parametrize(
    ("place", "value", "sentence"),
    [
        ((0, 0, 0), 1e6, "a split of none of the 3 columns"),
        ((0, 0, 0), 0.5, "a split of none of the 3 columns"),
        ((0, 0, 0), -3, "a split of none of the 3 columns"),
        ((0, 0, 0), -2, "a node without a parent"),
        ((0, 0, 0), -1, "a node without a parent"),
        ((0, 1, 0), -2, "a node without a parent|without one of its sides"),
        ((0, -1, 0), 2, "a split below depth 3"),
        ((0, 0, 1), math.nan, "not finite"),
        ((0, 0, 1), 1e31, "not finite, or too large"),
        ((0, 0, 2), -1.0, "a negative gain"),
        ((0, 0, 3), 39, "not of the 40 rows"),
        ((0, 1, 3), 3, "do not add up"),
        ((0, 1, 3), 0.5, "not of the 40 rows"),
    ],
)
def test_hostile_trees_are_refused_with_a_reason(place: Any, value: float, sentence: str) -> None:
    table = honest()
    assert reject_reason(table, 3, 3, 40) is None
    table[place] = value
    assert re.search(sentence, reject_reason(table, 3, 3, 40) or "")


def test_no_mutation_of_trees_crashes_anything(tmp_path: Path) -> None:
    """What is not refused is trees: they predict finite numbers, here and in xgboost."""
    table, rng = honest(), np.random.default_rng(7)
    values = [-3, -2, -1, 0, 1, 5, 6, 0.5, 39, 40, 41, 1e9, -1e9, 1e38, np.nan, np.inf, 2.0**31]
    refused = accepted = 0
    x = rows("binary", 40)[["a", "b", "c"]].to_numpy(np.float32)
    found = piebald.trees({"a": rows("binary", 40)}, target="y", rounds=3, max_depth=3, test=0.0, compare=False)
    for trial in range(300):
        changed = table.copy()
        for _ in range(rng.integers(1, 4)):
            place = tuple(int(rng.integers(size)) for size in changed.shape)
            changed[place] = values[rng.integers(len(values))]
        if reject_reason(changed, 3, 3, 40) is not None:
            refused += 1
            continue
        accepted += 1
        forest = Forest(changed, 3)
        margins = margins_of(x, forest, found.boosted.start)
        assert np.isfinite(margins).all()
        if trial % 10 == 0:
            other = replace(found, boosted=replace(found.boosted, forest=forest))
            loaded = xgboost.Booster(model_file=other.save(tmp_path / "trees.json"))
            told = loaded.predict(xgboost.DMatrix(x, feature_names=["a", "b", "c"]), output_margin=True)
            assert told == pytest.approx(margins[:, 0], rel=1e-5, abs=1e-5)
    assert refused > 100
    assert accepted > 10
    for shape in ((3, nodes(3), 3), (3, nodes(2), 4), (nodes(3), 4), (0,)):
        assert reject_reason(np.zeros(shape, dtype=np.float32), 3, 3, 40)


def test_a_target_that_is_always_the_same_is_refused() -> None:
    table = pandas.DataFrame({"a": [1.0, 2.0, 3.0], "y": [1, 1, 1], "who": list("abc")})
    with pytest.raises(SettingError, match="must have two classes"):
        piebald.trees(table, client="who", target="y", objective="binary")


def test_classes_that_are_long_numbers_stay_apart() -> None:
    """Before, both were called "1e+06", and all rows were of one class."""
    table = rows("binary")
    table["y"] += 1_000_001
    data = tree_data(
        table.assign(ward="north"), client="ward", target="y", columns=None, features=None, objective="binary",
        validation=None, test=None, seed=0, missing=None,
    )  # fmt: skip
    assert data.classes == ("1000001", "1000002")
    assert {float(one) for held in data.clients[0].y.values() for one in held} == {0.0, 1.0}


def test_clients_without_validation_rows_grow_trees() -> None:
    """Before, the rows that are not there could not be reshaped."""
    rng = np.random.default_rng(0)
    made = clients_from({name: (rng.normal(size=(40, 2)), rng.integers(0, 2, 40)) for name in "abc"}, test=0.25)
    assert piebald.trees(made, rounds=2).rounds == 2
    with pytest.raises(SettingError, match=r"patience needs validation rows, and no client has any"):
        piebald.trees(made, rounds=2, patience=1)


def test_trees_read_tables_as_a_run_prepares_them() -> None:
    """Dates in parts, booleans as one column, rare categories together, identifiers left out, gaps where they are."""
    rng, n = np.random.default_rng(1), 60
    table = pandas.DataFrame({
        "who": ["a", "b", "c"] * 20, "seen": pandas.date_range("2024-01-30", periods=n).strftime("%Y-%m-%d"),
        "smoker": rng.choice(["yes", "no"], n), "ward": ["x", "y"] * 28 + ["x", "x", "z", "w"],
        "name": [f"patient {k}" for k in range(n)], "age": rng.normal(60, 9, n), "y": rng.integers(0, 2, n),
    })  # fmt: skip
    table.loc[::9, ["smoker", "age"]] = None
    made = piebald.trees(table, client="who", target="y", rounds=1, compare=False, prepare={"least_rows": 3})
    dates = [f"seen: {part}" for part in ("days", "day", "month", "weekday")]
    assert made.encoding.columns == [*dates, "smoker", "ward=x", "ward=y", "ward is another", "age"]
    prepared = clients_from(table, client="who", target="y", prepare={"least_rows": 3})
    assert made.encoding.preparation == prepared.preparation  # type: ignore[union-attr]
    rows = made.encoding.inputs(table.iloc[[0, 58]])
    assert rows[0, 0] == 19752  # days since 1970
    assert np.isnan(rows[0, [4, 8]]).all()
    assert rows[:, 5:8].tolist() == [[1, 0, 0], [0, 0, 1]]
