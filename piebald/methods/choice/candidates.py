"""The models that a client could use.

The most widely shared first:

- `global`: the global model, of the main cluster where there are several.
- `cluster`: the model of the client's cluster, where there are several.
- `personal`: what the recipe gives the client, beyond the model that it was sent: with its private layers, trained
  beside the shared one (Ditto), or fine-tuned by the recipe.
- `fine_tuned`: the client's shared model after 1 to `TUNE_EPOCHS` more passes over its rows, the number with the lowest
  validation loss.
- `mixed`: a mixture of the shared model and one of its own, parameter by parameter: a * own + (1 - a) * shared (Deng
  et al. 2020, APFL, eq. 2; for models fine-tuned from the shared one, Wortsman et al. 2022, WiSE-FT).  Mansour et al.
  2020 (MAPPER) mix outputs instead.  Mixed parameters are a model of the user's own architecture, which is saved,
  loaded and deployed like any other; mixed outputs would need two models forever.
- `local`: what the client would have trained alone, with the same work: its tasks from the run's initial model, and 0
  to `TUNE_EPOCHS` more passes, as many as the fine-tuned model may have.

The record of one client's choice: plain values for the run folder, a site's file, and the page.

The models that a run ends with (`keep`): a name, or the table of a choice that each client makes for itself.

Training alone: the model that a client would have had without the federation, with the same work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from piebald.contracts import ClientContext, OwnChoice, Personalizes, Split, TrainInput, Trains
from piebald.contracts.component import Component, build
from piebald.core.errors import SettingError, unknown
from piebald.methods.choice.guard import FEWEST_ROWS, Verdict, judge
from piebald.methods.training.sgd import Sgd

CANDIDATES = ("global", "cluster", "personal", "fine_tuned", "mixed", "local")
SHARED = ("global", "cluster")
TUNE_EPOCHS = 5
SHARES = (0.25, 0.5, 0.75)  # of a client's own model in a mixture
ALONE = "nothing is shared, so there is no other model"
WORDS = {
    "global": "the global model",
    "cluster": "its cluster's model",
    "personal": "its personal model",
    "fine_tuned": "the fine-tuned model",
    "mixed": "the mixed model",
    "local": "its own local model",
    "neighbours": "the model with its neighbours",
}
Keep = Literal["last", "best", "best_for_each", "knn_per"]
KEEPS: tuple[str, ...] = get_args(Keep)
_OF_ALL = ("last", "best")
_OF_RUN = ("split", "tasks", "passes")  # settings that are no user's


def plain_sgd(trainer: Trains) -> Sgd:
    """The settings of a trainer as SGD without a term that ties it to others, and without noise.

    A model that never leaves its client needs neither.  A trainer that is no kind of SGD has no such settings: then it
    is SGD with its defaults.
    """
    if not isinstance(trainer, Sgd):
        return Sgd()
    settings = {name: getattr(trainer, name) for name in Sgd.model_fields}
    if trainer.protects:
        settings["clip"] = None  # that of single rows' gradients
    return Sgd(**settings)


def local_work(trainer: Trains, rows: int, steps: int) -> int:
    """The passes over a client's rows that a training task made.

    Args:
        trainer: the run's.
        rows: the client's training rows.
        steps: the optimizer steps that the client took, 0 where it does not say.
    """
    plain = plain_sgd(trainer)
    each = max(1, -(-rows // plain.step_rows))
    return plain.epochs if steps <= plain.epochs * each else round(steps / each)


def train_alone(
    trainer: Trains, inputs: TrainInput, context: ClientContext, tasks: Sequence[str], passes: Sequence[int]
) -> Tensor:
    """The models [c, p] of clients that train alone, from the run's initial model.

    They make the same tasks as in the run: with its learning rates, and with the same order of rows.  So the outcome is
    that of the recipe `local`.

    Args:
        trainer: the run's.
        inputs: of the clients.
        context: of the clients.
        tasks: `Task.rng_version` of each task that they made.
        passes: the passes over their rows in each of them.
    """
    # from the run's first model, and with its learning rates and orders of rows: the recipe `local`
    plain, model = plain_sgd(trainer), context.initial.expand(len(inputs.versions), -1)
    state = {name: part.expand(len(model), *part.shape) for name, part in plain.initial_state(model[0], 0).items()}
    for task, epochs in zip(tasks, passes, strict=True):
        version, _, attempt = task.partition(".")
        task_inputs = replace(inputs, model=model, state=state, vectors={}, versions=[int(version)] * len(model))
        again = context.with_rng(task if attempt else int(version))
        output = plain.model_copy(update={"epochs": epochs}).train(task_inputs, again)
        model, state = output.model, dict(output.state)
    return model


class Candidates:
    """Models that the clients of a stack could use: of several of a kind, the one that fits the validation rows best.

    Args:
        losses: returns the clients' validation losses [c, k] under each of k models [c, p].

    Attributes:
        models: [c, p] by name.
        epochs: passes over each client's rows by name, of models that are the best of several passes.
        mixture: for each client, the name of the model that is mixed with the base, and its share.
    """

    def __init__(self, losses: Callable[[Sequence[Tensor]], Tensor]) -> None:
        self.models: dict[str, Tensor] = {}
        self.epochs: dict[str, list[int]] = {}
        self.mixture: list[tuple[str, float]] = []
        self._losses = losses

    def add_best_pass(self, name: str, passes: Iterable[Sequence[Tensor]], first: int = 0) -> None:
        """Add the models after the number of passes with the lowest validation loss.

        Args:
            name: the candidate's name.
            passes: groups of models that are compared at once, after `first`, `first` + 1, ... passes.
            first: passes behind the first model.
        """
        self.models[name], best = self._lowest(passes)
        self.epochs[name] = [first + number for number in best]

    def add_mixture(self, base: Tensor, names: Sequence[str]) -> None:
        """Add as "mixed" the mixture of `base` [c, p] and one of these candidates with the lowest validation loss."""
        kinds = [(name, share) for name in names for share in SHARES]
        mixtures = [share * self.models[name] + (1 - share) * base for name, share in kinds]
        self.models["mixed"], best = self._lowest([mixtures])
        self.mixture = [kinds[number] for number in best]

    def put_in_order(self, names: Sequence[str]) -> None:
        """Put the models in the order of these names."""
        self.models = {name: self.models[name] for name in names if name in self.models}

    def verdict(self, losses: Tensor, shared: int, errors: float = 1.0) -> Verdict:
        """Return the guard's verdict for one client.

        Args:
            losses: [models, rows], of the models in their order.
            shared: how many of the models, from the first, are shared.
            errors: see `judge`.
        """
        names = list(self.models)
        return judge(losses, shared, errors, names.index("local") if "local" in names else None)

    def _lowest(self, groups: Iterable[Sequence[Tensor]]) -> tuple[Tensor, list[int]]:
        """Return each client's model with the lowest validation loss [c, p], the first of equals, and its number."""
        chosen: list[tuple[float, int, Tensor]] = []
        start = 0
        for models in groups:
            losses = self._losses(models).nan_to_num(math.inf)
            best = zip(losses.min(1).values.tolist(), losses.argmin(1).tolist(), strict=True)
            # group by group, so that a long search need not hold all of its models
            offers = [(loss, start + number, models[number][row]) for row, (loss, number) in enumerate(best)]
            pairs = zip(chosen or offers, offers, strict=True)
            chosen = [offer if offer[0] < earlier[0] else earlier for earlier, offer in pairs]
            start += len(models)
        return torch.stack([model for _, _, model in chosen]), [number for _, number, _ in chosen]


