"""Optimizers of clients: settings, defaults and updates of `torch.optim`, schedules within a task, and groups."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from piebald import recipes
from piebald.contracts import SgdConfig, StepSettings
from piebald.contracts.data import ModelSpec
from piebald.core.errors import SettingError
from piebald.core.objective import OBJECTIVES
from piebald.core.parameters import Layout
from piebald.engines.sgd_step import group_settings
from piebald.methods.training import (
    AdagradOptimizer,
    AdamOptimizer,
    AdamwOptimizer,
    CosineStepSchedule,
    LinearStepSchedule,
    ParameterGroup,
    RmspropOptimizer,
    Sgd,
    SgdOptimizer,
    Warmup,
    WarmupStepSchedule,
)
from piebald.methods.training.optimizer_state import average
from piebald.methods.training.optimizers import Optimizer
from tests.fakes import federation, seeded, simulate

TORCH: dict[str, Any] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
}
# Each optimizer with all settings at their defaults, and with each of them changed.
CASES: dict[str, tuple[Optimizer, dict[str, float]]] = {
    "sgd": (SgdOptimizer(), {}),
    "sgd, momentum, decay": (SgdOptimizer(), {"momentum": 0.9, "weight_decay": 0.1}),
    "sgd, nesterov": (SgdOptimizer(nesterov=True), {"momentum": 0.8, "weight_decay": 0.1}),
    "sgd, dampening": (SgdOptimizer(dampening=0.4), {"momentum": 0.8}),
    "adam": (AdamOptimizer(), {}),
    "adam, decay, betas, eps": (AdamOptimizer(betas=(0.5, 0.7), eps=1e-3), {"weight_decay": 0.1}),
    "adam, amsgrad": (AdamOptimizer(amsgrad=True, betas=(0.9, 0.5)), {}),
    "adamw": (AdamwOptimizer(), {"weight_decay": 0.1}),
    "adamw, amsgrad": (AdamwOptimizer(amsgrad=True, betas=(0.9, 0.5)), {"weight_decay": 0.01}),
    "rmsprop": (RmspropOptimizer(), {}),
    "rmsprop, momentum, decay": (RmspropOptimizer(alpha=0.5, eps=1e-3), {"momentum": 0.8, "weight_decay": 0.1}),
    "rmsprop, centered": (RmspropOptimizer(centered=True), {"momentum": 0.5}),
    "adagrad": (AdagradOptimizer(), {"weight_decay": 0.1}),
    "adagrad, all": (AdagradOptimizer(lr_decay=0.2, initial_accumulator_value=0.3, eps=1e-2), {}),
}


@pytest.mark.parametrize("form", ["numbers", "rows", "not in one piece"])
@pytest.mark.parametrize("case", CASES)
def test_the_update_is_that_of_torch(case: str, form: str) -> None:
    """Ten steps of three vectors: with numbers, with a rate and step for each row, and in a slice of a wider matrix."""
    optimizer, beside = CASES[case]
    lr, momentum, decay = 0.1, beside.get("momentum", 0.0), beside.get("weight_decay", 0.0)
    draw = torch.Generator().manual_seed(1)
    start, gradients = torch.randn(3, 7, generator=draw), torch.randn(10, 3, 7, generator=draw)
    expected = nn.Parameter(start.clone())
    theirs = optimizer.as_torch([{"params": [expected]}], lr, decay, momentum)
    assert type(theirs) is TORCH[optimizer.kind]
    wide = torch.zeros(7, 3) if form == "not in one piece" else torch.zeros(3, 7)
    ours = wide.T if form == "not in one piece" else wide
    ours.copy_(start)
    state = {one.name: torch.full((3, 7), one.start) for one in optimizer.state_vectors(momentum)}
    for number, gradient in enumerate(gradients):
        expected.grad = gradient.clone()
        theirs.step()
        rows = torch.ones(3, 1) if form == "rows" else 1.0
        optimizer.update(ours, gradient, state, StepSettings(lr * rows, decay, momentum, (number + 1) * rows))
        torch.testing.assert_close(ours, expected.detach(), rtol=1e-5, atol=1e-6)
    assert torch.equal(gradients[-1], gradient)


@pytest.mark.parametrize("kind", TORCH)
def test_names_and_defaults_are_those_of_torch(kind: str) -> None:
    theirs = {name: one.default for name, one in inspect.signature(TORCH[kind]).parameters.items()}
    trainer = Sgd(optimizer=kind)
    own = {name: getattr(trainer.optimizer, name) for name in type(trainer.optimizer).model_fields}
    assert own == {name: theirs[name] for name in own}
    assert trainer.weight_decay == theirs["weight_decay"]
    assert kind == "sgd" or trainer.lr == theirs["lr"]
    chosen = {"params", "lr", "weight_decay", "momentum", *own}
    ways = {
        "maximize",
        "foreach",
        "capturable",
        "differentiable",
        "fused",
        "decoupled_weight_decay",
    }  # not what, but how
    assert theirs.keys() - chosen <= ways


def test_defaults_yield_to_what_is_given() -> None:
    made = Sgd(optimizer="adamw", lr=0.2, weight_decay=0.0)
    assert (made.lr, made.weight_decay) == (0.2, 0.0)
    assert recipes.fedavg(lr=0.3).with_(training={"kind": "sgd", "optimizer": "adam"}).training.lr == 0.3
    assert recipes.fedavg(optimizer="adam").with_(training="proximal").training.lr == 0.001


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"optimizer": {"kind": "adamw", "weight_decay": 0.1}}, "has no weight_decay of its own"),
        ({"optimizer": "adam", "momentum": 0.9}, "momentum is no setting of adam"),
        ({"optimizer": {"kind": "sgd", "nesterov": True}}, "nesterov needs momentum"),
        ({"optimizer": {"kind": "adam", "betas": [0.9, 1.0]}}, "betas.1 must be below 1, got 1.0"),
        ({"optimizer": "adams"}, "did you mean 'adam'"),
        ({"optimizer_state": "kept"}, "would have no effect"),
        ({"optimizer": "adam", "keep_momentum": True, "lr": 0.1}, "keep_momentum"),
        ({"parameter_groups": [{"layers": "norm"}]}, "give lr or weight_decay"),
        ({"parameter_groups": {"layers": "norm"}}, "must be a list of tables"),
        ({"lr_schedule": lambda version: 1.0}, "define it with def"),
        ({"step_schedule": {"kind": "function", "function": "no_such_module:f"}}, "there is no module"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError, match=words) as caught:
        recipes.fedavg(**fields)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["scaffold", "fednova"])
@pytest.mark.parametrize(
    "fields", [{"optimizer": "adam"}, {"step_schedule": "cosine"}, {"parameter_groups": [{"layers": "0", "lr": 1.0}]}]
)
def test_methods_whose_theory_is_that_of_plain_sgd_refuse_others(name: str, fields: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match="plain SGD"):
        recipes.make(name, **fields)


def test_feddyn_refuses_state_that_outlives_a_task() -> None:
    assert recipes.feddyn(optimizer="adam").training.lr == 0.001
    with pytest.raises(SettingError, match="optimizer_state"):
        recipes.feddyn(optimizer="adam", optimizer_state="kept")


@pytest.mark.parametrize(
    ("schedule", "values"),
    [
        (WarmupStepSchedule(warmup=0.5), [0.5, 1, 1, 1]),
        (LinearStepSchedule(), [1, 0.75, 0.5, 0.25]),
        (LinearStepSchedule(warmup=0.4, floor=0.5), [0.5, 1, 1, 0.75]),
        (CosineStepSchedule(), [1, 0.75, 0.25]),
        (CosineStepSchedule(warmup=1.0), [0.25, 0.5, 0.75, 1]),
    ],
)
def test_values_of_schedules_within_a_task(schedule: Any, values: list[float]) -> None:
    assert [schedule.factor(step, len(values)) for step in range(len(values))] == pytest.approx(values)


def test_a_warm_up_over_server_steps_is_followed_by_another_schedule() -> None:
    schedule = Warmup(rounds=2, after={"kind": "exponential", "rate": 0.5})
    assert [schedule.factor(version) for version in range(5)] == pytest.approx([0.5, 1, 1, 0.5, 0.25])


def halved(version: int) -> float:
    return 0.5**version


def falling(step: int, steps: int) -> float:
    return 1 - step / steps


def negative(step: int, steps: int) -> float:
    return -1.0


def test_functions_are_schedules_like_others() -> None:
    made = recipes.fedavg(lr_schedule=halved, step_schedule=falling)
    known = recipes.fedavg(lr_schedule={"kind": "exponential", "rate": 0.5}, step_schedule="linear")
    assert made.fields["lr_schedule"] == {"kind": "function", "function": f"{__name__}:halved"}
    again = recipes.rebuild(made.model_dump())
    for step in range(4):
        assert again.training.lr_schedule.factor(step) == known.training.lr_schedule.factor(step)
        assert again.training.step_schedule.factor(step, 4) == known.training.step_schedule.factor(step, 4)
    with pytest.raises(SettingError, match="finite number of at least 0, got -1"):
        Sgd(step_schedule=negative).step_schedule.factor(0, 1)


class Normed(nn.Module):
    """A layer with a norm behind it, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.head = nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.inner(x)))  # type: ignore[no-any-return]


