"""Writes the pages of docs/reference that are made from the code.

python docs/make_reference.py          write them
python docs/make_reference.py --check  fail if one is not current
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

import piebald.partition
import piebald.recipes
import piebald.runtimes
from piebald import data, models
from piebald.component import Component
from piebald.recipes import named as registry
from piebald.recipes.describe import allowed, documented

sys.path.insert(0, str(Path(__file__).parent))
from make_pictures import EXAMPLES, VERTICAL

FOLDER = Path(__file__).parent / "reference"
NOTICE = "<!-- Made by docs/make_reference.py from the docstrings: change those, not this page. -->"
NONE = "No settings."
PRIVATE = "[private layers](../howto/private-layers.md)"

AXES = {
    "training": ("How does a client learn?", "client"),
    "share": ("What leaves the client?", "client"),
    "update": ("What befalls an update on its way?", "update"),
    "scheduling": ("When does the server step?", "server"),
    "group": ("Who is averaged with whom?", "server"),
    "aggregation": ("How much does each update count?", "server"),
    "step": ("How does the global model move?", "server"),
    "schedule": ("How does the learning rate change? (the `schedule` of a `learn` part)", "client"),
}


def kinds(axis: str) -> list[tuple[str, type[Component]]]:
    """Piebald's own parts of an axis; others may have been registered in this process."""
    return [
        (name, part)
        for name, part in sorted(Component.registry[axis].items())
        if part.__module__.startswith("piebald.")
    ]


def summary(thing: Any) -> str:
    """A docstring without its sections, as one paragraph."""
    text = re.split(r"\n\s*(?:Attributes|Args|Raises|Returns):", inspect.getdoc(thing) or "")[0]
    text = text.replace("`parameters.matching`", PRIVATE)
    return "\n\n".join(" ".join(block.split()) for block in text.split("\n\n"))


def written(value: Any) -> str:
    """A default as TOML has it."""
    if isinstance(value, Component):
        value = value.table()
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {written(one)}" for key, one in value.items()) + " }"
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, list | tuple):
        return "[" + ", ".join(written(one) for one in value) + "]"
    return str(value)


def cell(text: str) -> str:
    """A text that may stand in a table."""
    return text.replace("|", r"\|")


def rows(lines: list[tuple[str, str, str, str]]) -> str:
    """A table of settings."""
    body = [f"| `{name}` | {default} | {what} | {cell(about)} |" for name, default, what, about in lines]
    return "\n".join(["| setting | default | allowed | what it does |", "|---|---|---|---|", *body])


def part_rows(part: type[Component], skip: frozenset[str] = frozenset()) -> str:
    """The settings of a part."""
    says, lines = documented(part), []
    for name, info in part.model_fields.items():
        if name not in skip:
            default = "*needed*" if info.is_required() else f"`{written(info.get_default())}`"
            lines.append((name, default, allowed(part, name), linked(says.get(name, ""))))
    return rows(lines) if lines else NONE


def recipe_page() -> str:
    """docs/reference/recipes.md."""
    from piebald.training import Sgd

    listing = {entry["name"]: entry for entry in piebald.recipes.listing()}
    text = [NOTICE, "# Recipes", ""]
    text += ["Each is made by a function of its name in `piebald.recipes`, or by `name` in a TOML file's `[recipe]`."]
    text += ["`piebald recipes` prints this list, `piebald recipes NAME` one recipe's settings as TOML.", ""]
    text += ["| recipe | what it does | paper |", "|---|---|---|"]
    text += [
        f"| [`{name}`](#{name}) | {cell(entry['summary'])} | {cell(entry['paper'])} |"
        for name, entry in listing.items()
    ]
    text += ["", "## Settings of all recipes", "", "`cohort` and the settings of local training:", ""]
    default = written(listing["fedavg"]["fields"]["cohort"]["default"])
    about = listing["fedavg"]["fields"]["cohort"]["doc"]
    cohort = ("cohort", f"`{default}`", "whole number, or a share up to 1.0", about)
    text += [rows([cohort]) + "\n" + part_rows(Sgd).split("\n", 2)[2]]
    general = {"cohort", *Sgd.model_fields}
    for name, entry in listing.items():
        made = registry._made[name]
        text += ["", f"## {name}", "", summary(made.function), "", f"*{entry['paper']}*", ""]
        own = {field: about for field, about in entry["fields"].items() if field not in general}
        lines = [own_row(field, about) for field, about in own.items()]
        text += [rows(lines)] if lines else ["It has the settings of all recipes, and no others."]
    return "\n".join(text) + "\n"


