"""The query by which a client chooses its model, and the record of its choice."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from piebald.contracts import ClientContext, ModelSpec, OwnChoice, Split, TrainInput, TrainOutput, Trains
from piebald.methods.choice.candidates import CANDIDATES, FEWEST_ROWS, SHARED, ClientCandidates, Verdict, paired


class BestForEach(OwnChoice):
    """Let each client choose the one of its `ClientCandidates` that is best on its validation rows, by `guard.judge`.

    Attributes:
        split, tasks, passes: see `OwnChoice`; without tasks a client has no local model.
        errors: how many standard errors worse than the best one a shared model, or the local one, may be.
    """

    errors: float = Field(default=1.0, ge=0)

    def unsupported_model(self, spec: ModelSpec) -> str | None:
        if not spec.objective.compares_rows:
            return None
        return (
            f"keep = 'best_for_each' compares models row by row, but the loss {spec.objective.name!r} has no value for "
            "a single row: use keep = 'best'"
        )

    def record(self, metrics: Mapping[str, float], rows: int) -> dict[str, Any]:
        return record(metrics, rows)

    def is_new(self, chosen: str) -> bool:
        return chosen not in SHARED

    def answer(self, inputs: TrainInput, context: ClientContext, trainer: Trains) -> TrainOutput:
        offer = ClientCandidates(inputs, context, trainer, self.tasks, self.passes)
        names, count = list(offer.models), len(inputs.versions)
        # row by row, not as means: the guard compares two models on the same rows, which hides how hard the rows are
        losses = _losses(offer.models, context, "validation")
        verdicts = [offer.verdict(client_losses, offer.shared, self.errors) for client_losses in losses]
        chosen = torch.stack([offer.models[names[verdict.chosen]][row] for row, verdict in enumerate(verdicts)])
        numbers = {
            "shared": [offer.shared] * count,
            "difference": [verdict.difference for verdict in verdicts],
            "error": [verdict.error for verdict in verdicts],
            **{f"{name}/epochs": passes for name, passes in offer.epochs.items()},
        }
        metrics = marked("chosen", [names[verdict.chosen] for verdict in verdicts], names)
        metrics |= marked("best", [names[verdict.best] for verdict in verdicts], names)
        if offer.mixture:
            metrics |= marked("mixed/of", [name for name, _ in offer.mixture], names)
            numbers["mixed/share"] = [share for _, share in offer.mixture]
        metrics |= {name: torch.tensor(values, dtype=torch.float64) for name, values in numbers.items()}
        for name, model in offer.models.items():
            scores, metrics["examples"] = context.score(model, "validation")
            metrics |= {f"validation/{name}/{metric}": value for metric, value in scores.items()}
        if self.split is not None:
            # on rows that had no part in the choice: the best of several looks too good on the rows that chose it
            compared = {"chosen": chosen, "shared": offer.models[offer.fallback]}
            compared |= {"local": offer.models["local"]} if "local" in offer.models else {}
            metrics |= _judged(self.split, compared, context)
        vectors = {"model": chosen}
        if self.split is not None and self.classes:
            vectors["confusion"] = context.confusion(chosen, self.split).flatten(1)
        return inputs.answered(vectors=vectors, metrics=metrics)


def _losses(models: Mapping[str, Tensor], context: ClientContext, split: Split) -> list[Tensor]:
    """The losses [models, rows] of each client."""
    scored = [context.row_losses(model, split) for model in models.values()]
    counts = scored[0][1].tolist()
    # clients of a stack have unlike numbers of rows: what is behind a client's last row is padding
    return [torch.stack([losses[row, :count] for losses, _ in scored]) for row, count in enumerate(counts)]


def _judged(split: Split, models: Mapping[str, Tensor], context: ClientContext) -> dict[str, Tensor]:
    """Return how good the chosen model is on other rows, beside the shared one and the local one."""
    metrics: dict[str, Tensor] = {}
    for name, model in models.items():
        scores, metrics["judged/rows"] = context.score(model, split)
        metrics |= {f"judged/{name}/{metric}": value for metric, value in scores.items()}
    if "local" in models:
        both = _losses({name: models[name] for name in ("chosen", "local")}, context, split)
        gaps = [paired(*losses) for losses in both]
        metrics["alone/difference"] = torch.tensor([gap[0] for gap in gaps], dtype=torch.float64)
        metrics["alone/error"] = torch.tensor([gap[1] for gap in gaps], dtype=torch.float64)
    return metrics


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
    shared = int(metrics["shared"])
    chosen, names = marked_name("chosen", metrics), [name for name in CANDIDATES if f"chosen/{name}" in metrics]
    best = names.index(marked_name("best", metrics))
    verdict = Verdict(names.index(chosen), best, metrics["difference"], metrics["error"])
    choice = plain_choice(chosen, reason(verdict, names, shared, rows) if shared else ALONE, metrics, rows)
    if (epochs := metrics.get(f"{chosen}/epochs")) is not None:
        choice["epochs"] = int(epochs)
    if chosen == "mixed":
        choice["mixture"] = {"of": marked_name("mixed/of", metrics), "share": float(metrics["mixed/share"])}
    # without rows to judge by, both numbers are undefined
    if "judged" in choice and "alone/difference" in metrics:
        alone = finite(metrics)
        choice["alone"] = {"difference": alone["alone/difference"], "error": alone["alone/error"]}
    return choice


def plain_choice(chosen: str, why: str, metrics: Mapping[str, float], rows: int) -> dict[str, Any]:
    """The part of a choice that every way to choose has, see `record`."""
    values = finite(metrics)
    choice: dict[str, Any] = {
        "chosen": chosen,
        "why": why,
        "rows": rows,
        "candidates": grouped(values, "validation"),
        "difference": values["difference"],
        "error": values["error"],
    }
    # of no rows every score would be None
    if (judged := int(metrics.get("judged/rows", 0))) > 0:
        choice["judged"] = {"rows": judged, **grouped(values, "judged")}
    return choice


def loses(choice: Mapping[str, Any]) -> bool:
    """Return whether the chosen model is worse than the client's own local one, by more than two standard errors of the
    loss on the rows that models are judged by.
    """
    alone = choice.get("alone") or {}
    difference, error = alone.get("difference"), alone.get("error")
    # an error is None for a single row, which decides nothing
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
    # with nothing shared `shared - 1` would be the last candidate
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
