"""The settings of a run besides its recipe, clients, model and folder, and clients that lack an input."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from piebald.contracts import Clients, Rows, Split
from piebald.contracts.component import Component
from piebald.contracts.data import LacksInputs, lacked_inputs, without_inputs
from piebald.contracts.model_spec import ModelSpec
from piebald.core import pytree
from piebald.core.client_models import ClientModels, part_without
from piebald.core.errors import SettingError
from piebald.core.randomness import torch_seed
from piebald.methods.choice.final_models import Keep
from piebald.methods.recipe import Recipe
from piebald.report.callbacks import Tracker
from piebald.server import StoppingCriteria
from piebald.server.result_checks import LONGEST_STEP

Metrics = Mapping[str, Any] | Sequence[str | Mapping[str, Any]]

_RECORDED = (
    "rounds", "seed", "runtime", "checkpoint_every", "label", "settings", "stop", "keep", "unseen", "longest_step",
    "max_examples", "max_weight", "trackers", "per_class", "threshold",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The settings of a run, which `piebald.run` documents under the same names."""

    rounds: int | None = None
    stop: StoppingCriteria | Mapping[str, Any] | None = None
    seed: int = 0
    runtime: str | Component | Mapping[str, Any] = "simulator"
    loss: Any = None
    metrics: Metrics | None = None
    evaluate_every: int = 1
    evaluate_clients: int | None = None
    evaluate_split: Split = "test"
    keep: Keep | Mapping[str, Any] = "last"
    unseen: float | Sequence[str] = 0
    checkpoint_every: int | None = None
    label: str | None = None
    settings: Mapping[str, Any] | None = None
    longest_step: float = LONGEST_STEP
    max_examples: int | None = None
    max_weight: float = 1.0
    trackers: Sequence[str | Tracker | Mapping[str, Any]] = ()
    per_class: bool | None = None
    threshold: str | None = None

    @classmethod
    def among(cls, arguments: Mapping[str, Any], **settings: Any) -> Self:
        """Pick the options of a run from the keyword arguments of `piebald.run`, with `settings` in their place."""
        chosen = {field.name: arguments[field.name] for field in fields(cls) if field.name in arguments}
        return cls(**chosen | settings)

    @classmethod
    def of_folder(cls, meta: Mapping[str, Any], objective: Mapping[str, Any]) -> Self:
        """Read the options of the run in a folder.

        Args:
            meta: what the folder says of its run.
            objective: loss and metrics, which are no plain values, as the user gives them again.
        """
        interval, clients, split = meta["evaluate"]
        return cls(
            evaluate_every=interval,
            evaluate_clients=clients,
            evaluate_split=split,
            loss=objective.get("loss") or meta.get("loss"),
            metrics=objective.get("metrics") or meta.get("metrics"),
            **{name: meta[name] for name in _RECORDED},
        )

    def length(self) -> tuple[int | None, StoppingCriteria | None]:
        """Return the number of rounds and the stopping criteria; ten rounds if neither is given."""
        criteria = StoppingCriteria(**self.stop) if isinstance(self.stop, Mapping) else self.stop
        if criteria is not None and not isinstance(criteria, StoppingCriteria):
            raise SettingError(
                f"stop must be a StoppingCriteria or a table like {{'seconds': 3600}}, got {self.stop!r}"
            )
        return (10 if self.rounds is None and criteria is None else self.rounds), criteria

    def with_whole_counts(self) -> Self:
        """Return these options with their counts as Python integers, since NumPy's are not written to the folder."""
        counts: dict[str, Any] = {}
        for name, value, least in (
            ("rounds", self.length()[0], 1),
            ("seed", self.seed, 0),
            ("checkpoint_every", self.checkpoint_every, 1),
        ):
            if value is None and name != "seed":
                continue
            # A bool is an int in Python, and True rounds would be one.
            if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < least:
                raise SettingError(f"{name} must be a whole number of at least {least}, got {value!r}")
            counts[name] = int(value)
        return replace(self, **counts)

    def recorded(self) -> dict[str, Any]:
        """Return the options that influence the results of a run, as plain values for its folder."""
        rounds, stop = self.length()
        return {
            "rounds": rounds,
            "stop": None if stop is None else stop.model_dump(exclude_none=True),
            "evaluate": [self.evaluate_every, self.evaluate_clients, self.evaluate_split],
            "keep": self.keep if isinstance(self.keep, str) else dict(self.keep),
            "unseen": self.unseen if isinstance(self.unseen, int | float) else list(self.unseen),
            "longest_step": self.longest_step,
            "threshold": self.threshold,
            "max_examples": self.max_examples,
            "max_weight": self.max_weight,
        }


