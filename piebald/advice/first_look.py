"""Step 1 of `piebald advise`: look at clients before any training.

look(clients, model=None, *, fleet=None, recipes=None, disagreement=0.1, loss=None, metrics=None, seed=0) -> Look

Look.text()     plain text within 80 columns, ends with a line break
Look.rows()     {"federation": [...], "unlikeness": [...], "unusable": [...], "clients": [...]}: lists of rows
                (dicts of plain values) for a page or for JSON
Look.unlikeness["label"].word, .value       one of `unlikeness.KINDS`
Look.unusable["distfl"]                     why a recipe cannot be used; usable recipes are not in it
Look.detectable("validation"), ("test")     smallest difference in accuracy that the rows can show, 0 to 1, or None
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Unpack

import numpy as np

import piebald.runtimes  # noqa: F401 - registers the runtimes
from piebald.advice.odd_sites import DISAGREEMENT, detectable_difference
from piebald.advice.unlikeness import Unlikeness, unlikeness
from piebald.contracts import Clients, Fleet, HoldsRows, RowsAtSites, Split
from piebald.core.arguments import Fraction, Seed
from piebald.core.errors import SettingError
from piebald.core.plain_text import printable
from piebald.data.clients.sources import clients_of
from piebald.experiments.run_settings import ObjectiveKeywords, RunSettings, takes
from piebald.methods.catalog import recipes as all_recipes
from piebald.methods.recipe import Recipe
from piebald.runs.prepare import Model, prepare

WIDTH = 80
SPLITS: tuple[Split, ...] = ("train", "validation", "test")


@dataclass(frozen=True, slots=True)
class Look:
    """Properties of clients before training.

    Attributes:
        names: of the clients.
        sizes: rows of each client by split, None where they are not known here.
        classes: number of classes, None where targets are not classes.
        unlikeness: each kind of unlikeness by its name.
        unusable: why recipes cannot be used, by label; empty if no model was given.
        asked: the number of recipes that were asked whether they can be used.
        disagreement: share of rows on which one of two methods is right and the other wrong, assumed for `detectable`.
        counts: rows of each class of each client, where they are known.
    """

    names: Sequence[str]
    sizes: Mapping[Split, Sequence[int] | None]
    classes: int | None
    unlikeness: Mapping[str, Unlikeness]
    unusable: Mapping[str, str] = field(default_factory=dict)
    asked: int = 0
    disagreement: float = DISAGREEMENT
    counts: Sequence[Sequence[int]] | None = None

    def detectable(self, split: Split) -> float | None:
        """The smallest difference in mean accuracy that the rows of a split can show, see `detectable_difference`.

        None where there are no rows, where they cannot be counted here, or where targets are not classes.
        """
        # a real target has no share of rows on which methods disagree
        rows = self.sizes.get(split)
        return None if rows is None or self.classes is None else detectable_difference(rows, self.disagreement)

    def text(self) -> str:
        """Plain text for a terminal of 80 columns."""
        lines = ["What there is", *self._sizes_text(), "", "What can be seen at all", *self._detectable_text()]
        lines += ["", "How the clients differ (0 alike, 1 nothing in common)"]
        for measure in self.unlikeness.values():
            lines += _wrapped(measure.sentence())
        if self.asked:
            lines += ["", f"What cannot be used ({len(self.unusable)} recipes)"]
            for group in grouped(self.unusable):
                lines += _wrapped(f"{', '.join(group['recipes'])}: {group['why']}")
        return "\n".join(lines) + "\n"

    def rows(self) -> dict[str, list[dict[str, Any]]]:
        """Tables of plain values: of the federation, of unlikeness, of unusable recipes, and of clients."""
        federation = [
            {"split": split, "rows": None if self.sizes[split] is None else sum(self.sizes[split] or ()),
             "detectable": self.detectable(split)}
            for split in SPLITS
        ]  # fmt: skip
        return {
            "federation": federation,
            "unlikeness": [measure.row() for measure in self.unlikeness.values()],
            "unusable": grouped(self.unusable),
            "clients": [self._client_row(client) for client in range(len(self.names))],
        }

    def _client_row(self, client: int) -> dict[str, Any]:
        row: dict[str, Any] = {"client": self.names[client]}
        for split in SPLITS:
            rows = self.sizes[split]
            row[split] = None if rows is None else rows[client]
        if self.counts is not None:
            row["classes"] = sum(count > 0 for count in self.counts[client])
        for kind, measure in self.unlikeness.items():
            if measure.clients is not None and client < len(measure.clients):
                value = float(measure.clients[client])
                row[kind] = None if np.isnan(value) else value
        return row

    def _sizes_text(self) -> list[str]:
        train = self.sizes["train"]
        targets = "numbers to predict" if self.classes is None else f"{self.classes} classes"
        if train is None:
            return _wrapped(f"{len(self.names)} clients, {targets}; their rows are where this machine cannot count")
        lines = _wrapped(
            f"{len(self.names)} clients with {min(train):,} to {max(train):,} training rows (median "
            f"{np.median(train):,.0f}), {targets}"
        )
        if self.counts is not None and self.classes is not None:
            held = [sum(count > 0 for count in counts) for counts in self.counts]
            lines += _wrapped(f"classes at a client: {min(held)} to {max(held)} (median {np.median(held):.0f})")
        return lines

    def _detectable_text(self) -> list[str]:
        lines: list[str] = []
        for split, use in (("validation", "to choose a method by"), ("test", "to check it once")):
            rows = self.sizes[split]  # type: ignore[index]
            if rows is None:
                lines += _wrapped(f"{split} rows cannot be counted here")
                continue
            if not sum(rows):
                lines += _wrapped(f"no {split} rows {use}" + (": nothing can be chosen" if split != "test" else ""))
                continue
            held = [count for count in rows if count]
            each = f"{held[0]:,}" if min(held) == max(held) else f"{min(held):,} to {max(held):,}"
            sentence = f"with {len(held)} clients of {each} {split} rows {use}"
            smallest = self.detectable(split)  # type: ignore[arg-type]
            if smallest is not None:
                sentence += f", differences below {100 * smallest:.1f} points cannot be told apart"
            lines += _wrapped(sentence)
        if any("differences" in line for line in lines):
            lines += _wrapped(
                f"(a true difference of that size is found four times in five, if two methods disagree on "
                f"{100 * self.disagreement:.0f} % of the rows; other seeds and other clients add to it)"
            )
        return lines


@takes(ObjectiveKeywords)
def look(
    clients: Clients | Any,
    model: Model | None = None,
    *,
    fleet: Fleet | None = None,
    recipes: Mapping[str, Recipe | str] | None = None,
    disagreement: Fraction = DISAGREEMENT,
    seed: Seed = 0,
    **objective: Unpack[ObjectiveKeywords],
) -> Look:
    """Look at clients before any training: sizes, detectable differences, unlikeness, recipes that cannot be used.

    Only training rows are looked at; validation and test rows are counted.  Rows that are not in memory, or at their
    sites, are not fetched, and the text says what is not known for that reason.

    Args:
        clients: a `Clients` value, or anything that `clients_from` accepts.
        model: a module, or a function of the seed that makes one, to ask recipes whether they can train it; None asks
            no recipe.
        fleet: the clients' devices, if known.
        recipes: the recipes to ask, by label; all by default.
        disagreement: share of rows on which one of two methods is right and the other wrong, for the smallest
            difference that can be seen.
        seed: seed of the rows that are drawn for measures.
        objective: `loss` and `metrics`, as given to `run`.

    Raises:
        SettingError: the clients or the model cannot be used at all.

    Examples:
        >>> import piebald
        >>> split = piebald.partition.Iid(clients=4, validation=0.2, test=0.2, limit=200)
        >>> seen = look(split.split(piebald.data.digits()))
        >>> print(seen.text().splitlines()[1].strip())
        4 clients with 30 to 30 training rows (median 30), 10 classes
        >>> seen.unlikeness["size"].word
        'none'
    """
    held = clients_of(clients)
    refused: dict[str, str] = {}
    tried = {} if model is None else every_recipe() if recipes is None else dict(recipes)
    if model is not None:
        refused = unusable(held, model, tried, RunSettings.of_call({**objective, "seed": seed}))
    return Look(
        names=[printable(name) for name in held.names],
        sizes={split: _sizes(held, split) for split in SPLITS},
        classes=None if held.classes is None else len(held.classes),
        unlikeness={measure.kind: measure for measure in unlikeness(held, fleet, seed)},
        unusable=refused,
        asked=len(tried),
        disagreement=disagreement,
        counts=_counts(held),
    )


def _sizes(clients: HoldsRows, split: Split) -> list[int] | None:
    sizes = [clients.size(client, split) for client in range(len(clients))]  # type: ignore[arg-type]
    # one unknown size makes sums and medians wrong, so none is told
    return None if any(size is None for size in sizes) else [size or 0 for size in sizes]


def _counts(clients: Clients) -> list[list[int]] | None:
    if clients.classes is None:
        return None
    table = [clients.counts(client, "train") for client in range(len(clients))]
    return None if any(counts is None for counts in table) else [list(counts or ()) for counts in table]


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(printable(text), WIDTH - 2, initial_indent="  ", subsequent_indent="    ")


def unusable(clients: Clients, model: Model, asked: Mapping[str, Recipe | str], options: RunSettings) -> dict[str, str]:
    """The recipes that would be refused before the first round, each with the sentence that refuses it.

    Args:
        clients, model: as given to `run`.
        asked: recipes, or names of recipes with their default settings, by label.
        options: the options that the recipes would run with; the runtime is the one where the rows are.
    """
    at_sites = isinstance(clients, RowsAtSites) and clients.elsewhere
    # An engine is named, or the simulator would train some steps for each recipe to find the fastest.
    runtime = {"kind": "federation"} if at_sites else {"kind": "simulator", "engine": "sequential"}
    options = options.model_copy(update={"runtime": runtime})
    refused = {}
    for label, recipe in asked.items():
        try:
            prepare(recipe, clients, model, options)
        except SettingError as error:
            refused[label] = str(error)
    return refused


def every_recipe() -> dict[str, Recipe | str]:
    """All recipes by name, with their default settings."""
    return {name: name for name in all_recipes.names()}


def grouped(reasons: Mapping[str, str]) -> list[dict[str, Any]]:
    """Rows of a reason and the recipes that it holds for, the most frequent first."""
    by_reason: dict[str, list[str]] = {}
    for label, reason in reasons.items():
        by_reason.setdefault(reason, []).append(label)
    return [
        {"recipes": labels, "why": reason}
        for reason, labels in sorted(by_reason.items(), key=lambda item: -len(item[1]))
    ]
