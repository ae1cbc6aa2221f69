"""Optimizers of clients: names, settings, defaults and update equations are those of `torch.optim`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from piebald.contracts import Component, StateVector, StepSettings, UpdateRule
from piebald.core.arguments import Share
from piebald.core.errors import SettingError
from piebald.core.machine import float64_device

_BESIDE = ("lr", "momentum", "weight_decay")  # settings that all optimizers of torch have, or several of them


class Optimizer(Component):
    """The update of a client's parameters from their gradients: the setting `optimizer` of a trainer.

    `lr`, `weight_decay` and `momentum` are settings of the trainer, since methods and schedules work with them.  Other
    settings of `torch.optim` are settings of the optimizer.  The update is arithmetic on flat vectors, number by
    number, written once for all engines.

    A user's own optimizers derive from this class and are named like any component.  `update` has to give the same
    numbers wherever a vector is cut.
    """

    axis = "optimizer"
    default_lr: ClassVar[float] = 0.001
    default_weight_decay: ClassVar[float] = 0.0
    takes_momentum: ClassVar[bool] = False
    in_torch: ClassVar[type[torch.optim.Optimizer] | None] = None  # with these settings, by these names
    of_momentum: ClassVar[tuple[str, ...]] = ()  # settings that torch takes beside momentum alone

    def __init__(self, *values: Any, **fields: Any) -> None:
        # pydantic would only call the field unknown, and the user would not learn where it belongs
        for name in _BESIDE:
            if name in fields and name not in type(self).model_fields:
                raise SettingError(
                    f"optimizer {self.kind!r} has no {name} of its own, which is a setting of training: write it "
                    "beside optimizer, not inside"
                )
        super().__init__(*values, **fields)

    def state_vectors(self, momentum: float) -> tuple[StateVector, ...]:
        """The vectors that the optimizer keeps beside the parameters, by their names in `torch.optim`."""
        return ()

    def update(self, w: Tensor, g: Tensor, state: Mapping[str, Tensor], settings: StepSettings) -> None:
        """One step along g [..., p], in place on w [..., p] and the state's vectors [..., p]; g is not written to."""
        raise NotImplementedError

    def as_torch(
        self, groups: Iterable[Mapping[str, Any]], lr: float, weight_decay: float, momentum: float
    ) -> torch.optim.Optimizer:
        """The same optimizer of `torch.optim`, which the engine "reference" uses; this one in its form if torch has
        none.

        Args:
            groups: groups of parameters, as `torch.optim` takes them.
            lr: learning rate.
            weight_decay: weight decay.
            momentum: momentum.
        """
        # a class of a user that derives from one has an update of its own
        in_torch: Callable[..., torch.optim.Optimizer] | None = vars(type(self)).get("in_torch")
        if in_torch is None:
            return RuleOptimizer(groups, self, lr, weight_decay, momentum)
        own = {
            name: getattr(self, name) for name in type(self).model_fields if momentum or name not in self.of_momentum
        }
        own |= {"momentum": momentum} if self.takes_momentum else {}
        return in_torch([dict(group) for group in groups], lr=lr, weight_decay=weight_decay, **own)


class SgdOptimizer(Optimizer):
    """Stochastic gradient descent, as `torch.optim.SGD`.

    Attributes:
        dampening: share of each gradient but the first that the momentum leaves out, in [0, 1).
        nesterov: Nesterov's momentum; it needs momentum, and no dampening.
    """

    default_lr = 0.05
    takes_momentum = True
    in_torch = torch.optim.SGD
    of_momentum = ("dampening", "nesterov")

    dampening: float = Field(default=0.0, ge=0, lt=1)
    nesterov: bool = False

    @model_validator(mode="after")
    def _check_nesterov(self) -> Self:
        if self.nesterov and self.dampening:
            raise ValueError(f"nesterov needs dampening = 0, got {self.dampening:g}: leave one of them out")
        return self

    @property
    def plain(self) -> bool:
        """True if a step with one learning rate is that of Metis' eq. 2 as well."""
        return not self.nesterov and not self.dampening

    def state_vectors(self, momentum: float) -> tuple[StateVector, ...]:
        return (StateVector("momentum_buffer"),) if momentum else ()

    def update(self, w: Tensor, g: Tensor, state: Mapping[str, Tensor], settings: StepSettings) -> None:
        if settings.weight_decay:
            g = g.add(w, alpha=settings.weight_decay)
        if settings.momentum:
            buffer, damped = state["momentum_buffer"].mul_(settings.momentum), 1 - self.dampening
            # torch adds the first gradient without dampening; clients of a stack may be at different steps
            if isinstance(settings.step, Tensor):
                buffer.add_(g * torch.where(settings.step == 1, 1.0, damped))
            else:
                buffer.add_(g, alpha=1.0 if settings.step == 1 else damped)
            g = g.add(buffer, alpha=settings.momentum) if self.nesterov else buffer
        descend(w, g, settings.lr)


