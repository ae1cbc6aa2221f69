"""Judge `piebald advise` on federations whose truth is known: python benchmarks/advise/run.py truth

    truth       train every recipe with every setting on every federation; what is in truth/ is not repeated
    references  measure the unlikeness of the federations, and write piebald/advice/references.json
    portfolio   learn the portfolio of settings from truth/, and write piebald/advice/portfolio.json
    rows        train once more what the races finish on truth/, and keep which rows are right
    advise      run the race on truth/ instead of training, and write advice.json
    simulated   train on federations that were made up, draw scores of others, and write simulated.json
    product     run `piebald advise` itself on federations with many fresh rows, and the full grid beside it
    distilled   run `piebald advise --distil` on them
    score       score the adviser and simple rules by truth/, and write RESULTS.md

All need the prepared data sets (PIEBALD_DATA).  `truth` takes minutes for one seed on one core and can be stopped at
any time; a recipe that is added to grid.py is trained without the others.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # for `shared`

import truth
from shared.options import reader


def main() -> int:
    """Run one of the parts."""
    parser = reader(
        __doc__, seeds=list(truth.SEEDS), federations=[], minutes=float("inf"), truth=truth.FOLDER, out=Path()
    )
    parser.add_argument(
        "part",
        choices=("truth", "references", "portfolio", "rows", "advise", "simulated", "product", "distilled", "score"),
    )
    options = parser.parse_args()
    if options.part == "truth":
        there, wanted = truth.run_all(options.truth, tuple(options.seeds), tuple(options.federations), options.minutes)
        print(f"{there} of {wanted} runs")
        return 0 if there >= wanted else 1
    if options.part == "product":
        import product

        there, wanted = product.run_all(
            product.FOLDER,
            tuple(options.seeds),
            tuple(options.federations),
            options.minutes,
            None if options.out == Path() else options.out,
        )
        print(f"{there} of {wanted} runs")
        return 0 if there >= wanted else 1
    if options.part == "distilled":
        import product

        print(product.distil_all(product.FOLDER, tuple(options.seeds), tuple(options.federations)))
        return 0
    if options.part == "references":
        import portfolio

        print(portfolio.write_references())
        return 0
    if options.part == "portfolio":
        import portfolio

        print(portfolio.write_portfolio(options.truth))
        return 0
    if options.part == "simulated":
        import simulated

        print(simulated.write())
        return 0
    import score

    if options.part == "rows":
        import single_rows

        there, wanted = single_rows.run_all(options.truth, score.finished(options.truth), options.minutes)
        print(f"{there} of {wanted} runs")
        return 0 if there >= wanted else 1
    print(score.write_advice(options.truth) if options.part == "advise" else score.write(options.truth))
    return 0


if __name__ == "__main__":
    sys.exit(main())
