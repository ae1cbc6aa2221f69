"""Contract of what a client decides about its own model when a run has ended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from piebald.contracts.data import Split
from piebald.contracts.messages import Query
from piebald.contracts.result_form import ResultForm

if TYPE_CHECKING:
    from piebald.contracts.model_spec import ModelSpec


class OwnChoice(Query):
    """The query by which a client finds its own model, by its validation rows, when the run has ended (`keep`).

    The answer is a model [p], as vector "model", and metrics that `record` makes a record of.  It is meant for the
    client itself: a site does not send it.

    Attributes:
        split: the rows on which the chosen model is judged afterwards, None for no judgement.
        tasks: the training tasks that the client made, as `Task.rng_version`.
        passes: passes over its rows in each of them.
        classes: C, to count the judged rows by class and by what the chosen model takes them for, as vector "confusion"
            [C * C]; 0 does not.
    """

    axis = "query"
    asked_of = "itself"
    trains: ClassVar[bool] = True

    split: Split | None = "test"
    tasks: tuple[str, ...] = ()
    passes: tuple[int, ...] = ()
    classes: int = Field(default=0, ge=0)

    def record(self, metrics: Mapping[str, float], rows: int) -> dict[str, Any]:
        """A choice as plain values, for the run folder, a site's file and the page, see `choice.record`.

        Args:
            metrics: those of the answer.
            rows: the client's validation rows.
        """
        raise NotImplementedError

    def is_new(self, chosen: str) -> bool:
        """Whether a chosen model is none of those that the run has anyway, so that it is kept for the client."""
        raise NotImplementedError

    def answer_form(self, spec: ModelSpec, rows: Mapping[Split, int]) -> ResultForm:
        counts = {"confusion": (self.classes**2,)} if self.classes and self.split is not None else {}
        return ResultForm({"model": (spec.layout.size,), **counts}, None, rows["validation"], 0)
