"""Plugins: the modules of users that a run needs, whose components, models and functions can be named where ours can.

A module is imported because its user names it: in `plugins` of an experiment file, as "mylab" where it is installed or
by its file, "lab/mylab.py"; as "mylab:Net" where a name is allowed; or by installing a package with an entry point in
the group "piebald.components".  A registered component can then be named by its kind, like every other.  Who may name
what is in `piebald.core.references`.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import WrapValidator

from piebald.contracts.component import Component, imported, knows
from piebald.core.arguments import check_some
from piebald.core.errors import SettingError, shown, unknown
from piebald.core.objective import InUnit, Objective, named_metrics, objective_for
from piebald.core.pytree import Tree
from piebald.core.references import USERS, Reference, Resolver, failed, is_reference, module_name


class Plugin(NamedTuple):
    """A module that a run needs, with the version of its package: "" where it has none."""

    module: str
    version: str


def find(name: str, what: str) -> Any:
    """Return what a reference names.

    Raises:
        SettingError: it is text that no resolver has marked, or see `Resolver.find`.
    """
    if not isinstance(name, Reference):
        raise SettingError(f"{what} {shown(name)} is text: pass the class or the function itself")
    return name.resolved(what)


def reference(function: Any, what: str) -> Reference:
    """The "module:name" by which a function is found wherever clients train.

    Args:
        function: a function or class, defined at the top of its module.
        what: what it is, for messages.

    Raises:
        SettingError: it cannot be found by a name, such as a lambda.
    """
    module, name = getattr(function, "__module__", None), str(getattr(function, "__qualname__", ""))
    # a lambda, or a function inside of another, would be found on no other machine
    held = vars(sys.modules[module]).get(name) if module in sys.modules else None
    if held is not function:
        raise SettingError(
            f"{what} must be a function that has a name at the top of its module, so that it is found wherever clients "
            f"train, got {shown(function)}: define it with def"
        )
    return Reference(f"{module}:{name}", USERS)


def function_name(what: str) -> WrapValidator:
    """The validator of a setting that is a function, or a reference to one, and is kept as a reference.

    Args:
        what: what the function is, for messages.
    """

    def referenced(function: Any, _: Any) -> Reference:
        named = reference(function, what) if callable(function) else function
        found = find(named, what)
        if not callable(found) or isinstance(found, type):  # a class would make an object of each batch
            raise ValueError(f"must name a function, got {shown(named)}")
        return named

    return WrapValidator(referenced)


def call(name: str, what: str) -> Any:
    """Call the function that a reference names; its errors become one sentence.

    Raises:
        SettingError: see `find`, or the function fails.
    """
    function = find(name, what)
    if not callable(function):
        raise SettingError(f"{what} {name!r} must be a function without arguments, got {function!r}")
    try:
        return function()
    except (Exception, SystemExit) as error:
        raise failed(name, "fails", error) from error


def read(value: Any, resolver: Resolver) -> Any:
    """Tables of components as their author's resolver marks them; it discovers more where nobody knows a kind."""
    marked = resolver.mark(value)
    if not all(isinstance(kind, Reference) or knows(kind) for kind in _kinds(marked)):
        resolver.discover()
    return marked


def _kinds(value: Any, whole: bool = True) -> list[str]:
    """The kinds of components: the whole value where it is text, entries of a list, and those in tables."""
    if isinstance(value, str):
        return [value] if whole else []
    if isinstance(value, list | tuple):
        return [kind for inner in value for kind in _kinds(inner, whole)]
    if not isinstance(value, Mapping):
        return []
    return [kind for name, inner in value.items() for kind in _kinds(inner, name == "kind")]


def objective_named(targets: Tree, loss: Any, metrics: Any) -> Objective:
    """`objective.objective_for`, where the loss and metrics may be references.

    A metric is then called by the name alone.  The settings beside the name of a loss are its arguments.
    """
    settings = dict(loss) if isinstance(loss, Mapping) else {"name": loss}
    named = settings.pop("name", None)
    if isinstance(named, Reference):
        loss = _with_settings(named, settings)
    if isinstance(metrics, list | tuple) and any(isinstance(metric, Reference) for metric in metrics):
        name = objective_for(targets, loss).name
        metrics = dict(_metric(metric, name) for metric in metrics)
    objective = objective_for(targets, loss, metrics)
    return replace(objective, name=str(named)) if isinstance(named, Reference) else objective


