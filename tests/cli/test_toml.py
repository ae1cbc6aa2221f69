"""TOML documents: the lines of keys, the meaning of flags, and writing."""

from __future__ import annotations

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piebald.core.errors import SettingError
from piebald.settings.toml_document import Document, dotted, dumps

TEXT = '''# a comment with [brackets] and = signs
rounds = 3
"quoted key".x = 1  # a = 2
a.b . c = """
lines = 1
[not.a.table]
"""
list = [
  1, # one
  "]",
  { x = 1, y.z = [
      2] },
]
one = 'a = "b'
long = \'\'\'
 x\'\'\'
[section]
inline = { p = 1, q = "}" }
[[recipes]]
name = "a"
[recipes.scheduling]
kind = "x"
[[recipes]]
name = "b"
[ "grid" ]
"recipe.lr" = [1,
 2]
'''


@pytest.mark.parametrize(
    ("key", "line"),
    [
        (("rounds",), 2),
        (("quoted key", "x"), 3),
        (("a", "b", "c"), 4),
        (("list",), 8),
        (("list", 0), 9),
        (("list", 1), 10),
        (("list", 2, "x"), 11),
        (("list", 2, "y", "z", 0), 12),
        (("one",), 14),
        (("long",), 15),
        (("section",), 17),
        (("section", "inline", "q"), 18),
        (("recipes", 0), 19),
        (("recipes", 0, "name"), 20),
        (("recipes", 0, "scheduling", "kind"), 22),
        (("recipes", 1, "name"), 24),
        (("grid", "recipe.lr"), 26),
        (("grid", "recipe.lr", 1), 27),
    ],
)
def test_each_key_knows_its_line(key, line):
    assert Document(TEXT, "f.toml").origin(key) == f"f.toml:{line}"


def test_a_missing_key_is_where_its_table_is():
    document = Document(TEXT, "f.toml")
    assert document.origin(("section", "missing")) == "f.toml:17"
    assert document.origin(("nowhere",)) == "f.toml"


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_lines_do_not_depend_on_the_newline(newline):
    text = "a = 1\nb = [\n1,\n2]\n[c]\nd = 1\n".replace("\n", newline)
    assert Document(text, "f").origin(("c", "d")) == "f:6"


@pytest.mark.parametrize(
    ("flag", "key", "value"),
    [
        ("rounds=7", ("rounds",), 7),
        ("section.lr = 0.1", ("section", "lr"), 0.1),
        ("section.on=true", ("section", "on"), True),
        ("section.name=hdafl", ("section", "name"), "hdafl"),
        ("section.name='two words'", ("section", "name"), "two words"),
        ("section.text=a=b", ("section", "text"), "a=b"),
        ("new.table.x=[1, 2]", ("new", "table", "x"), [1, 2]),
        ('grid."recipe.lr"=[3]', ("grid", "recipe.lr"), [3]),
        ("recipes.1.name=c", ("recipes", 1, "name"), "c"),
    ],
)
def test_a_flag_goes_on_top(flag, key, value):
    document = Document(TEXT, "f.toml")
    document.set(flag)
    found = document.values
    for word in key:
        found = found[word]
    assert found == value
    assert document.origin(key).startswith("--set ")


@pytest.mark.parametrize(
    "flag",
    ["rounds", "=1", "rounds=", "a..b=1", ".a=1", "rounds.x=1", "recipes.9.name=c", "recipes.x=1", "x=[1,", 'x="'],
)
def test_a_flag_that_cannot_be_read_is_refused(flag):
    with pytest.raises(SettingError, match="--set"):
        Document(TEXT, "f.toml").set(flag)


@pytest.mark.parametrize(
    ("text", "place"), [("a = ", "f:1:5"), ("a = 1\na = 2", "f:2:"), ("[x\n", "f:1:3"), ("a = 1\nb = [1,", "f:2:8")]
)
def test_broken_toml_says_line_and_column(text, place):
    with pytest.raises(SettingError, match=f"^{place}.*not TOML"):
        Document(text, "f")


def test_dotted_writes_keys_as_people_do():
    assert dotted(("recipes", 1, "scheduling", "kind")) == "recipes[1].scheduling.kind"


TEXTS = st.text(st.characters(codec="utf-8"))
PLAIN = st.one_of(st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False, width=32), TEXTS)
VALUES = st.recursive(PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3))


@pytest.mark.full
@given(st.dictionaries(TEXTS, VALUES, max_size=5))
def test_what_is_written_reads_the_same(values):
    assert tomllib.loads(dumps(values)) == values


@pytest.mark.full
@given(st.dictionaries(TEXTS.filter(bool), VALUES, min_size=1, max_size=5))
def test_every_key_that_is_written_has_a_line(values):
    text = dumps(values)
    document = Document(text, "f")
    for key in values:
        place = document.origin((key,))
        line = text.split("\n")[int(place.removeprefix("f:")) - 1]
        assert tomllib.loads(line.replace("[[", "[").replace("]]", "]")) if line.startswith("[") else "=" in line


def test_what_cannot_be_written_is_refused():
    with pytest.raises(SettingError, match="numbers, text"):
        dumps({"a": object()})
