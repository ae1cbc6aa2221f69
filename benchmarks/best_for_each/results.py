"""RESULTS.md from what was measured."""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from shared.markdown import table
from shared.stored import texts

from piebald.methods.choice import judge

TEXTS = texts(Path(__file__).with_name("page.md"))
CHOSEN_BY = (0, 1, 2)  # seeds of the runs that the guard for a client's own models was chosen by
DRAWS = 400  # of signs, for each client
TITLES = {
    "gives": "what the recipe gives",
    "lowest": "lowest validation loss",
    "shared": "guard for shared models only",
    "one": "one standard error",
    "two": "two standard errors",
}
ERRORS = {"lowest": 0.0, "shared": 1.0, "one": 1.0, "two": 2.0}  # of the guard; the product has "one"
NAMES = {"digits": "digits, Dirichlet(0.3)", "mnist_writers": "MNIST by writer", "har": "HAR by person",
         "heart": "heart, four hospitals"}  # fmt: skip

Client = dict[str, Any]
Groups = dict[tuple[str, str], list[dict[str, Any]]]


def chosen(client: Client, errors: float, own: bool = True) -> str:
    """The model that the guard chooses for a client; without `own` it guards shared models only."""
    models, losses = client["models"], torch.tensor(client["validation"]["loss"])
    alone = models.index("local") if own and "local" in models else None
    return str(models[judge(losses, client["shared"], errors, alone).chosen])


def write(folder: Path, file: Path) -> Path:
    """Write the tables."""
    runs = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    for run in runs:
        run["clients"] = [_measured(one) for one in run["clients"] if _usable(one)]
    groups, fresh = (_grouped([run for run in runs if (run["seed"] in CHOSEN_BY) == known]) for known in (True, False))
    text = TEXTS["head"].format(seeds=", ".join(map(str, sorted({run["seed"] for run in runs}))))
    text += f"## Whether the goal is reached\n\n{_verdict(groups)}{TEXTS['reading']}"
    if fresh:
        text += "The guard for a client's own models was chosen by these runs.  With others,\n"
        text += f"{_seeds(fresh)}:\n\n"
        text += f"{_verdict(fresh)}\n"
    text += _losers(groups, "loss") + _losers(groups, "accuracy") + _scores(groups) + _choices(groups) + _cost(groups)
    file.write_text(text)
    return file


def _grouped(runs: list[dict[str, Any]]) -> Groups:
    found: Groups = {}
    for name in NAMES:
        for recipe in ("fedavg", "hdafl"):
            if own := [run for run in runs if (run["federation"], run["recipe"]) == (name, recipe)]:
                found[name, recipe] = own
    return found


def _seeds(groups: Groups) -> str:
    seeds = sorted({run["seed"] for runs in groups.values() for run in runs})
    names = ", ".join(dict.fromkeys(NAMES[name] for name, _ in groups))
    return f"seeds {', '.join(map(str, seeds))}, of {names}"


def _usable(client: Client) -> bool:
    return "local" in client["models"] and len(client["test"]["loss"][0]) > 1


def _measured(client: Client) -> Client:
    """What each rule chooses for a client, and how that compares with the local model on test rows."""
    names, alone = client["models"], client["models"].index("local")
    roles = {"gives": names[max(client["shared"] - 1, 0)]}
    roles |= {role: chosen(client, errors, role != "shared") for role, errors in ERRORS.items()}
    test = {measure: np.array(values) for measure, values in client["test"].items()}
    together = np.array(client["recordings"].get("test", range(test["loss"].shape[1])))
    compared = {}
    for role, name in roles.items():
        own = names.index(name)
        worse = {
            "loss": test["loss"][own] - test["loss"][alone],
            "accuracy": test["accuracy"][alone] - test["accuracy"][own],
        }
        compared[role] = {"model": name, "score": test["accuracy"][own].mean()} | {
            measure: _lost(values, together, role in ("gives", "one")) for measure, values in worse.items()
        }
    candidates = {name: test["accuracy"][number].mean() for number, name in enumerate(names)}
    return {"compared": compared, "candidates": candidates, "alone": candidates["local"]}


def _lost(worse: np.ndarray, together: np.ndarray, chance: bool) -> dict[str, float]:
    """Whether a client loses by two standard errors of recordings, and of rows, and how often it would by chance."""
    if not worse.any():
        return {"loses": 0.0, "by rows": 0.0, "chance": 0.0}
    _, unit = np.unique(together, return_inverse=True)
    found = {
        "loses": float(_passes(worse[None], unit)[0]),
        "by rows": float(_passes(worse[None], np.arange(len(worse)))[0]),
    }
    if chance:
        signs = _signs(int(unit.max()) + 1)[:, unit]
        found["chance"] = float(_passes(signs * worse, unit).mean())
    return found


