"""The leaderboard: python benchmarks/leaderboard/run.py

    train   train what is not in results/ yet; stops and goes on at any time
    page    write docs/leaderboard.md and its pictures from what is there

Both by default.  Training needs the prepared data sets (PIEBALD_DATA).  A method that is added to methods.py is trained
without the others.  On two cores, `train` in two processes with other --federations takes half as long.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # for `shared`

import competition
from shared.options import reader
from tiers import SMALL, TIERS


def main() -> int:
    """Run the parts."""
    parser = reader(
        __doc__, federations=[], methods=[], seeds=list(competition.SEEDS), minutes=float("inf"),
        results=competition.RESULTS,
    )  # fmt: skip
    parser.add_argument("part", nargs="?", choices=("train", "page"))
    parser.add_argument("--tier", choices=TIERS, default=SMALL, help="see tiers.py; a large one wants a GPU")
    options = parser.parse_args()
    if options.part != "page":
        made = competition.compete(
            options.federations, options.methods, options.seeds, options.minutes, options.results, options.tier
        )
        print(f"{made} runs were made")
    if options.part != "train":
        import page

        print(page.write(options.results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
