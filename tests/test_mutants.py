"""The mutants that `make mutants` runs are where they are said to be, and each is another program."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from tests.scripts import loaded

mutants = loaded(Path(__file__).with_name("mutants.py"))


@cache
def program(text: bytes) -> str:
    return ast.dump(ast.parse(text))


def test_the_stated_mutants_are_programs_of_their_own():
    stated = mutants.stated()
    assert len({mutant.name for mutant in stated}) == len(stated) == sum(mutants.QUOTAS.values()) + len(mutants.KNOWN)
    for mutant in stated:
        text = mutant.file.read_bytes()
        assert program(mutant.source(text)) != program(text), mutant
    assert mutants.tests_of(mutants.TESTS)
    assert mutants.REASONS.keys() <= {mutant.name for mutant in stated}
