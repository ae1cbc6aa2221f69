"""Write docs/papers/verdicts.md, and the verdicts of each paper's page: python benchmarks/papers/verdicts.py

claims.toml says what is compared, the paper's size, and where ours is read (`measured.py`); every verdict follows from
both by `benchmarks/shared/verdicts.py`, and what differs from the paper is read from its page (`deviations.py`).
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # for `shared`

from measured import READERS, ROOT, Difference
from shared.markdown import block, cells, rows, table
from shared.stored import printed
from shared.stored import table as stored
from shared.verdicts import WORDS, seeds_needed, verdict

PAGE = ROOT / "docs" / "papers" / "verdicts.md"
NAMES = {"cgau": "CGAU", "distfl": "DistFL", "hdafl": "HDAFL", "metis": "Metis", "smmd": "SMMD"}
TOLD = ("data", "clients", "rows each", "network", "rounds")  # conditions that stand beside a verdict


@dataclass(frozen=True)
class Comparison:
    """A difference of a paper beside ours.

    Attributes:
        what: what is compared with what.
        printed: the paper's size, or "+" or "-" where only a sign is printed.
        ours: what is measured here.
        none: printed differences below this are none (`verdicts.verdict`).
    """

    what: str
    printed: float | str
    ours: Difference
    none: float

    @property
    def size(self) -> float:
        """The paper's size, 1 or -1 where there is only a sign."""
        return self.printed if isinstance(self.printed, float) else float(f"{self.printed}1")

    @property
    def verdict(self) -> str:
        """The verdict by the rule for all papers."""
        return verdict(self.size, self.ours.mean, self.ours.half, self.none, isinstance(self.printed, float))

    @property
    def row(self) -> list[str]:
        """Cells of the table."""
        needed = None if isinstance(self.printed, str) else seeds_needed(
            self.printed, self.ours.half, self.ours.seeds, self.none
        )  # fmt: skip
        shown = f"{self.printed:+g}" if isinstance(self.printed, float) else f"{self.printed}, no size"
        return [self.what, shown, self.ours.text, self.verdict, str(self.ours.seeds), str(needed or "-")]


@dataclass(frozen=True)
class Group:
    """The comparisons of a table.

    Attributes:
        paper: its folder.
        title: what they have in common.
        comparisons: one for each.
        deviations: the table's name on the paper's page, where its conditions stand beside ours.
        help: what a method has here that the paper's has not, or other differences that no condition says.
        row: the first cell of the table's row on the paper's page, by default that with which the title begins.
        at: what stands in its second cell, where several begin alike.
    """

    paper: str
    title: str
    comparisons: Sequence[Comparison]
    deviations: str = ""
    help: str = ""
    row: str = ""
    at: str = ""

    def is_of(self, first: str, second: str) -> bool:
        """Return whether a row of the paper's page is about this table."""
        begins = re.match(rf"{re.escape(first)}(?=[:, ]|$)", self.title) is not None
        return self.at in second and (first == self.row or begins)

    @property
    def none(self) -> float:
        """Printed differences below this are none."""
        return self.comparisons[0].none

    @property
    def differs(self) -> str:
        """What differs from the paper."""
        return (
            "; ".join(filter(None, [*conditions(self.paper, self.deviations), self.help])) or "nothing that is printed"
        )


@dataclass
class Sections:
    """The groups of all papers, with the counts of their words."""

    groups: list[Group] = field(default_factory=list)

    def counts(self, paper: str = "") -> Counter[str]:
        """Return how many verdicts have which word, of one paper or of all."""
        chosen = (group for group in self.groups if paper in ("", group.paper))
        return Counter(one.verdict.partition(",")[0] for group in chosen for one in group.comparisons)


def conditions(paper: str, name: str) -> Iterator[str]:
    """Yield the conditions of a table that differ, as the paper's page says them."""
    if not name:
        return
    text = (ROOT / "docs" / "papers" / f"{paper}.md").read_text("utf-8")
    line = next(row["the paper → here"] for row in rows(block(text, "deviations")) if row["table"] == name)
    yield from (one for one in line.split("; ") if one.startswith(TOLD) and not one.startswith("classes"))


def in_words(counts: Counter[str]) -> str:
    """Return how many verdicts have which word, all words in their order."""
    return ", ".join(f"{word} {counts[word]}" for word in (*WORDS, *sorted(counts.keys() - {*WORDS})) if counts[word])


