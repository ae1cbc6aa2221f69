"""The wording of what is wrong with a value: the same words wherever it came from."""

from __future__ import annotations

from typing import Annotated, Literal

import pytest
from pydantic import Field

from piebald.contracts.component import Settings, from_tables
from piebald.core.arguments import Positive, checked, type_in_words
from piebald.core.errors import SettingError
from piebald.settings.toml_document import dumps, pair


class Inner(Settings):
    """A table in the table."""

    share: float = Field(default=0.5, ge=0, le=1)


class Table(Settings):
    """Settings of many types."""

    rate: Positive = 0.1
    count: int = Field(default=1, ge=1)
    name: str = "a"
    on: bool = True
    kind: Literal["sgd", "adam"] = "sgd"
    layers: Annotated[tuple[str, ...], Field(min_length=1)] = ("a",)
    widths: list[int] = [1]  # noqa: RUF012 - pydantic copies it
    inner: Inner = Inner()


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"rate": 0}, "a table: rate must be above 0, got 0"),
        ({"rate": "x"}, "a table: rate must be a number, got 'x'"),
        ({"count": 0}, "a table: count must be at least 1, got 0"),
        ({"count": 1.5}, "a table: count must be a whole number, got 1.5"),
        ({"count": True}, "a table: count must be a whole number, got True"),
        ({"name": 3}, "a table: name must be text, got 3"),
        ({"on": 1}, "a table: on must be true or false, got 1"),
        ({"kind": "sdg"}, "a table: kind must be 'sgd' or 'adam', got 'sdg'"),
        ({"layers": []}, "a table: layers needs at least one entry"),
        ({"layers": "a"}, "a table: layers must be a list, got 'a'"),
        ({"widths": [1, "b"]}, "a table: widths.1 must be a whole number, got 'b'"),
        ({"inner": 3}, "a table: inner must be a component of Inner, got 3"),
        ({"ratee": 1}, "there is no setting of a table called 'ratee': did you mean 'rate'?"),
        ({"count": 0, "ratee": 1}, "there is no setting of a table called 'ratee'"),  # rather than what it may explain
    ],
)
def test_what_is_wrong_is_one_sentence(fields, sentence):
    with pytest.raises(SettingError) as refused:
        Table(**fields)
    assert str(refused.value).startswith(sentence)


def test_settings_are_given_by_name():
    with pytest.raises(SettingError, match=r"a table takes its settings by name \(rate=..., .*\), got 3"):
        Table(3)


def test_the_bounds_themselves_are_allowed():
    assert Table(count=1).count == 1
    assert [Inner(share=share).share for share in (0.0, 1.0)] == [0.0, 1.0]
    for share in (-1e-9, 1 + 1e-9):
        with pytest.raises(SettingError, match="a table: share must be at"):
            Inner(share=share)


def test_an_argument_and_a_setting_are_refused_in_the_same_words():
    @checked
    def train(rate: Positive) -> float:
        return rate

    with pytest.raises(SettingError, match=r"^rate must be a finite number above 0, got 0$"):
        train(0)
    with pytest.raises(SettingError, match=r"^a table: rate must be above 0, got 0$"):
        Table(rate=0)


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (int, "a whole number"),
        (float | None, "a finite number"),
        (int | str, "a whole number or text"),
        (Positive, "a finite number above 0"),
        (Annotated[int, Field(ge=1, le=9)], "a whole number of at least 1 and of at most 9"),
        (Literal["a", "b"], "'a' or 'b'"),
        (list[int], "a list whose entries are each a whole number"),
        (dict[str, int], "a table"),
    ],
)
def test_types_have_words(annotation, words):
    assert type_in_words(annotation) == words


@pytest.mark.parametrize(
    ("tables", "sentence"),
    [
        ("text", "must be a list of tables like {}, got 'text'"),
        ([{"share": 0.1}, 3], "must be a list of tables like {}, but number 1 is 3"),
        (
            [{"share": 2.0}],
            "must be a list of tables like {}, but in number 0, a table: share must be at most 1, got 2.0",
        ),
    ],
)
def test_a_list_of_tables_names_the_first_that_is_wrong(tables, sentence):
    with pytest.raises(ValueError, match=r"must be a list of tables") as refused:
        from_tables(Inner, tables, "{}")
    assert str(refused.value) == sentence


def test_tables_and_values_may_be_mixed():
    assert from_tables(Inner, [{"share": 0.1}, Inner(share=0.2)], "{}") == (Inner(share=0.1), Inner(share=0.2))


def test_lists_and_inner_tables_are_written_on_one_line():
    long = [{"layers": [f"block.{number}" for number in range(30)], "lr": 0.1}]
    text = dumps({"seeds": [1, 2], "recipe": {"groups": long, "training": {"kind": "sgd"}}})
    assert text.splitlines()[:3] == ["seeds = [1, 2]", "", "[recipe]"]
    assert [line.partition(" = ")[0] for line in text.splitlines()[3:]] == ["groups", "training"]


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("a", (), "a = []"),
        ("a", {}, "a = {}"),
        ("a", [[1], [[]]], "a = [[1], [[]]]"),
        ("a b", ["x,\n]", "[\n"], 'a_b = ["x,\\n]", "[\\n"]'.replace("a_b", '"a b"')),
        ("a", {"b": None, "c": {1.5}}, "a = { c = [1.5] }"),
        ("a", [True, float("inf"), 1e-05], "a = [true, inf, 1e-05]"),
    ],
)
def test_a_value_is_one_line(key, value, line):
    assert pair(key, value) == line
