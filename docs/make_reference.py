"""Write the pages of docs/reference that are made from the code.

python docs/make_reference.py          write them
python docs/make_reference.py --check  fail if one is out of date
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

from pydantic import BaseModel
from pydantic.fields import FieldInfo

import piebald
import piebald.data.partition
import piebald.runtimes
from piebald import data, models
from piebald.contracts.component import Component
from piebald.core.arguments import type_in_words
from piebald.experiments.recipes import ExperimentFields
from piebald.experiments.run_settings import KEYS, ComparedKeywords, RunKeywords, RunSettings, SearchKeywords
from piebald.federation.link.wire_format import Leaving
from piebald.federation.site.gate import declared
from piebald.federation.site.policy import Policy
from piebald.methods.catalog.recipe_help import allowed, documented

sys.path.insert(0, str(Path(__file__).parent))
from make_pictures import EXAMPLES, VERTICAL

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "reference"
NOTICE = "<!-- Made by docs/make_reference.py from the docstrings: change those, not this page. -->"
PRIVACY = ROOT / "docs" / "explanation" / "privacy.md"
MARK = "<!-- The table of releases is made by docs/make_reference.py. -->"
NONE = "No settings."
TYPES = ("whole number", "number", "text", "true or false", "list", "table")  # which a default shows
PRIVATE = "[private layers](../howto/private-layers.md)"

# The axes of a recipe: the question that its component answers.
AXES = {
    "training": "How does a client train?",
    "sharing": "Which parameters leave the client?",
    "transforms": "What is done to an update between client and server?",
    "scheduling": "When does the server request training, and when does it step?",
    "clustering": "Which clients are aggregated with which?",
    "aggregation": "How are updates combined?",
    "server_optimizer": "How does the global model move?",
}
# Settings of trainers that are components themselves.
TRAINER_SETTINGS = {
    "optimizer": "How parameters move along their gradients",
    "lr_schedule": "How the learning rate changes from server step to server step",
    "step_schedule": "How the learning rate changes within a task",
    "augmentation": "How a batch changes at random before each step",
}


def kinds(axis: str) -> list[tuple[str, type[Component]]]:
    """Piebald's own components of an axis; others may have been registered in this process."""
    return [
        (name, component)
        for name, component in sorted(Component.registry[axis].items())
        if component.__module__.startswith("piebald.")
    ]


def summary(thing: Any) -> str:
    """A docstring without its sections, as one paragraph for each of its paragraphs."""
    text = re.split(r"\n\s*(?:Attributes|Args|Raises|Returns|Examples):", inspect.getdoc(thing) or "")[0]
    text = text.replace("`parameters.matching`", PRIVATE)
    return "\n\n".join(" ".join(block.split()) for block in text.split("\n\n"))


def first_paragraph(thing: Any) -> str:
    """The first paragraph of a docstring."""
    return summary(thing).partition("\n\n")[0]


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


def brief(line: str) -> str:
    """A setting's line without references in brackets, and without remarks that nobody needs to write a file."""
    line = re.sub(r" \((?=[^()]*(?:\b(?:19|20)\d\d\b|section|table \d|algorithm))[^()]{25,}\)", "", line)
    line = re.sub(r",? \(?see `[\w.]+`\)?", "", line)
    line = re.split(r"\. (?=(?:Ours|With|Running|The paper|The file|The larger|Numbers are|Where all|Later) ?)", line)[
        0
    ]
    name, _, about = line.partition(": ")
    first, _, rest = about.partition("; ")
    needed = first.count("(") > first.count(")") or re.search(r'["`\[]|None|default|refused|above|at least', rest)
    return line if not rest or needed else f"{name}: {first}"


def settings_of(component: type[BaseModel], skip: frozenset[str] = frozenset()) -> str:
    """The settings of a component, or of a section of a file, as a list."""
    says, lines = documented(component), []
    for name, info in component.model_fields.items():
        default = None if info.is_required() else info.get_default(call_default_factory=True, validated_data={})
        if name in skip or (isinstance(default, BaseModel) and not isinstance(default, Component)):
            continue  # a section of its own
        if not re.search("(set by the recipe|filled in by)", says.get(name, "")):  # nobody writes those
            lines.append(setting_line(info.alias or name, info, allowed(component, name), linked(says.get(name, ""))))
    return "\n".join(lines) if lines else NONE


