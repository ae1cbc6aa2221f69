"""The pages of the papers: every figure of ours is in the results that they point to, and nothing is left out."""

from __future__ import annotations

import re
from itertools import dropwhile, takewhile
from pathlib import Path

import pytest

from tests.scripts import loaded

ROOT = Path(__file__).parents[2]
PARTS = {  # what each paper prints, in its order
    "cgau": ["Fig. 1", "Fig. 2a", "Table 1", "Fig. 2b", *(f"Fig. 3{panel}" for panel in "abcgh")],
    "hdafl": ["Table 1", "Table 2", "Fig. 1", "Fig. 2", "Table 3", "Fig. 3", "Table 4", "Table 5"],
    "smmd": ["Fig. 1", "Fig. 2", "Table 1", "Table 2", "Table 3", "FTL", "source only"],
    "metis": [
        *(f"Figure {number}" for number in range(1, 10)),
        "Table I, left",
        "Table I, right",
        "Table II, ",
        "Table III",
    ],
    "distfl": [*(f"Fig. {number}" for number in range(1, 9)), *(f"Table {number}" for number in range(1, 8))],
}
SOURCES = {
    "cgau": ["cgau", "partition"], "hdafl": ["hdafl"], "smmd": ["smmd"], "metis": ["metis"], "distfl": ["distfl"],
}  # fmt: skip
HEADS = ["", "what it shows", "paper", "here", "command", "scale", "verdict"]


def rows(page: str) -> list[list[str]]:
    """The rows of a page's first table; paper and ours may have other words behind them in the heading."""
    text = (ROOT / "docs" / "papers" / f"{page}.md").read_text("utf-8")
    lines = takewhile(lambda line: line.startswith("|"), dropwhile(lambda line: line[:1] != "|", text.splitlines()))
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [head.partition(":")[0] for head in cells[0]] == HEADS
    return cells[2:]


def unknown(text: str, sources: list[str]) -> list[str]:
    """Numbers of a text that are in none of these results."""
    results = "".join((ROOT / "benchmarks" / name / "RESULTS.md").read_text("utf-8") for name in sources)
    return [
        number
        for number in re.findall(r"[-+]?\d+\.\d+", text)
        if not re.search(rf"(?<![\d.]){re.escape(number)}(?!\d)", results)
        and not re.search(rf"(?<![\d.]){re.escape(number.lstrip('+'))}(?!\d)", results)
    ]


@pytest.mark.parametrize("paper", PARTS)
def test_every_table_and_figure_has_a_row_with_a_verdict(paper: str) -> None:
    found = rows(paper)
    assert all(len(row) == len(HEADS) and row[-1] for row in found)
    missing = [part for part in PARTS[paper] if not any(part in f"{row[0]} {row[1]}" for row in found)]
    assert missing == []
    for row in found:  # the paper's figure stands beside ours, or the row says why one of them is missing
        assert row[2] not in ("", "-"), row
        assert row[3], row
        assert row[3] != "-" or re.search("cannot|not made|not run|nothing to", row[-1]), row
        if row[3] == "-" and "nothing to" not in row[-1]:  # and what it would take
            assert re.search("needs|without|core|GPU|published", row[-1]), row
        assert "open" not in row[-1].split(), row
    for kind in ("Table", "Fig."):
        numbers = [int(seen[1]) for row in found if (seen := re.match(rf"{re.escape(kind)} (\d)", row[0]))]
        assert numbers == sorted(numbers)


@pytest.mark.parametrize("paper", PARTS)
def test_figures_of_ours_are_those_of_the_results(paper: str) -> None:
    """Before, pages and results could differ; what the paper prints is in its own column."""
    wrong = {f"{row[0]}, {row[1]}": missing for row in rows(paper) if (missing := unknown(row[3], SOURCES[paper]))}
    assert wrong == {}


def test_verdicts_are_written_from_the_claims_and_claims_are_those_of_the_results() -> None:
    """The page is what its program writes, and what it has measured stands in the results of the paper's benchmark."""
    made = loaded(ROOT / "benchmarks" / "papers" / "verdicts.py")
    assert (ROOT / "docs" / "papers" / "verdicts.md").read_text("utf-8") == made.page()
    said = {claim: f"{claim.ours} {claim.why}" for claim in made.CLAIMS}
    wrong = {claim.claim: gone for claim, text in said.items() if (gone := unknown(text, SOURCES[claim.paper]))}
    assert wrong == {}
    results = {name: (ROOT / "benchmarks" / name / "RESULTS.md").read_text("utf-8") for name in PARTS}
    differences = [(claim.paper, one) for claim in made.CLAIMS if claim.said == "" for one in claim.ours.split("; ")]
    assert [one for paper, one in differences if one.lstrip("+") not in results[paper]] == []  # with its interval
    assert [claim.claim for claim in made.CLAIMS if {*claim.verdicts} != {"agrees"} and not claim.why] == []
    assert {claim.paper for claim in made.CLAIMS} == set(PARTS)
    assert all(all(claim.verdicts) for claim in made.CLAIMS)


@pytest.mark.parametrize(
    ("printed", "mean", "half", "words"),
    [
        (10.0, 5.1, 1.0, "agrees"), (10.0, 19.9, 1.0, "agrees"), (-10.0, -9.0, 1.0, "agrees"),
        (10.0, 4.9, 1.0, "same sign, half"), (10.0, 0.5, 0.4, "same sign, a twentieth"),
        (78.81, 3.5, 1.5, "same sign, 1/23"), (10.0, 31.0, 1.0, "same sign, 3 times"),
        (10.0, 9.0, 9.0, "not found"), (10.0, -9.0, 9.1, "not found"), (10.0, -9.0, 1.0, "opposite"),
        (0.5, 0.9, 0.1, "agrees"), (0.5, 1.1, 0.1, "a difference where the paper has none"),
        (0.5, 1.1, 3.1, "not found"), (10.0, 9.0, float("nan"), "no verdict from one seed"),
    ],
)  # fmt: skip
def test_a_verdict_has_a_size(printed: float, mean: float, half: float, words: str) -> None:
    """A twentieth of the paper's effect does not agree with it."""
    assert loaded(ROOT / "benchmarks" / "shared" / "verdicts.py").verdict(printed, mean, half) == words


def test_each_paper_has_a_file_of_settings() -> None:
    """`tests/cli/test_paper_files.py` reads and trains them."""
    files = (ROOT / "examples" / "papers").glob("*.toml")
    assert {file.stem.partition("-")[0] for file in files} == set(PARTS)
