"""The mutants that `make mutants` runs are where they are said to be, and each is another program."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.scripts import loaded

mutants = loaded(Path(__file__).with_name("mutants.py"))


def test_the_stated_mutants_are_programs_of_their_own():
    stated = mutants.stated()
    assert len({mutant.name for mutant in stated}) == len(stated) == sum(mutants.QUOTAS.values()) + len(mutants.KNOWN)
    for mutant in stated:
        before, after = (ast.dump(ast.parse(text)) for text in (mutant.file.read_bytes(), mutant.source()))
        assert before != after, mutant
    assert mutants.tests_of(mutants.TESTS)
    assert mutants.REASONS.keys() <= {mutant.name for mutant in stated}