def setting_line(name: str, info: FieldInfo, may_be: str, about: str) -> str:
    """A setting with its default; what is allowed, unless the default or the description says it."""
    type_, *limits = may_be.split(", ")
    if not info.is_required():
        default = info.get_default(call_default_factory=True, validated_data={})
        given = f"{name} = {written(default)}"
        shown = type_ in TYPES and default is not None
    else:
        given, shown = name, False
    ranges = ", ".join(limits)
    said = "at least" in about or "above" in about or "at most" in about or "in [0" in about or "in (0" in about
    notes = [] if not info.is_required() else ["required"]
    notes += [] if shown or all(option in about for option in type_.split(" or ")) else [type_]
    notes += [ranges] if ranges and not said else []
    noted = f" ({', '.join(notes)})" if notes else ""
    return f"- `{given}`{noted}: {about}".rstrip(": ")


def linked(text: str) -> str:
    """A text with links to pages in place of names in the code."""
    return text.replace("`parameters.matching`", PRIVATE)


def recipe_page() -> str:
    """docs/reference/recipes.md."""
    from piebald.methods.training import Sgd

    listing = {entry["name"]: entry for entry in piebald.recipes.listing()}
    text = [NOTICE, "# Recipes", ""]
    text += ["`recipes.NAME()` in Python, or `name` in the section `[recipe]` of a TOML file.  `piebald recipes` lists"]
    text += [
        "them, `piebald recipes NAME` prints one as TOML.  FedAvg has the default [components](components.md); each"
    ]
    text += [
        "recipe names those in which it differs, where its settings are explained; a default stands here where it is"
    ]
    text += ["the recipe's own.", ""]
    text += ["## Settings of all recipes", ""]
    cohort = listing["fedavg"]["fields"]["cohort"]
    text += [f"- `cohort = {written(cohort['default'])}`: {cohort['doc']}"]
    text += ["- those of [sgd](components.md#training--sgd): `lr`, `epochs`, `batch`, `momentum`, `optimizer` and more"]
    general = {"cohort", *Sgd.model_fields}
    for name, entry in listing.items():
        own = {field: info for field, info in entry["fields"].items() if field not in general}
        usual = usual_defaults(name)
        settings = ", ".join(
            f"`{field}`" if usual.get(field) == info["default"] else f"`{field} = {written(info['default'])}`"
            for field, info in own.items()
        )
        text += ["", f"## {name}", "", f"{entry['summary']}  *{entry['paper']}.*", ""]
        if parts := parts_of(name):
            text += [f"- Components: {', '.join(parts)}."]
        text += [f"- Settings: {settings}."] if settings else []
    text += ["", "## Tests of recipes", ""]
    text += ["`docs/method_tests.py` names the tests of what each paper claims, of its equations, and of the setting"]
    text += ["with which the recipe is FedAvg or training alone.  [Other"]
    text += ["programs](../../benchmarks/crosscheck/RESULTS.md) compute the same numbers."]
    return "\n".join(text) + "\n"


def usual_defaults(recipe: str) -> dict[str, Any]:
    """Defaults of the settings of a recipe's components, which the page of components has."""
    made = piebald.recipes.make(recipe)
    parts = [part for axis in AXES for part in (made.transforms if axis == "transforms" else [getattr(made, axis)])]
    return {name: info.default for part in parts for name, info in type(part).model_fields.items()}


def parts_of(name: str) -> list[str]:
    """Links to the components in which a recipe differs from FedAvg."""
    made, plain = piebald.recipes.make(name), piebald.recipes.make("fedavg")
    found = []
    for axis in AXES:
        usual = getattr(plain, axis)
        for part in getattr(made, axis) if axis == "transforms" else [getattr(made, axis)]:
            if axis == "transforms" or type(part) is not type(usual):
                found.append(f"[{part.kind}](components.md#{axis}--{part.kind})")
    return found


