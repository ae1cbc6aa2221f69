"""Local stochastic gradient descent, the base of most other trainers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Self, TypedDict

from pydantic import Field, model_validator
from torch import Tensor

from piebald import contracts
from piebald.contracts.data import ModelSpec
from piebald.contracts.training import batch_count
from piebald.core.client_models import idle_pattern_reason
from piebald.methods.training import optimizer_state
from piebald.methods.training.augmentation import Augmentation, unfit
from piebald.methods.training.base import Trainer, no_features
from piebald.methods.training.checkpointing import CheckpointedLayers, unsupported_checkpointing
from piebald.methods.training.client_settings import ClientSettings, ClientTable, settings_of
from piebald.methods.training.optimizers import Optimizer, SgdOptimizer
from piebald.methods.training.parameter_groups import ParameterGroup, ParameterGroups, unsupported
from piebald.methods.training.schedules import Constant, ConstantStepSchedule, LrSchedule, StepSchedule

_LOSS_SCALE = contracts.PLAIN_PASSES.loss_scale


class SgdSettings(TypedDict, total=False):
    """The settings of `Sgd`, for recipes that hand them on."""

    lr: float
    lr_schedule: LrSchedule | dict[str, object] | str | Callable[[int], float]
    step_schedule: StepSchedule | dict[str, object] | str | Callable[[int, int], float]
    epochs: int
    steps: int | None
    batch: int
    batches: contracts.Batches
    momentum: float
    keep_momentum: bool
    weight_decay: float
    clip: float | None
    optimizer: Optimizer | dict[str, Any] | str
    optimizer_state: Literal["fresh", "kept", "averaged"]
    parameter_groups: Sequence[ParameterGroup | Mapping[str, Any]]
    augmentation: Sequence[Augmentation | Mapping[str, Any] | str | Callable[..., Any]]
    precision: contracts.Precision
    loss_scale: float
    accumulate: int
    checkpointing: str | Sequence[str]
    clients: Mapping[str, ClientSettings | Mapping[str, Any]]


class Sgd(Trainer):
    """Mini-batch SGD with momentum from the model that was sent (McMahan et al. 2017, ClientUpdate; Metis eq. 2), or
    another optimizer.

    With `optimizer = "adamw"` and others, the defaults of `lr` and `weight_decay` are those of `torch.optim`.  Any such
    setting, and `optimizer_state`, `parameter_groups` or `step_schedule`, takes the update of `torch.optim`, in which
    the learning rate is no part of the momentum as it is in Metis' eq. 2; with a constant learning rate both are the
    same.

    With `optimizer_state = "kept"` the state is client state and never leaves the client.  With "averaged" it is sent
    with the update, and what belongs to private layers is kept; `training.optimizer_state` names the sources.

    With `precision` "bfloat16" or "float16", forward and backward passes of training run under `torch.autocast`;
    parameters, updates and the optimizer's state are float32, and so is evaluation.  With "float16" the loss is scaled
    as by `torch.amp.GradScaler`, which begins anew in each task: a step whose gradient is not finite is skipped, is not
    counted, and halves the scale.

    With `accumulate` above 1, a step sums the gradients of so many batches, each counted by its rows, so that it is the
    step of a batch that is so many times larger: also the rows of a step are divided as `batches` says.  Batch norm
    and losses that compare rows see one batch at a time.

    Attributes:
        lr: learning rate, above 0; by default 0.05, and for other optimizers than SGD that of `torch.optim`.
        lr_schedule: factor on the learning rate, depending on the number of server steps made.
        step_schedule: factor on the learning rate, depending on the steps of the task, such as a warm-up.
        epochs: passes over the client's rows.  steps: exactly this many steps instead, however many passes they take;
            refused beside other epochs than 1.  step_limit: the epochs end after this many steps at the latest, as the
            clients of CGAU's paper take ten steps or one epoch, whichever ends first.
        batch: rows in each step, or in each of those that `accumulate` adds up.  batches: "equal" for as many batches
            an epoch as that takes, whose sizes differ by one row at most; "exact" for full batches and a last one of
            the rows that are left, as most other programs have them: a last batch of a few rows moves a model as far
            as a full one, and can undo an epoch.
        momentum: in [0, 1), of SGD and RMSprop.  keep_momentum: keep the velocity of Metis' eq. 2 in the client's state
            between tasks.
        weight_decay: L2 decay, which AdamW takes from the parameters directly; by default 0, and 0.01 for AdamW.
        clip: largest gradient norm (Euclidean), no limit by default.
        optimizer: how parameters move along their gradients.
        optimizer_state: state at the beginning of a task, new, the client's own or the mean of all clients'.
        parameter_groups: parameters with a learning rate or weight decay of their own, like [{ layers = ["norm",
            "*.bias"], weight_decay = 0.0 }].
        augmentation: random changes of each batch in this order, like ["horizontal_flip", { kind = "random_crop",
            padding = 4 }, "mylab:jitter"].
        precision: of forward and backward passes in training: "float32", "bfloat16" or "float16".
        loss_scale: with float16, the factor on the loss at the beginning of a task, above 0.
        accumulate: batches in each step.
        checkpointing: layers whose activations are computed again in the backward pass instead of being kept, like
            ["blocks.*"]; "auto" where the model itself knows which, as those of transformers do.
        clients: epochs, steps, batch and lr of some clients in place of these, by name or by pattern, like {"ward *":
            {"epochs": 5}}; each setting is that of the most particular entry, the name or else the longest pattern.

    Examples:
        >>> trainer = Sgd(epochs=2, batch=20)
        >>> trainer.lr, trainer.max_steps(examples=50)
        (0.05, 6)
        >>> adam = Sgd(optimizer="adamw")  # with the defaults of torch.optim
        >>> adam.lr, adam.weight_decay
        (0.001, 0.01)
    """

    lr: float = Field(default=0.05, gt=0)
    lr_schedule: LrSchedule = Constant()
    step_schedule: StepSchedule = ConstantStepSchedule()
    epochs: int = Field(default=1, ge=1)
    steps: int | None = Field(default=None, ge=1)
    step_limit: int | None = Field(default=None, ge=1)
    batch: int = Field(default=20, ge=1)
    batches: contracts.Batches = "equal"
    momentum: float = Field(default=0.0, ge=0, lt=1)
    keep_momentum: bool = False
    weight_decay: float = Field(default=0.0, ge=0)
    clip: float | None = Field(default=None, gt=0)

    optimizer: Optimizer = SgdOptimizer()
    optimizer_state: Literal["fresh", "kept", "averaged"] = "fresh"
    parameter_groups: ParameterGroups = ()
    augmentation: tuple[Augmentation, ...] = ()

    precision: contracts.Precision = "float32"
    loss_scale: float = Field(default=_LOSS_SCALE, gt=0)
    accumulate: int = Field(default=1, ge=1)
    checkpointing: CheckpointedLayers = ()
    clients: ClientTable = {}  # noqa: RUF012 - a pydantic field

    @model_validator(mode="after")
    def _take_defaults(self) -> Self:
        if not isinstance(self.optimizer, SgdOptimizer):
            # only what the user left open: a rate of SGD is far too large for Adam
            defaults = {"lr": self.optimizer.default_lr, "weight_decay": self.optimizer.default_weight_decay}
            # a frozen model: pydantic would refuse to set attributes after validation
            self.__dict__.update({name: value for name, value in defaults.items() if name not in self.model_fields_set})
        return self

    @model_validator(mode="after")
    def _check_optimizer(self) -> Self:
        kind, sgd = self.optimizer.kind, self.optimizer
        if self.momentum and not sgd.takes_momentum:
            raise ValueError(f"momentum is no setting of {kind}, got {self.momentum:g}: leave it out")
        # torch.optim would take dampening without momentum in silence
        if isinstance(sgd, SgdOptimizer) and not sgd.plain and not self.momentum:
            setting = "nesterov" if sgd.nesterov else "dampening"
            raise ValueError(f"{setting} needs momentum above 0: give momentum, or leave {setting} out")
        if self.keep_momentum and self.rule is not None:
            raise ValueError(
                "keep_momentum keeps the velocity of plain SGD only: leave it out, and write optimizer_state = 'kept'"
            )
        if self.optimizer_state != "fresh" and not self.state_vectors:
            raise ValueError(
                f"optimizer_state = {self.optimizer_state!r} would have no effect, as {kind} without momentum has no "
                "state: leave it out, or give momentum"
            )
        return self

    @model_validator(mode="after")
    def _check_length(self) -> Self:
        if self.steps is not None and self.epochs != 1:
            raise ValueError(
                f"steps = {self.steps} takes so many steps instead of epochs = {self.epochs}: leave one of them out"
            )
        if self.steps is not None and self.step_limit is not None:
            raise ValueError(
                f"steps = {self.steps} takes so many steps, and step_limit = {self.step_limit} ends epochs: leave one "
                "of them out"
            )
        return self

    @model_validator(mode="after")
    def _check_scale(self) -> Self:
        if self.loss_scale != _LOSS_SCALE and self.precision != "float16":
            raise ValueError(
                f"loss_scale would have no effect with precision = {self.precision!r}: leave it out, or set "
                "precision = 'float16'"
            )
        return self

    @property
    def passes(self) -> contracts.PassSettings:
        """The settings by which the gradient of a step is computed."""
        return contracts.PassSettings(self.precision, self.loss_scale, self.accumulate, self.checkpointing)

    @property
    def local_step(self) -> contracts.LocalStep:
        """The rows that a step sees and the direction in which it goes; methods override it."""
        return contracts.PLAIN_STEP

    @property
    def step_rows(self) -> int:
        """Rows in each step."""
        return self.batch * self.accumulate

    @property
    def rule(self) -> Optimizer | None:
        """The optimizer where its steps are not those of Metis' eq. 2, else None."""
        return self.optimizer if self.beyond_plain_sgd() else None

    def beyond_plain_sgd(self) -> str | None:
        """The first setting by which steps are not those of plain SGD with one learning rate, or None."""
        sgd = self.optimizer
        if not (type(sgd) is SgdOptimizer and sgd.plain):
            return "optimizer"
        if self.optimizer_state != "fresh":
            return "optimizer_state"
        if self.parameter_groups:
            return "parameter_groups"
        return None if type(self.step_schedule) is ConstantStepSchedule else "step_schedule"

    def steps_plainly(self) -> bool:
        """Return whether training is one run of `Sgd` with these settings, and not what a subclass makes of it."""
        return not self.overrides(Sgd.train, Sgd.run_sgd, Sgd.sgd_config, Sgd.start_state, Sgd.output)

    @property
    def state_vectors(self) -> tuple[contracts.StateVector, ...]:
        """The vectors that the optimizer keeps."""
        return self.optimizer.state_vectors(self.momentum)

    def unsupported_model(self, spec: ModelSpec) -> str | None:
        # the budget follows from the sampling rate and the number of steps, which these settings change
        if self.clients and self.row_privacy() is not None:
            return (
                f"{self.kind} states one privacy budget for all clients, which settings of single clients would "
                "change: leave clients out"
            )
        if self.optimizer_state == "averaged" and not spec.layout.shared:
            return (
                "optimizer_state = 'averaged' has no average where nothing is shared: choose 'kept', which a client "
                "keeps to itself, or 'fresh'"
            )
        if self.reads_features and (reason := no_features(self.kind, spec)):
            return reason
        groups, augmentation = unsupported(self.parameter_groups, spec), unfit(self.augmentation, spec)
        return groups or augmentation or unsupported_checkpointing(self.checkpointing, spec)

    def of_client(self, name: str) -> Self:
        if not self.clients:
            return self
        own = settings_of({name: table.model_dump(exclude_none=True) for name, table in self.clients.items()}, name)
        if own.get("epochs", 0) is None:
            del own["epochs"]  # which steps leave unread
        # only fields that were set, so that the others count as defaults in the new trainer as well
        fields = {field: getattr(self, field) for field in self.model_fields_set if field != "clients"}
        return type(self)(**{**fields, **own})

    def unsupported_clients(self, names: Sequence[str]) -> str | None:
        return idle_pattern_reason(self.clients, names, "clients") if self.clients else None

    def initial_state(self, model: Tensor, shared: int) -> dict[str, Tensor]:
        if self.momentum and self.keep_momentum:
            return {"velocity": model.new_zeros(model.shape)}
        if self.optimizer_state == "kept":
            return optimizer_state.zero_state(self.state_vectors, len(model))
        if self.optimizer_state == "averaged" and len(model) > shared:
            return optimizer_state.without_step(optimizer_state.zero_state(self.state_vectors, len(model) - shared))
        return {}

    def uploads(self) -> tuple[str, ...]:
        return tuple(self.server_vectors(0))

    def server_vectors(self, shared: int) -> dict[str, Tensor]:
        averaged = self.optimizer_state == "averaged"
        return optimizer_state.zero_state(self.state_vectors, shared) if averaged else {}

    def update_server_vectors(
        self, vectors: Mapping[str, Tensor], means: Mapping[str, Tensor], context: contracts.StepContext
    ) -> dict[str, Tensor]:
        return optimizer_state.average(self.state_vectors, vectors, means)

    def start_state(self, inputs: contracts.TrainInput) -> Mapping[str, Tensor]:
        """The optimizer's state at the beginning of a task; empty for a new one."""
        if self.optimizer_state == "kept":
            return optimizer_state.kept_start(self.state_vectors, inputs)
        if self.optimizer_state == "averaged":
            return optimizer_state.averaged_start(self.state_vectors, inputs)
        # other state of a client belongs to a method, not to the optimizer
        return {name: vector for name, vector in inputs.state.items() if name == "velocity"}

    def train(self, inputs: contracts.TrainInput, context: contracts.ClientContext) -> contracts.TrainOutput:
        return self.output(self.run_sgd(inputs, context))

    def min_steps(self, examples: int) -> int:
        if self.precision == "float16":
            return 0  # any step may be skipped
        return self._steps(examples, self.epoch_steps(examples))

    def max_steps(self, examples: int) -> int:
        # a last batch that is not full is a step of its own at most
        return self._steps(examples, -(-examples // self.step_rows))

    def _steps(self, examples: int, each: int) -> int:
        """Return the steps of a task whose epochs have `each`."""
        if self.steps is not None and examples:
            return self.steps
        steps = self.epochs * each
        return steps if self.step_limit is None else min(steps, self.step_limit)

    def epoch_steps(self, examples: int) -> int:
        """Steps of one pass, at least: a row that would be alone in a batch may join another."""
        return batch_count(examples, self.step_rows, self.batches, mixes=True)

    def run_sgd(
        self,
        inputs: contracts.TrainInput,
        context: contracts.ClientContext,
        *,
        prox: float = 0.0,
        correction: Tensor | None = None,
        local_loss: contracts.LocalLoss | None = None,
        own: Mapping[str, Tensor] | None = None,
    ) -> contracts.SgdOutcome:
        """Run SGD from the model that was sent, see `contracts.ClientContext.run_sgd`; `prox` draws to that model."""
        return context.run_sgd(
            inputs.model,
            self.sgd_config(inputs),
            prox=prox,
            prox_center=inputs.model if prox else None,
            correction=correction,
            state=self.start_state(inputs),
            local_loss=local_loss,
            own=own,
        )

    def sgd_config(self, inputs: contracts.TrainInput, epochs: int | None = None) -> contracts.SgdConfig:
        """These settings, with the learning rates that the tasks' versions mean and perhaps other epochs."""
        return contracts.SgdConfig(
            lr=self.rate(inputs),
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            clip=self.clip,
            batch=self.batch,
            batches=self.batches,
            epochs=epochs or self.epochs,
            # a caller that says how many passes means passes, whatever ends a task of the run
            steps=None if epochs else self.steps,
            step_limit=None if epochs else self.step_limit,
            rule=self.rule,
            schedule=None if type(self.step_schedule) is ConstantStepSchedule else self.step_schedule,
            groups=self.parameter_groups,
            base_lr=self.lr,
            augmentation=self.augmentation,
            passes=self.passes,
            step=self.local_step,
        )

    def rate(self, inputs: contracts.TrainInput) -> float | Tensor:
        """The learning rate: one number where all clients of the stack have one version, else [c, 1]."""
        rates = [self.lr * self.lr_schedule.factor(version) for version in inputs.versions]
        # a number where it can be one: kernels that step in one pass over memory take no vector of rates
        return rates[0] if len(set(rates)) == 1 else inputs.model.new_tensor(rates).unsqueeze(1)

    def output(self, end: contracts.SgdOutcome, **more: dict[str, Tensor]) -> contracts.TrainOutput:
        """Return the output of training; `more` adds state and vectors."""
        state, vectors = dict(more.get("state", {})), dict(more.get("vectors", {}))
        if self.momentum and self.keep_momentum and "velocity" in end.state:
            state["velocity"] = end.state["velocity"]
        # one number for all parameters: it goes with the shared part, and private state has none
        ended = {optimizer_state.PREFIX + "step": end.state["step"]} if self.optimizer_state != "fresh" else {}
        if self.optimizer_state == "kept":
            state |= optimizer_state.named(end.state) | ended
        elif self.optimizer_state == "averaged":
            vectors |= optimizer_state.named(end.state, stop=end.shared) | ended
            # what belongs to private layers has no average and stays with the client
            if end.model.shape[-1] > end.shared:
                state |= optimizer_state.named(end.state, start=end.shared)
        return contracts.TrainOutput(end.model, end.steps, vectors=vectors, state=state, metrics={"loss": end.loss})
