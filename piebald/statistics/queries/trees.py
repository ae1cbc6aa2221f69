"""Boosted trees at a client: sums of its targets, trees that it grows on its own rows, and scores of a forest."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from piebald.contracts import ClientContext, Query, ResultForm, Rows, Split, TrainInput, TrainOutput, Trains, Update
from piebald.contracts.model_spec import ModelSpec
from piebald.core import pytree
from piebald.statistics.boosting.clients import HereClients, TreeRows, alone, fresh, usable
from piebald.statistics.boosting.forest import PARTS, Forest, nodes, reject_reason
from piebald.statistics.boosting.rounds import Start
from piebald.statistics.boosting.settings import Objective, TreeSettings
from piebald.statistics.boosting.targets import SCORES, Target

Ask = Literal["sums", "grow", "loss", "scores", "alone"]
STATED = ("kind", "boosting", "objective", "classes", "seed")  # before trees are grown
SPLITS: tuple[Split, ...] = ("train", "validation", "test")


class TreesQuery(Query):
    """Grow trees on top of a forest, or tell how good one is (`kind` is "trees").

    The forest comes as the task's vector "forest" [t, nodes, 2], see `boosting.forest.Forest`.  A site answers only
    where its policy names this query, and keeps to itself a tree with a leaf about fewer rows than it demands.

    Attributes:
        ask: "sums" of the training targets, trees that "grow", the sum of the "loss", "scores", or scores of the model
            that the client boosts "alone".
        boosting: the settings.
        objective, classes: what is predicted; 0 classes for a regression.
        start: margins that boosting starts from, one for each group.
        class_weights: weight of a row of each class; None where all are 1.
        round: the number of the round, from 0.
        seed: of subsampling.
        split: whose rows are scored.
    """

    by_name = True
    reads_model = False

    ask: Ask
    boosting: TreeSettings
    objective: Objective
    classes: int = Field(default=0, ge=0, le=1000)
    start: tuple[float, ...] = Field(default=(), max_length=1000)
    class_weights: tuple[float, ...] | None = Field(default=None, max_length=1000)
    round: int = Field(default=0, ge=0)
    seed: int = Field(default=0, ge=0)
    split: Split = "test"

    def topic(self) -> str:
        return TreeScoresQuery.kind if self.ask in ("scores", "alone") else TreesQuery.kind

    def most_asked(self, hides: bool) -> int:
        return 10 if self.ask in ("scores", "alone") else 500

    def most_steps(self) -> int:
        rounds = {"grow": 1, "alone": self.boosting.rounds}.get(self.ask, 0)
        return rounds * self.boosting.local_rounds

    def row_influence(self, rows: Rows) -> Mapping[str, float] | None:
        """See `Query`: an accuracy is a share of rows, and an area a share of pairs with a row of the rarest class."""
        if self.ask in ("sums", "grow"):
            return None
        if self.ask == "loss" or not self.classes:
            return {}
        counts = torch.bincount(pytree.single(rows.y, "trees").long().reshape(-1), minlength=self.classes)
        rarest = min((int(count) for count in counts if count), default=1)
        return {"accuracy": 1 / max(len(rows), 1), "auc": 1 / rarest}

    def stated(self) -> dict[str, Any]:
        return {name: value for name, value in self.table().items() if name in STATED}

    @property
    def target(self) -> Target:
        """The objective and its classes."""
        return Target(self.objective, self.classes)

    def rows_read(self, personal: bool) -> set[Split]:
        if self.ask == "alone":
            return {"train", "validation", self.split}
        return {"train"} if self.ask in ("sums", "grow") else {self.split}

    def answer(self, inputs: TrainInput, context: ClientContext, trainer: Trains) -> TrainOutput:
        told = [self._told(inputs, context, place) for place in range(len(inputs.versions))]
        names = [name for name in told[0] if name in ("sums", "forest")]
        metrics = {name: torch.tensor([float(one[name]) for one in told]) for name in told[0] if name not in names}
        vectors = {name: torch.stack([torch.as_tensor(one[name]) for one in told]) for name in names}
        return TrainOutput(inputs.model, torch.zeros(len(told)), vectors=vectors, metrics=metrics)

    def _told(self, inputs: TrainInput, context: ClientContext, place: int) -> dict[str, float | Tensor]:
        """What one client tells: numbers, and one vector at most."""
        rows = rows_of(context, place, self.rows_read(False) | {"train"}, self.boosting, self.classes)
        examples = {"examples": float(len(rows.y["train" if self.ask in ("sums", "grow") else self.split]))}
        if self.ask == "sums":
            return {"sums": torch.tensor(self.target.sums(rows.y["train"]).counts, dtype=torch.float64), **examples}
        if self.ask == "alone":
            model = alone(rows, self.target, self.boosting, self.seed)
            margins = None if model is None else fresh(rows.x[self.split], model.forest, model.start)
            known = {} if margins is None else self.target.scores(margins, rows.y[self.split])
            return {**dict.fromkeys(SCORES[self.objective], math.nan), **known, **examples}
        start = start_of(self.start, self.class_weights, self.target)
        forest = forest_of(inputs.vectors["forest"][place], rows.x["train"].shape[1], self.boosting.max_depth)
        if self.ask == "grow":
            here = HereClients([rows], self.target, self.boosting, self.seed, [inputs.clients[place]])
            grown = here.grow(forest, start, self.round, [0])[0]
            assert grown is not None
            return {"forest": torch.from_numpy(grown.table), **examples}
        margins = fresh(rows.x[self.split], forest, start)
        if self.ask == "loss":
            return {"loss": float(self.target.row_losses(margins, rows.y[self.split]).sum()), **examples}
        return {**self.target.scores(margins, rows.y[self.split]), **examples}

    def answer_form(self, spec: ModelSpec, rows: Mapping[Split, int]) -> ResultForm:
        if self.ask == "sums":
            sums = {"sums": (max(self.classes, 1),)}
            return ResultForm(sums, (), rows["train"], 0, types={"sums": "torch.float64"})
        if self.ask == "grow":
            trees = self.boosting.local_rounds * self.target.groups
            return ResultForm({"forest": (trees, nodes(self.boosting.max_depth), PARTS)}, (), rows["train"], 0)
        names = ("loss",) if self.ask == "loss" else SCORES[self.objective]
        return ResultForm({}, names, rows[self.split], 0)

    def fewest_rows(self, answer: Update) -> int | None:
        """See `Query`: the rows of the smallest leaf or class, or those that scores are of."""
        if "forest" in answer.vectors:
            table = answer.vectors["forest"]
            counts = table[:, :, 3][table[:, :, 0] == -1]
        elif self.ask == "sums" and self.classes:
            counts = answer.vectors["sums"]
        else:
            counts = torch.tensor([float(answer.examples)])
        held = counts[counts > 0]
        return int(held.min()) if len(held) else None

    def reject_reason(self, answer: Update, spec: ModelSpec) -> str | None:
        if self.ask == "sums":
            return self._sums_reason(answer)
        if self.ask != "grow":
            return None
        table = answer.vectors.get("forest")
        trees = self.boosting.local_rounds * self.target.groups
        if table is None or table.dtype != torch.float32 or len(table) != trees:
            return f"must send {trees} trees"
        width = sum(math.prod(shape) for shape in pytree.shapes(spec.shape))
        most = self.boosting.learning_rate * self.boosting.max_delta_step * (1 + 1e-5)
        return reject_reason(table.numpy(), width, self.boosting.max_depth, answer.examples, most or 1e30)

    def _sums_reason(self, answer: Update) -> str | None:
        sums = answer.vectors.get("sums")
        if sums is None or tuple(sums.shape) != (max(self.classes, 1),):
            return "must send sums of its targets"
        if not self.classes:
            return None if answer.examples or not bool(sums.any()) else "sent a sum of no rows"
        if bool((sums < 0).any()) or bool((sums != sums.round()).any()) or int(sums.sum()) != answer.examples:
            return "sent counts of classes that do not add up to its rows"
        return None


class TreeScoresQuery(TreesQuery):
    """Tell how good a forest is, or one that the client boosts alone, and no tree (`kind` is "tree_scores").

    Attributes:
        ask: "scores", or scores of the model that the client boosts "alone".
    """

    blurred = True

    ask: Literal["scores", "alone"]


def rows_of(
    context: ClientContext, place: int, wanted: Collection[Split], boosting: TreeSettings, classes: int
) -> TreeRows:
    """A client's rows of some splits, and none of the others.

    Args:
        context: of a stack of clients.
        place: the client's, in the stack.
        wanted: the splits.
        boosting: whose `missing` stands for a gap.
        classes: of the target, 0 for a number.

    Raises:
        ValueError: there are not as many targets, or a class that is none.
    """
    x, y = {}, {}
    for split in SPLITS:
        rows = context.rows(split)[place]
        rows = rows if split in wanted else rows[:0]
        x[split] = usable(flat(rows), boosting.missing, "a client")
        y[split] = pytree.single(rows.y, "trees").detach().cpu().double().reshape(-1).numpy()
        if len(x[split]) != len(y[split]) or (classes and (y[split] >= classes).any()):
            raise ValueError(f"trees have one target a row, a class below {classes} or a number")
    return TreeRows("", x, y)


def start_of(margins: Sequence[float], class_weights: tuple[float, ...] | None, target: Target) -> Start:
    """The start that came.

    Raises:
        ValueError: it has another number of margins.
    """
    if len(margins) != target.groups:
        raise ValueError(f"a start of {len(margins)} numbers came for {target.groups} groups")
    return Start(np.asarray(margins, dtype=np.float32), class_weights, ())


def forest_of(came: Tensor, columns: int, depth: int) -> Forest:
    """The forest that came.

    Raises:
        ValueError: it is none.
    """
    table = came.detach().cpu().float().numpy()
    if reason := reject_reason(table, columns, depth):
        raise ValueError(f"the server {reason}")
    return Forest(table, depth)


def flat(rows: Rows) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """Inputs as a table [n, d]."""
    x = pytree.single(rows.x, "trees").detach().cpu().float()
    return np.asarray(x.reshape(len(x), math.prod(x.shape[1:])).numpy())