def components_page() -> str:
    """docs/reference/components.md."""
    text = [NOTICE, "# Components", ""]
    text += ["A recipe has seven components, one on each axis: the folder in `piebald/methods/`, the field of"]
    text += ["`piebald.Recipe` and the key in a TOML file.  A component is chosen by its kind:", ""]
    text += ['```toml\n[recipe]\nname = "fedavg"\naggregation = { kind = "equal_weighted" }\n```', ""]
    text += ['In Python: `recipes.fedavg().with_(aggregation="equal_weighted")`, or an object, `EqualWeighted()`.']
    text += [
        "The whole text, with papers, equations and departures: `help(piebald.methods.aggregation.EqualWeighted)`."
    ]
    known: dict[str, str] = {}
    for axis, question in AXES.items():
        text += ["", f"## {axis}", "", question]
        if axis == "training":
            text += ["", "All trainers but those of scikit-learn have the settings of [sgd](#training--sgd) too."]
        for name, component in kinds(axis):
            text += component_lines(axis, name, component, known)
    for setting, question in TRAINER_SETTINGS.items():
        text += ["", f"## {setting}", "", f"{question}: the setting `{setting}` of a trainer."]
        for name, component in kinds(setting):
            text += component_lines(setting, name, component, known)
    text += ["", "## runtime", "", "Where a recipe runs: the section `[runtime]`, or the argument `runtime`."]
    for name, component in kinds("runtime"):
        text += component_lines("runtime", name, component, known)
    return "\n".join(text) + "\n"


def component_lines(axis: str, name: str, component: type[Component], known: dict[str, str]) -> list[str]:
    """A section about one component.

    Args:
        axis, name, component: what it is about.
        known: the sections in which settings were explained, by their lines; those are named and not explained again.
    """
    from piebald.methods.training import Sgd

    about = re.sub(r" \((?:[^()]|\([^()]*\))*\b(?:19|20)\d\d\b(?:[^()]|\([^()]*\))*\)", "", first_paragraph(component))
    text = ["", f"### {axis} = {name}", "", about]
    shared = issubclass(component, Sgd) and component is not Sgd
    own = settings_of(component, frozenset(Sgd.model_fields) if shared else frozenset())
    if own == NONE:
        return text
    here, elsewhere = f"{axis}--{name}", dict[str, list[str]]()
    lines = []
    for line in map(brief, own.splitlines()):
        home = known.setdefault(line, here)
        if len(line) < 60 or home == here:
            lines.append(line)
        else:
            elsewhere.setdefault(home, []).append(re.sub(r"^- (`\w+).*?`.*", r"\1`", line))
    lines += [f"- {', '.join(names)}: as of {linked_kind(home)}" for home, names in elsewhere.items()]
    return [*text, "", *lines]


def linked_kind(home: str) -> str:
    """A link to a component's section."""
    return f"[{home.partition('--')[2]}](#{home})"


def partition_page() -> str:
    """docs/reference/partitions.md."""
    from piebald.data.partition.data_change import DataChange
    from piebald.data.partition.devices import Devices
    from piebald.data.partition.partition import Partition

    shared = frozenset(Partition.model_fields)
    text = [
        NOTICE,
        "# Partitions, devices, models and data sets",
        "",
        "## Partitions: which client holds which rows",
        "",
    ]
    text += [first_paragraph(sys.modules["piebald.data.partition.partition"]), ""]
    text += ["In a TOML file: `[partition]` with a `kind`.  In Python: `partition.Iid(clients=10).split(dataset)`."]
    text += ["Your own data needs none of them: see [bring your own data](../howto/your-data.md).", ""]
    text += ["All partitions but `sites` have these settings:", "", settings_of(Partition)]
    for name, component in kinds("partition"):
        text += ["", f"### {name}", "", first_paragraph(component), ""]
        if name in EXAMPLES:
            picture = f"![{name}](../images/partitions/{name}.png)"
            text += [picture, "", f"*`{EXAMPLES[name]}`*", "", settings_of(component, shared)]
        else:
            text += ["For [real federations](../howto/federation.md).  It has these settings and no others:", ""]
            text += [settings_of(component)]
    text += ["", "## Sizes: how many rows each client gets", ""]
    text += ['The setting `sizes` of some partitions: `sizes = { kind = "power_law", exponent = 1.5 }`.']
    text += ["", "![sizes](../images/partitions/sizes.png)"]
    for name, component in kinds("sizes"):
        text += ["", f"### sizes = {name}", "", first_paragraph(component), "", settings_of(component)]
    text += ["", "## Changes: what is done to clients' rows after the split", ""]
    text += ['The setting `changes` of all partitions: `changes = [{ kind = "flip_random", share = 0.3 }]`.', ""]
    text += ["All changes have these settings:", "", settings_of(DataChange), ""]
    text += ["![flipped labels](../images/partitions/flips.png)", ""]
    text += ["![changed inputs](../images/partitions/changes.png)"]
    change = frozenset(DataChange.model_fields)
    for name, component in kinds("change"):
        text += ["", f"### change = {name}", "", first_paragraph(component), "", settings_of(component, change)]
    text += ["", "## Vertical: which party holds which features", "", summary(piebald.data.partition.Vertical), ""]
    text += ["![vertical](../images/partitions/vertical.png)", "", f"*`{VERTICAL}`*", ""]
    text += [settings_of(piebald.data.partition.Vertical)]
    text += ["", "## Devices: how fast clients are", ""]
    text += ["In a TOML file: `[fleet]` with a `kind`.  In Python: `Simulator(fleet=partition.FastSlow())`."]
    text += ["", "![devices](../images/partitions/fleets.png)"]
    text += ["", "All have these settings:", "", settings_of(Devices)]
    for name, component in kinds("fleet"):
        text += [
            "",
            f"### {name}",
            "",
            first_paragraph(component),
            "",
            settings_of(component, frozenset(Devices.model_fields)),
        ]
    return "\n".join([*text, *model_lines(), *dataset_lines()]) + "\n"


