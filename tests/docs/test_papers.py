"""The pages of the papers: every figure of ours is in the results that they point to, and nothing is left out."""

from __future__ import annotations

import math
import re
import sys
from itertools import dropwhile, takewhile
from pathlib import Path
from types import ModuleType

import pytest
from scipy.stats import t

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


@pytest.mark.parametrize("paper", ["cgau", "hdafl", "smmd"])
def test_sentences_of_the_results_cite_only_figures_of_their_tables(paper: str) -> None:
    """A table that a program writes anew must not leave a sentence behind that says something else."""
    sentences, *measured = _split(paper)
    assert _uncited(sentences, measured) == []
    assert len(_uncited(sentences, [])) > 20


def _split(paper: str) -> list[str]:
    """What a person wrote on a page of results, then each block that a program writes."""
    text = (ROOT / "benchmarks" / paper / "RESULTS.md").read_text("utf-8")
    block = re.compile(r"<!-- (?!end)(.*?) -->\n(.*?)<!-- end of \1 -->", re.DOTALL)
    return [block.sub("", text), *(match[2] for match in block.finditer(text))]


def _uncited(sentences: str, measured: list[str]) -> list[str]:
    """Differences and halves of intervals in sentences that are in no block."""
    tables = "".join(measured)
    figures = re.findall(r"(?<![\w.])[-+]\d+\.\d+|\d+\.\d+(?= ±)|(?<=± )\d+\.\d+", sentences)
    return [one for one in figures if not re.search(rf"(?<![\d.]){re.escape(one.lstrip('+'))}(?!\d)", tables)]


@pytest.fixture(scope="module")
def made() -> ModuleType:
    folder = ROOT / "benchmarks" / "papers"
    sys.path.append(str(folder))
    try:
        return loaded(folder / "verdicts.py")
    finally:
        sys.path.remove(str(folder))


def test_pages_of_verdicts_are_what_their_program_writes(made: ModuleType) -> None:
    """Byte for byte, from stored seeds and tables of results: none of their judgements is written by hand."""
    docs, every = ROOT / "docs" / "papers", made.sections()
    assert (docs / "verdicts.md").read_text("utf-8") == made.page()
    assert (docs / "index.md").read_text("utf-8") == made.index()
    for paper in PARTS:
        text = (docs / f"{paper}.md").read_text("utf-8")
        assert text == made.judged(paper, text, every), paper


def test_figures_in_explanations_are_those_of_the_results(made: ModuleType) -> None:
    """They are written by hand, and must not outlive the results that they quote."""
    names = {name: paper for paper, name in made.NAMES.items()}
    said = [(one["paper"], one["why"]) for one in made.CLAIMS["remembered"]]
    said += [(names[one["what"].partition(",")[0]], one["here"]) for one in made.CLAIMS["unjudged"]]
    wrong = {text: missing for paper, text in said if (missing := unknown(text, SOURCES[paper]))}
    assert wrong == {}


def test_a_judgement_that_somebody_writes_by_hand_is_not_kept(made: ModuleType) -> None:
    text = (ROOT / "docs" / "papers" / "cgau.md").read_text("utf-8")
    row = next(line for line in text.splitlines() if line.startswith("| Fig. 2b |"))
    written = text.replace(row, f"{row.rpartition(' | ')[0]} | agrees |")
    assert written != text
    assert made.judged("cgau", written, made.sections()) == text


def test_every_comparison_of_a_results_page_with_its_paper_has_a_verdict(made: ModuleType) -> None:
    """Before, 6 of the 45 comparisons of Metis' table I had one, and no method was compared with AsyncFedAvg."""
    every = made.sections()
    compared = {one.what for group in every.groups for one in group.comparisons if group.paper == "metis"}
    figures = made.printed("metis")
    cells = [cell.replace(", ", " ") for cell in figures["seconds_14k"]]
    assert compared >= {f"{policy} minus SyncFedAvg, {cell}" for policy in made.POLICIES[1:] for cell in cells}
    assert compared >= {f"AsyncDVW minus {base}, {cell}" for base in ("AsyncFedAvg", "FedAsync") for cell in cells}
    assert compared >= {f"DVW minus FedAvg, {cell}" for cell in cells}
    assert {group.paper for group in every.groups} == set(PARTS)
    assert sum(every.counts().values()) == sum(len(group.comparisons) for group in every.groups)
    assert set(every.counts()) <= {*made.WORDS}


@pytest.mark.parametrize(
    ("printed", "mean", "half", "words"),
    [
        (10.0, 5.1, 1.0, "agrees"), (10.0, 19.9, 1.0, "agrees"), (-10.0, -9.0, 1.0, "agrees"),
        (10.0, 4.9, 1.0, "same sign, half"), (10.0, 0.5, 0.4, "same sign, a twentieth"),
        (78.81, 3.5, 1.5, "same sign, 1/23"), (10.0, 31.0, 1.0, "same sign, 3 times"),
        (10.0, 9.0, 9.0, "undecided"), (10.0, -9.0, 9.1, "refuted"), (10.0, -9.0, 1.0, "opposite"),
        (0.5, 0.9, 0.1, "agrees"), (0.5, 1.1, 0.1, "agrees"), (0.5, 1.1, 3.1, "undecided"), (0.1, 1.8, 1.0, "refuted"),
        (0.1, 0.0, 1.7, "undecided"), (10.0, 9.0, float("nan"), "no verdict from one seed"),
    ],
)  # fmt: skip
def test_a_verdict_follows_from_the_interval(printed: float, mean: float, half: float, words: str) -> None:
    """A twentieth of the paper's effect does not agree with it, and a wide interval shows no equivalence."""
    assert loaded(ROOT / "benchmarks" / "shared" / "verdicts.py").verdict(printed, mean, half) == words


@pytest.mark.parametrize(("printed", "half", "seeds"), [(0.4, 1.3, 3), (5.0, 8.0, 5), (0.0, 2.0, 4)])
def test_the_seeds_that_are_needed_are_the_fewest(printed: float, half: float, seeds: int) -> None:
    rule = loaded(ROOT / "benchmarks" / "shared" / "verdicts.py")
    none = 0.1 if printed else 1.0
    needed = rule.seeds_needed(printed, half, seeds, none)
    spread = half * math.sqrt(seeds) / t.ppf(0.975, seeds - 1)
    wanted = printed / 2 or none
    halves = [t.ppf(0.975, count - 1) * spread / math.sqrt(count) for count in (needed - 1, needed)]
    assert halves[0] > wanted >= halves[1]
    assert rule.seeds_needed(printed, 0.0, seeds, none) is None


def test_each_paper_has_a_file_of_settings() -> None:
    """`tests/cli/test_paper_files.py` reads and trains them."""
    files = (ROOT / "examples" / "papers").glob("*.toml")
    assert {file.stem.partition("-")[0] for file in files} == set(PARTS)
