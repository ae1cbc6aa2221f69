"""Components: frozen values that recipes, partitions and runtimes consist of."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar, Protocol, Self, TypeVar

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError
from pydantic_core import CoreSchema, core_schema

from piebald.contracts.data import ModelSpec
from piebald.core.arguments import STRICT, sentence, settled, wants_list
from piebald.core.discovery import public_classes
from piebald.core.errors import SettingError, shown, unknown
from piebald.core.references import Reference

S = TypeVar("S", bound="Settings")


class RecipeComponents(Protocol):
    """The components of a recipe, one for each question; `recipe.Recipe` has them."""

    @property
    def training(self) -> Component: ...
    @property
    def sharing(self) -> Component: ...
    @property
    def transforms(self) -> Sequence[Component]: ...
    @property
    def scheduling(self) -> Component: ...
    @property
    def clustering(self) -> Component: ...
    @property
    def aggregation(self) -> Component: ...
    @property
    def server_optimizer(self) -> Component: ...


# The packages or modules of Piebald's own components, by axis, those of a recipe first.
HOMES: Mapping[str, tuple[str, ...]] = {
    "training": ("piebald.methods.training",),
    "sharing": ("piebald.methods.sharing",),
    "transforms": ("piebald.methods.transforms", "piebald.methods.attacks", "piebald.privacy.secure_aggregation"),
    "scheduling": ("piebald.methods.scheduling",),
    "clustering": ("piebald.methods.clustering",),
    "aggregation": ("piebald.methods.aggregation",),
    "server_optimizer": ("piebald.methods.server_optimizer",),
    "augmentation": ("piebald.methods.training",),
    "lr_schedule": ("piebald.methods.training",),
    "optimizer": ("piebald.methods.training",),
    "step_schedule": ("piebald.methods.training",),
    "query": (
        "piebald.methods.queries",
        "piebald.methods.choice",
        "piebald.privacy.secure_aggregation",
        "piebald.inference.queries",
    ),
    "partition": ("piebald.data.partition", "piebald.data.clients.sites"),
    "sizes": ("piebald.data.partition",),
    "change": ("piebald.data.partition",),
    "fleet": ("piebald.data.partition",),
    "vertical": ("piebald.data.partition",),
    "runtime": (
        "piebald.runtimes.simulation.simulator",
        "piebald.runtimes.ray.actors",
        "piebald.federation.hub.settings",
    ),
    "tracker": ("piebald.report.callbacks",),
    "kernel": ("piebald.vertical.kernels",),
    "method": ("piebald.vertical.transfer_methods",),
    "backend": ("piebald.vertical.encryption",),
}


def load(*axes: str) -> None:
    """Import Piebald's own components of these axes."""
    for axis in axes:
        for place in HOMES.get(axis, ()):
            public_classes(place)


class Registry(dict[str, dict[str, "type[Component]"]]):
    """Components by axis and kind.  Piebald's own of an axis are imported when one of them is first looked up."""

    def __getitem__(self, axis: str) -> dict[str, type[Component]]:
        load(axis)
        return super().__getitem__(axis)

    def get(self, axis: str, default: Any = None) -> Any:
        load(axis)
        return super().get(axis, default)

    def items(self) -> Any:
        load(*HOMES)
        return super().items()

    def values(self) -> Any:
        load(*HOMES)
        return super().values()


class WordedModel(BaseModel):
    """A model whose invalid values are a `SettingError` in plain English."""

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise SettingError(sentence(error, self.in_words(), type(self).model_fields)) from None

    @classmethod
    def in_words(cls) -> str:
        """Return what messages call the table."""
        return cls.__name__.lower()


