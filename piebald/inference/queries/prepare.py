"""What a site tells of its columns before a run, so that all sites prepare their rows alike."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np
import torch
from pydantic import Field, TypeAdapter, ValidationError, model_validator
from torch import Tensor

from piebald.contracts import ClientContext, Query, ResultForm, Split, TrainInput, TrainOutput, Trains, Update
from piebald.contracts.data import ModelSpec
from piebald.core.moments import Floats
from piebald.data.preparation.answers import (
    Answer,
    CountsAnswer,
    CountsQuestion,
    KindsAnswer,
    KindsQuestion,
    NumbersAnswer,
    PowersAnswer,
    PowersQuestion,
    Question,
    ValuesAnswer,
    ValuesQuestion,
    answer,
)
from piebald.data.preparation.columns import PARTS, Kind
from piebald.inference.queries.columns import LIMBS, SumsQuery, to_limbs

_NUMBERS = 1 << 15  # of an answer: its text, packed
FIRST_UNIT = 2.0**40  # so that sums of large numbers stay below the largest sum under masks
_MOST_BYTES = 1 << 24  # of its text
_KINDS = {
    "kinds": "the columns, and which are numbers, words, dates or truths",
    "forms": "the forms in which dates are written",
}
# arguments that follow from earlier answers
_LATER: Mapping[str, Mapping[str, str]] = {
    "kinds": {},
    "values": {**_KINDS, "scale": "columns whose logarithms are taken", "targets": "how many targets are numbers"},
    "counts": {**_KINDS, "thresholds": "up to 2,048 numbers for each column, of which numbers are counted below each"},
    "powers": {"exponents": "up to 2,048 for each column, between -5 and 5 and multiples of 1e-7"},
}
_questions: TypeAdapter[Question] = TypeAdapter(Question)
_answers: TypeAdapter[Answer] = TypeAdapter(Answer)


class PrepareQuery(Query):
    """Send kinds of columns, moments, names of categories, or counts of numbers (`kind` is "prepare").

    A site answers only where its policy names this query; a class or category is named where it has enough rows of it.

    Attributes:
        question: one of `data.preparation.answers.Question`, as a table.
    """

    by_name = True
    reads_model = False
    later: ClassVar = {"question": "what of its table follows from earlier answers, see `stated`"}

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

    def answer(self, inputs: TrainInput, context: ClientContext, trainer: Trains) -> TrainOutput:
        answers = [packed(told) for told in self._answers(context)]
        examples = torch.tensor([len(table.frame) for table in context.tables("train")])
        return inputs.answered(vectors={"told": torch.stack(answers)}, metrics={"examples": examples})

    def _answers(self, context: ClientContext) -> list[Answer]:
        rules, answers = context.disclosure, []
        for table in context.tables("train"):
            classes = table.classes if rules is None else table.named_classes(rules.least_rows)
            answers.append(answer(self.asked, table.frame, table.y, classes, rules))
        return answers

    def answer_form(self, spec: ModelSpec, rows: Mapping[Split, int]) -> ResultForm:
        return ResultForm({"told": (_NUMBERS,)}, (), rows["train"], 0, types={"told": "torch.int64"})

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
        """See `Query`; also of the table that the question is, only what follows from answers is not known before."""
        question, follows = self.asked.model_dump(), _LATER[self.asked.about]
        known = {name: value for name, value in question.items() if name not in follows}
        later = {**follows, **{name: words for name, words in self.later.items() if name != "question"}}
        return self.stated_but(later, self.table() | {"question": known})


class PrepareNamesQuery(PrepareQuery):
    """Send kinds of columns, or names of categories, and no number of rows (`kind` is "prepare_names").

    It is asked where moments and counts come under masks: what is not known by name cannot be added up.
    """

    names_only = True

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        if not isinstance(self.asked, KindsQuestion) and summand_count(self.asked):
            raise ValueError("question must be one of names: numbers are added up under masks")
        return self

    def answer(self, inputs: TrainInput, context: ClientContext, trainer: Trains) -> TrainOutput:
        answers = [told.model_copy(update={"rows": 0}) if isinstance(told, KindsAnswer) else told
                   for told in self._answers(context)]  # fmt: skip
        vectors = {"told": torch.stack([packed(told) for told in answers])}
        return inputs.answered(vectors=vectors, metrics={"examples": torch.zeros(len(answers))})


class MaskedPrepareQuery(SumsQuery, PrepareQuery):
    """Send what can be added up of an answer under the run's masks (`kind` is "masked_prepare").

    Attributes:
        about: of each column's moments, where they are taken about and in which unit; without them, the sums tell both.
    """

    later: ClassVar = {
        **PrepareQuery.later,
        "about": "a number and a unit for each column, about which and in which moments are taken",
    }

    about: tuple[tuple[float, float], ...] = Field(default=(), max_length=1 << 16)

    @model_validator(mode="after")
    def _check_sums(self) -> Self:
        if isinstance(self.asked, KindsQuestion):
            raise ValueError("question must be one of numbers: kinds of columns cannot be added up")
        if self.about and len(self.about) != len(moment_names(self.asked)):
            raise ValueError(f"about must be of each of {len(moment_names(self.asked))} columns, got {len(self.about)}")
        return self

    @property
    def summands(self) -> int:
        return LIMBS * summand_count(self.asked)

    def most_asked(self, hides: bool) -> int:
        return 400  # each is counted; an agreement asks about 2 of values, 8 of counts, 14 of powers

    def answer(self, inputs: TrainInput, context: ClientContext, trainer: Trains) -> TrainOutput:
        return self.sums_answer(inputs, [to_limbs(summands(told, self.about)) for told in self._answers(context)])


def moment_names(question: Question) -> list[str]:
    """Return the columns whose moments an answer has, in order: one for each exponent, and the target last."""
    if isinstance(question, ValuesQuestion):
        return [*sorted(parsed_names(question.kinds)), *["target"] * question.targets]
    tried = question.exponents if isinstance(question, PowersQuestion) else {}
    return [name for name in sorted(tried) for _ in tried[name]]


def summand_count(question: Question) -> int:
    """Return how many numbers of an answer are added up."""
    if isinstance(question, CountsQuestion):
        return sum(map(len, question.thresholds.values()))
    logarithms = len(question.exponents) if isinstance(question, PowersQuestion) else 0
    return 4 * len(moment_names(question)) + logarithms


def summands(told: Answer, about: Sequence[tuple[float, float]]) -> Floats:
    """Return the numbers of a client's answer that are added up.

    Counts are added as they are.  Of each column, they are the present and missing numbers, and the sums of x and x^2
    for x = (number - center) / unit; without `about`, in place of these, the sum of numbers in the unit 2^40 and the
    root mean square, times present ones.
    """
    if isinstance(told, CountsAnswer):
        return np.concatenate([np.array(told.counts[name], dtype=np.float64) for name in sorted(told.counts)])
    assert not isinstance(told, KindsAnswer)
    logarithms = [told.logarithms[name] for name in sorted(told.logarithms)] if isinstance(told, PowersAnswer) else []
    sums = []
    for index, column in enumerate(_moments(told)):
        rows = column.present
        center, unit = about[index] if about else (0.0, FIRST_UNIT)
        mean, scatter = (column.mean - center) / unit, column.scatter / unit**2
        square = scatter + rows * mean**2
        sums.append([rows, column.missing, rows * mean, square if about else math.sqrt(rows * square)])
    return np.array([*np.ravel(sums), *logarithms], dtype=np.float64)


def _moments(told: ValuesAnswer | PowersAnswer) -> list[NumbersAnswer]:
    """Return the moments of an answer in the order of `moment_names`."""
    if isinstance(told, PowersAnswer):
        return [moments for name in sorted(told.moments) for moments in told.moments[name]]
    return [*(told.numbers[name] for name in sorted(told.numbers)), *told.targets]


def centers(sums: Floats, question: Question) -> tuple[tuple[float, float], ...]:
    """Return where moments are to be taken about and in which unit, from the sums that clients sent without it."""
    columns = sums[: 4 * len(moment_names(question))].reshape(-1, 4)
    return tuple(
        # a column of zeros has no size; 1 leaves its numbers as they are
        (FIRST_UNIT * total / max(present, 1), FIRST_UNIT * size / max(present, 1) or 1.0)
        for present, _, total, size in columns.tolist()
    )


def pooled_answer(question: Question, sums: Floats, about: Sequence[tuple[float, float]] = ()) -> Answer:
    """Return the answer that one client with the rows of all would give; names of categories are none of it."""
    if isinstance(question, CountsQuestion):
        ends = np.cumsum([len(question.thresholds[name]) for name in sorted(question.thresholds)])
        parts = np.split(np.round(sums).astype(np.int64), ends[:-1])
        return CountsAnswer(counts={name: part.tolist() for name, part in zip(sorted(question.thresholds), parts)})  # noqa: B905
    columns = []
    for (present, missing, total, square), (center, unit) in zip(
        sums[: 4 * len(about)].reshape(-1, 4).tolist(), about, strict=True
    ):
        mean = total / max(present, 1)
        columns.append(NumbersAnswer(
            present=round(present), missing=round(missing), mean=center + unit * mean,
            # the difference of two sums of squares may be rounded below 0
            scatter=unit**2 * max(square - present * mean**2, 0.0) if present > 1 else 0.0,
        ))  # fmt: skip
    if isinstance(question, PowersQuestion):
        left = iter(columns)
        tried = {name: [next(left) for _ in question.exponents[name]] for name in sorted(question.exponents)}
        return PowersAnswer(moments=tried, logarithms=dict(zip(tried, sums[4 * len(about) :].tolist(), strict=True)))
    assert isinstance(question, ValuesQuestion)
    last = len(columns) - question.targets
    names = parsed_names(question.kinds)
    sums_of = dict(zip(sorted(names), columns[:last], strict=True))
    return ValuesAnswer(numbers={name: sums_of[name] for name in names}, categories={}, targets=columns[last:])


def parsed_names(kinds: Mapping[str, Kind]) -> list[str]:
    """Return the names of the columns of numbers that columns of these kinds become, in order."""
    parts = {"number": [""], "boolean": [""], "date": [": days", *(f": {part}" for part in PARTS)]}
    return [f"{name}{part}" for name, kind in kinds.items() for part in parts.get(kind, ())]


def packed(told: Answer) -> Tensor:
    """Return an answer as whole numbers.

    Raises:
        ValueError: it is too long.
    """
    text = zlib.compress(told.model_dump_json().encode())
    if len(text) > 8 * (_NUMBERS - 1):
        raise ValueError("this site has too many columns or categories to tell of them")
    # a fixed length whatever the answer says: the form of the result is known before the question is sent
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
        # a limit on the length of the text, since few packed bytes may unpack to more than the memory
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
            # counts at most rising thresholds cannot fall; stable, as thresholds may be equal
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
        words = {name for name, kind in kinds.items() if kind == "category"}
        if {*told.numbers} != {*parsed_names(kinds)} or {*told.categories} != words:
            return "must tell of each column that was asked for, and of no other"
        if getattr(asked, "targets", 0) != len(told.targets):
            return "must tell of its targets where they were asked for"
        numbers = [*told.numbers.values(), *told.targets]
    # a single number has no scatter: anything else is not of its rows
    bad = any(one.present + one.missing != rows or (one.present < 2 and one.scatter) for one in numbers)
    return f"sent moments that cannot be those of {rows:,} rows" if bad else None
