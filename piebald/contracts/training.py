"""Contracts of training on a client: the inputs, outputs and context of a trainer, and the steps of SGD.

`Sgd` and every engine walk through the steps of a task alike, each with a forward and a backward pass.  A method
changes a step in one of three places:

    along what it goes, and which rows it sees    a `LocalStep`, as `SgdConfig.step`
    how parameters move along that                an `UpdateRule`, as `SgdConfig.rule`
    everything, on several vectors                a `VectorStep`, called by `ClientContext.run_steps`

No engine knows any of them by name, so a new one runs on all engines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeAlias, TypeVar, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from piebald.contracts.data import Rows, Split
from piebald.core.parameters import Part, pad
from piebald.core.randomness import NoiseSource, long_key

Gradients: TypeAlias = "tuple[Tensor, Sequence[Tensor]]"  # mean losses [c], and [c, ...] for each trained parameter


class StepPoint(Protocol):
    """The models [c, p] of some clients at a step, and gradients of the mean loss of the step's batch there."""

    def gradients(self, away: Iterable[Tensor] | None = None) -> Gradients:
        """Return the mean losses [c] and the gradients at the models, [c, ...] for each trained parameter.

        Dropout draws the same masks at every call, and batch norm's running statistics are those of the first one.

        Args:
            away: a distance [c, ...] for each trained parameter by which the models are moved for this call.  It is
                read before anything is computed: it may be made of gradients, which are lost at the next call.
        """

    def hidden(self, clip: float, deviation: float, /) -> Gradients:
        """Return the mean losses [c] and hidden gradients, for a step that `hides_rows`.

        Each row's own gradient is shortened to the length `clip` (Euclidean, over all parameters), Gaussian noise of
        this standard deviation is added to the sum of the rows, and that is divided by the expected number of rows.
        """


@dataclass(frozen=True)
class LocalStep:
    """A step of SGD on one batch of each client; this class is the plain one.

    A subclass is a frozen dataclass that overrides what a method changes.  What it returns goes into the optimizer:
    momentum, weight decay, a proximal term, learning rates and clipping are as in any other run.

    Attributes:
        rows: the client's "own" training rows, or the "public" ones that all clients have; the targets of public rows
            are their positions, for a `LocalLoss` that knows what they stand for.
        hides_rows: true if single rows are hidden, as in DP-SGD.  Batches are then `lots`, whatever is random is drawn
            from numbers that only the client knows, and `StepPoint.hidden` may be called.

    Examples:
        >>> @dataclass(frozen=True)
        ... class SignStep(LocalStep):
        ...     def gradients(self, point):
        ...         losses, gradients = point.gradients()
        ...         return losses, [gradient.sign() for gradient in gradients]
        >>> LocalStep().changes_gradients, SignStep().changes_gradients
        (False, True)
    """

    rows: ClassVar[Literal["own", "public"]] = "own"
    hides_rows: ClassVar[bool] = False

    def seen(self, count: int) -> int | None:
        """Return how many of a client's rows a run sees, drawn anew for each run; None for all."""
        return None

    def lots(self, count: int, size: int, steps: int, rng_key: Sequence[int | str]) -> Iterator[np.ndarray[Any, Any]]:
        """Yield which of a client's `count` rows each of the steps takes, `size` of them in the mean."""
        raise NotImplementedError

    def gradients(self, point: StepPoint) -> Gradients:
        """Return the mean losses [c] and what the step goes along, [c, ...] for each trained parameter."""
        return point.gradients()

    @property
    def changes_gradients(self) -> bool:
        """True if a step goes along something else than the gradient at the models."""
        return type(self).gradients is not LocalStep.gradients


PLAIN_STEP = LocalStep()