class AdamOptimizer(Optimizer):
    """Adam with L2 decay, as `torch.optim.Adam` (Kingma, Ba 2015, algorithm 1; `amsgrad`: Reddi et al. 2018).

    Attributes:
        betas: decay rates of the means of gradients and of their squares, each in [0, 1).
        eps: added to the root of the mean square, at least 0.
        amsgrad: divide by the largest mean square so far.

    Examples:
        >>> [vector.name for vector in AdamOptimizer().state_vectors(momentum=0.0)]
        ['exp_avg', 'exp_avg_sq']
    """

    decoupled: ClassVar[bool] = False
    in_torch: ClassVar[type[torch.optim.Optimizer] | None] = torch.optim.Adam

    betas: tuple[Share, Share] = (0.9, 0.999)
    eps: float = Field(default=1e-8, ge=0)
    amsgrad: bool = False

    def state_vectors(self, momentum: float) -> tuple[StateVector, ...]:
        vectors = (StateVector("exp_avg"), StateVector("exp_avg_sq", squares=True))
        return (*vectors, StateVector("max_exp_avg_sq", squares=True)) if self.amsgrad else vectors

    def update(self, w: Tensor, g: Tensor, state: Mapping[str, Tensor], settings: StepSettings) -> None:
        (beta1, beta2), lr, decay = self.betas, settings.lr, settings.weight_decay
        if not isinstance(lr, Tensor) and not isinstance(settings.step, Tensor) and _can_fuse(w, g):
            self._fused(w, g, state, lr, decay, settings.step)
            return
        # before the step, as in torch: the decay acts on the parameters that the gradient belongs to
        if decay and self.decoupled:
            w.mul_(1 - lr * decay)
        elif decay:
            g = g.add(w, alpha=decay)
        mean, square = state["exp_avg"].lerp_(g, 1 - beta1), state["exp_avg_sq"]
        square.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        if self.amsgrad:
            # in place, since the state's vectors are those that the caller keeps
            square = torch.maximum(state["max_exp_avg_sq"], square, out=state["max_exp_avg_sq"])
        root = square.sqrt()
        root.mul_(_bias_correction(beta2, settings.step) ** 0.5).add_(self.eps)
        _descend_quotient(w, mean, root, lr * _bias_correction(beta1, settings.step))

    def _fused(
        self, w: Tensor, g: Tensor, state: Mapping[str, Tensor], lr: float, weight_decay: float, step: float
    ) -> None:
        """The step in one pass over memory: torch's kernel, which needs contiguous rows."""
        largest = state.get("max_exp_avg_sq")
        # the kernel steps one tensor after another and wants the step number of each
        step_vectors = [w.new_tensor(step)] * (len(w) if w.dim() > 1 else 1)
        kernel, means = torch._fused_adamw_ if self.decoupled else torch._fused_adam_, _rows(state["exp_avg"])
        squares, most = _rows(state["exp_avg_sq"]), [] if largest is None else _rows(largest)
        kernel(
            _rows(w), _rows(g), means, squares, most, step_vectors, lr=lr, beta1=self.betas[0], beta2=self.betas[1],
            weight_decay=weight_decay, eps=self.eps, amsgrad=self.amsgrad, maximize=False,
        )  # fmt: skip


class AdamwOptimizer(AdamOptimizer):
    """Adam whose weight decay shrinks parameters directly, as `torch.optim.AdamW` (Loshchilov, Hutter 2019, algorithm
    2).
    """

    default_weight_decay = 0.01
    decoupled = True
    in_torch = torch.optim.AdamW


class RmspropOptimizer(Optimizer):
    """Steps divided by a running root mean square of gradients, as `torch.optim.RMSprop` (Hinton 2012, lecture 6).

    Attributes:
        alpha: decay rate of the mean square, in [0, 1).
        eps: added to the root, at least 0.
        centered: divide by the deviation, the mean square less the squared mean (Graves 2013, eq. 38 to 40).
    """

    default_lr = 0.01
    takes_momentum = True
    in_torch = torch.optim.RMSprop

    alpha: float = Field(default=0.99, ge=0, lt=1)
    eps: float = Field(default=1e-8, ge=0)
    centered: bool = False

    def state_vectors(self, momentum: float) -> tuple[StateVector, ...]:
        vectors = [StateVector("square_avg", squares=True)]
        vectors += [StateVector("grad_avg")] if self.centered else []
        return (*vectors, StateVector("momentum_buffer")) if momentum else tuple(vectors)

    def update(self, w: Tensor, g: Tensor, state: Mapping[str, Tensor], settings: StepSettings) -> None:
        if settings.weight_decay:
            g = g.add(w, alpha=settings.weight_decay)
        square = state["square_avg"].mul_(self.alpha).addcmul_(g, g, value=1 - self.alpha)
        if self.centered:
            mean = state["grad_avg"].lerp_(g, 1 - self.alpha)
            # rounding may leave a variance just below 0
            square = square.addcmul(mean, mean, value=-1).clamp_(min=0)
        root = square.sqrt().add_(self.eps)
        if settings.momentum:
            descend(w, state["momentum_buffer"].mul_(settings.momentum).addcdiv_(g, root), settings.lr)
        else:
            _descend_quotient(w, g, root, settings.lr)


