"""A method: one component for each question."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import ConfigDict, field_validator, model_validator

from piebald.contracts import ModelSpec, Personalizes
from piebald.contracts.component import Component, WordedModel
from piebald.core.errors import SettingError, unknown
from piebald.core.references import USERS, Text
from piebald.methods.aggregation import linear
from piebald.methods.aggregation.base import Aggregator
from piebald.methods.clustering.base import Clustering
from piebald.methods.recipe_settings import replace
from piebald.methods.scheduling.base import Scheduler
from piebald.methods.server_optimizer.base import ServerOptimizer
from piebald.methods.sharing.base import Sharing
from piebald.methods.training.base import Trainer
from piebald.methods.training.sgd import Sgd
from piebald.methods.transforms.base import MaskingTransform, Transform
from piebald.methods.transforms.compression import Compressor


class Recipe(WordedModel):
    """Seven components, one for each question.  Frozen; combinations that cannot work are refused.

    Attributes:
        name, fields, paper: the named recipe it was made by, its settings, and its source.
        training: how clients train.
        sharing: which parameters leave a client.
        transforms: what is done to updates between client and server, in this order.
        scheduling: when the server requests training, and when it steps.
        clustering: which clients are aggregated with which.
        aggregation: how updates are combined.
        server_optimizer: how the global model moves.

    Raises:
        SettingError: a component is missing or unknown, or two of them cannot work together.

    Examples:
        >>> from piebald import recipes
        >>> recipe = recipes.fedavg(lr=0.1, cohort=10)
        >>> recipe.training.lr, recipe.scheduling.cohort, recipe.aggregation.kind
        (0.1, 10, 'example_weighted')
        >>> [component.kind for component in recipe.components][:3]
        ['sgd', 'full', 'synchronous']
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    name: Text = "custom"
    fields: Mapping[str, Any] = {}
    paper: str = ""
    training: Trainer
    sharing: Sharing
    transforms: tuple[Transform, ...] = ()
    scheduling: Scheduler
    clustering: Clustering
    aggregation: Aggregator
    server_optimizer: ServerOptimizer

    axes: ClassVar[tuple[str, ...]] = (
        "training",
        "sharing",
        "transforms",
        "scheduling",
        "clustering",
        "aggregation",
        "server_optimizer",
    )

    @field_validator("transforms", mode="before")
    @classmethod
    def _as_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, Component | Mapping | str) else value

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        self._check_masking()
        self._check_cached()
        self._check_joined()
        self._check_parts()
        extra = self.training.uploads()
        for transform in self.transforms:
            # other vectors would leave without noise or clip
            if transform.protects_model_only and extra:
                raise ValueError(
                    f"{transform.kind} protects only the model but {self.training.kind} also sends {extra[0]!r}: "
                    f"choose another training, or drop {transform.kind}"
                )
        for component in self.components:
            if reason := component.incompatible_with(self):
                raise ValueError(reason)
        self._check_disclosures()
        return self

    def _check_masking(self) -> None:
        masking = self.masking
        if masking is None:
            return
        looking: list[Component] = [] if linear.computes_from_masked_sum(self.aggregation) else [self.aggregation]
        looking += [self.clustering] if self.clustering.requires_individual_updates else []
        for component in (*looking, *self._colluding):
            raise ValueError(
                f"{masking.kind} shows the server only sums but {component.kind} needs individual updates: "
                f"choose another {component.axis}, or drop {masking.kind}"
            )

    def _check_disclosures(self) -> None:
        hiding = next((component.kind for component in self.components if component.protects), None)
        for component in self.components if hiding else ():
            if disclosed := component.discloses():
                raise ValueError(
                    f"{hiding} protects what clients send but {component.kind} has them tell {disclosed}, which no "
                    f"privacy budget counts: choose another {component.axis}, or drop {hiding}"
                )

    def _check_cached(self) -> None:
        if self.server_optimizer.model_memory is None:
            return
        kind = self.server_optimizer.kind
        # the cached sum is updated by one client's contribution, which only a weight of its own makes possible
        if not isinstance(self.aggregation, linear.Linear):
            raise ValueError(
                f"{kind} gives every client's last model a weight of its own but {self.aggregation.kind} weighs "
                f"updates together: choose another aggregation, or another server_optimizer"
            )
        for transform in self.transforms:
            if isinstance(transform, MaskingTransform) or transform.overrides(Transform.on_server):
                raise ValueError(
                    f"{kind} needs every client's own model but {transform.kind} acts on averages: "
                    f"drop {transform.kind}, or choose another server_optimizer"
                )

    def _check_joined(self) -> None:
        """Refuse what is kept for each cluster beside its model, where cluster models become one again and again."""
        if not self.clustering.clusters_to_join:
            return
        kind, optimizer = self.clustering.kind, self.server_optimizer
        if self.scheduling.round_kind() is None:
            raise ValueError(
                f"{kind} counts rounds but {self.scheduling.kind} has none: {self.scheduling.rounds_advice}"
            )
        # an optimizer without state of its own has nothing that would have to be averaged
        stateful = optimizer.overrides(ServerOptimizer.initial_state) or optimizer.model_memory is not None
        if stateful or self.training.server_vectors(1):
            keeping: Component = optimizer if stateful else self.training
            raise ValueError(
                f"{kind} averages cluster models but nothing would average what {keeping.kind} keeps for each cluster: "
                f"choose another {keeping.axis}, or another clustering"
            )

    def _check_parts(self) -> None:
        """Refuse what takes updates as wholes, where clients have parts of the model only."""
        trainer = self.training
        if not trainer.holds_parts:
            return
        if reason := self.parts_reason(trainer.kind):
            raise ValueError(reason)
        keeping = [
            transform.kind
            for transform in self.transforms
            if isinstance(transform, Compressor) and transform.keeps_state
        ]
        # what a compressor keeps is as long as the part, which is another one at the next task
        if trainer.changes_parts and keeping:
            raise ValueError(
                f"{trainer.kind} gives a client another part of the model for each task but {keeping[0]} keeps "
                "something of its length for the client's next update: choose one that keeps nothing, like qsgd with "
                "error_feedback = false"
            )

    def parts_reason(self, trainer: str | None = None) -> str | None:
        """Return why updates are taken as wholes, so that no client may have a part of the model only, or None.

        Args:
            trainer: the kind of the trainer that makes parts; None where clients lack inputs, so that a weighted mean
                leaves out what they lack.
        """
        # where inputs are lacking, a weighted mean can itself leave out the numbers that a client does not have
        takes = self.aggregation.takes_parts or (trainer is None and linear.computes_from_sum(self.aggregation))
        whole: list[Component] = [] if takes else [self.aggregation]
        whole += [] if self.clustering.is_single() else [self.clustering]
        whole += [transform for transform in self.transforms if transform.protects or transform.noises_mean()]
        if trainer is None and (self.training.uploads() or self.training.overrides(Trainer.own_models)):
            whole.append(self.training)
        for component in whole:
            advice = f"drop {component.kind}" if component.axis == "transforms" else f"choose another {component.axis}"
            advice = "choose aggregation = 'held_average'" if component is self.aggregation else advice
            return (
                f"{trainer or 'that'} gives clients unlike parts of the model but {component.kind} takes every update "
                f"as a change of the whole one: {advice}, or give all clients the whole one"
            )
        return None

    @property
    def components(self) -> tuple[Component, ...]:
        """All components, transforms in their order."""
        components: list[Component] = []
        for axis in self.axes:
            components += self.transforms if axis == "transforms" else [getattr(self, axis)]
        return tuple(components)

    @property
    def masking(self) -> MaskingTransform | None:
        """The transform after which the server sees only sums, or None."""
        return next((transform for transform in self.transforms if isinstance(transform, MaskingTransform)), None)

    @property
    def _colluding(self) -> list[Transform]:
        """The attacks that need the updates of a step side by side."""
        return [transform for transform in self.transforms if transform.colludes()]

    @property
    def noises_mean(self) -> bool:
        """True if a transform adds noise to the mean of updates, to hide clients."""
        return any(transform.noises_mean() for transform in self.transforms)

    def expected_updates(self, known: int) -> float | None:
        """Return how many updates a step expects, where noise on their mean hides clients: their sum is divided by
        that.

        None where no transform adds such noise, and where steps are no rounds of one cluster that wait for everybody.
        """
        if not self.noises_mean or not self.clustering.is_single():
            return None
        return self.scheduling.expected_updates(known)

    @property
    def requires_individual_updates(self) -> bool:
        """True if individual updates must reach the server, so that they cannot be summed where clients train."""
        return (
            not linear.computes_from_sum(self.aggregation)
            or self.clustering.requires_individual_updates
            or self.server_optimizer.from_current_model
            or self.server_optimizer.model_memory is not None
            or bool(self._colluding)
            # outside whole rounds nobody but the server knows which updates a step has
            or self.scheduling.round_kind() != "complete"
        )

    @property
    def compares_on_device(self) -> bool:
        """True if individual updates may be compared where clients' models are computed, on a GPU."""
        # models that outlive their step would fill a GPU's memory
        kept = self.server_optimizer.model_memory is not None or self.scheduling.round_kind() != "complete"
        # `vars`, not `getattr`: a subclass must say so itself, since its own code may need the CPU
        return not kept and all(vars(type(part)).get("on_device") for part in (self.aggregation, self.clustering))

    @property
    def needs_matrix(self) -> bool:
        """True if a step needs the changes side by side; else they are read one after another, a piece at a time."""
        compares = self.clustering.requires_individual_updates and self.clustering.compares_changes
        if self.server_optimizer.model_memory is not None:  # which takes one model after another
            return compares
        return compares or not linear.computes_from_sum(self.aggregation) or bool(self._colluding)

    def adapted_to(self, spec: ModelSpec) -> Recipe:
        """The recipe with those settings filled in that follow from its components together and from the model."""
        adapted = {axis: getattr(self, axis).adapted_to(self, spec) for axis in self.axes if axis != "transforms"}
        transforms = tuple(transform.adapted_to(self, spec) for transform in self.transforms)
        return self._rebuilt(self.fields, {**adapted, "transforms": transforms})

    def with_(self, **components: Any) -> Recipe:
        """This recipe with other components, given as components, tables, kinds, functions or "module:name".

        What the recipe was given for the old component, such as a learning rate, is handed down to the new one, unless
        that was given a value of its own.

        Raises:
            SettingError: there is no such axis or component, or the new component has no place for such a setting.

        Examples:
            >>> from piebald import recipes
            >>> recipe = recipes.fedavg(lr=0.1).with_(aggregation="krum", training={"kind": "proximal", "mu": 0.5})
            >>> recipe.aggregation.kind, recipe.training.mu, recipe.training.lr
            ('krum', 0.5, 0.1)
        """
        return self.replaced(USERS.mark(components))

    def replaced(self, components: Mapping[str, Any]) -> Recipe:
        """This recipe with other components, see `with_`; what is no reference yet in their tables, names nothing."""
        fields, replaced = dict(self.fields), dict(components)
        for axis, component in components.items():
            if axis not in self.axes:
                raise unknown("axis", axis, self.axes)
            if axis != "transforms":  # settings of recipes are never those of transforms
                replaced[axis], fields = replace(self.name, fields, axis, getattr(self, axis), component)
        if "training" in replaced:
            self._check_trainer(replaced["training"])
        return self._rebuilt(fields, replaced)

    def for_clients(self, table: Mapping[str, Mapping[str, Any]]) -> Recipe:
        """This recipe with settings of single clients, by their names or by patterns.

        Each setting is that of the most particular entry that has it: the name, or else the longest pattern.

        Args:
            table: for each name or pattern `epochs`, `steps`, `batch` and `lr` in place of the trainer's, and `share`,
                what the client's updates count in every average, whatever rows it has.

        Raises:
            SettingError: a setting is unknown or out of range, or the recipe has no place for it.

        Examples:
            >>> from piebald import recipes
            >>> recipe = recipes.fedavg().for_clients({"north": {"epochs": 5, "share": 0.4}, "*": {"share": 0.2}})
            >>> recipe.training.of_client("north").epochs, recipe.aggregation.shares
            (5, {'north': 0.4, '*': 0.2})
        """
        entries = {str(name): dict(fields) for name, fields in table.items()}
        shares = {name: fields.pop("share") for name, fields in entries.items() if "share" in fields}
        settings, components = {name: fields for name, fields in entries.items() if fields}, dict[str, Any]()
        if settings:
            trainer = self.training
            if "clients" not in type(trainer).model_fields:
                raise SettingError(f"training {trainer.kind!r} has no settings of single clients: leave them out")
            # only fields that were set: the others must not count as given in the new trainer
            fields = {name: getattr(trainer, name) for name in trainer.model_fields_set}
            components["training"] = type(trainer)(**{**fields, "clients": settings})
        if shares:
            if not linear.weighs_by_examples(self.aggregation):
                raise SettingError(
                    f"share says what clients count in a weighted mean, and aggregation {self.aggregation.kind!r} has "
                    "weights of its own: leave share out, or choose aggregation = 'example_weighted'"
                )
            components["aggregation"] = linear.FixedShares(shares=shares)
        return self.replaced(components) if components else self

    def _check_trainer(self, trainer: Trainer) -> None:
        """Refuse a trainer in whose place the recipe's method would be gone, though the run would bear its name."""
        before, own = self.training, type(self.training)
        if not isinstance(before, Sgd) or before.steps_plainly() or isinstance(trainer, own):
            return
        settings = own.model_fields.keys() - Sgd.model_fields.keys()
        # a term that others have, too, such as FedProx's
        is_composed = settings and settings <= trainer.model_fields_set and not isinstance(before, Personalizes)
        if self.name == "fedavg" or is_composed:
            return
        raise SettingError(
            f"{self.name} is what training = {before.kind!r} does, and training = {trainer.kind!r} would replace "
            "it: give that to recipe 'fedavg', or leave it out"
        )

    def _rebuilt(self, fields: Mapping[str, Any], components: Mapping[str, Any]) -> Recipe:
        values = {axis: getattr(self, axis) for axis in self.axes} | dict(components)
        return Recipe(name=self.name, fields=fields, paper=self.paper, **values)
