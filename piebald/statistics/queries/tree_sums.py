"""Sums under masks from which who asks grows boosted trees: no client tells a tree or a sum of its own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field

from piebald.contracts import (
    SUM,
    ClientContext,
    Hiding,
    Query,
    ResultForm,
    Split,
    TrainInput,
    TrainOutput,
    Trains,
    Update,
)
from piebald.contracts.model_spec import ModelSpec
from piebald.core.moments import Ints
from piebald.statistics.boosting.clients import TreeRows, fresh
from piebald.statistics.boosting.settings import Objective, TreeSettings
from piebald.statistics.boosting.summed_rounds import MOST_SUMS
from piebald.statistics.boosting.summed_rows import PARTS, SummedRows, open_nodes, summed_loss
from piebald.statistics.boosting.targets import Target
from piebald.statistics.queries.trees import STATED, forest_of, rows_of, start_of


class MaskedTreeSumsQuery(Query):
    """Tell sums about rows to grow trees from, under the run's masks (`kind` is "masked_tree_sums").

    Sums are whole numbers, see `boosting.summed_rows`.  They are of training rows, but losses, which are of validation
    rows.  The model so far comes as the task's vector "forest", the trees of this round as "grown" and thresholds of
    each column as "thresholds" [d, t].

    Attributes:
        ask: sums of "targets"; how many numbers are "at_most" some thresholds; "histograms" of a level's open nodes;
            the "loss".
        boosting: the settings.
        objective, classes: what is predicted; 0 classes for a regression.
        columns, thresholds: d and t, 0 where none come.
        nodes: how many nodes are open.
        level: of these nodes, from 0.
        start: margins that boosting starts from, one for each group.
        class_weights: weight of a row of each class; None where all are 1.
        round: the number of the round, from 0.
        seed: of subsampling.
    """

    by_name = True
    reads_model = False

    ask: Literal["targets", "at_most", "histograms", "loss"]
    boosting: TreeSettings
    objective: Objective
    classes: int = Field(default=0, ge=0, le=1000)
    columns: int = Field(default=0, ge=0, le=1 << 16)
    thresholds: int = Field(default=0, ge=0, le=1 << 16)
    nodes: int = Field(default=0, ge=0, le=1 << 20)
    level: int = Field(default=0, ge=0, le=10)
    start: tuple[float, ...] = Field(default=(), max_length=1000)
    class_weights: tuple[float, ...] | None = Field(default=None, max_length=1000)
    round: int = Field(default=0, ge=0)
    seed: int = Field(default=0, ge=0)

    @property
    def target(self) -> Target:
        """The objective and its classes."""
        return Target(self.objective, self.classes)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the sums, which are sent as one vector."""
        return {
            "targets": (self.classes or 2,),
            "at_most": (self.columns, self.thresholds),
            "histograms": (self.nodes, self.columns, self.thresholds + 2, PARTS),
            "loss": (2,),
        }[self.ask]

    def hiding(self) -> Hiding | None:
        return Hiding(noise=0.0, masked=True)

    def most_asked(self, hides: bool) -> int:
        return 2000  # a model of 100 rounds of depth 6 takes 710

    def stated(self) -> dict[str, Any]:
        return {name: value for name, value in self.table().items() if name in STATED}

    def rows_read(self, personal: bool) -> set[Split]:
        return {"validation"} if self.ask == "loss" else {"train"}

    def answer(self, inputs: TrainInput, context: ClientContext, trainer: Trains) -> TrainOutput:
        if math.prod(self.shape) > MOST_SUMS:
            raise ValueError(f"sums are at most {MOST_SUMS:,} numbers, got {math.prod(self.shape):,}")
        told = [self._told(inputs, context, place).reshape(-1) for place in range(len(inputs.versions))]
        none = torch.zeros(len(told))  # no number besides the sums: nothing would hide it
        return TrainOutput(
            inputs.model, none, vectors={SUM: torch.from_numpy(np.stack(told))}, metrics={"examples": none}
        )

    def _told(self, inputs: TrainInput, context: ClientContext, place: int) -> Ints:
        """The sums of one client."""
        rows = rows_of(context, place, self.rows_read(False), self.boosting, self.classes)
        if self.ask in ("targets", "at_most"):
            own = SummedRows(rows.x["train"], rows.y["train"], self.target, self.boosting)
            return own.targets() if self.ask == "targets" else own.at_most(self._thresholds(inputs, place, rows))
        start = start_of(self.start, self.class_weights, self.target)
        width, depth = rows.x["train"].shape[1], self.boosting.max_depth
        forest = forest_of(inputs.vectors["forest"][place], width, depth)
        if self.ask == "loss":
            margins = fresh(rows.x["validation"], forest, start)
            return summed_loss(margins, rows.y["validation"], self.target, self.boosting)
        own = SummedRows(rows.x["train"], rows.y["train"], self.target, self.boosting)
        grown = forest_of(inputs.vectors["grown"][place], width, depth)
        if len(grown) != self.target.groups or self.level >= depth or len(open_nodes(grown, self.level)) != self.nodes:
            raise ValueError(f"the trees that came do not have {self.nodes} open nodes on level {self.level}")
        words = self.seed, "trees", inputs.clients[place], self.round
        return own.histograms(fresh(rows.x["train"], forest, start), grown, self.level,
                              self._thresholds(inputs, place, rows), self.class_weights, *words)  # fmt: skip

    def _thresholds(
        self, inputs: TrainInput, place: int, rows: TreeRows
    ) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
        """The thresholds that came."""
        came = inputs.vectors["thresholds"][place].detach().cpu().float().numpy()
        if came.shape != (self.columns, self.thresholds) or self.columns != rows.x["train"].shape[1]:
            raise ValueError(f"thresholds of form {list(came.shape)} came for {rows.x['train'].shape[1]} columns")
        if (np.diff(came, axis=1) < 0).any() and self.ask == "histograms":
            raise ValueError("thresholds came that do not increase")
        return came

    def answer_form(self, spec: ModelSpec, rows: Mapping[Split, int]) -> ResultForm:
        return ResultForm({SUM: (math.prod(self.shape),)}, (), 0, 0, types={SUM: "torch.int64"})

    def reject_reason(self, answer: Update, spec: ModelSpec) -> str | None:
        told = answer.vectors.get(SUM)
        if told is None or told.dtype != torch.int64 or tuple(told.shape) != (math.prod(self.shape),):
            return f"must send {math.prod(self.shape):,} whole numbers"
        return None  # under masks, any numbers may come