def own_row(name: str, about: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """One row for a setting that a recipe has and others have not."""
    return name, f"`{written(about['default'])}`", about["type"], linked(about["doc"])


def linked(text: str) -> str:
    """A text with links to pages in place of names in the code."""
    return text.replace("`parameters.matching`", PRIVATE)


def parts_page() -> str:
    """docs/reference/parts.md."""
    from piebald.training import Sgd

    text = [NOTICE, "# Parts", "", "A recipe is one part for each axis.  A part's kind is what a TOML table names:", ""]
    text += ['```toml\n[recipe]\nname = "fedavg"\nweigh = { kind = "equal" }\n```', ""]
    text += ["In Python: `recipes.fedavg().with_(aggregation=Equal())`, or `with_(aggregation={'kind': 'equal'})`."]
    for axis, (question, folder) in AXES.items():
        text += ["", f"## {axis}: {question}", "", f"In `piebald/{folder}/`."]
        for name, part in kinds(axis):
            text += ["", f"### {axis} = {name}", "", summary(part), ""]
            if issubclass(part, Sgd) and part is not Sgd:
                own = part_rows(part, frozenset(Sgd.model_fields))
                text += [
                    "The settings of [sgd](#learn--sgd)." if own == NONE else f"As [sgd](#learn--sgd), and:\n\n{own}"
                ]
            else:
                text += [part_rows(part)]
    text += ["", "## runtime: where does it run?"]
    for name, part in kinds("runtime"):
        text += ["", f"### runtime = {name}", "", summary(part), "", part_rows(part)]
    return "\n".join(text) + "\n"


def partition_page() -> str:
    """docs/reference/partitions.md."""
    from piebald.partition.data_change import DataChange
    from piebald.partition.partition import Partition

    shared = frozenset(Partition.model_fields)
    text = [NOTICE, "# Partitions, devices, models and data sets", "", "## Partitions: who holds what?", ""]
    text += [" ".join(summary(sys.modules["piebald.partition.partition"]).split("\n\n")[0].split()), ""]
    text += ["In a TOML file: `[partition]` with a `kind`.  In Python: `partition.Iid(clients=10).split(dataset)`."]
    text += ["Your own data needs none of them: see [bring your own data](../howto/your-data.md).", ""]
    text += ["All of them but `sites` have these settings:", "", part_rows(Partition)]
    for name, part in kinds("partition"):
        text += ["", f"### {name}", "", summary(part), ""]
        if name in EXAMPLES:
            picture = f"![{name}](../images/partitions/{name}.png)"
            text += [picture, "", f"*`{EXAMPLES[name]}` on the digits.*", "", part_rows(part, shared)]
        else:
            text += [
                "For [real federations](../howto/federation.md); it has these settings and no others:",
                "",
                part_rows(part),
            ]
    text += ["", "## Sizes: how many rows does each client get?", ""]
    text += ['The setting `sizes` of some partitions: `sizes = { kind = "power_law", exponent = 1.5 }`.']
    text += ["", "![sizes](../images/partitions/sizes.png)"]
    for name, part in kinds("sizes"):
        text += ["", f"### sizes = {name}", "", summary(part), "", part_rows(part)]
    text += ["", "## Changes: what is done to clients' rows after the deal?", ""]
    text += ['The setting `changes` of all partitions: `changes = [{ kind = "flip_random", share = 0.3 }]`.', ""]
    change = frozenset(DataChange.model_fields)
    text += ["All of them have these settings:", "", part_rows(DataChange)]
    text += [
        "",
        "![flipped labels](../images/partitions/flips.png)",
        "",
        "![changed inputs](../images/partitions/changes.png)",
    ]
    for name, part in kinds("change"):
        text += ["", f"### change = {name}", "", summary(part), "", part_rows(part, change)]
    text += ["", "## Vertical: who knows which features?", "", summary(piebald.partition.Vertical), ""]
    text += ["![vertical](../images/partitions/vertical.png)", "", f"*`{VERTICAL}`*", ""]
    text += [part_rows(piebald.partition.Vertical)]
    text += ["", "## Devices: how fast are the clients?", ""]
    text += ["In a TOML file: `[fleet]` with a `kind`.  In Python: `Simulator(fleet=partition.FastSlow())`."]
    text += ["", "![devices](../images/partitions/fleets.png)"]
    for name, part in kinds("fleet"):
        text += ["", f"### {name}", "", summary(part), "", part_rows(part)]
    text += [
        "",
        "## Models",
        "",
        "In a TOML file: `[model]` with a `name`.  In Python: `models.build_model(name, ...)`, or",
    ]
    text += ["any `nn.Module` of [yours](../howto/your-model.md)."]
    for name in models.names():
        cls = models.registry._MODELS[name]
        text += ["", f"### {name}", "", summary(cls), ""]
        settings = list(inspect.signature(cls).parameters.values())[2:]
        shown = ", ".join(f"`{one.name} = {written(one.default)}`" for one in settings)
        text += [f"Settings: {shown}." if shown else NONE]
    text += dataset_lines()
    return "\n".join(text) + "\n"


def dataset_lines() -> list[str]:
    """The data sets: what each is, and what it needs."""
    text = ["", "## Data sets", "", "In a TOML file: `[data]` with a `name`.  In Python: `data.load(name)`."]
    text += ["`digits` comes with scikit-learn.  The others are looked for in the folder that the environment variable"]
    text += [
        "`PIEBALD_DATA` names (see [data files](data-files.md)), then in the cache, and else downloaded from where they"
    ]
    text += ["are published; `piebald data` says what is missing where."]
    for name in data.names():
        text += ["", f"### {name}", "", summary(data.registry._LOADERS[name])]
    return text


def transfer_page() -> str:
    """docs/reference/transfer.md."""
    from piebald.vertical import transfer_settings as settings

    text = [NOTICE, "# Transfers", "", "The file of `piebald transfer`, and `piebald.vertical.Settings`."]
    text += ["See [how to run one](../howto/transfer.md) and [what it hides](../explanation/transfer.md)."]
    sections = {
        "": settings.Settings,
        "data": settings.Data,
        "files.source], [files.target": settings.File,
        "network": settings.Networks,
        "runtime": settings.Runtime,
    }
    for name, section in sections.items():
        text += ["", f"## {f'[{name}]' if name else 'The file'}", "", summary(section), "", section_rows(section)]
    axes = {"method": "what pulls the parties together?", "backend": "under what encryption?"}
    for axis, question in (axes | {"kernel": "how alike are two hidden rows? (a setting of smmd)"}).items():
        text += ["", f"## {axis}: {question}"]
        for name, part in kinds(axis):
            text += ["", f"### {axis} = {name}", "", summary(part), "", part_rows(part)]
    text += ["", "## Environment", ""]
    text += ["`PIEBALD_TRANSFER_SECRET`: 1 to 64 bytes in hexadecimal that both parties share; messages are then"]
    text += ["authenticated.  Used with `--party`."]
    return "\n".join(text) + "\n"


def section_rows(section: Any) -> str:
    """The settings of a section of a transfer's file."""
    says = documented(section)
    lines = []
    for name, info in section.model_fields.items():
        default = info.get_default(call_default_factory=True)
        if isinstance(default, BaseModel) and not isinstance(default, Component):
            continue  # a section of its own
        lines.append((name, f"`{written(default)}`", allowed(section, name), says.get(name, "")))
    return rows(lines)


PAGES = {
    "recipes.md": recipe_page,
    "parts.md": parts_page,
    "partitions.md": partition_page,
    "transfer.md": transfer_page,
}


def stale() -> list[str]:
    """Pages that differ from what the code says."""
    found = []
    for name, make in PAGES.items():
        path = FOLDER / name
        if not path.exists() or path.read_text("utf-8") != make():
            found.append(name)
    return found


def main() -> int:
    """Write the pages, or check them."""
    parser = argparse.ArgumentParser(description="Write the reference pages that are made from the code.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page is not current")
    if parser.parse_args().check:
        for name in (old := stale()):
            print(f"docs/reference/{name} is not current: run python docs/make_reference.py")
        return 1 if old else 0
    FOLDER.mkdir(exist_ok=True)
    for name, make in PAGES.items():
        (FOLDER / name).write_text(make(), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