@dataclass(frozen=True)
class RowPrivacy(LocalStep):
    """Noisy sums of clipped gradients of single rows (DP-SGD, Abadi et al. 2016, algorithm 1).

    Attributes:
        clip: C, longest gradient of one row (Euclidean norm over all parameters).
        noise: sigma, standard deviation of the noise on the sum of a step's rows, in clips.

    Examples:
        >>> lots = RowPrivacy(clip=1.0, noise=1.0).lots(count=1000, size=50, steps=3, rng_key=("seed",))
        >>> [30 < len(rows) < 70 for rows in lots]
        [True, True, True]
    """

    hides_rows = True

    clip: float
    noise: float

    def lots(self, count: int, size: int, steps: int, rng_key: Sequence[int | str]) -> Iterator[np.ndarray[Any, Any]]:
        """Yield Poisson samples, as accountants of DP-SGD assume: each row is in a step independently of all others.

        Whoever knows which rows are in a lot gains nothing from sampling, so lots are drawn as noise is.
        """
        for step in range(steps):
            drawn = NoiseSource.repeatable(long_key("poisson", step, *rng_key)).uniform(count)
            yield np.flatnonzero(drawn < size / count)

    def gradients(self, point: StepPoint) -> Gradients:
        return point.hidden(self.clip, self.noise * self.clip)


Precision = Literal["float32", "bfloat16", "float16"]
Batches = Literal["equal", "exact"]


def batch_count(count: int, size: int, batches: Batches, mixes: bool) -> int:
    """Return how many batches an epoch has.

    Args:
        count: rows.
        size: rows of a batch, at most; where a row would be alone, one more.
        batches: how rows are divided, see `SgdConfig`.
        mixes: whether the model mixes the rows of a batch (batch norm), so that none may have a single row.
    """
    number = math.ceil(count / size)
    alone = count % size == 1 if batches == "exact" else count < 2 * number
    return number - 1 if mixes and alone and number > 1 else number


@dataclass(frozen=True, slots=True)
class PassSettings:
    """The forward and backward passes of a step of `SgdConfig`.  Parameters, updates and an optimizer's state are
    float32 whatever is chosen here.

    Attributes:
        precision: of the passes; other than float32 under `torch.autocast`.
        loss_scale: with float16, what the loss is multiplied by at the beginning of a run, see `torch.amp.GradScaler`.
        accumulate: passes of which a step sums the gradients; it has as many times the rows of a batch.
        checkpointing: layers that keep no activations for the backward pass and compute them again, as in
            `training.checkpointing`.
    """

    precision: Precision = "float32"
    loss_scale: float = 65536.0
    accumulate: int = 1
    checkpointing: tuple[str, ...] = ()

    @property
    def alone(self) -> bool:
        """True if clients train one after another, as none may be skipped with others, or memory is short."""
        return self.precision == "float16" or self.accumulate > 1 or bool(self.checkpointing)


PLAIN_PASSES = PassSettings()


@dataclass(frozen=True, slots=True, eq=False)
class RowOutputs:
    """A model's features and outputs for one client's rows.

    Attributes:
        features: what goes into the last linear layer [n, d].
        outputs: what comes out of the model [n, classes].
        labels: the rows' classes [n], below 0 for those that do not count.
    """

    features: Tensor
    outputs: Tensor
    labels: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LossBatch:
    """One client's batch, as a `LocalLoss` sees it.

    Attributes:
        losses: the objective's loss, (outputs, targets) to one value for each row or to their mean.
        outputs, targets: [b, ...]; targets may be several tensors, and those of mixed rows.
        mask: [b], 1 for rows and 0 for those that only fill a batch up: a loss for each row need not look at it.
        own: the tensors that were given for this client, by name.
        features: what goes into the last linear layer [b, d], under "model" for the model that is trained and under
            their names for the `LocalLoss.anchors`.
    """

    losses: Callable[[Any, Any], Tensor]
    outputs: Tensor
    targets: Any
    mask: Tensor
    own: Mapping[str, Tensor]
    features: Mapping[str, Tensor]


class LocalLoss(Protocol):
    """A loss in place of the objective's while a client trains, for `ClientContext.run_sgd`."""

    @property
    def reads_features(self) -> bool:
        """True if it is given features.  The model then needs a linear layer, see `parameters.head`."""

    @property
    def anchors(self) -> tuple[str, ...]:
        """Names of the client's own tensors that are models [p]: their features go along, in evaluation mode."""

    def batch_loss(self, batch: LossBatch) -> Tensor:
        """The loss of each row [b], written for one client, or one value for all of them."""


