"""Plugins: modules of users, whose components, models, data sets and functions can be named where ours can.

A module is imported because its user names it: in `plugins = ["mylab"]` of an experiment file, as "mylab:Net" where a
name is allowed, or by installing a package with an entry point in the group "piebald.components".  A registered
component can then be named by its kind, like every other.

A run folder and the terms of a federation also name modules, and neither may decide what is executed.  So modules are
imported only from Python's own path and from the folders that `search` was given, never from a path that was read
somewhere, nor from a folder that was given to `distrust`; modules of Python's standard library are refused; and after
`restrict`, so is everything that the list given to it does not contain.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from piebald.component import Component, build, knows
from piebald.errors import SettingError, shown, unknown
from piebald.objective import Objective, named_metrics, objective_for
from piebald.origins import is_reference as is_reference
from piebald.origins import modules_named_in, modules_of
from piebald.pytree import Tree

GROUP = "piebald.components"  # of entry points

_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_NAME = _MODULE
_folders: list[Path] = []  # where modules are searched besides Python's path
_distrusted: list[Path] = []  # run folders
DEEPEST = 64  # levels of tables and lists in a component
_allowed: Collection[str] | None = None  # None for all
_discovered = False


class Plugin(NamedTuple):
    """A module that a run needs, with the version of its package: "" where it has none."""

    module: str
    version: str


def search(folder: Path | str) -> None:
    """Find modules in this folder as well, after all others."""
    place = Path(folder).resolve()
    if place not in _folders:
        _folders.append(place)
    if str(place) not in sys.path:
        sys.path.append(str(place))  # so that the modules there find one another, also in workers


def folders() -> tuple[Path, ...]:
    """The folders of `search`."""
    return tuple(_folders)


def distrust(folder: Path | str) -> None:
    """Import nothing that lies in this folder, whatever Python's path is: a run folder holds data."""
    _distrusted.append(Path(folder).resolve())


def restrict(modules: Collection[str] | None) -> None:
    """Import no modules but these, and those inside of them; None allows all.

    A site calls this with its policy before it reads what the server sends.
    """
    global _allowed
    _allowed = None if modules is None else tuple(modules)


def use(modules: Iterable[str]) -> None:
    """Import modules, which register their components and recipes.

    Raises:
        SettingError: one of them is not allowed, does not exist, or fails.
    """
    if isinstance(modules, str) or not all(isinstance(module, str) for module in modules):
        raise SettingError(f"plugins must be a list of modules, like ['mylab'], got {modules!r}")
    for module in modules:
        _imported(module)


def find(reference: str, what: str) -> Any:
    """The object that "module:name" or "file.py:name" names.

    Args:
        reference: the module, or the path of a file relative to the folders of `search`, and the name inside of it.
        what: what is named, for messages, e.g. ``"model"``.

    Raises:
        SettingError: there is no such module or name, it is not allowed, or the import fails.
    """
    module, _, name = reference.rpartition(":")
    if not module or not _NAME.fullmatch(name):
        raise SettingError(f"{what} must be a name or 'module:name', like 'mylab:Net', got {reference!r}")
    found: Any = _of_file(module) if module.endswith(".py") else _imported(module)
    for word in name.split("."):
        known = {*vars(found), *(dir(found) if isinstance(found, ModuleType) else ())}  # some import when asked
        if word.startswith("_") or word not in known:
            public = sorted(name for name in known if not name.startswith("_"))
            raise unknown(f"{what} in {module} called", word, public)
        found = getattr(found, word) if isinstance(found, ModuleType) else vars(found)[word]
    return found


def reference(function: Any, what: str) -> str:
    """The "module:name" by which `find` finds a function.

    Args:
        function: a function or class, defined at the top of its module.
        what: what it is, for messages.

    Raises:
        SettingError: it cannot be found by a name, such as a lambda.
    """
    module, name = getattr(function, "__module__", None), str(getattr(function, "__qualname__", ""))
    held = vars(sys.modules[module]).get(name) if module in sys.modules else None
    if held is not function:
        raise SettingError(
            f"{what} must be a function that has a name at the top of its module, so that it is found wherever clients "
            f"train, got {shown(function)}: define it with def"
        )
    return f"{module}:{name}"


