"""Questions about boosted trees: trees that a client grows, scores of a forest, and sums from which trees grow."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from piebald.contracts import (
    ClientContext,
    Disclosure,
    Query,
    ResultForm,
    Rows,
    Split,
    TrainInput,
    TrainOutput,
    Trains,
    Update,
)
from piebald.contracts.data import ModelSpec
from piebald.core import pytree
from piebald.core.errors import SettingError
from piebald.core.moments import Ints
from piebald.data.preparation.answers import check_moments
from piebald.inference.queries.columns import SumsQuery
from piebald.inference.trees.client_rows import SplitRows, alone
from piebald.inference.trees.encoding import TreeRows, usable
from piebald.inference.trees.forest import (
    PARTS,
    SCORES,
    Floats32,
    Forest,
    Objective,
    Target,
    TreeSettings,
    nodes,
    reject_reason,
)
from piebald.inference.trees.rounds import MOST_SUMS, SUMS, Boosted, Start, open_nodes, summed_loss

Ask = Literal["sums", "grow", "loss", "scores", "alone"]


class BoostingQuery(Query):
    """A question about boosting, which a site answers only where its policy names it.

    Attributes:
        boosting: the settings.
        objective, classes: the objective, and its classes; 0 for a regression.
        start: margins that boosting starts from, one for each group.
        class_weights: weight of a row of each class; None where all are 1.
        round: the number of the round, from 0.
        seed: of subsampling.
    """

    axis = "query"
    by_name = True
    reads_model = False
    later: ClassVar = {
        "start": "margins that trees start from, which follow from sums of all sites' targets",
        "class_weights": "weights of classes, which follow from their counts",
        "round": "the number of the round",
        "forest": "the trees so far, of the server's choice",
    }

    boosting: TreeSettings
    objective: Objective
    classes: int = Field(default=0, ge=0, le=1000)
    start: tuple[float, ...] = Field(default=(), max_length=1000)
    class_weights: tuple[float, ...] | None = Field(default=None, max_length=1000)
    round: int = Field(default=0, ge=0)
    seed: int = Field(default=0, ge=0)

    @property
    def target(self) -> Target:
        """The objective and its classes."""
        return Target(self.objective, self.classes)

    def rows_of(self, context: ClientContext, split: Split) -> list[SplitRows]:
        """Return the rows of a split of each client, which are the same objects for all questions of a call.

        Raises:
            SettingError: there are not as many targets, or a number that is no class.
        """
        return context.cached(split, (self.boosting.model_dump_json(), self.target), self._split_rows)

    def _split_rows(self, rows: Rows, client: str) -> SplitRows:
        x = usable(flat(rows), self.boosting.missing, f"client {client!r}")
        y = pytree.single(rows.y, "trees").detach().cpu().double().reshape(-1).numpy()
        if len(x) != len(y) or (self.classes and (y >= self.classes).any()):
            raise SettingError(f"trees have one target a row, a class below {self.classes} or a number")
        weights = None if rows.weight is None else rows.weight.detach().cpu().double().numpy()
        return SplitRows(x, y, self.target, self.boosting, weights)

    def forests_of(self, inputs: TrainInput, name: str, columns: int) -> list[Forest]:
        """Return the forest that came for each client, checked as what goes to the server is: a site trusts no table.

        Raises:
            ValueError: it is no forest.
        """
        sent, forests = inputs.vectors[name], list[Forest]()
        for table in sent if sent.stride(0) else sent[:1]:  # one for all is checked once
            array = table.detach().cpu().float().numpy()
            if reason := reject_reason(array, columns, self.boosting.max_depth):
                raise ValueError(f"the server {reason}")
            forests.append(Forest(array, self.boosting.max_depth))
        return forests if len(forests) == len(sent) else forests * len(sent)


class TreesQuery(BoostingQuery):
    """Grow trees on top of a forest, or score one (`kind` is "trees").

    The forest comes as the task's vector "forest" [t, nodes, 2], see `trees.forest.Forest`.  A site answers only
    where its policy names this query, and does not send a tree with a leaf of fewer rows than it demands.

    Attributes:
        ask: "sums" of the training targets, trees that "grow", the sum of the "loss", "scores", or scores of the model
            that the client boosts "alone".
        split: the split of the rows that are scored.
    """

    later: ClassVar = {**BoostingQuery.later, "split": "the rows that are scored"}

    ask: Ask
    split: Split = "test"

    def topic(self) -> str:
        return TreeScoresQuery.kind if self.ask in ("scores", "alone") else TreesQuery.kind

    def most_asked(self, hides: bool) -> int:
        return 10 if self.ask in ("scores", "alone") else 500

    def most_steps(self) -> int:
        rounds = {"grow": 1, "alone": self.boosting.rounds}.get(self.ask, 0)
        return rounds * self.boosting.local_rounds

    def row_influence(self, rows: Rows) -> Mapping[str, float] | None:
        """See `Query`: an accuracy is a share of rows; how far a row moves an area, others decide."""
        if self.ask in ("sums", "grow"):
            return None
        # a loss, or an error of amounts, has no bound that one row keeps, so there is no influence to state
        if self.ask == "loss" or not self.classes:
            return {}
        weights = torch.ones(len(rows)) if rows.weight is None else rows.weight
        return {"accuracy": float(weights.max() / weights.sum()) if len(rows) else 1.0}

    def rows_read(self, personal: bool) -> set[Split]:
        if self.ask == "alone":
            return {"train", "validation", self.split}
        return {"train"} if self.ask in ("sums", "grow") else {self.split}

    def answer(self, inputs: TrainInput, context: ClientContext, trainer: Trains) -> TrainOutput:
        names = sorted(self.rows_read(False))
        splits = zip(*(self.rows_of(context, split) for split in names), strict=True)
        rows = [dict(zip(names, of_client, strict=True)) for of_client in splits]
        width = next(iter(rows[0].values())).x.shape[1]
        forests = [None] * len(rows) if self.ask in ("sums", "alone") else self.forests_of(inputs, "forest", width)
        answers = [*map(partial(self._answer, context.disclosure), rows, forests, inputs.clients)]
        sent = [name for name in answers[0] if name in ("sums", "forest")]
        metrics = {
            name: torch.tensor([float(answer[name]) for answer in answers]) for name in answers[0] if name not in sent
        }
        vectors = {name: torch.stack([torch.as_tensor(answer[name]) for answer in answers]) for name in sent}
        return inputs.answered(vectors=vectors, metrics=metrics)

    def _answer(
        self, rules: Disclosure | None, rows: Mapping[Split, SplitRows], forest: Forest | None, client: int
    ) -> dict[str, float | Tensor]:  # fmt: skip
        """Return the answer of one client: numbers, and one vector at most."""
        held = rows["train" if self.ask in ("sums", "grow") else self.split]
        examples = {"examples": float(len(held))}
        if self.ask == "sums":
            if rules is not None and self.classes:
                rules.check_counts(np.bincount(held.y.astype(np.int64), minlength=self.classes))
            elif rules is not None:
                check_moments(held.y, rules)
            return {"sums": torch.tensor(self.target.sums(held.y).counts, dtype=torch.float64), **examples}
        if forest is None:
            whole = TreeRows("", {split: each.x for split, each in rows.items()},
                             {split: each.y for split, each in rows.items()},
                             {split: each.weights for split, each in rows.items()
                              if each.weights is not None})  # fmt: skip
            model = alone(whole, self.target, self.boosting, self.seed)
            scores = dict.fromkeys(SCORES[self.objective], math.nan) if model is None else held.scores(model)
            return {**scores, **examples}
        start = start_of(self.start, self.class_weights, self.target)
        if self.ask == "grow":
            grown = held.grow(forest, start, self.seed, "trees", client, self.round)
            if rules is not None:
                _check_leaves(grown, held, held.margins(forest, start), self.target, rules)
            return {"forest": torch.from_numpy(grown.table), **examples}
        if self.ask == "loss":
            losses = held.losses(forest, start)
            if rules is not None:
                rules.check_counts(np.array([len(losses)]))
                rules.check([losses[:, None]], dominance_only=True)
            return {"loss": float(losses.sum()), **examples}
        return {**held.scores(Boosted(start, forest)), **examples}

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
        """See `Query`: the rows that are scored."""
        return answer.examples or None if self.ask in ("scores", "alone") else None

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
        # float32 may round a leaf above its largest weight
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
    """Score a forest, or the model that the client boosts alone, and send no tree (`kind` is "tree_scores").

    Attributes:
        ask: "scores", or scores of the model that the client boosts "alone".
    """

    blurred = True

    ask: Literal["scores", "alone"]


class MaskedTreeSumsQuery(SumsQuery, BoostingQuery):
    """Send sums from which trees grow, under the run's masks (`kind` is "masked_tree_sums").

    Sums are whole numbers, see `trees.rounds`.  They are of training rows, except losses, which are of validation
    rows.  The model so far comes as the task's vector "forest", the trees of this round as "grown" and thresholds of
    each column as "thresholds" [d, t].

    Attributes:
        ask: sums of "targets"; counts of numbers that are "at_most" some thresholds; "histograms" of a level's open
            nodes; the "loss".
        columns, thresholds: d and t, 0 where none come.
        nodes: how many nodes are open.
        level: of these nodes, from 0.
    """

    later: ClassVar = {
        **BoostingQuery.later,
        "grown": "the trees of this round so far, of the server's choice",
        "thresholds": "numbers in which the columns are cut, which follow from counts",
        "columns": "how many columns there are",
        "nodes": "how many nodes of these trees are open",
        "level": "the level of these nodes",
    }

    ask: Literal["targets", "at_most", "histograms", "loss"]
    columns: int = Field(default=0, ge=0, le=1 << 16)
    thresholds: int = Field(default=0, ge=0, le=1 << 16)
    nodes: int = Field(default=0, ge=0, le=1 << 20)
    level: int = Field(default=0, ge=0, le=10)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the sums, which are sent as one vector."""
        return {
            "targets": (self.classes or 2,),
            "at_most": (self.columns, self.thresholds),
            "histograms": (self.nodes, self.columns, self.thresholds + 2, SUMS),
            "loss": (2,),
        }[self.ask]

    @property
    def summands(self) -> int:
        return math.prod(self.shape)

    def most_asked(self, hides: bool) -> int:
        return 2000  # a model of 100 rounds of depth 6 takes 710

    def rows_read(self, personal: bool) -> set[Split]:
        return {"validation"} if self.ask == "loss" else {"train"}

    def answer(self, inputs: TrainInput, context: ClientContext, trainer: Trains) -> TrainOutput:
        # before the sums are made: the shape is what the server says
        if math.prod(self.shape) > MOST_SUMS:
            raise ValueError(f"sums are at most {MOST_SUMS:,} numbers, got {math.prod(self.shape):,}")
        (split,) = self.rows_read(False)
        rows, sent = self.rows_of(context, split), ["forest", "grown"] if self.ask == "histograms" else ["forest"]
        forests: list[tuple[Forest, ...]] = [()] * len(rows)
        if self.ask in ("histograms", "loss"):
            forests = [*zip(*(self.forests_of(inputs, name, rows[0].x.shape[1]) for name in sent), strict=True)]
        sums = [
            self._sums(inputs, held, index, *trees)
            for index, (held, trees) in enumerate(zip(rows, forests, strict=True))
        ]
        if context.disclosure is not None:
            for of_client in sums:
                # of a loss and of a regression's targets the first number is a sum of what no row exceeds
                counts = of_client[..., -1] if self.ask in ("histograms", "loss") else of_client
                context.disclosure.check_counts(counts[:1] if self.ask == "targets" and not self.classes else counts)
        return self.sums_answer(inputs, [of_client.reshape(-1) for of_client in sums])

    def _sums(self, inputs: TrainInput, rows: SplitRows, place: int, *forests: Forest) -> Ints:
        """Return the sums of one client."""
        if self.ask == "targets":
            return rows.summed.targets()
        width, depth = rows.x.shape[1], self.boosting.max_depth
        if self.ask == "at_most":
            return rows.summed.at_most(self._thresholds(inputs, place, width))
        margins = rows.margins(forests[0], start_of(self.start, self.class_weights, self.target))
        if self.ask == "loss":
            return summed_loss(margins, rows.y, self.target, self.boosting, rows.weights)
        grown = forests[1]
        # the size of the answer follows from `nodes`, so the trees that came must have as many open nodes
        if len(grown) != self.target.groups or self.level >= depth or len(open_nodes(grown, self.level)) != self.nodes:
            raise ValueError(f"the trees that came do not have {self.nodes} open nodes on level {self.level}")
        # the same draws at each client, since under masks none is told its number
        words = self.seed, "trees", self.round
        thresholds = self._thresholds(inputs, place, width)
        return rows.summed.histograms(margins, grown, self.level, thresholds, self.class_weights, *words)

    def _thresholds(self, inputs: TrainInput, place: int, columns: int) -> Floats32:
        """Return the thresholds that came, checked."""
        thresholds: Floats32 = inputs.vectors["thresholds"][place].detach().cpu().float().numpy()
        if thresholds.shape != (self.columns, self.thresholds) or self.columns != columns:
            raise ValueError(f"thresholds of form {list(thresholds.shape)} came for {columns} columns")
        # `searchsorted` needs an increasing order; counts of single thresholds do not
        if (np.diff(thresholds, axis=1) < 0).any() and self.ask == "histograms":
            raise ValueError("the thresholds that came do not increase")
        return thresholds