T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class TrainInput:
    """The inputs of training, for a stack of `c` clients.

    Attributes:
        model: [c, p], the shared numbers as sent and the private ones from the clients' state.  Not to be written to.
        shared: `s`, how many of the numbers are shared.
        state: the clients' state, by name, each [c, ...].
        vectors: what was sent besides the model, by name, each [c, ...].
        versions: the tasks' versions.
        committed: [c, 1] float64, the tasks' `committed`.
        examples: [c, 1], training rows of each client.
        clients: the clients' numbers.
        statistics: how many of the shared numbers, the last ones, are running statistics.
    """

    model: Tensor
    shared: int
    state: Mapping[str, Tensor]
    vectors: Mapping[str, Tensor]
    versions: Sequence[int]
    committed: Tensor
    examples: Tensor
    clients: Sequence[int] = ()
    statistics: int = 0

    def of_parameters(self, change: Tensor) -> Tensor:
        """Changes of the shared numbers [c, s] with 0 for running statistics, which have no gradient and no drift."""
        if not self.statistics:
            return change
        return pad(change[:, : self.shared - self.statistics], self.shared)

    def answered(
        self, *, vectors: Mapping[str, Tensor] | None = None, metrics: Mapping[str, Tensor] | None = None
    ) -> TrainOutput:
        """Return the answer to a query, for which nothing was trained."""
        return TrainOutput(self.model, torch.zeros(len(self.versions)), vectors or {}, {}, metrics or {})


@dataclass(frozen=True, slots=True, eq=False)
class TrainOutput:
    """The outputs of training: the local model [c, p], further named vectors to send, the clients' new state, and
    metrics [c].
    """

    model: Tensor
    steps: Tensor
    vectors: Mapping[str, Tensor] = field(default_factory=dict)
    state: Mapping[str, Tensor] = field(default_factory=dict)
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


class StateVector(NamedTuple):
    """A vector that an optimizer keeps beside the parameters.

    Attributes:
        name: its name, as in `torch.optim`.
        start: the number that all of it starts from.
        squares: whether it holds means or sums of squares, which are never negative.
    """

    name: str
    start: float = 0.0
    squares: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class StepSettings:
    """The settings of one step of some parameters, for an update rule.

    Attributes:
        lr: learning rate, one number or [c, 1].
        weight_decay: decay of these parameters.
        momentum: momentum.
        step: number of this step since the state began, from 1; one number or [c, 1].
    """

    lr: float | Tensor
    weight_decay: float
    momentum: float
    step: float | Tensor


class UpdateRule(Protocol):
    """The update of an optimizer, such as Adam's: arithmetic on flat vectors, number by number."""

    def state_vectors(self, momentum: float) -> tuple[StateVector, ...]:
        """The vectors that it keeps."""

    def update(self, w: Tensor, g: Tensor, state: Mapping[str, Tensor], settings: StepSettings) -> None:
        """One step along g [..., p], in place on w [..., p] and the state's vectors [..., p]; g is not written to."""


class StepFactor(Protocol):
    """A learning-rate schedule within one run of an optimizer."""

    def factor(self, step: int, steps: int) -> float:
        """The factor on the learning rate at a step, from 0 to steps - 1."""


class GroupSettings(Protocol):
    """Parameters with settings of their own.

    Attributes:
        layers: patterns, see `parameters.matching`.
        lr: learning rate in place of the trainer's, or None.
        weight_decay: weight decay in place of the trainer's, or None.
    """

    @property
    def layers(self) -> tuple[str, ...]: ...
    @property
    def lr(self) -> float | None: ...
    @property
    def weight_decay(self) -> float | None: ...


class RowChange(Protocol):
    """A random change of a batch of one client before a step."""

    def augment(self, rows: Rows, rng: torch.Generator) -> Rows:
        """The changed batch."""