class Settings(WordedModel):
    """A frozen table of settings, which can be made in Python as well as from a file.

    Raises:
        SettingError: a setting is unknown, missing or not allowed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, **STRICT)

    def __init__(self, *values: Any, **fields: Any) -> None:
        subject = self.in_words()
        if values:
            names = ", ".join(f"{name}=..." for name in type(self).model_fields) or "nothing"
            raise SettingError(f"{subject} takes its settings by name ({names}), got {shown(values[0])}")
        for name, value in fields.items():
            try:
                fields[name] = settled(value)
                if name in type(self).model_fields and wants_list(type(self).model_fields[name].annotation):
                    fields[name] = list(value) if isinstance(value, list | tuple) else value
            except ValueError as error:
                raise SettingError(f"{subject}: {name} {error}") from None
        super().__init__(**fields)

    def __str__(self) -> str:
        # pydantic's is empty where there are no settings
        return repr(self)

    @classmethod
    def in_words(cls) -> str:
        return "a table"


class Component(Settings):
    """A frozen value on one axis of a recipe.  Its fields are its settings; its kind is its class name in snake case.

    The kind leaves out the name of the axis at the end: `ExampleWeighted` is "example_weighted", and `GaussianKernel`
    on the axis "kernel" is "gaussian".  A subclass registers itself, so a recipe can be rebuilt from (kind, fields) on
    any machine with nothing pickled.
    """

    axis: ClassVar[str] = ""
    protects: ClassVar[bool] = False  # whether it hides rows or updates, by noise or in sums
    kind: ClassVar[str] = ""
    registry: ClassVar[Registry] = Registry()

    @classmethod
    def in_words(cls) -> str:
        return f"{cls.axis} {cls.kind!r}" if cls.kind else cls.axis

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Let a field that is annotated with the base class of an axis take what `build` takes, and write its table."""
        schema = handler(source)
        is_base = getattr(super(cls, cls), "axis", None) == ""  # a choice from outside may say its axis again
        if not is_base or cls.axis not in HOMES:
            return schema
        written = core_schema.plain_serializer_function_ser_schema(lambda component: component.table())
        return core_schema.no_info_before_validator_function(
            lambda table: build(cls.axis, table), schema, serialization=written
        )

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        if "axis" in vars(cls):  # the base class of an axis, not a choice on it
            return
        # snake case: a capital after a small letter or a digit begins a word
        cls.kind = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower().removesuffix(f"_{cls.axis}")
        if not cls.__module__.startswith("piebald."):
            load(cls.axis)  # so that a kind of Piebald's is known to be taken
        kinds = Component.registry.setdefault(cls.axis, {})
        registered = kinds.get(cls.kind)
        # a module that is executed again, as in a notebook, defines its own classes anew
        if registered is not None and (registered.__module__, registered.__qualname__) != (
            cls.__module__,
            cls.__qualname__,
        ):
            raise SettingError(
                f"{cls.axis} {cls.kind!r} is already defined by {registered.__name__} in {registered.__module__}: "
                f"rename {cls.__name__} in {cls.__module__}"
            )
        kinds[cls.kind] = cls

    def needs_server_rows(self) -> bool:
        """Return whether the server must hold rows of its own (`Clients.server_rows`)."""
        return False

    def needs_validation_rows(self) -> bool:
        """Return whether clients must hold validation rows."""
        return False

    def discloses(self) -> str | None:
        """Return what clients tell about their rows for this component, besides updates, or None.

        No privacy budget counts it, so it is refused beside noise and secure aggregation.
        """
        return None

    def asks(self, spec: ModelSpec) -> Sequence[Component]:
        """Return the queries that clients are put for this component, besides training and evaluations.

        The terms of a run name them, so that sites approve them.
        """
        return ()

    def references(self) -> tuple[str, ...]:
        """The functions that its own settings name as "module:name"."""
        return ()

    def incompatible_with(self, recipe: RecipeComponents) -> str | None:
        """Return why this component cannot work beside the other components of a recipe, or None."""
        return None

    def unsupported_model(self, spec: ModelSpec) -> str | None:
        """Return why this component cannot work with a model or its objective, or None; asked before any training."""
        return None

    def unsupported_clients(self, names: Sequence[str]) -> str | None:
        """Return why this component cannot work with the clients of these names, or None; asked before training."""
        return None

    def unsupported_cohort(self, count: int) -> str | None:
        """Return why this component cannot work with the updates of `count` clients at a step, or None; asked before
        anything is trained.
        """
        return None

    def adapted_to(self, recipe: RecipeComponents, spec: ModelSpec) -> Self:
        """This component with those settings filled in that follow from the rest of the recipe and from the model."""
        return self

    @classmethod
    def overrides(cls, *methods: Callable[..., Any]) -> bool:
        """Return whether the class has other methods in place of some of these methods of its base classes.

        What a base class says about itself holds for a subclass only while the methods that it follows from are the
        base class's own.
        """
        return any(getattr(cls, method.__name__, None) is not method for method in methods)

    def table(self) -> dict[str, Any]:
        """This component as plain values: its kind and its fields, without those that are None."""
        return {"kind": self.kind, **self.model_dump(exclude_none=True)}