def model_lines() -> list[str]:
    """The models: what each is, and its settings."""
    text = ["", "## Models", ""]
    text += ["In a TOML file: `[model]` with a `name`.  In Python: `models.build_model(name, ...)`, or any `nn.Module`"]
    text += ["of [your own](../howto/your-model.md)."]
    text += ["", "| model | what it is | settings |", "|---|---|---|"]
    classes = {name.lower(): getattr(models, name) for name in models.__all__}
    for name in models.names():
        factory = classes[name.replace("_", "")]
        given = ("input_shape", "outputs", "seed")  # by the data and the run
        settings = [setting for setting in inspect.signature(factory).parameters.values() if setting.name not in given]
        shown = ", ".join(
            f"`{setting.name}` (required)" if setting.default is setting.empty
            else f"`{setting.name} = {written(setting.default)}`"
            for setting in settings
        )  # fmt: skip
        text += [f"| `{name}` | {first_paragraph(factory)} | {shown} |"]
    return text


def dataset_lines() -> list[str]:
    """The data sets: what each is, and what it needs."""
    text = ["", "## Data sets", "", "In a TOML file: `[data]` with a `name`.  In Python: `data.load(name)`."]
    text += ["`digits` and `breast_cancer` come with scikit-learn.  The others are looked for in the folder that the"]
    text += ["environment variable `PIEBALD_DATA` names (see [data files](data-files.md)), then in the cache, and are"]
    text += ["otherwise downloaded from their publishers.  `piebald data` lists what is missing, and where it was"]
    text += ["looked for.", "", "| name | what it is |", "|---|---|"]
    return [*text, *(f"| `{name}` | {first_paragraph(getattr(data, name))} |" for name in data.names())]


def transfer_page() -> str:
    """docs/reference/transfer.md."""
    from piebald.vertical.transfer_settings import PartyFile, TransferSettings

    text = [NOTICE, "# Transfers", "", "The file of `piebald transfer`, and `piebald.vertical.TransferSettings`."]
    text += ["See [how to run a transfer](../howto/transfer.md) and [what it hides](../explanation/transfer.md)."]
    text += ["", "## The file", "", summary(TransferSettings), "", settings_of(TransferSettings)]
    for name, field in TransferSettings.model_fields.items():
        section = type(field.get_default(call_default_factory=True))
        if issubclass(section, BaseModel) and not issubclass(section, Component):
            text += ["", f"## [{name}]", "", summary(section), "", settings_of(section)]
    text += ["", "## [files.source], [files.target]", "", summary(PartyFile), ""]
    text += [settings_of(PartyFile)]
    axes = {
        "method": "how the two parties' layers are aligned",
        "backend": "the encryption",
        "kernel": "how similar two hidden rows are (a setting of smmd)",
    }
    for axis, about in axes.items():
        text += ["", f"## {axis}: {about}"]
        for name, component in kinds(axis):
            text += ["", f"### {axis} = {name}", "", first_paragraph(component), "", settings_of(component)]
    return "\n".join(text) + "\n"


