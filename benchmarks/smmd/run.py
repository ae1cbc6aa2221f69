"""SMMD: tables, speed, and a check of encrypted against fixed-point training.  See RESULTS.md.

    python benchmarks/smmd/run.py tables --seeds 5     credit and census need PIEBALD_DATA
    python benchmarks/smmd/run.py gap --seeds 3        one change of our conditions at a time, beside the paper's
    python benchmarks/smmd/run.py verify
    python benchmarks/smmd/run.py speed                the column of `phe` needs: pip install phe
    python benchmarks/smmd/run.py parts                a direction under BFV, and its parts
    python benchmarks/smmd/run.py write                put what was measured into RESULTS.md
    python benchmarks/smmd/run.py tables --scale full  encrypted with BFV instead of its integers in fixed point

`--dry-run` prints the conditions beside the paper's and runs nothing; `--seeds` is 5 at full scale, else 1.
The tables' runs are kept in seeds.jsonl beside this file and other measurements in build/smmd/, and what is there is
not run again.  Without a word, all six in small.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1]))  # for `shared`
import conditions
import gap
import parts
import speed
import tables
import verify
from shared.markdown import put
from shared.options import reader

HERE = Path(__file__).parent
RAW = Path("build") / "smmd"


def write(raw_tables: Path) -> None:
    """Replace what stands between the marks of RESULTS.md, with the tables of this file."""
    page = HERE / "RESULTS.md"
    text = page.read_text("utf-8")
    made_by = {"tables": tables, "gap": gap, "speed": speed, "parts": parts, "verify": verify}
    files = {name: RAW / f"{name}.jsonl" for name in made_by} | {"tables": raw_tables}
    found = [module.tables(files[name]) for name, module in made_by.items() if files[name].exists()]
    blocks = {name: block for made in found for name, block in made.items()}
    for name, block in blocks.items():
        text = put(text, name, block)
    page.write_text(text, "utf-8")


def main() -> None:
    parser = reader(__doc__, scale=tuple(conditions.BACKENDS), dry_run=False)
    parser.add_argument("what", nargs="?", choices=["tables", "gap", "verify", "speed", "parts", "write"])
    parser.add_argument("--seeds", type=int, help="of the tables, and of gap")
    given = parser.parse_args()
    full = given.scale == "full"
    seeds = given.seeds or (conditions.SEEDS if full else 1)
    if given.dry_run:
        print(conditions.printed(given.scale, seeds))
        return
    if given.what in (None, "verify"):
        verify.run(RAW / "verify.jsonl")
    if given.what in (None, "speed"):
        speed.run(RAW / "speed.jsonl", small=given.what is None)
    if given.what in (None, "parts"):
        parts.run(RAW / "parts.jsonl", 1 if given.what is None else 5)
    raw = RAW / "tables_full.jsonl" if full else HERE / "seeds.jsonl"
    if given.what in (None, "tables"):
        tables.run(range(seeds), raw, conditions.BACKENDS[given.scale])
    if given.what in (None, "gap"):
        gap.run(seeds, RAW / "gap.jsonl")
    if given.what in (None, "write"):
        write(raw)


if __name__ == "__main__":
    main()
