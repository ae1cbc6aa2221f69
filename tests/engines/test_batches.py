"""Batches of any form: inputs, targets and outputs that are tuples or dicts of tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import piebald
from piebald import recipes
from piebald.core.errors import PiebaldError
from piebald.methods.recipe import Recipe
from piebald.privacy.accounting import of_rows
from piebald.runs.finished_run import Run

ENGINES = ("sequential", "vmapped", "batched", "reference")


def rows(count: int, seed: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Inputs [count, 6] and one of three classes."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, 6)).astype(np.float32)
    return x, (x[:, 0] > 0).astype(np.int64) + (x[:, 1] > 1)


ROWS = [rows(count, seed) for seed, count in enumerate((9, 14, 5))]


class One(nn.Module):
    """A small network of one tensor [n, 6]."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(torch.tanh(self.first(x)))
        return out


class Named(One):
    """The same network, which gets its inputs by name."""

    def forward(self, left: Tensor, right: Tensor) -> Any:  # type: ignore[override]
        return {"logits": super().forward(torch.cat([left, right], 1)), "cache": [left]}


class Placed(One):
    """The same network, which gets its inputs by place."""

    def forward(self, left: Tensor, right: Tensor) -> Any:  # type: ignore[override]
        return (super().forward(torch.cat([left, right], 1)),)


def ran(
    model: type[nn.Module], clients: Any, recipe: Recipe | str = "fedavg", engine: str = "sequential", **options: Any
) -> Run:
    torch.manual_seed(0)
    runtime = {"kind": "simulator", "engine": engine, "workers": 0, **options.pop("runtime", {})}
    made = piebald.clients_from(clients, test=0.3, validation=0.2)
    return piebald.run(recipe, made, model(), rounds=2, runtime=runtime, **options)


def named() -> dict[str, Any]:
    return {f"c{n}": ({"left": x[:, :2], "right": x[:, 2:]}, y) for n, (x, y) in enumerate(ROWS)}


def vector(run: Run) -> Tensor:
    return run.work.layout.flatten(run.model())


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(recipes.ditto(), id="ditto"),
        # another model has other noise, so it is left out
        pytest.param(recipes.dp_sgd(clip=0.5, noise=0.0), id="dp_sgd"),
    ],
)
def test_inputs_in_a_dict_or_a_tuple_train_like_the_same_inputs_in_one_tensor(engine: str, recipe: Recipe) -> None:
    one = ran(One, {f"c{n}": pair for n, pair in enumerate(ROWS)}, recipe, engine)
    placed = {f"c{n}": ((x[:, :2], x[:, 2:]), y) for n, (x, y) in enumerate(ROWS)}
    for again in (ran(Named, named(), recipe, engine), ran(Placed, placed, recipe, engine)):
        assert torch.equal(vector(one), vector(again))
        assert repr(one.scores) == repr(again.scores)  # every number of every client, also where it is NaN


class Wordy(nn.Module):
    """A masked mean of embeddings; returns what Hugging Face models return."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(11, 4), nn.Linear(4, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> Any:
        from transformers.modeling_outputs import SequenceClassifierOutput

        mask = attention_mask.unsqueeze(2)
        scores = self.head((self.words(input_ids) * mask).sum(1) / mask.sum(1))
        loss = None if labels is None else functional.cross_entropy(scores, labels)
        return SequenceClassifierOutput(loss=loss, logits=scores)


def texts(count: int, seed: int, length: int = 5) -> dict[str, np.ndarray[Any, Any]]:
    """Token ids, masks and labels."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(1, 11, size=(count, length))
    mask = np.arange(length) < rng.integers(1, length + 1, size=(count, 1))
    return {
        "input_ids": ids * mask,
        "attention_mask": mask.astype(np.int64),
        "labels": (ids[:, 0] > 5).astype(np.int64),
    }


