"""Write docs/papers/verdicts.md from the claims of claims.toml: python benchmarks/papers/verdicts.py

What the papers print and what is measured here stand in that file; the verdict follows from both by
`benchmarks/shared/verdicts.py`.  `tests/docs/test_papers.py` holds our figures against the benchmarks' results.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # for `shared`

from shared.markdown import table
from shared.stored import table as stored
from shared.verdicts import verdict

ROOT = Path(__file__).parents[2]

PAGE = ROOT / "docs" / "papers" / "verdicts.md"
NAMES = {"cgau": "CGAU", "distfl": "DistFL", "hdafl": "HDAFL", "metis": "Metis", "smmd": "SMMD"}


@dataclass(frozen=True)
class Claim:
    """A claim of a paper beside what is measured here; several, where a table has the same comparison several times.

    Attributes:
        paper: its folder.
        claim: what is compared.
        printed: the paper's differences, or words where it has none.
        ours: ours with their intervals, as the results have them, with "; " between several.
        why: a reason, with the experiment that shows it.
        said: the verdict where there is no difference of two numbers.
        none: printed differences below this are none (`verdicts.verdict`).
    """

    paper: str
    claim: str
    printed: tuple[float, ...] | str
    ours: str
    why: str = ""
    said: str = ""
    none: float = 0.0

    @property
    def verdicts(self) -> list[str]:
        """The verdict on each difference by the rule for all papers, or as it is said."""
        if isinstance(self.printed, str):
            return [self.said]
        pairs = zip(self.printed, map(measured, self.ours.split("; ")), strict=True)
        return [verdict(printed, *mean_and_half, self.none) for printed, mean_and_half in pairs]

    @property
    def row(self) -> list[str]:
        """Cells of the table."""
        printed = self.printed if isinstance(self.printed, str) else "; ".join(f"{one:+g}" for one in self.printed)
        judged = self.verdicts if len({*self.verdicts}) > 1 else self.verdicts[:1]
        return [f"[{NAMES[self.paper]}]({self.paper}.md)", self.claim, printed, self.ours, "; ".join(judged), self.why]


def measured(text: str) -> tuple[float, float]:
    """Return a difference and half of its interval, from "+1.2 ± 0.3" or "+1.2 [+0.9, +1.5]"."""
    mean, *ends = map(float, re.findall(r"[-+]?\d+\.\d+", text))
    return mean, ends[0] if len(ends) == 1 else mean - ends[0] if mean > 0 else ends[1] - mean


STORED = stored(Path(__file__).with_name("claims.toml"))
CLAIMS = tuple(
    Claim(**one | {"printed": one["printed"] if isinstance(one["printed"], str) else tuple(one["printed"])})
    for one in STORED["claims"]
)
MISSING = [list(one.values()) for one in STORED["missing"]]


def page() -> str:
    """Return the page."""
    counts = Counter(one.partition(",")[0] for claim in CLAIMS for one in claim.verdicts)
    summed = ", ".join(f"{word} {count}" for word, count in counts.most_common())
    return f"""# Verdicts

{counts.total()} claims of the five papers beside what is measured here, in points unless said otherwise, with 95 %
intervals over seeds.  A verdict has a size, by one rule in `benchmarks/shared/verdicts.py`: *agrees* between half and
twice the paper's difference, *same sign* with the share or multiple of it, *not found* where the interval holds 0,
*opposite*.  A row has several, with semicolons, where a table makes the same comparison several times, and one verdict
where it is the same.  In all: {summed}.

Conditions that differ from the paper's stand on its page; `examples/papers/` has a file of settings for tables of each.

{table(["paper", "claim", "the paper", "here", "verdict", "reason, with its experiment"], [one.row for one in CLAIMS])}

## What cannot be remade here

{table(["what", "what it would need", "what stands in"], MISSING)}
"""


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