def test_groups_hold_what_their_patterns_name() -> None:
    plain, fast = (
        ParameterGroup(layers=("norm", "*r.bias", "head.bias"), weight_decay=0.0),
        ParameterGroup(layers="head.weight", lr=0.4),
    )
    found = group_settings(SgdConfig(lr=0.1, weight_decay=0.2, groups=(plain, fast), base_lr=0.2), Normed())
    bare = ["norm.weight", "norm.bias", "inner.bias", "head.bias"]
    assert found == dict.fromkeys(bare, (1.0, 0.0)) | {"head.weight": (2.0, 0.2)}


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ([{"layers": "hed", "lr": 0.1}], "did you mean 'head'"),
        ([{"layers": "batch_norm", "lr": 0.1}], "it has none"),
        (
            [{"layers": "head", "lr": 0.1}, {"layers": "*.bias", "weight_decay": 0.0}],
            "'head.bias' is in numbers 0 and 1",
        ),
    ],
)
def test_groups_that_do_not_fit_the_model_are_refused(groups: Any, words: str) -> None:
    model = Normed()
    spec = ModelSpec(
        model, Layout.of(model), Layout.of(model).flatten(model), OBJECTIVES["classification"], 0, (2,), (2,)
    )
    assert words in str(Sgd(parameter_groups=groups).unsupported_model(spec))