def test_a_hugging_face_output_is_scored_by_its_logits() -> None:
    clients = {}
    for seed in range(2):
        made = texts(8, seed)
        clients[f"c{seed}"] = ({name: made[name] for name in ("input_ids", "attention_mask")}, made["labels"])
    sequential, vmapped = (ran(Wordy, clients, engine=engine) for engine in ("sequential", "vmapped"))
    torch.testing.assert_close(vector(sequential), vector(vmapped))
    assert sequential.work.outputs == (2,)


def test_the_models_own_loss_is_that_of_each_client_alone() -> None:
    clients = {}
    for seed in range(2):
        made = texts(8, seed)
        clients[f"c{seed}"] = (made, made["labels"])  # the model gets its labels among the inputs
    own, named = (ran(Wordy, clients, loss=loss) for loss in ("model", "classification"))
    torch.testing.assert_close(vector(own), vector(named))
    for one, two in zip(own.scores, named.scores, strict=True):  # one mean a client, not one of all that are scored
        assert one["value"] == pytest.approx(two["value"], rel=1e-5)
    with pytest.raises(PiebaldError, match="it returns none: put 'labels' among its inputs"):
        ran(One, dict(enumerate(ROWS)), loss="model")


@pytest.mark.parametrize(
    ("clients", "words"),
    [
        ([({"a": np.ones((3, 2))}, [0, 1, 0]), ({"a": np.ones((3, 4))}, [0, 1, 0])], "all clients need inputs of one"),
        ([({"a": np.ones((3, 2))}, [0, 1, 0]), (np.ones((3, 2)), [0, 1, 0])], "all clients need inputs of one"),
        ([({"a": np.ones((3, 2)), "b": np.ones((2, 2))}, [0, 1, 0])], "same rows in every part, got 3 of 'a', 2 of"),
        ([({"a": np.ones((3, 2))}, [0, 1])], "has 3 inputs but 2 targets"),
        ([({}, [0, 1])], "got an empty dict"),
        ([({"a": [["x"], ["y"]]}, [0, 1])], "inputs 'a' must be numbers, got text"),
    ],
)
def test_batches_of_another_form_are_refused_in_one_sentence(clients: Any, words: str) -> None:
    with pytest.raises(PiebaldError, match=words) as refused:
        piebald.clients_from(clients)
    assert "\n" not in str(refused.value)


def test_what_a_model_returns_without_scores_is_refused_with_what_it_returned() -> None:
    class Odd(One):
        def forward(self, x: Tensor) -> Any:  # type: ignore[override]
            return {"hidden": super().forward(x)}

    with pytest.raises(PiebaldError, match="'logits', got a dict with hidden"):
        ran(Odd, dict(enumerate(ROWS)))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_limit_of_steps_ends_the_epochs_of_large_clients_alone(engine: str) -> None:
    clients = piebald.clients_from({f"c{n}": pair for n, pair in enumerate(ROWS)}, test=0.0)  # of 9, 14 and 5 rows
    recipe = piebald.recipes.fedavg(batch=4, epochs=2, step_limit=5)
    run = piebald.run(recipe, clients, One(), rounds=1, runtime=piebald.Simulator(engine=engine))
    assert {row["client"]: row["steps"] for row in run.results} == {0: 5, 1: 5, 2: 4}


def test_a_limit_beside_steps_is_refused() -> None:
    with pytest.raises(PiebaldError, match="steps = 3 takes so many steps, and step_limit = 5 ends epochs: leave one"):
        piebald.recipes.fedavg(steps=3, step_limit=5)


@pytest.mark.full
def test_budgets_count_the_steps_that_a_limit_leaves() -> None:
    budgets = [
        of_rows(piebald.recipes.dp_sgd(batch=4, **length), [40], 5)
        for length in ({"steps": 3}, {"step_limit": 3}, {"epochs": 1})
    ]
    assert budgets[0].epsilon_pld == budgets[1].epsilon_pld < budgets[2].epsilon_pld