@dataclass(frozen=True, slots=True, eq=False)
class SgdConfig:
    """Settings of SGD on local data.  Metis eq. 2: u <- momentum * u - lr * g;  w <- w + u.

    Attributes:
        lr: step size, one number or [c, 1].
        momentum: in [0, 1).
        weight_decay: added to the gradient as weight_decay * w.
        clip: longest gradient allowed (Euclidean norm over all parameters), None for no limit.
        batch: rows in each pass, and in each step unless gradients are accumulated.
        batches: "equal" for ceil(rows / batch) batches an epoch whose sizes differ by one at most; "exact" for batches
            of `batch` rows and a last one of what is left, which is never dropped.
        epochs: epochs over the client's training rows.
        steps: if given, exactly this many steps instead of `epochs`.
        step_limit: if given, the most steps of all epochs.
        rule: another update than Metis eq. 2, or None.
        schedule: if given, factors on the learning rate within the run; needs a `rule`.
        groups: parameters with settings of their own; they need a `rule`.
        base_lr: the trainer's learning rate, of which those of `groups` are multiples at every step.
        augmentation: changes of each batch, in this order.
        part: the parameters that are trained, "all", or only the "shared" or the "private" ones.  The others stay as
            they are; batch norm takes its statistics from each batch as always.
        passes: how the gradient of a step is computed.
        step: which rows a step sees, and along what it goes.
    """

    lr: float | Tensor
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float | None = None
    batch: int = 20
    batches: Batches = "equal"
    epochs: int = 1
    steps: int | None = None
    step_limit: int | None = None
    rule: UpdateRule | None = None
    schedule: StepFactor | None = None
    groups: tuple[GroupSettings, ...] = ()
    base_lr: float = 1.0
    augmentation: tuple[RowChange, ...] = ()
    part: Part = "all"
    passes: PassSettings = PLAIN_PASSES
    step: LocalStep = PLAIN_STEP

    @property
    def step_rows(self) -> int:
        """Rows in each step."""
        return self.batch * self.passes.accumulate


@dataclass(frozen=True, slots=True, eq=False)
class SgdOutcome:
    """The outcome of SGD: model [c, p], steps [c], mean training loss over the steps [c], the optimizer's state, and
    how many of the numbers are shared.

    The state of a `SgdConfig.rule` are its vectors [c, p] and "step" [c, 1], the steps behind them; that of SGD with
    momentum is "velocity", u of Metis eq. 2; otherwise it is empty.
    """

    model: Tensor
    steps: Tensor
    loss: Tensor
    state: Mapping[str, Tensor] = field(default_factory=dict)
    shared: int = 0


class Slope(NamedTuple):
    """The gradient of a batch's mean loss at some models.

    Attributes:
        gradient: [c, p], 0 for buffers.
        model: [c, p], the same models, with the statistics of batch norm as they are after this batch.
    """

    gradient: Tensor
    model: Tensor


class Slopes(Protocol):
    """The gradients that one step may ask for, as often as it needs to and at any models."""

    @property
    def trained(self) -> Tensor:
        """The mask [p] of the numbers that are parameters; the others are buffers."""

    def __call__(self, model: Tensor, batch: int = 0) -> Slope:
        """The gradient at `model` [c, p] on this one of the step's batches, clipped and with weight decay as
        `SgdConfig` says.  Dropout draws the same masks wherever a batch is asked about.
        """


class VectorStep(Protocol):
    """A step of local training that is made of gradients at more than one point."""

    def __call__(self, at: Mapping[str, Tensor], slopes: Slopes) -> Mapping[str, Tensor]:
        """The vectors that change, from all vectors [c, ...] before the step; "step" [c, 1] counts steps from 0."""


@dataclass(frozen=True, slots=True, eq=False)
class StepsOutcome:
    """The vectors [c, ...] after local training by a `VectorStep`, how many steps each client made [c], and the mean
    over the steps of the loss at the first point of each [c].
    """

    vectors: Mapping[str, Tensor]
    steps: Tensor
    loss: Tensor