def of_file(one: dict[str, Any]) -> Group:
    """Return the group that a table of claims.toml describes.

    Its `compared` are rows of what is compared, the printed size, and the arguments of the reader.
    """
    read, common = READERS[one["read"]], one.get("with", {})
    comparisons = [
        Comparison(
            what, size if isinstance(size, str) else float(size), read(*arguments, **common), one.get("none", 0.0)
        )
        for what, size, *arguments in one["compared"]
    ]
    more = {name: one[name] for name in ("deviations", "help", "row", "at") if name in one}
    return Group(one["paper"], one["title"], comparisons, **more)


SYNCHRONOUS, UNEVEN = "Synchronous", "Five fast and five slow clients, 2,500"
POLICIES = (
    "SyncFedAvg",
    "SyncDVW",
    "AsyncFedAvg",
    "FedAsync",
    "AsyncDVW",
    "AsyncDVW, adaptive",
)  # printed.toml's order


def of_metis() -> Iterator[Group]:
    """Yield table I: all policies minus FedAvg in all cells, and AsyncDVW minus the asynchronous ones beside it."""
    figures = printed("metis")
    left, right = figures["rounds_200"], figures["seconds_14k"]
    cells = {key: key.replace(", ", " ") for key in left}
    dvw = [Comparison(f"DVW minus FedAvg, {cell}", round(left[key][1] - left[key][0], 2),
                      READERS["metis"](SYNCHRONOUS, cell, "DVW"), 1.0) for key, cell in cells.items()]  # fmt: skip
    yield Group("metis", "Table I, left", dvw, "Table I, synchronous, power law Non-IID(3)")
    uneven = "Table I, uneven, power law Non-IID(3)"
    for policy in ("AsyncFedAvg", "FedAsync"):
        place, mine = POLICIES.index(policy), POLICIES.index("AsyncDVW")
        beside = [Comparison(f"AsyncDVW minus {policy}, {cell}", round(right[key][mine] - right[key][place], 2),
                             READERS["unpaired"](UNEVEN, cell, "AsyncDVW", policy), 1.0)
                  for key, cell in cells.items()]  # fmt: skip
        yield Group("metis", f"Table I, right: AsyncDVW minus {policy}", beside, uneven)
    for place, policy in enumerate(POLICIES[1:], 1):
        minus = [Comparison(f"{policy} minus SyncFedAvg, {cell}", round(right[key][place] - right[key][0], 2),
                            READERS["metis"](UNEVEN, cell, policy), 1.0) for key, cell in cells.items()]  # fmt: skip
        yield Group("metis", f"Table I, right: {policy} minus SyncFedAvg", minus, uneven)
    key, cell = "power law, Non-IID(3)", "power law Non-IID(3)"
    longer = [Comparison(f"{policy} minus SyncFedAvg, {cell}", round(right[key][place] - right[key][0], 2),
                         READERS["metis"]("long", cell, policy), 1.0)
              for place, policy in enumerate(POLICIES[1:], 1)]  # fmt: skip
    yield Group("metis", "Table I, right, for 21 rounds of SyncFedAvg, not four", longer, uneven)


CLAIMS = stored(Path(__file__).with_name("claims.toml"))


def sections() -> Sections:
    """Return all groups, in the papers' order."""
    groups = [*map(of_file, CLAIMS["groups"]), *of_metis()]
    return Sections(sorted(groups, key=lambda group: [*NAMES].index(group.paper)))