def _passes(worse: np.ndarray, unit: np.ndarray) -> np.ndarray:
    """Whether means of differences [draws, rows] are above two standard errors, where units [rows] are drawn as one."""
    mean, count = worse.mean(1, keepdims=True), int(unit.max()) + 1
    sums = (worse - mean) @ (unit[:, None] == np.arange(count)).astype(float)
    error = np.sqrt((sums**2).sum(1) * count / max(count - 1, 1)) / worse.shape[1]
    return np.asarray(mean[:, 0] > 2 * error + 1e-12)


@cache
def _signs(units: int) -> np.ndarray:
    return np.random.default_rng(units).choice([-1.0, 1.0], (DRAWS, units))


def _verdict(groups: Groups) -> str:
    """Whether the goal is reached."""
    heads = ["recipe", "measure", "clients x seeds", "the recipe alone", "one standard error", "goal of 1 %",
             "by chance", "rows one by one", "without HAR"]  # fmt: skip
    lines = []
    for recipe in dict.fromkeys(recipe for _, recipe in groups):
        everybody = [one for (_, made), runs in groups.items() if made == recipe for one in _clients(runs)]
        others = [
            one for (name, made), runs in groups.items() if made == recipe and name != "har" for one in _clients(runs)
        ]
        for measure in ("accuracy", "loss"):
            share = _share(everybody, "one", measure)
            cells = [_share(everybody, "gives", measure), share, "reached" if share <= 0.01 else "**missed**",
                     _share(everybody, "one", measure, "chance"), _share(everybody, "one", measure, "by rows"),
                     _share(others, "one", measure)]  # fmt: skip
            shown = [one if isinstance(one, str) else f"{100 * one:.1f} %" for one in cells]
            lines.append([recipe, measure, len(everybody), *shown])
    return table(heads, lines, "---", "---", "--:", "--:", "--:", "---", "--:") + "\n"


def _clients(runs: list[dict[str, Any]]) -> list[Client]:
    return [client for run in runs for client in run["clients"]]


def _share(clients: list[Client], role: str, measure: str, what: str = "loses") -> float:
    return float(np.mean([one["compared"][role][measure][what] for one in clients]))


def _losers(groups: Groups, measure: str) -> str:
    named = [(NAMES[name], recipe, _clients(runs)) for (name, recipe), runs in groups.items()]
    for recipe in dict.fromkeys(recipe for _, recipe in groups):
        named.append(("**all**", recipe, [client for _, made, own in named if made == recipe for client in own]))
    lines = [
        [name, recipe, len(own), *(f"{100 * _share(own, role, measure):.1f} %" for role in TITLES)]
        for name, recipe, own in named
    ]
    title = f"Clients that lose against training alone, by {measure}"
    return _section(title, ["federation", "recipe", "clients x seeds", *TITLES.values()], lines)


def _section(title: str, heads: list[str], lines: list[list[Any]], said: str = "") -> str:
    """A table below a heading, of two columns of words and others of numbers."""
    return f"## {title}\n\n{said}{table(heads, lines, '---', '---', '--:')}\n\n"


def _scores(groups: Groups) -> str:
    lines = []
    for (name, recipe), runs in groups.items():
        clients = _clients(runs)
        alone = [one["alone"] for one in clients]
        means = [_percent([one["compared"][role]["score"] for one in clients]) for role in TITLES]
        lines.append([NAMES[name], recipe, _percent(alone), *means])
    heads = ["federation", "recipe", "alone", *TITLES.values()]
    return _section("Mean accuracy of clients on test rows", heads, lines)


def _percent(values: list[float]) -> str:
    return f"{100 * sum(values) / len(values):.1f} %"


def _choices(groups: Groups) -> str:
    names = ("global", "personal", "fine_tuned", "mixed", "local")
    lines = []
    for (name, recipe), runs in groups.items():
        clients = _clients(runs)
        taken = Counter(one["compared"]["one"]["model"] for one in clients)
        cells = []
        for model in names:
            scores = [one["candidates"][model] for one in clients if model in one["candidates"]]
            cells.append(f"{100 * taken[model] / len(clients):.0f} % ({_percent(scores)})" if scores else "")
        lines.append([NAMES[name], recipe, *cells])
    title = "What clients choose (one standard error), and what each candidate scores on test rows"
    return _section(title, ["federation", "recipe", *names], lines)


def _cost(groups: Groups) -> str:
    lines = []
    for (name, recipe), runs in groups.items():
        run, choice = (sum(one["seconds"][part] for one in runs) / len(runs) for part in ("run", "choice"))
        steps = sum(one["steps"] for one in runs) // len(runs)
        lines.append([NAMES[name], recipe, f"{steps:,}", f"{run:.0f} s", f"{choice:.0f} s"])
    said = (
        "Seconds of one run without evaluation, and of its clients' choice, on one core that others shared.  Nothing\n"
        "is sent.\n\n"
    )
    return _section("Cost", ["federation", "recipe", "optimizer steps", "run", "choice"], lines, said)[:-1]