class Disclosure(Protocol):
    """Rules of a site about sums that leave it without noise, see `privacy.ledger`.

    `check` and `check_counts` raise an error where the rules do not allow sums to be told.
    """

    @property
    def least_rows(self) -> int:
        """The least number of rows that a number may be about."""

    def check(self, contributions: Iterable[Any], units: Any = None, dominance_only: bool = False) -> None:
        """Check sums by the contributions of rows, arrays [n, k], and of the units [n] that rows belong to; or only
        that no row has a large share.
        """

    def allow(self, contributions: Any, dominance_only: bool = False) -> bool:
        """Return whether `check` would let sums of contributions [n, k] be told."""

    def check_counts(self, counts: Any) -> None:
        """Check counts of rows, an array of any shape."""


class ClientContext(Protocol):
    """The interface of an engine for client code: training and evaluation on the data of a stack of clients."""

    @property
    def initial(self) -> Tensor:
        """The model [p] that the run starts from."""

    @property
    def disclosure(self) -> Disclosure | None:
        """The rules that answers without noise obey at a site; None in a simulation, whose rows are at hand."""

    def with_rng(self, rng_version: int | str | None = None) -> ClientContext:
        """Return the same clients with the random numbers of another of their tasks (`Task.rng_version`), or, without
        one, of another stream, so that those of the task stay as they are.
        """

    def run_sgd(
        self,
        model: Tensor,
        config: SgdConfig,
        *,
        prox: float = 0.0,
        prox_center: Tensor | None = None,
        correction: Tensor | None = None,
        state: Mapping[str, Tensor] | None = None,
        local_loss: LocalLoss | None = None,
        own: Mapping[str, Tensor] | None = None,
    ) -> SgdOutcome:
        """Run mini-batch SGD from `model` [c, p] along  g + prox * (w - prox_center) + correction  (parameters only,
        not buffers), or another optimizer (`SgdConfig.rule`) with this in place of the gradient.

        The proximal term belongs to the objective, so `clip` sees it; correction and weight decay are added after
        clipping.  `state` is the optimizer's, as in `SgdOutcome`; without it, the optimizer starts afresh.  Each call
        in one task uses another order of the rows.  `local_loss` takes the place of the objective's loss, and `own`
        are the clients' tensors that it needs, by name, [c, ...] each.

        Raises:
            RuntimeFault: there is a proximal term without its center.
        """

    def run_steps(
        self, start: Mapping[str, Tensor], config: SgdConfig, step: VectorStep, *, batches: int = 1
    ) -> StepsOutcome:
        """Run a step of the caller's own as often as SGD with these settings would, from named vectors [c, ...].

        The step's batches are those of `batches` independent orders of the client's rows; the first order, and dropout
        on it, are those that `run_sgd` would take.  Of `config`, `lr`, `momentum`, `rule` and `schedule` are unused.
        """

    def score(self, model: Tensor, split: Split, metrics: bool = True) -> tuple[dict[str, Tensor], Tensor]:
        """The loss and, if wanted, the objective's metrics by name, each [c] (NaN without rows), and how many rows were
        counted [c].

        Models are in evaluation mode: no dropout, batch norm with its running statistics.
        """

    def losses(self, models: Sequence[Tensor], split: Split) -> Tensor:
        """The loss of each client under each of some models [c, p], [c, models]: what `score` returns for one after
        another, but rows are looked up once, and copied once where they are few.
        """

    def row_losses(self, model: Tensor, split: Split) -> tuple[Tensor, Tensor]:
        """The loss of each row [c, rows], padded with NaN for clients with fewer rows, and how many rows each client
        has [c].  Models are in evaluation mode, as for `score`.  Where rows have weights, the loss is times the weight
        over the client's mean weight.
        """

    def row_scores(self, model: Tensor, split: Split) -> tuple[Tensor, Tensor]:
        """The objective's main metric of each row that has a target [c, rows], padded with NaN, and how many rows each
        client has [c].  Of a metric without a value for each row they are those of groups of rows, see
        `engines.scoring.pseudo_values`.
        """

    def row_values(self, model: Tensor, split: Split, measure: Callable[[Any, Any], Tensor]) -> tuple[Tensor, Tensor]:
        """Return what `row_scores` does, by a function of the outputs and targets of a client's rows with a target."""

    def constant_scores(self, constants: Tensor, split: Split) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """Return what `score` and `row_scores` return of outputs that are the same for all rows of a client, [c, k]."""

    def moments(self, model: Tensor, layers: Sequence[str]) -> Tensor:
        """Mean and variance of what goes into some layers over the clients' training rows, channel by channel [c, m].

        For each layer all means, then all variances; 0 for a client without rows.  Models are in evaluation mode.
        """

    def batch_statistics(self, model: Tensor, batch: int) -> tuple[Tensor, Tensor]:
        """Return what batch norms compute in training, over the clients' training rows in batches of `batch` rows.

        These are the shared buffers [c, b] of the models, each the mean over the rows of its batch's statistic, and
        the number of rows of each client [c], 0 where a batch norm cannot take so few.  Everything else is in
        evaluation mode.
        """

    def belongs(self, layers: Sequence[str] | None = None) -> Tensor:
        """Return which of the numbers [p] are parameters of some layers (`parameters.matching`), or of any; buffers,
        such as running statistics, are none.
        """

    def rows(self, split: Split) -> list[Rows]:
        """The clients' own rows, for queries without a model."""

    def weights(self, split: Split) -> Tensor | None:
        """How much each client's rows count in an average of losses over clients [c], None where by their number."""

    def cached(self, split: Split, key: Hashable, function: Callable[[Rows, str], T]) -> list[T]:
        """Return a function of each client's rows, computed once for many questions about the same rows.

        A value is computed anew where the key is another, or where rows are other tensors, or were written to by
        torch; what writes to the memory of an array behind them must return other tensors.

        Args:
            split: the rows.
            key: what the values follow from besides the rows; of each client and split the last one is remembered.
            function: of rows and the name of their client, which is the same for all under masks.
        """

    @property
    def features(self) -> Sequence[str]:
        """Names of the numbers of an input, empty where they have none."""

    def tables(self, split: Split) -> list[Any]:
        """The clients' rows before they are prepared (`contracts.data.HasTables`), for questions about columns.

        Raises:
            SettingError: the rows are no tables that are to be prepared.
        """

    def noise_keys(self) -> list[int]:
        """A key of 256 bits for each client, from which `randomness.NoiseSource` draws noise that belongs to this task.

        At a site of a federation it comes from the operating system's randomness, in a simulation from the run's seed.
        """

    def label_counts(self, weighted: bool = False) -> Tensor:
        """Training rows of each class [c, classes], for classification with one label for each row.

        Args:
            weighted: whether rows count by their weights, where they have some.
        """

    def class_features(self, model: Tensor) -> tuple[Tensor, Tensor]:
        """The mean over each class' training rows of what goes into the last linear layer [c, classes, d], 0 for a
        class without rows, and how many rows each has [c, classes].  For classification with one label for each row;
        models are in evaluation mode.
        """

    def row_outputs(self, model: Tensor, split: Split) -> list[RowOutputs]:
        """Return features and outputs of the models for each of the clients' rows, for targets of one class each;
        models are in evaluation mode.
        """

    def measure(self, outputs: Sequence[Tensor], split: Split) -> tuple[dict[str, Tensor], Tensor]:
        """Return the scores of given outputs, [rows, ...] for each client's rows of a split, as `score` does."""

    def public_outputs(self, model: Tensor) -> Tensor:
        """The models' outputs for the public rows [c, n, ...]; models are in evaluation mode."""

    def public_targets(self) -> Tensor:
        """The targets of the public rows [c, n, ...], the same for all clients."""

    def confusion(self, model: Tensor, split: Split) -> Tensor:
        """Rows by true class and by the class with the largest output, [c, classes, classes]; for classification."""


class Trains(Protocol):
    """A trainer of a stack of clients; every trainer is one."""

    def train(self, inputs: TrainInput, context: ClientContext) -> TrainOutput:
        """Train once."""


@runtime_checkable
class Personalizes(Protocol):
    """A trainer whose clients use another model than the one they were sent, beyond private layers."""

    def personalize(self, inputs: TrainInput, context: ClientContext) -> Tensor:
        """The models [c, p] that clients use for themselves, given what the server last sent."""
