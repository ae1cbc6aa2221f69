"""The benchmark of matches: people whose truth is known, some of whom are spelt differently."""

from __future__ import annotations

from pathlib import Path

from tests.scripts import loaded

SPELLING = loaded(Path(__file__).parents[2] / "benchmarks" / "match" / "spelling.py")


def test_half_of_each_partys_people_are_at_both_and_a_tenth_each_is_spelt_differently() -> None:
    bank, shop = SPELLING.people(400, 0)
    assert len(bank) == len(shop) == 400
    both = bank.merge(shop, on="who")
    assert len(both) == 200
    assert (both["born_x"] == both["born_y"]).all()
    assert ((both["name_x"] == both["name_y"]) >= (both["spelt"] == "as it is")).all()
    assert set(both["spelt"]) == set(SPELLING.CHANGES)


def test_names_are_found_as_they_are_spelt() -> None:
    plain, near = (SPELLING.shares(["name", "born"], kind, 400, 0) for kind in ("text", "name"))
    assert plain["as it is"] == near["as it is"] == near["in capitals, surname first"] == 1
    assert plain["one letter"] < 0.5 < near["one letter"]
    assert near["two letters"] < near["one letter"]
    assert near["another surname"] < 0.2
    assert near["wrong links"] == 0
