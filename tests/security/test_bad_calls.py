"""Bad calls end in one sentence: the argument, what is allowed, what was given.

Before, 191 of 904 such calls raised raw errors, and numbers as text, booleans as numbers and infinite counts were
taken.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from typing_extensions import TypeAliasType

import piebald
from piebald import data, models, partition, recipes, vertical
from piebald.contracts.component import Component
from piebald.core.arguments import Count, PathLike, checked
from piebald.federation import Federation
from tests.security.fuzzers import fuzzer


@pytest.fixture(scope="module")
def parts() -> tuple[Any, torch.nn.Module]:
    return partition.Iid(clients=3, limit=60).split(data.digits()), models.build_model("logistic", (1, 8, 8), 10)


ARGUMENTS: dict[str, Any] = {
    "evaluate_every": "x", "metrics": 5, "seed": True, "rounds": "3", "evaluate_clients": -1, "unseen": float("nan"),
    "longest_step": float("inf"), "checkpoint_every": 2.0, "label": 5, "out": 5, "stop": 5, "loss": 5, "settings": 5,
    "keep": b"last", "measure": None, "progress": 1, "evaluate_split": "tset", "runtime": 5,
}  # fmt: skip


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_an_argument_of_run_of_another_type_is_refused_by_name(argument: str, parts: Any) -> None:
    with pytest.raises(piebald.SettingError, match=rf"\b{argument}\b") as caught:
        piebald.run("fedavg", *parts, **{argument: ARGUMENTS[argument]})
    assert "\n" not in str(caught.value)


CALLS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "no path": (lambda parts: piebald.resume(None), "path must be a path or text, got None"),
    "an empty path": (lambda parts: piebald.resume(""), "path must be a path of 1 to 4096 characters"),
    "a path of two lines": (lambda parts: piebald.resume(Path("a\nb")), r"without control characters, got 'a\nb'"),
    "no rows": (lambda parts: piebald.clients_from({"a": ([], [])}), "client 'a' has no rows: leave it out"),
    "no stopping rule": (lambda parts: piebald.run("fedavg", *parts, stop={"second": 1}), "stop called 'second'"),
    "one path for a list": (lambda parts: piebald.write_report("folder", "out"), "write run_paths=['folder']"),
    "one seed": (lambda parts: piebald.compare(["fedavg"], *parts, seeds=5), "seeds must be a list"),
    "an option that is none": (lambda parts: piebald.compare(["fedavg"], *parts, seed=5), "did you mean 'seeds'"),
    "an argument that is none": (lambda parts: piebald.run("fedavg", *parts, rondus=5), "did you mean 'rounds'"),
    "a missing argument": (lambda parts: piebald.run("fedavg"), "missing a required argument: 'clients'"),
    "text for a rate": (lambda parts: recipes.fedavg(lr="0.1"), "lr must be a number, got '0.1'"),
    "true for a count": (lambda parts: recipes.fedavg(batch=True), "batch must be a whole number, got True"),
    "a count beyond all": (lambda parts: recipes.fedavg(epochs=10**5000), "at most 64 bits"),
    "a rate beyond float32": (lambda parts: recipes.fedavg(lr=1e308), "32 bits"),
    "a deep list": (lambda parts: recipes.fedavg(cohort=fuzzer("hostile").VALUES[36]()), "nested at most 50 deep"),
    "another axis": (lambda parts: piebald.run("fedavg", *parts, runtime=recipes.fedavg().training), "runtime must be"),
    "a model too large": (lambda parts: models.build_model("mlp", (1, 8, 8), 2**62), "cannot be made"),
    "a model by its name": (
        lambda parts: piebald.run("fedavg", parts[0], "mlp"),
        "or a table of them, got 'mlp': piebald.models.build_model makes a model by its name",
    ),
    "a budget of nothing": (
        lambda parts: piebald.advise(*parts, budget="much"),
        "budget must be a number and a unit, like '300 rounds' or '10 minutes', got 'much'",
    ),
    "transforms of nothing": (lambda parts: recipes.fedavg().with_(transforms=5), "transforms must be a list"),
    "settings of a transfer": (lambda parts: vertical.run(5), "settings must be a TransferSettings, got 5"),
}


@pytest.mark.parametrize("case", CALLS)
def test_a_bad_call_says_what_is_wrong(case: str, parts: Any) -> None:
    call, message = CALLS[case]
    with pytest.raises(piebald.SettingError) as caught:
        call(parts)
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_numbers_of_numpy_are_numbers() -> None:
    made = recipes.fedavg(lr=np.float32(0.5), batch=np.int64(5))
    assert (made.training.lr, made.training.batch) == (0.5, 5)
    assert type(made.training.batch) is int


def test_a_new_component_and_a_new_function_are_strict_without_doing_anything() -> None:
    class Wobble(Component):
        axis = "wobble_of_this_test"

    class Gentle(Wobble):
        times: int = 1
        names: tuple[str, ...] = ()

    @checked
    def shake(times: Count, path: PathLike | None = None) -> int:
        return times

    for wrong in ("1", True, 1.0, None, 10**30):
        with pytest.raises(piebald.SettingError, match="times"):
            Gentle(times=wrong)
        with pytest.raises(piebald.SettingError, match="times"):
            shake(wrong)
    assert Gentle(names=["a"]).names == ("a",)
    assert shake(np.int64(3)) == 3
    with pytest.raises(piebald.SettingError, match="times must be a whole number of at least 1, got 0"):
        shake(0)


def test_no_more_workers_are_started_than_there_are_clients(parts: Any) -> None:
    """Before, `workers = 60` started 60 processes for three clients."""
    runtime = {"kind": "simulator", "engine": "sequential", "workers": 60}
    run = piebald.run("fedavg", *parts, rounds=1, runtime=runtime)
    assert run.meta["runtime"]["workers"] == 3


@pytest.mark.full
def test_every_public_name_is_a_subject(tmp_path: Path) -> None:
    """What is added to a public list is fuzzed at once, or named as left out."""
    calls = fuzzer("api_fuzzer")
    known = {one.name for one in calls.subjects(tmp_path)} | calls.LEFT_OUT
    for name in ("run", "resume", "compare", "adapt", "clients_from", "write_report", "LazyClients"):
        assert f"piebald.{name}" in known
    assert {f"piebald.methods.catalog.recipes.{name}" for name in recipes.names()} <= known
    assert not issubclass(Federation, Exception)


@pytest.mark.full
def test_every_good_call_gets_past_its_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One bad argument among good ones is looked at only if the good ones are; before, 60 of 390 were not good."""
    monkeypatch.chdir(tmp_path)
    calls = fuzzer("api_fuzzer")
    refused = {}
    for subject in calls.subjects(tmp_path):
        if subject.name in calls.NEEDS_FILES or not subject.name.startswith(calls.QUICK):
            continue
        try:
            subject.call(**subject.good)
        except piebald.PiebaldError as error:
            if "cannot be downloaded" not in str(error):  # without a network, and past its arguments
                refused[subject.name] = str(error)
    assert refused == {}


def test_an_alias_of_a_type_is_checked_as_the_type() -> None:
    """NumPy 2.5 made one of `NDArray`: then arrays were not checked, and lists in their place ended raw."""
    numbers = TypeVar("numbers")
    alias = TypeAliasType("alias", np.ndarray[Any, np.dtype[numbers]], type_params=(numbers,))
    plain = TypeAliasType("plain", Count)

    def function(rows, array=None): ...

    function.__annotations__ = {"rows": plain, "array": alias[np.float64] | None}
    taking = checked(function)
    taking(1, np.zeros(2))
    with pytest.raises(piebald.SettingError, match=r"array must be a ndarray, got \[1\]"):
        taking(1, [1])
    with pytest.raises(piebald.SettingError, match="rows must be a whole number of at least 1, got 0"):
        taking(0)


@pytest.mark.full
def test_no_bad_call_ends_raw() -> None:
    for row in fuzzer("api_fuzzer").run(150, seed=11):
        assert row.good, row.examples


@pytest.mark.full
def test_no_bad_call_of_many_ends_raw() -> None:
    for row in fuzzer("api_fuzzer").run(1000, seed=12):
        assert row.good, row.examples
