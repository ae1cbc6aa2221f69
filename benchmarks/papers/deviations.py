"""Write each paper's conditions beside ours into its page: python benchmarks/papers/deviations.py [PAPER ...].

What the paper prints stands in conditions.toml; ours is read from the recipe, the clients and the model that the
benchmark's own program would run for the table (`shared.capture`).  The row of a table whose data set is not in
`PIEBALD_DATA` stays as it is.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # for `shared`

from shared import markdown
from shared.capture import Case, capture, dealt
from shared.markdown import block, put, table
from shared.programs import listed, without_the_extractor
from shared.stored import table as stored

from piebald.core.errors import SettingError

ROOT = Path(__file__).parents[2]
HEADING = "## Where the runs differ from the paper"
Labels = Iterable[str]
Cell = tuple[str, dict[str, str], Callable[[], Any], int, Labels]  # table, the paper's, what runs it, seeds, methods

WEIGHTS = {"equal_weighted": "equal", "example_weighted": "by rows", "dvw": "by validation score"}
SEEDS = 3
METIS_CELL = "power law Non-IID(3)"
# the method whose run is read, by the part of the benchmark where a paper has several
DESCRIBED = {"distfl": "DistFL", "hdafl": "HDAFL", "cgau": "CGAU", "synchronous": "DVW", "uneven": "AsyncDVW"}
PRINTED = stored(Path(__file__).with_name("conditions.toml"))


def tables(paper: str) -> Iterator[tuple[str, str, dict[str, str]]]:
    """The part of the benchmark, the name, and what the paper prints of each of its tables."""
    for one in PRINTED[paper]["tables"]:
        yield one["part"], one["name"], PRINTED[paper]["all"] | one["printed"]


def cells(paper: str) -> Iterator[Cell]:
    """The tables of a paper whose runs a simulator makes."""
    if paper == "distfl":
        import federations

        federations.data = lambda name, load=federations.data: dealt(load(name))
    if paper == "cgau":
        without_the_extractor()
    every = [*listed(paper, "cells" if paper == "metis" else "small")]
    for part, name, printed in tables(paper):
        here = [one for one in every if part in (one.part, one.case) and (paper != "metis" or one.case == METIS_CELL)]
        method = DESCRIBED.get(part, DESCRIBED.get(paper))
        own = next(one for one in here if one.label.partition(",")[0] == method)
        yield name, printed, own.begin, SEEDS, [one.label for one in here]


def smmd() -> Iterator[tuple[str, dict[str, str], dict[str, str], int, Labels]]:
    """Tables 1 to 3, whose settings are those of a transfer."""
    import conditions

    found = conditions.rows("small", 3)
    yield "Tables 1 to 3", {what: paper for what, paper, _ in found}, {what: ours for what, _, ours in found}, 3, ()


def described(case: Case, seeds: int) -> dict[str, str]:
    """Return the conditions of a run."""
    recipe, clients, training = case.recipe, case.clients, case.recipe.training
    sizes = [clients.size(client, "train") for client in range(len(clients))]
    classes = [len(set(clients.rows(client, "train").y.tolist())) for client in range(len(clients))]
    held = sum(clients.size(client, "validation") for client in range(len(clients)))
    model = case.model(0)
    count, unit = (training.steps, "step") if getattr(training, "steps", None) else (training.epochs, "epoch")
    stop = case.options.get("stop") or {}
    return {
        "data": case.data, "clients": str(len(clients)), "rows each": _span(sizes), "classes each": _span(classes),
        "validation": f"{held / (held + sum(sizes)):.0%} of the rows" if held else "none",
        "network": f"{type(model).__name__}, {sum(part.numel() for part in model.parameters()):,} parameters",
        "weights": WEIGHTS.get(recipe.aggregation.kind, recipe.aggregation.kind),
        "private": getattr(recipe.sharing, "private_layers", None) or "nothing",
        "in a round": _cohort(getattr(recipe.scheduling, "cohort", 1.0)),
        "local training": f"{count} {unit}{'s' if count != 1 else ''}", "lr": f"{training.lr:g}",
        "momentum": f"{training.momentum:g}", "batch": str(training.batch),
        "rounds": str(case.options.get("rounds") or f"{stop.get('seconds', 0):,.0f} s"), "seeds": str(seeds),
    }  # fmt: skip


def _span(values: list[int]) -> str:
    return " to ".join(dict.fromkeys(f"{value:,}" for value in (min(values), max(values))))


def _cohort(cohort: float) -> str:
    return "all" if cohort == 1.0 and isinstance(cohort, float) else str(cohort)


def beside(printed: str, labels: Labels) -> str:
    """Return the methods of a table beside the paper's: those that are missing, and those that the paper has not."""
    theirs, ours = printed.split(" / "), dict.fromkeys(labels)
    missing = [name for name in theirs if not any(label.partition(" (")[0] == name for label in ours)]
    more = [label for label in ours if label.partition(" (")[0] not in theirs]
    parts = [*(["without " + " / ".join(missing)] if missing else []), *(["also " + " / ".join(more)] if more else [])]
    return ", ".join(parts) or printed


def row(name: str, paper: Mapping[str, str], ours: Mapping[str, str]) -> list[str]:
    """Return a table's name, and what differs from what the paper prints."""
    apart = {what: here for what, here in ours.items() if paper.get(what, here) not in (here, "not printed")}
    return [name, "; ".join(f"{what} {paper[what]} → {here}" for what, here in apart.items())]


def page(text: str, rows: list[list[str]]) -> str:
    """Return a paper's page with one row for each of its tables that differs; an empty row stays as the page has it."""
    before = {(line := markdown.cells(row))[0]: line for row in block(text, "deviations").splitlines()}
    rows = [given if len(given) > 1 else before.get(given[0], [given[0], ""]) for given in rows]
    text = text if HEADING in text else f"{text.rstrip()}\n\n{HEADING}\n"
    inside = table(["table", "the paper → here"], [given for given in rows if given[1]])
    return put(text, "deviations", inside, append=True)


def read(paper: str) -> list[list[str]]:
    """Return the rows of a paper's tables; that of a table whose data are not here has its name only."""
    rows = []
    for name, printed, begin, seeds, labels in smmd() if paper == "smmd" else cells(paper):
        try:
            if callable(begin):
                ours = described(capture(begin), seeds) | {"methods": beside(printed["methods"], labels)}
            rows.append(row(name, printed, ours if callable(begin) else begin))
        except SettingError as error:
            print(f"{paper}, {name}: its row stays: {error}", file=sys.stderr)
            rows.append([name])
    return rows


def main(papers: list[str]) -> None:
    """Write the tables of some papers; each is read in a process of its own, since programs have modules alike."""
    for paper in papers or ["distfl", "hdafl", "metis", "cgau", "smmd"]:
        done = subprocess.run(
            [sys.executable, __file__, "--read", paper], cwd=ROOT / "benchmarks" / paper, stdout=subprocess.PIPE,
            text=True, check=True,
        )  # fmt: skip
        path = ROOT / "docs" / "papers" / f"{paper}.md"
        path.write_text(page(path.read_text("utf-8"), json.loads(done.stdout.splitlines()[-1])), "utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--read"]:
        sys.path[:0] = [str(ROOT / "benchmarks" / sys.argv[2]), str(ROOT)]
        print(json.dumps(read(sys.argv[2])))
    else:
        main(sys.argv[1:])
