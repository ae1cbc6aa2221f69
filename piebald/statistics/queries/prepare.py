"""What a site tells of its columns before a run, so that all sites prepare their rows alike."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any, Self

import numpy as np
import torch
from pydantic import Field, TypeAdapter, ValidationError, model_validator
from torch import Tensor

from piebald.contracts import ClientContext, Query, ResultForm, Split, TrainInput, TrainOutput, Trains, Update
from piebald.contracts.model_spec import ModelSpec
from piebald.data.preparation.answers import (
    Answer,
    CountsAnswer,
    CountsQuestion,
    KindsAnswer,
    PowersAnswer,
    PowersQuestion,
    Question,
    ValuesAnswer,
    ValuesQuestion,
    answer,
)
from piebald.data.preparation.columns import PARTS

_NUMBERS = 1 << 15  # of an answer: its text, packed
_MOST_BYTES = 1 << 24  # of its text
_questions: TypeAdapter[Question] = TypeAdapter(Question)
_answers: TypeAdapter[Answer] = TypeAdapter(Answer)


class PrepareQuery(Query):
    """Send kinds of columns, moments, names of categories, or counts of numbers (`kind` is "prepare").

    A site answers only where its policy names this query; a category is named where it has enough rows of it.

    Attributes:
        question: one of `data.preparation.answers.Question`, as a table.
    """

    by_name = True
    reads_model = False

    question: dict[str, Any] = Field(max_length=10)

    @model_validator(mode="after")
    def _check_question(self) -> Self:
        try:
            _questions.validate_python(self.question)
        except ValidationError as error:
            raise ValueError(f"question must be one about columns: {error.errors()[0]['msg']}") from None
        return self

    @property
    def asked(self) -> Question:
        """The question."""
        return _questions.validate_python(self.question)

    def rows_read(self, personal: bool) -> set[Split]:
        return {"train"}

    def answer(self, inputs: TrainInput, context: ClientContext, trainer: Trains) -> TrainOutput:
        tables = context.tables("train")
        answers = [packed(answer(self.asked, table.frame, table.y, table.classes)) for table in tables]
        examples = torch.tensor([len(table.frame) for table in tables])
        return TrainOutput(
            inputs.model,
            torch.zeros(len(tables)),
            vectors={"told": torch.stack(answers)},
            metrics={"examples": examples},
        )

    def answer_form(self, spec: ModelSpec, rows: Mapping[Split, int]) -> ResultForm:
        return ResultForm({"told": (_NUMBERS,)}, (), rows["train"], 0, types={"told": "torch.int64"})

    def fewest_rows(self, answer: Update) -> int | None:
        """See `Query`: the smallest count that is not 0; a category has at least as many rows as was asked for."""
        told, asked = unpacked(answer.vectors["told"]), self.asked
        if isinstance(told, KindsAnswer):
            return told.rows or None
        if isinstance(told, CountsAnswer) and isinstance(asked, CountsQuestion):
            ordered = [
                np.sort(np.array(counts)[np.argsort(asked.thresholds[name])]) for name, counts in told.counts.items()
            ]
            parts = [np.diff(counts, prepend=0, append=answer.examples) for counts in ordered]
            positive = [int(part[part > 0].min()) for part in parts if (part > 0).any()]
            return min(positive, default=None)
        numbers = [*told.numbers.values()] if isinstance(told, ValuesAnswer) else []
        if isinstance(told, PowersAnswer):
            numbers = [one for moments in told.moments.values() for one in moments]
        counts = [count for one in numbers for count in (one.present, one.missing) if count]
        if isinstance(told, ValuesAnswer) and any(one.names for one in told.categories.values()):
            counts.append(asked.least_rows if isinstance(asked, ValuesQuestion) else 1)
        return min(counts, default=None)

    def reject_reason(self, answer: Update, spec: ModelSpec) -> str | None:
        told = answer.vectors.get("told")
        if told is None or told.dtype != torch.int64 or tuple(told.shape) != (_NUMBERS,):
            return f"must send {_NUMBERS:,} whole numbers"
        try:
            read = unpacked(told)
        except ValueError:
            return "sent no answer to the question about its columns"
        return misfit(read, self.asked, answer.examples)

    def topic(self) -> str:
        return f"{self.kind}: {self.question.get('about')}"

    def most_asked(self, hides: bool) -> int:
        return 1 if hides else 40

    def stated(self) -> dict[str, Any]:
        """See `Query`; what follows from answers is not known before, and its kind is."""
        return {"kind": self.kind, "question": {"about": self.question.get("about")}}


def packed(told: Answer) -> Tensor:
    """Return an answer as whole numbers.

    Raises:
        ValueError: it is too long.
    """
    text = zlib.compress(told.model_dump_json().encode())
    if len(text) > 8 * (_NUMBERS - 1):
        raise ValueError("this site has too many columns or categories to tell of them")
    padded = len(text).to_bytes(8, "little") + text.ljust(8 * (_NUMBERS - 1), b"\0")
    return torch.from_numpy(np.frombuffer(padded, dtype="<i8").astype(np.int64))


def unpacked(numbers: Tensor) -> Answer:
    """Return the answer that `packed` made numbers of.

    Raises:
        ValueError: it is none.
    """
    data = numbers.cpu().numpy().astype("<i8").tobytes()
    length = int.from_bytes(data[:8], "little")
    unzip = zlib.decompressobj()
    try:
        text = unzip.decompress(data[8 : 8 + min(length, 8 * (_NUMBERS - 1))], _MOST_BYTES)
        return _answers.validate_python(json.loads(text))
    except (zlib.error, ValueError, RecursionError) as error:  # also pydantic's
        raise ValueError("no answer") from error


def misfit(told: Answer, asked: Question, rows: int) -> str | None:
    """Return why an answer is not about the question, or has counts that its rows do not allow, or None."""
    if told.about != asked.about:
        return "answered another question"
    if isinstance(told, KindsAnswer):
        return None if told.rows == rows else "sent another number of rows"
    if isinstance(told, CountsAnswer) and isinstance(asked, CountsQuestion):
        for name, limits in asked.thresholds.items():
            counts = np.array(told.counts.get(name, []))
            if len(counts) != len(limits):
                return "must send a count for each threshold"
            if (counts > rows).any() or (np.diff(counts[np.argsort(limits, kind="stable")]) < 0).any():
                return f"sent counts that cannot be those of {rows:,} rows"
        return None
    if isinstance(told, PowersAnswer) and isinstance(asked, PowersQuestion):
        fits = {name: len(moments) for name, moments in told.moments.items()}
        if fits != {name: len(tried) for name, tried in asked.exponents.items()} or {*told.logarithms} != {*fits}:
            return "must send moments for each exponent"
        numbers = [one for moments in told.moments.values() for one in moments]
    else:
        assert isinstance(told, ValuesAnswer)
        kinds = getattr(asked, "kinds", {})
        wanted = {name for name, kind in kinds.items() if kind in ("number", "boolean")}
        dates = {f"{name}: {part}" for name, kind in kinds.items() if kind == "date" for part in ("days", *PARTS)}
        words = {name for name, kind in kinds.items() if kind == "category"}
        if {*told.numbers} != wanted | dates or {*told.categories} != words:
            return "must tell of each column that was asked for, and of no other"
        if getattr(asked, "target", False) != (told.target is not None):
            return "must tell of its targets where they were asked for"
        numbers = [*told.numbers.values(), *([] if told.target is None else [told.target])]
    bad = any(one.present + one.missing != rows or (one.present < 2 and one.scatter) for one in numbers)
    return f"sent moments that cannot be those of {rows:,} rows" if bad else None