def call(reference: str, what: str) -> Any:
    """What the function that "module:name" names returns; its errors become one sentence.

    Raises:
        SettingError: see `find`, or the function fails.
    """
    function = find(reference, what)
    if not callable(function):
        raise SettingError(f"{what} {reference!r} must be a function without arguments, got {function!r}")
    try:
        return function()
    except (Exception, SystemExit) as error:
        raise _failed(reference, "fails", error) from error


def discover() -> None:
    """Import the modules that installed packages offer in the group "piebald.components", once."""
    global _discovered
    if _discovered:
        return
    _discovered = True
    for entry in metadata.entry_points(group=GROUP):
        if _allowed is None or _is_allowed(entry.module):
            _imported(entry.module)


def resolved(value: Any) -> Any:
    """A component's kind or table, or a list of them, with kinds in place of references; other values as they are.

    Inside of a table only kinds are looked at: other text may have a colon.
    """
    if isinstance(value, list | tuple):  # lists in it are no components, however deep they go
        return [inner if isinstance(inner, list | tuple) else resolved(inner) for inner in value]
    return _kind_of(value) if isinstance(value, str) else _with_kinds(value)


def built(axis: str, given: Any) -> Component:
    """`component.build`, where a kind may be "module:name", and a function stands for the kind "function" of its axis.

    Raises:
        SettingError: see `find` and `component.build`.
    """
    if not isinstance(given, Component) and "function" in Component.registry.get(axis, {}):
        found = find(given, axis) if is_reference(given) else given
        if callable(found) and not isinstance(found, type):
            given = {"kind": "function", "function": given}
    return build(axis, resolved(given))


def objective_named(targets: Tree, loss: Any, metrics: Any) -> Objective:
    """`objective.objective_for`, where the loss and metrics may be named as "module:name".

    A metric is then called by the name alone.  The settings beside the name of a loss are its arguments.
    """
    settings = dict(loss) if isinstance(loss, Mapping) else {"name": loss}
    named = settings.pop("name", None)
    if is_reference(named):
        loss = find(named, "loss")
        loss = partial(loss, **settings) if settings and callable(loss) else loss
    if isinstance(metrics, list | tuple) and any(is_reference(metric) for metric in metrics):
        name = objective_for(targets, loss).name
        metrics = {_short(metric): _metric(metric, name) for metric in metrics}
    made = objective_for(targets, loss, metrics)
    return replace(made, name=named) if is_reference(named) else made


def _short(metric: str) -> str:
    return metric.rpartition(":")[2].rpartition(".")[2]


def _metric(name: str, objective: str) -> Any:
    if not is_reference(name):
        return named_metrics([name], objective)[name]
    found = find(name, "metric")
    return found() if isinstance(found, type) else found  # a class of torchmetrics


def needed_by(values: Iterable[Any], named: Any = None) -> tuple[Plugin, ...]:
    """The modules outside of Piebald, Python and torch that define these objects or their classes.

    Args:
        values: components, models, functions; components and sequences inside of them are looked into.
        named: tables such as the settings of an experiment file; the modules that they name are added, by `plugins`, a
            kind, or a reference, if they were imported.
    """
    modules = {module for value in values for module in modules_of(value)} | modules_named_in(named)
    return tuple(Plugin(module, version(module)) for module in sorted(modules))


def use_recorded(plugins: Iterable[Sequence[str]], whose: str) -> list[str]:
    """Import the modules that a run needs, unless they are there already; returns notes about other versions.

    Args:
        plugins: modules and versions, as `needed_by` returned them when the run began.
        whose: the run, for messages, e.g. ``"the run in runs/fedavg"``.

    Raises:
        SettingError: a module is not allowed, does not exist, or fails.
    """
    notes = []
    for plugin in (Plugin(*given) for given in plugins):
        if plugin.module not in sys.modules:
            try:
                _imported(plugin.module)
            except SettingError as error:
                what = f"{plugin.module} {plugin.version}".rstrip()
                raise SettingError(f"{whose} needs the plugin {what}: {error}") from None
        here = version(plugin.module)
        if here != plugin.version:
            notes.append(f"{whose} has {plugin.module} {plugin.version or 'of no version'}, here is {here or 'none'}")
    return notes


def version(module: str) -> str:
    """The version of the package of a module; for a module that is not installed, a digest of its file."""
    top = module.partition(".")[0]
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(top)
    for distribution in _distributions(sum(1 for _ in metadata.distributions())).get(top, ()):
        return metadata.version(distribution)
    loaded = sys.modules.get(module)
    file = None if loaded is None else loaded.__spec__ and loaded.__spec__.origin
    if file and Path(file).is_file():
        return f"sha256:{hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]}"
    return ""