def models_without_inputs(recipe: Recipe, spec: ModelSpec, clients: Clients, rows: Rows) -> ClientModels | None:
    """Return the models of clients that lack an input, without what only that input reaches; None where nobody does.

    A parameter is theirs if a gradient reaches it without the input, and a buffer if its layer runs.  They have no say
    for those that the recipe's sharing says belong to the input.

    Args:
        recipe: how clients train.
        spec: the run's model.
        clients: who has which inputs.
        rows: training rows of a client that has all of them.

    Raises:
        SettingError: the model cannot do without an input, or the recipe takes every update as one of the whole model.
    """
    # inputs without names are all there
    named = isinstance(clients, LacksInputs) and isinstance(rows.x, Mapping)
    lacked = [lacked_inputs(clients, client) for client in range(len(clients) if named else 0)]
    kinds = sorted({names for names in lacked if names}, key=sorted)
    known = rows.x.keys() if isinstance(rows.x, Mapping) else ()
    for name in recipe.sharing.inputs or ():
        if name not in known:
            raise SettingError(
                f"inputs of sharing must name inputs, which are {', '.join(known) or 'not named'}, got {name!r}"
            )
    if not kinds:
        return None
    if reason := recipe.parts_reason():
        raise SettingError(f"some clients lack an input: {reason}")
    reached = _reached(spec.model, rows.x)
    models = []
    for names in kinds:
        client = str(clients.names[lacked.index(names)])
        try:
            gone = reached - _reached(spec.model, without_inputs(rows.x, names))
        except Exception as error:  # whatever the user's own model may raise
            raise SettingError(
                f"client {client!r} lacks {' and '.join(sorted(names))}, and the model cannot do without: "
                f"{type(error).__name__}: {error}; give that argument of its forward a default"
            ) from error
        silent = recipe.sharing.belonging(spec.model, names)
        models.append(part_without(spec.model, spec.layout, spec.outputs, gone, names, silent))
    return ClientModels(tuple(models), tuple(kinds.index(names) if names else None for names in lacked))


def _reached(module: nn.Module, x: pytree.Tree) -> set[str]:
    """Return the names of the parameters that a gradient reaches from some inputs, and of the buffers of layers that
    run.
    """
    trial, ran = copy.deepcopy(module).train(), set[str]()
    for name, layer in trial.named_modules():
        layer.register_forward_hook(lambda *_, name=name: ran.add(name))
    few = pytree.take(x, [0, 0])  # batch norm refuses a single row
    parameters = {name: parameter for name, parameter in trial.named_parameters() if parameter.requires_grad}
    with torch.enable_grad(), torch_seed(0):
        outputs = [leaf for leaf in pytree.leaves(pytree.run(trial, few)) if isinstance(leaf, Tensor)]
        total = sum((leaf.float().sum() for leaf in outputs if leaf.requires_grad), start=torch.zeros(()))
        gradients = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
    reached = {name for name, gradient in zip(parameters, gradients, strict=True) if gradient is not None}
    return reached | {name for name, _ in trial.named_buffers() if name.rpartition(".")[0] in ran}