def page() -> str:
    """Return the page."""
    every = sections()
    counts = every.counts()
    parts = [f"""# Verdicts

{counts.total()} comparisons of the five papers beside what is measured here, in points unless said otherwise, with 95 %
intervals over seeds: **{in_words(counts)}**.

The program `benchmarks/papers/verdicts.py` writes this page from the results, by one rule, that of
`benchmarks/shared/verdicts.py`:

- *agrees*: the interval excludes 0 and ours is between half and twice the printed size; or, also where the paper has no
  difference, the interval lies as near to the printed size as is no difference, which a table says.
- *same sign*: the interval excludes 0, with the share or multiple of the printed size, where one is printed.
- *undecided*: it holds 0 and the printed size; *refuted*: it holds 0, or the paper has no difference, and it excludes
  the printed size.
- *opposite*: the interval excludes 0 on the other side.

The last column says how many seeds would tell the printed size from 0, by the spread of ours; "-" where no size is
printed, where the seeds do not differ, or where it would be over a thousand.  Where seeds of both methods are known and
their pairs are not, the interval is Welch's ("unpaired").  Comparisons that results have and a paper has not are on the
results' own pages, and all conditions on the pages of the papers; `examples/papers/` has a file of settings for tables
of each.
"""]  # fmt: skip
    for paper, name in NAMES.items():
        parts.append(f"## {name}\n\n[Tables and figures]({paper}.md): {in_words(every.counts(paper))}.\n")
        for group in every.groups:
            if group.paper != paper:
                continue
            words = in_words(Counter(one.verdict.partition(",")[0] for one in group.comparisons))
            heads = ["compared", "the paper", "here", "verdict", "seeds", "seeds needed"]
            inside = table(heads, [one.row for one in group.comparisons])
            margin = f"  A printed difference below {group.none:g} is none." if group.none else ""
            parts.append(
                f"<details markdown><summary>{group.title}: {words}</summary>\n\n"
                f"Differs from the paper: {group.differs}.{margin}\n\n{inside}\n\n</details>\n"
            )
    missing = [list(one.values()) for one in CLAIMS["missing"]]
    unjudged = [list(one.values()) for one in CLAIMS["unjudged"]]
    parts.append(f"""## Without a verdict

What the paper prints without a size or a sign, and what holds by construction.

{table(["what", "the paper", "here"], unjudged)}

## What cannot be remade here

{table(["what", "what it would need", "what stands in"], missing)}
""")
    return "\n".join(parts)


def index() -> str:
    """Return the page of what readers remember of the papers."""
    every = sections()
    by_title = {(group.paper, group.title): group for group in every.groups}
    lines, seeds = [], set[int]()
    for one in CLAIMS["remembered"]:
        groups = [by_title[one["paper"], title] for title in one["groups"]]
        counts = Counter(each.verdict.partition(",")[0] for group in groups for each in group.comparisons)
        name = f"[{NAMES[one['paper']]}]({one['paper']}.md)"
        seeds |= {each.ours.seeds for group in groups for each in group.comparisons}
        lines.append([name, one["claim"], f"[{in_words(counts)}](verdicts.md#{one['paper']})", one["why"]])
    return f"""# The papers

Piebald remakes the tables and figures of five papers.  What a reader remembers of each abstract, in our words, and what
our runs say of it, by [one rule](verdicts.md): a claim that holds has *agrees* and *same sign*, one that does not
*refuted* and *opposite*, and *undecided* is what more seeds would tell.  Each comparison of this table is of
{" or ".join(map(str, sorted(seeds)))} seeds, so that intervals are wide.  What may explain verdicts is what we think,
and no test of it.

{table(["paper", "its claim", "our verdicts", "what may explain them"], lines)}

In all, {every.counts().total()} comparisons: {in_words(every.counts())}.  [All of them](verdicts.md), with what differs
from each paper and the seeds that a verdict would need.
"""


REASONS = re.compile("nothing to|cannot be|not made here|not run|no recordings")  # why there is nothing to judge


def judged(paper: str, text: str, every: Sections) -> str:
    """Return a paper's page with the verdicts of its tables and figures, in the last cells of its first table."""
    groups, lines = [group for group in every.groups if group.paper == paper], text.splitlines()
    for place, line in enumerate(lines):
        row = cells(line)
        if not line.startswith("|") or len(row) != 7 or row[-1] in ("verdict", "---"):
            continue
        mine = [group for group in groups if group.is_of(*row[:2])]
        counts = Counter(one.verdict.partition(",")[0] for group in mine for one in group.comparisons)
        if row[2] == "not in the paper":
            row[-1] = row[2]
        elif mine:
            row[-1] = f"[{in_words(counts)}](verdicts.md#{paper})"
        elif not REASONS.match(row[-1]):
            row[-1] = "nothing to judge by the rule: no size is printed, or no seeds are stored"
        lines[place] = f"| {' | '.join(row)} |"
    return "\n".join(lines) + "\n"


def write() -> None:
    """Write all pages."""
    every = sections()
    PAGE.write_text(page(), "utf-8")
    PAGE.with_name("index.md").write_text(index(), "utf-8")
    for paper in NAMES:
        path = PAGE.with_name(f"{paper}.md")
        path.write_text(judged(paper, path.read_text("utf-8"), every), "utf-8")


if __name__ == "__main__":
    write()