def _check_leaves(grown: Forest, rows: SplitRows, margins: Floats32, target: Target, rules: Disclosure) -> None:
    """Refuse trees with a leaf that few rows decide.

    Args:
        grown: the trees.
        rows, margins: from which they were grown, and their margins before [n, G].
        target: the objective.
        rules: of the site.

    Raises:
        Withheld: a leaf has few rows, or most of its weight from one.
    """
    for tree in range(len(grown)):
        leaves = grown.leaves(rows.x, tree)
        rules.check_counts(np.bincount(leaves))
        # derivatives of classes are at most 1, so that the number of rows bounds the share of each
        if target.objective == "regression" or rows.weights is not None:
            apart = rows.y - margins[:, 0] if target.objective == "regression" else np.ones(len(rows))
            apart = apart if rows.weights is None else apart * rows.weights
            rules.check((apart[leaves == leaf, None] for leaf in np.unique(leaves)), dominance_only=True)


def start_of(margins: Sequence[float], class_weights: tuple[float, ...] | None, target: Target) -> Start:
    """Return the start that came, checked.

    Raises:
        ValueError: it has another number of margins.
    """
    if len(margins) != target.groups:
        raise ValueError(f"a start of {len(margins)} numbers came for {target.groups} groups")
    return Start(np.asarray(margins, dtype=np.float32), class_weights, ())


def flat(rows: Rows) -> Floats32:
    """Return inputs as a table [n, d]."""
    x = pytree.single(rows.x, "trees").detach().cpu().float()
    return np.asarray(x.reshape(len(x), math.prod(x.shape[1:])).numpy())