class AdagradOptimizer(Optimizer):
    """Steps divided by the root of the sum of squared gradients, as `torch.optim.Adagrad` (Duchi et al. 2011, eq. 1).

    Attributes:
        lr_decay: the learning rate is divided by 1 + lr_decay * steps, at least 0.
        initial_accumulator_value: what the sum starts from, at least 0.
        eps: added to the root, at least 0.
    """

    default_lr = 0.01
    in_torch = torch.optim.Adagrad

    lr_decay: float = Field(default=0.0, ge=0)
    initial_accumulator_value: float = Field(default=0.0, ge=0)
    eps: float = Field(default=1e-10, ge=0)

    def state_vectors(self, momentum: float) -> tuple[StateVector, ...]:
        return (StateVector("sum", self.initial_accumulator_value, squares=True),)

    def update(self, w: Tensor, g: Tensor, state: Mapping[str, Tensor], settings: StepSettings) -> None:
        if settings.weight_decay:
            g = g.add(w, alpha=settings.weight_decay)
        root = state["sum"].addcmul_(g, g).sqrt().add_(self.eps)
        # steps count from 1, and the first one is not decayed
        _descend_quotient(w, g, root, settings.lr / (1 + (settings.step - 1) * self.lr_decay))


def _can_fuse(w: Tensor, g: Tensor) -> bool:
    """Return whether torch's fused kernels can step vectors: each row lies in one piece in the processor's memory."""
    return w.device.type == "cpu" and w.dim() <= 2 and w.stride(-1) == 1 and g.stride(-1) == 1 and g.dtype == w.dtype


def _rows(vectors: Tensor) -> list[Tensor]:
    return [vectors] if vectors.dim() == 1 else list(vectors.unbind(0))


def _bias_correction(beta: float, step: float | Tensor) -> float | Tensor:
    """1 / (1 - beta^step), in double precision, as 0.999^step is near to 1."""
    if isinstance(step, Tensor):
        wide = step.to(float64_device(step.device)).double()
        return (1 / (1 - beta**wide)).to(step.dtype).to(step.device)
    return float(1 / (1 - beta**step))


def descend(w: Tensor, along: Tensor, lr: float | Tensor) -> None:
    """W <- w - lr * along."""
    if isinstance(lr, Tensor):
        w.sub_(along * lr)
    else:
        w.add_(along, alpha=-lr)


def _descend_quotient(w: Tensor, above: Tensor, below: Tensor, lr: float | Tensor) -> None:
    """W <- w - lr * above / below; where both are 0, as with eps = 0, torch's own result, which is not finite."""
    if isinstance(lr, Tensor):
        w.sub_(torch.div(above, below).mul_(lr))
    else:
        w.addcdiv_(above, below, value=-lr)


class RuleOptimizer(torch.optim.Optimizer):
    """Steps parameters by a rule, one tensor after another.

    Args:
        groups: groups of parameters, as `torch.optim` takes them.
        rule: the rule.
        lr, weight_decay, momentum: settings of groups that have none of their own.
    """

    def __init__(
        self, groups: Iterable[Mapping[str, Any]], rule: UpdateRule, lr: float, weight_decay: float, momentum: float
    ) -> None:
        self.rule = rule
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
        super().__init__([dict(group) for group in groups], defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One step of all parameters that have a gradient."""
        for group in self.param_groups:
            vectors = self.rule.state_vectors(group["momentum"])
            for parameter in group["params"]:
                # frozen, or not reached by the loss: torch's optimizers pass it over as well
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    # at the first step, as in torch's own optimizers: a parameter without a gradient needs no state
                    state |= {vector.name: torch.full_like(parameter, vector.start) for vector in vectors}
                    state["step"] = torch.tensor(0.0)
                state["step"] += 1
                vectors_by_name = {vector.name: state[vector.name] for vector in vectors}
                settings = StepSettings(group["lr"], group["weight_decay"], group["momentum"], float(state["step"]))
                self.rule.update(parameter, parameter.grad, vectors_by_name, settings)