def _with_settings(named: Reference, settings: Mapping[str, Any]) -> Any:
    """A loss of a plugin with its settings, which are arguments after the outputs and the targets."""
    loss = named.resolved("loss")
    if not settings or not callable(loss):
        return loss
    names = [*inspect.signature(loss).parameters][2:]
    for setting in settings:
        if setting not in names:
            raise unknown(f"setting of loss {str(named)!r} called", setting, names)
    check_some(loss, {name: value for name, value in settings.items() if isinstance(value, str | bool | int | float)})
    return partial(loss, **settings)


def _metric(name: Any, objective: str) -> tuple[str, Any]:
    """Return the name of a metric of a list and the metric."""
    if not isinstance(name, Reference):
        return next(iter(named_metrics([name], objective).items()))
    metric = name.resolved("metric")
    short = name.rpartition(":")[2].rpartition(".")[2]
    return short, metric() if isinstance(metric, type) else metric  # a class of torchmetrics


def needed_by(values: Iterable[Any], named: Any = None) -> tuple[Plugin, ...]:
    """The modules outside of Piebald, Python and torch that define these objects or their classes.

    Args:
        values: components, models, functions; components and sequences inside of them are looked into.
        named: tables such as the settings of an experiment file; the modules that they name are added, by `plugins`, a
            kind, or a reference, if they were imported.
    """
    modules = {module for value in values for module in modules_of(value)} | modules_named_in(named)
    return tuple(Plugin(module, version(module)) for module in sorted(modules))


def modules_of(value: Any) -> set[str]:
    """Modules of an object's class, and of the components, classes and functions inside of it."""
    if isinstance(value, Component):
        inner = {module for name in type(value).model_fields for module in modules_of(getattr(value, name))}
        named = {reference.rpartition(":")[0] for reference in value.references()}
        return inner | _foreign(type(value).__module__) | {module for name in named for module in _foreign(name)}
    if isinstance(value, Mapping):
        return {module for entry in value.values() for module in modules_of(entry)}
    if isinstance(value, list | tuple):
        return {module for entry in value for module in modules_of(entry)}
    if isinstance(value, partial):  # a loss with settings
        return modules_of(value.func)
    if isinstance(value, InUnit):
        return modules_of(value.metric)
    if callable(value) or isinstance(value, type):
        return _foreign(getattr(value, "__module__", None) or type(value).__module__)
    return _foreign(type(value).__module__)


def modules_named_in(value: Any) -> set[str]:
    """The modules that settings of an experiment name, as a plugin, by a kind or a reference, and that are imported."""
    if isinstance(value, Mapping):
        kind = value.get("kind")
        registries = imported() if isinstance(kind, str) else ()
        of_kind = [kinds[kind].__module__ for kinds in registries if kind in kinds]
        plugins = value.get("plugins")
        listed = plugins if isinstance(plugins, list) else []
        inside = [modules_named_in(inner) for inner in value.values()]
        return {name for module in (*of_kind, *listed) for name in _foreign(module)}.union(*inside)
    if isinstance(value, list | tuple):
        return {module for entry in value for module in modules_named_in(entry)}
    if not is_reference(value):
        return set()
    module = module_name(value.rpartition(":")[0])
    return _foreign(module) if module in sys.modules else set()


def use_recorded(plugins: Iterable[Sequence[str]], whose: str, resolver: Resolver) -> list[str]:
    """Import the modules that a run needs, unless they are there already; returns notes about other versions.

    Args:
        plugins: modules and versions, as `needed_by` returned them when the run began.
        whose: the run, for messages, e.g. ``"the run in runs/fedavg"``.
        resolver: that of the run's author.

    Raises:
        SettingError: a module is not allowed, does not exist, or fails.
    """
    notes = []
    for recorded in plugins:
        if not (
            isinstance(recorded, list | tuple)
            and len(recorded) == 2
            and all(isinstance(word, str) for word in recorded)
        ):
            raise SettingError(
                f"{whose} must say which plugins it needs as modules and versions, got {shown(recorded)}"
            )
        plugin = Plugin(*recorded)
        # a notebook may define a module's classes itself, which an import would replace
        if plugin.module not in sys.modules:
            try:
                resolver.use([plugin.module])
            except SettingError as error:
                package = f"{plugin.module} {plugin.version}".rstrip()
                raise SettingError(f"{whose} needs the plugin {package}: {error}") from None
        installed = version(plugin.module)
        if installed != plugin.version:
            recorded_version = plugin.version or "of no version"
            notes.append(f"{whose} has {plugin.module} {recorded_version}, this machine has {installed or 'none'}")
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


def _foreign(plugin: str) -> set[str]:
    module = module_name(plugin)
    top = module.partition(".")[0]
    ours = (
        top in {"piebald", "torch", "torchmetrics", "numpy", "builtins", "__main__"} or top in sys.stdlib_module_names
    )
    return set() if ours else {module}
