"""The section [prepare] of an experiment: what is asked for, before clients agree."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from piebald.contracts.component import WordedModel
from piebald.core.errors import unknown
from piebald.data.preparation.column_models import MOST_TOKENS, Name, Scale
from piebald.data.preparation.columns import Kind, is_numeric, numbers_of, words_of
from piebald.data.preparation.preparation import Preparation

if TYPE_CHECKING:
    import pandas as pd


class PrepareSettings(WordedModel):
    """How the columns of tables become inputs, the same at every client.

    Attributes:
        columns: the kinds of columns by name, where the guess is wrong: "number", "category", "boolean", "date",
            "text" (with a tokenizer), or "leave out".
        scale: how columns of numbers are scaled, by name: "standard" scores by default, those of the logarithm of 1 + x
            ("log") or of a power ("power", Yeo and Johnson 2000), the "rank" among the training rows, or "none".
        gaps: values that stand for a gap, like "-9", besides empty cells, "?", "NA" and the like.
        least_rows: the rows from which on a client tells a category by name; rarer ones count together.
        one_hot: the most categories that become a column each; of more, a model learns an embedding.
        tokenizer: makes token ids of the one column that is read, which is text: a tokenizer.json of Hugging Face's
            tokenizers, the folder of one, or the name of a model on the Hugging Face Hub.
        length: token ids of each text, which is cut and filled up.
        harmonise: "combat" takes differences of place and scale between clients out of numbers (Johnson et al. 2007).
        agreed: what clients have agreed on, which a run keeps; None asks them.

    Raises:
        SettingError: a value is not allowed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    columns: dict[Name, Literal[Kind, "leave out"]] = Field(default={})
    scale: dict[Name, Scale] = Field(default={})
    gaps: list[Name] = Field(default=[], max_length=100)
    least_rows: int = Field(default=5, ge=1)
    one_hot: int = Field(default=20, ge=2, le=1000)
    tokenizer: str | None = Field(default=None, min_length=1, max_length=1000)
    length: int | None = Field(default=None, ge=1, le=MOST_TOKENS)
    harmonise: Literal["combat"] | None = None
    agreed: Preparation | None = None

    @classmethod
    def in_words(cls) -> str:
        return "prepare"

    @model_validator(mode="after")
    def _check_text(self) -> Self:
        if (self.tokenizer is None) != (self.length is None):
            raise ValueError("tokenizer and length, the number of token ids of each text, belong together")
        if self.tokenizer is not None and self.harmonise is not None:
            raise ValueError("harmonise is for numbers, and a tokenizer reads text: leave one of them out")
        return self

    def read(self, frame: pd.DataFrame, apart: Collection[str | None] = ()) -> pd.DataFrame:
        """Return a table as these settings read it, for what needs no inputs: gaps are empty, kinds are those named.

        Args:
            frame: the rows.
            apart: columns that are none of the inputs and stay as they are.

        Raises:
            SettingError: there is no such column, or a value cannot be read.
        """
        columns: dict[str, Any] = {}
        for name in self.columns:
            if name not in frame.columns:
                raise unknown("column, which [prepare] names,", name, map(str, frame.columns))
        for name in frame.columns:
            kind = self.columns.get(name)
            if name in apart or (kind is None and not self.gaps):
                columns[name] = frame[name]
            elif kind != "leave out":
                numeric = kind == "number" or (kind is None and is_numeric(frame[name]))
                values = (numbers_of if numeric else words_of)(frame[name], self.gaps)
                columns[name] = frame[name].__class__(values, frame.index, "category" if kind == "category" else None)
        return frame.__class__(columns, index=frame.index)