class ClientCandidates(Candidates):
    """The candidates of a stack of clients when a run has ended.

    Args:
        inputs, context, trainer: as `Query.answer` gets them.
        tasks, passes: the clients' work, see `train_alone`.

    Attributes:
        shared: how many of the models, from the first, are shared.
        fallback: the name of the shared one that fits the clients best.
    """

    def __init__(
        self, inputs: TrainInput, context: ClientContext, trainer: Trains, tasks: Sequence[str], passes: Sequence[int]
    ) -> None:
        super().__init__(lambda models: context.losses(models, "validation"))
        self._inputs, self._context, self._trainer = inputs, context, trainer
        shared, personal = self._untrained()
        self.models = {**shared, **personal}
        if inputs.shared:  # else the model that was not sent is the local one
            self.add_best_pass("fine_tuned", [self._tuned(inputs.model)], first=1)
            if tasks:
                alone = train_alone(trainer, inputs, context, tasks, passes)
                self.add_best_pass("local", [[alone, *self._tuned(alone)]])
            self.add_mixture(inputs.model, [name for name in self.models if name not in shared])
        self.put_in_order(CANDIDATES)
        self.shared = len(shared)
        self.fallback = list(self.models)[max(self.shared - 1, 0)]

    def _untrained(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the models that are there without training: shared ones, and others."""
        inputs, trainer = self._inputs, self._trainer
        if inputs.shared == 0:
            return {}, {"local": inputs.model}
        personal = trainer.personalize(inputs, self._context) if isinstance(trainer, Personalizes) else None
        if inputs.shared < inputs.model.shape[-1]:  # shared layers are of use only together with the client's own
            return {"personal": inputs.model if personal is None else personal}, {}
        wide = inputs.vectors.get("global")
        shared = {"global": inputs.model} if wide is None else {"global": wide, "cluster": inputs.model}
        return shared, {} if personal is None else {"personal": personal}

    def _tuned(self, start: Tensor) -> list[Tensor]:
        """Return the models after 1, 2, ... `TUNE_EPOCHS` more passes over the clients' rows."""
        plain, model = plain_sgd(self._trainer).model_copy(update={"epochs": 1, "steps": None}), start
        state = {name: part.expand(len(model), *part.shape) for name, part in plain.initial_state(model[0], 0).items()}
        models: list[Tensor] = []
        for _ in range(TUNE_EPOCHS):
            output = plain.train(replace(self._inputs, model=model, state=state, vectors={}), self._context)
            model, state = output.model, dict(output.state)
            models.append(model)
        return models


def record(metrics: Mapping[str, float], rows: int) -> dict[str, Any]:
    """A choice as plain values.

    Args:
        metrics: those of an answer to `BestForEach`.
        rows: the client's validation rows.

    Returns:
        `chosen`: the name of the chosen candidate; `why`: the reason, in one sentence; `rows`: validation rows;
        `candidates`: loss and metrics on validation rows by candidate; `difference` and `error`: by how much the best
        candidate's loss is below the shared model's, and the standard error of that; `epochs`: the passes after the run
        that the chosen model has made; `mixture`: the client's own model in the mixture and its share; `judged`: rows,
        loss and metrics of the chosen model on the rows that models are judged by, and of the shared and the local one;
        `alone`: the chosen model's loss there minus that of the local one, and its standard error.  What does not exist
        is None or left out.
    """
    values, shared = finite(metrics), int(metrics["shared"])
    chosen, names = marked_name("chosen", metrics), [name for name in CANDIDATES if f"chosen/{name}" in metrics]
    best = names.index(marked_name("best", metrics))
    verdict = Verdict(names.index(chosen), best, metrics["difference"], metrics["error"])
    choice: dict[str, Any] = {
        "chosen": chosen,
        "why": reason(verdict, names, shared, rows) if shared else ALONE,
        "rows": rows,
        "candidates": grouped(values, "validation"),
        "difference": values["difference"],
        "error": values["error"],
    }
    if (epochs := metrics.get(f"{chosen}/epochs")) is not None:
        choice["epochs"] = int(epochs)
    if chosen == "mixed":
        choice["mixture"] = {"of": marked_name("mixed/of", metrics), "share": float(metrics["mixed/share"])}
    if (judged := int(metrics.get("judged/rows", 0))) > 0:
        choice["judged"] = {"rows": judged, **grouped(values, "judged")}
        if "alone/difference" in values:
            choice["alone"] = {"difference": values["alone/difference"], "error": values["alone/error"]}
    return choice


def loses(choice: Mapping[str, Any]) -> bool:
    """Return whether the chosen model is worse than the client's own local one, by more than two standard errors of the
    loss on the rows that models are judged by.
    """
    alone = choice.get("alone") or {}
    difference, error = alone.get("difference"), alone.get("error")
    return difference is not None and error is not None and bool(difference > 2 * error)


def finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Metrics as plain values, None for what is not defined."""
    return {name: None if not math.isfinite(value) else float(value) for name, value in metrics.items()}


def marked(group: str, names: Sequence[str], choices: Sequence[str]) -> dict[str, Tensor]:
    """Return the clients' names as metrics [c]: "GROUP/CHOICE" is 1 for those whose name it is, and 0 for the others.

    Examples:
        >>> marked("chosen", ["local", "global"], ["global", "local"])
        {'chosen/global': tensor([0., 1.]), 'chosen/local': tensor([1., 0.])}
    """
    return {f"{group}/{choice}": torch.tensor([float(name == choice) for name in names]) for choice in choices}


def marked_name(group: str, metrics: Mapping[str, float]) -> str:
    """Return the name that `marked` has marked in one client's metrics.

    Examples:
        >>> marked_name("chosen", {"chosen/global": 0.0, "chosen/local": 1.0, "shared": 1.0})
        'local'
    """
    prefix = f"{group}/"
    return next(name.removeprefix(prefix) for name, value in metrics.items() if name.startswith(prefix) and value)


def grouped(told: Mapping[str, float | None], group: str) -> dict[str, dict[str, float | None]]:
    """The scores "GROUP/MODEL/METRIC" of one group, by model and metric."""
    scores: dict[str, dict[str, float | None]] = {}
    for name, value in told.items():
        kind, _, rest = name.partition("/")
        model, _, metric = rest.partition("/")
        if kind == group and metric:
            scores.setdefault(model, {})[metric] = value
    return scores


def reason(verdict: Verdict, names: Sequence[str], shared: int, rows: int, words: Mapping[str, str] = WORDS) -> str:
    """The reason for a choice, in one sentence.

    Args:
        verdict: what the guard says.
        names: of the candidates, in its order; the first `shared` are shared.
        shared: how many are.
        rows: validation rows.
        words: for the names.
    """
    chosen, best, fallback = (words[names[n]] for n in (verdict.chosen, verdict.best, max(shared - 1, 0)))
    result, error = f"so it keeps {fallback}", verdict.error
    if rows == 0:
        return f"it has no validation rows, {result}"
    if rows < FEWEST_ROWS and shared:
        return f"it has only {rows} validation rows, fewer than {FEWEST_ROWS}, {result}"
    if not math.isfinite(verdict.difference):
        return f"no model has a finite loss on its {rows} validation rows, {result}"
    if chosen == best == fallback or not shared:
        return f"{best} has the lowest loss on its {rows} validation rows"
    if chosen == best:
        sure = f", {verdict.difference / error:.1f} standard errors" if error > 0 else ""
        return f"{best} is {verdict.difference:.3g} of loss below {fallback} on its {rows} validation rows{sure}"
    return f"{best} is not below {chosen} by more than one standard error on its {rows} validation rows"


def own_choice(keep: str | Mapping[str, Any], split: Split | None) -> OwnChoice | None:
    """Return the query by which each client finds its own model, None where all take what the run ends with.

    Args:
        keep: one of `KEEPS`, or a table with a kind, such as {"kind": "knn_per", "k": [5]}; also that of an `OwnChoice`
            of the user's.
        split: the rows on which the models are judged afterwards, None for no judgement.

    Raises:
        SettingError: there is no such choice or setting.

    Examples:
        >>> own_choice("last", "test") is None
        True
        >>> own_choice({"kind": "knn_per", "k": [5]}, "test").k
        (5,)
    """
    if keep in _OF_ALL:
        return None
    table = {"kind": keep} if isinstance(keep, str) else dict(keep)
    kind = str(table.get("kind"))
    query = Component.registry["query"].get(kind) if kind not in KEEPS else OwnChoice
    if kind in _OF_ALL or query is None or not issubclass(query, OwnChoice):
        raise unknown("version to keep called", kind, KEEPS)
    for name in _OF_RUN:
        if name in table:
            raise SettingError(f"keep cannot set {name}, which the run says: leave it out")
    choice = build("query", table)
    assert isinstance(choice, OwnChoice)
    return choice.model_copy(update={"split": split})