def settings_page() -> str:
    """docs/reference/settings.md."""
    text = [NOTICE, "# Settings", "", "## Of a run", ""]
    text += [
        "Keywords of `piebald.run`, and keys of a [TOML file](toml.md), under another name where one is given.  Those"
    ]
    text += ["with one star are keywords of `piebald.compare` too, those with two of `tune` and `advise` as well.", ""]
    hints, usual = get_type_hints(RunKeywords, include_extras=True), RunSettings()
    for name, (*sections, field) in KEYS.items():
        stars = "\\*" * sum(name in keywords.__annotations__ for keywords in (ComparedKeywords, SearchKeywords))
        key = ", ".join([*(f"`{section}.{field}` in a file" for section in sections), type_in_words(hints[name])])
        about = documented(type(usual.evaluate) if sections else RunSettings)[field]
        text.append(f"- `{name} = {written(usual.value(name))}`{stars} ({key}): {about}")
    text += ["", "## Of a file besides", "", settings_of(ExperimentFields, frozenset(RunSettings.model_fields)), ""]
    text += ["`[partition]` and `[fleet]` have the settings of their [kinds](partitions.md), `[runtime]` those of"]
    text += ["[its own](components.md#runtime), `[recipe]` those of a [recipe](recipes.md)."]
    for name in ("data", "prepare", "split", "tune", "advise"):
        for section in sections_in(ExperimentFields.model_fields[name].annotation):
            text += ["", f"## [{name}]", "", summary(section), "", settings_of(section)]
    text += [
        "",
        "## For editors",
        "",
        "`piebald schema` prints the JSON schema of the file.  Editors that know TOML complete",
    ]
    text += [
        "and check by it a file whose first line is `#:schema ./experiment.schema.json`: `piebald new` writes both."
    ]
    return "\n".join(text) + "\n"


def sections_in(annotation: Any) -> list[type[BaseModel]]:
    """The models in an annotation."""
    if isinstance(annotation, type):
        return [annotation] if issubclass(annotation, BaseModel) else []
    return [model for kind in get_args(annotation) for model in sections_in(kind)]


PAGES = {
    "settings.md": settings_page,
    "recipes.md": recipe_page,
    "components.md": components_page,
    "partitions.md": partition_page,
    "transfer.md": transfer_page,
}


def release_lines() -> list[str]:
    """The table of what leaves a site, from the list that its `--check` prints and its gate goes by."""
    own = [kind for kind, _ in kinds("query")]
    strict = Policy(queries=own, least_rows=10)
    answers: dict[str, list[str]] = {}
    for policy, where in ((Policy(queries=own), ""), (strict, " beside `least_rows`")):
        for line in declared(policy):
            if line.leaves is Leaving.ANSWER:
                answers.setdefault(line.name, []).append(f"{line.mechanism}{where}")
    mechanisms: dict[str, list[str]] = {}
    for kind, (usual, hiding) in answers.items():
        same = hiding == f"{usual} beside `least_rows`"
        mechanisms.setdefault(usual if same else f"{usual}; {hiding}", []).append(f"`{kind}`")
    lines = ["| release | what about | mechanism | when |", "|---|---|---|---|"]
    for line in declared(Policy()):
        if line.leaves is not Leaving.ANSWER:
            lines.append(f"| {' | '.join(line.cells)} |")
    about, when = Leaving.ANSWER.about, Leaving.ANSWER.when
    lines += [f"| answer {', '.join(names)} | {about} | {how} | {when} |" for how, names in mechanisms.items()]
    return lines


def privacy_page() -> str:
    """The page about privacy, with the table between its marks made anew."""
    before, _, rest = PRIVACY.read_text("utf-8").partition(MARK)
    return "\n".join([before + MARK, "", *release_lines(), "", MARK + rest.partition(MARK)[2]])


def generated() -> dict[Path, str]:
    """All generated pages, and what they should contain."""
    return {**{FOLDER / name: make() for name, make in PAGES.items()}, PRIVACY: privacy_page()}


def stale() -> list[str]:
    """Pages that are not what the code makes of them."""
    made = generated().items()
    found = [path for path, text in made if not path.exists() or path.read_text("utf-8") != text]
    return [str(path.relative_to(ROOT)) for path in found]


def main() -> int:
    """Write the pages, or check them."""
    parser = argparse.ArgumentParser(description="Write the reference pages that are made from the code.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page is out of date")
    if parser.parse_args().check:
        for name in (old := stale()):
            print(f"{name} is out of date: run python docs/make_reference.py")
        return 1 if old else 0
    FOLDER.mkdir(exist_ok=True)
    for path, text in generated().items():
        path.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