# -------------------------------------------------------------------------------------------------------------- helpers


@lru_cache(maxsize=1)
def _distributions(installed: int) -> Mapping[str, list[str]]:
    """The distributions of each package; to read them takes half a second, so only when their number has changed."""
    return metadata.packages_distributions()


def _imported(module: str) -> ModuleType:
    if not _MODULE.fullmatch(module):
        raise SettingError(f"a plugin is named like 'mylab' or 'mylab.models', got {module!r}")
    _check_allowed(module)
    before = sys.modules.get(module)
    if before is not None:
        return before
    try:
        found = importlib.util.find_spec(module.partition(".")[0])
        if found is not None and any(_is_distrusted(place) for place in (found.origin, *_places(found))):
            raise ModuleNotFoundError(name=module)
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and (module == error.name or module.startswith(f"{error.name}.")):
            raise SettingError(
                f"there is no module {module!r}: install its package, or start in the folder that holds {module}.py"
            ) from None
        raise _failed(module, "cannot be imported", error) from None
    except (Exception, SystemExit) as error:
        raise _failed(module, "cannot be imported", error) from error


def _of_file(path: str) -> ModuleType:
    """The module in a file, under the name of the file."""
    name = Path(path).stem
    if _allowed is not None:
        raise SettingError(f"{path} is a file, which nobody else has: make it a module, and name that")
    if Path(path).is_absolute() or ".." in Path(path).parts or not _MODULE.fullmatch(name):
        raise SettingError(
            f"a file of Python code is named from the folder that holds it, like my_data.py, got {path!r}"
        )
    known = [folder / path for folder in _folders if (folder / path).is_file()]
    file = next((file for file in known if not _is_distrusted(file)), None)
    if file is None:
        raise SettingError(f"there is no file {path}: start in the folder that holds it")
    before = sys.modules.get(name)
    if before is not None:
        if before.__spec__ is not None and before.__spec__.origin == str(file):
            return before
        raise SettingError(f"{path} has the name of a module that is in use already: rename it")
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[name] = made
    try:
        spec.loader.exec_module(made)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _failed(path, "cannot be imported", error) from error
    return made


def _places(spec: ModuleSpec) -> Sequence[str]:
    return list(spec.submodule_search_locations or ())


def _is_distrusted(file: Path | str | None) -> bool:
    return file is not None and any(folder in Path(file).resolve().parents for folder in _distrusted)


def _failed(name: str, how: str, error: BaseException) -> SettingError:
    if isinstance(error, SettingError):
        return error
    text = " ".join(str(error).split())
    return SettingError(f"{name} {how}: {type(error).__name__}{f': {text}' if text else ''}")


def _check_allowed(module: str) -> None:
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names:
        raise SettingError(f"{module!r} is a module of Python itself, not a plugin")
    if not _is_allowed(module):
        raise SettingError(
            f"the plugin {module!r} is not allowed here: name it in plugins of the policy, if you trust it"
        )


def _is_allowed(module: str) -> bool:
    if _allowed is None:
        return True
    return any(module == one or module.startswith(f"{one}.") for one in (*_allowed, "piebald"))


def _kind_of(name: str) -> str:
    if is_reference(name):
        return _kind(name)
    if not knows(name):
        discover()
    return name


def _with_kinds(value: Any, depth: int = 0) -> Any:
    """Tables with kinds in place of references, at every depth."""
    if not isinstance(value, Mapping | list | tuple):
        return value
    if depth == DEEPEST:
        raise SettingError(f"lists and tables must be nested at most {DEEPEST} deep")
    if isinstance(value, Mapping):
        table = {key: _with_kinds(inner, depth + 1) for key, inner in value.items()}
        return table | {"kind": _kind_of(table["kind"])} if isinstance(table.get("kind"), str) else table
    return [_with_kinds(inner, depth + 1) for inner in value]


def _kind(reference: str) -> str:
    found = find(reference, "component")
    if not (isinstance(found, type) and issubclass(found, Component) and found.kind):
        raise SettingError(f"{reference} must be a component, a class like piebald.training.Trainer, got {found!r}")
    return found.kind