def imported() -> Collection[dict[str, type[Component]]]:
    """Return the components that have been imported so far, by kind, for each axis; all that are not Piebald's."""
    # not the registry's own method, which imports all axes
    return dict.values(Component.registry)


def knows(kind: str) -> bool:
    """Return whether a component has this kind on some axis; no more is imported than is needed to find one."""
    return any(kind in kinds for kinds in imported()) or any(kind in Component.registry.get(axis, ()) for axis in HOMES)


def build(axis: str, table: Any) -> Component:
    """A component from its `table`, or from its kind alone; a component is returned as it is.

    A kind may be a `Reference` to a component's class.  A function, or a reference to one, stands for the kind
    "function" of its axis.

    Raises:
        SettingError: the component is on another axis, or there is no such kind or setting, or a value is not allowed.

    Examples:
        >>> build("training", {"kind": "sgd", "lr": 0.1}).lr
        0.1
        >>> build("training", "sdg")
        Traceback (most recent call last):
            ...
        piebald.core.errors.SettingError: there is no training 'sdg': did you mean 'sgd'?
    """
    if isinstance(table, Component):
        if table.axis != axis:
            raise SettingError(f"{axis} must be a component of {axis}, got {table.axis} {table.kind!r}")
        return table
    target = table.resolved(axis) if isinstance(table, Reference) else table
    if callable(target) and not isinstance(target, type) and "function" in Component.registry.get(axis, {}):
        table = {"kind": "function", "function": table}
    if isinstance(table, str):
        table = {"kind": table}
    if not isinstance(table, Mapping) or not isinstance(table.get("kind"), str):
        raise SettingError(f"{axis} must be a table with a kind, like {{ kind = '...' }}, got {shown(table)}")
    fields = {str(name): value for name, value in table.items()}
    kind = kind_of(fields.pop("kind"))
    # what is imported already is looked through first, so that a run imports no more than it needs
    kinds: dict[str, type[Component]] = dict.get(Component.registry, axis, {})
    if kind not in kinds:
        kinds = Component.registry.get(axis, {})
    if kind not in kinds:
        raise unknown(axis, kind, kinds)
    return kinds[kind](**fields)


def kind_of(name: str) -> str:
    """The kind that a name means: that of the class, for a reference.

    Raises:
        SettingError: it refers to something else than a component.
    """
    if not isinstance(name, Reference):
        return name
    target = name.resolved("component")
    if not (isinstance(target, type) and issubclass(target, Component) and target.kind):
        raise SettingError(
            f"{name} must name a component, a class like piebald.methods.training.Trainer, got {target!r}"
        )
    return target.kind


def from_tables(kind: type[S], given: Any, example: str) -> tuple[S, ...]:
    """Return values from a list of their tables.

    Args:
        kind: what each table becomes.
        given: the list; values of this kind pass as they are.
        example: a table that is right, for messages.

    Raises:
        ValueError: `given` is no list, or a table in it is wrong.
    """
    must = f"must be a list of tables like {example}"
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise ValueError(f"{must}, got {shown(given)}")
    values = []
    for number, table in enumerate(given):
        if not isinstance(table, kind | Mapping) or any(not isinstance(name, str) for name in dict(table)):
            raise ValueError(f"{must}, but number {number} is {shown(table)}")
        try:
            values.append(kind(**table) if isinstance(table, Mapping) else table)
        except SettingError as error:
            raise ValueError(f"{must}, but in number {number}, {error}") from None
    return tuple(values)