def test_kept_state_stays_and_averaged_state_is_sent_but_for_private_layers() -> None:
    rows = [(torch.randn(6, 2), torch.arange(6) % 2) for _ in range(2)]
    for state, sent in (("kept", 1), ("averaged", 3)):
        recipe = recipes.hdafl(private="head", optimizer="adam", optimizer_state=state, batch=3)
        run = simulate(recipe, federation(*rows), seeded(Normed), rounds=2)
        shared, size = run.work.layout.shared, run.work.layout.size
        kept = run.work.initial_state()
        assert kept["optimizer_exp_avg"].shape == (size if state == "kept" else size - shared,)
        assert {row["bytes_up"] for row in run.results} == {4 * (sent * shared + (sent > 1))}


def test_no_client_makes_means_of_squares_negative() -> None:
    kept = AdamOptimizer().state_vectors(0.0)
    names = ("optimizer_exp_avg", "optimizer_exp_avg_sq", "optimizer_step")
    before = {name: torch.zeros(2) for name in names}
    after = average(kept, before, {name: torch.tensor([-1.0, 1.0]) for name in names})
    assert [after[name].tolist() for name in names] == [[-1, 1], [0, 1], [0, 1]]


class FixedSteps(Optimizer):
    """An optimizer of one's own: w <- w - lr * sign(g)."""

    default_lr = 0.5

    def update(self, w: Tensor, g: Tensor, state: Any, settings: StepSettings) -> None:
        w.sub_(g.sign() * settings.lr)


@pytest.mark.parametrize("engine", ["sequential", "vmapped", "batched", "reference"])
def test_an_optimizer_of_ones_own(engine: str) -> None:
    recipe = recipes.fedavg(optimizer="fixed_steps", steps=3)
    rows = federation((torch.ones(2, 2), torch.zeros(2)), (torch.ones(3, 2), torch.zeros(3)))
    run = simulate(recipe, rows, seeded(lambda: nn.Sequential(nn.Linear(2, 1))), rounds=1, simulator={"engine": engine})
    moved = run.work.layout.flatten(run.model()) - run.work.initial
    assert bool((moved.abs() <= 1.5).all())
    assert bool(((moved * 2).round() - moved * 2).abs().max() < 1e-5)


def test_a_class_that_derives_from_one_steps_by_its_own_update_on_every_engine() -> None:
    """Before, the engine "reference" took torch's optimizer of the class that it derives from."""

    class Halving(AdamOptimizer):
        def update(self, w: Tensor, g: Tensor, state: Mapping[str, Tensor], settings: StepSettings) -> None:
            w.mul_(0.5)

    parameter = nn.Parameter(torch.tensor([8.0]))
    parameter.grad = torch.ones(1)
    made = Halving().as_torch([{"params": [parameter]}], lr=0.1, weight_decay=0.0, momentum=0.0)
    made.step()
    assert parameter.item() == 4.0
    assert isinstance(AdamOptimizer().as_torch([{"params": [parameter]}], 0.1, 0.0, 0.0), torch.optim.Adam)
