"""Losses and metrics by name, against torch, Hugging Face, statsmodels and plain loops."""

from __future__ import annotations

import itertools
import math
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import piebald
from piebald.core.errors import SettingError
from piebald.core.metrics import Concordance, Perplexity, next_token_accuracy, survival_loss
from piebald.core.objective import Objective, objective_for
from piebald.core.references import USERS
from piebald.settings import plugins

CLASSES = torch.tensor([0, 2, 1, 2])
TOKENS = torch.tensor([[3, 1, 4, 1], [2, 0, -100, -100]])


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def of(name: str, targets: Any, **settings: Any) -> Objective:
    return objective_for(targets, {"name": name, **settings})


def test_label_smoothing_and_class_weights_are_those_of_torch() -> None:
    settings = {"label_smoothing": 0.2, "class_weights": [1.0, 0.5, 3.0]}
    scores = drawn(4, 3)
    expected = functional.cross_entropy(
        scores, CLASSES, torch.tensor([1.0, 0.5, 3.0]), label_smoothing=0.2, reduction="none"
    )
    torch.testing.assert_close(of("classification", CLASSES, **settings).loss(scores, CLASSES), expected)


def test_the_ordinal_loss_is_the_sum_of_log_losses_of_cumulative_probabilities() -> None:
    scores, ranks = drawn(6, 4).double(), torch.tensor([0, 1, 2, 3, 3, 1])
    chances = scores.softmax(1)
    slow = torch.zeros(6, dtype=torch.float64)
    for row, rank in enumerate(ranks.tolist()):
        for k in range(3):
            above = chances[row, k + 1 :].sum()
            slow[row] -= torch.log(above if rank > k else 1 - above)
    made = of("ordinal", ranks)
    torch.testing.assert_close(made.loss(scores, ranks), slow)
    assert made.metric == "rank_error"
    assert made.metrics["rank_error"](torch.eye(4)[[3, 0, 2]], torch.tensor([0, 0, 1])).tolist() == [3, 0, 1]
    two, right = drawn(6, 2), torch.tensor([0, 1, 1, 0, 1, 0])  # of two classes it is the cross-entropy
    torch.testing.assert_close(
        of("ordinal", right).loss(two, right), functional.cross_entropy(two, right, reduction="none")
    )
    far = torch.tensor([[9.0, 0, 0, 0], [0, 9.0, 0, 0]])  # both are wrong, the first by more
    first, second = made.loss(far, torch.tensor([3, 3])).tolist()
    assert first > second + 5
    assert made.loss(torch.tensor([[1e4, 0, 0, 0]]), torch.tensor([3])).isfinite().all()


def test_losses_of_numbers_and_labels_are_those_of_torch() -> None:
    outputs, targets = drawn(5, 3), drawn(5, 3) * 2
    for name, expected in {
        "regression": functional.mse_loss(outputs, targets, reduction="none"),
        "l1": functional.l1_loss(outputs, targets, reduction="none"),
        "huber": functional.huber_loss(outputs, targets, delta=0.7, reduction="none"),
    }.items():
        settings = {"delta": 0.7} if name == "huber" else {}
        torch.testing.assert_close(of(name, targets, **settings).loss(outputs, targets), expected.mean(1))
    labels = (targets > 0).float()
    weights = torch.tensor([1.0, 4.0, 2.0])
    expected = functional.binary_cross_entropy_with_logits(outputs, labels, pos_weight=weights, reduction="none")
    made = of("multilabel", labels, positive_weights=[1.0, 4.0, 2.0])
    torch.testing.assert_close(made.loss(outputs, labels), expected.mean(1))


def test_the_next_token_loss_is_that_of_a_hugging_face_model_and_perplexity_its_exponential() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=7, n_positions=4, n_embd=8, n_layer=1, n_head=2)
    model = transformers.GPT2LMHeadModel(config).eval()
    ids = TOKENS.clamp(min=0)
    with torch.no_grad():
        by_row = [model(input_ids=ids[row : row + 1], labels=TOKENS[row : row + 1]) for row in range(2)]
        together = model(input_ids=ids, labels=TOKENS)
    made = objective_for(TOKENS, "language_modelling")
    torch.testing.assert_close(made.loss(together, TOKENS), torch.stack([one.loss for one in by_row]))
    perplexity = made.metrics["perplexity"]
    perplexity.reset()
    for row, one in enumerate(by_row):  # whatever the batches, each token counts once
        perplexity.update(one, TOKENS[row : row + 1])
    assert float(perplexity.compute()) == pytest.approx(math.exp(float(together.loss)), rel=1e-5)


def test_ignored_targets_change_nothing() -> None:
    outputs = drawn(2, 4, 7)
    other = outputs.clone()
    other[1, 1:] += 5.0  # what predicts ignored tokens
    for name in ("language_modelling", "token_classification"):
        if name == "token_classification":
            other[1, 1] = outputs[1, 1]
        made = objective_for(TOKENS, name)
        assert torch.equal(made.loss(outputs, TOKENS), made.loss(other, TOKENS))
        for metric in made.metrics.values():
            if callable(metric):
                assert torch.equal(metric(outputs, TOKENS), metric(other, TOKENS))
    assert torch.equal(next_token_accuracy(outputs, TOKENS)[1:], (outputs[1:, 0].argmax(1) == 0).float())
    unheard = torch.full_like(TOKENS, -100)
    assert objective_for(TOKENS, "language_modelling").loss(outputs, unheard).tolist() == [0.0, 0.0]
    aligned = Perplexity(shifted=False)
    aligned.update(outputs, unheard)
    assert math.isnan(float(aligned.compute()))


def lives(count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log hazards, times with ties, and events."""
    rng = np.random.default_rng(seed)
    time, event = rng.integers(1, 8, count), rng.random(count) < 0.6
    return (torch.from_numpy(rng.normal(size=count)), torch.from_numpy(time).float(), torch.from_numpy(event).float())


def test_the_partial_likelihood_and_its_gradient_are_those_of_plain_loops() -> None:
    hazard, time, event = lives(40, 0)
    h, total, gradient = hazard.tolist(), 0.0, np.zeros(40)
    for i in range(40):
        if event[i]:
            risk = [j for j in range(40) if time[j] >= time[i]]
            whole = sum(math.exp(h[j]) for j in risk)
            total -= h[i] - math.log(whole)
            gradient[i] -= 1
            for j in risk:
                gradient[j] += math.exp(h[j]) / whole
    hazard.requires_grad_()
    loss = survival_loss(hazard.unsqueeze(1), {"time": time, "event": event})
    loss.backward()
    assert loss.item() == pytest.approx(total / float(event.sum()))
    assert hazard.grad is not None
    np.testing.assert_allclose(hazard.grad.numpy(), gradient / float(event.sum()), atol=1e-6)


@pytest.mark.parametrize(
    ("slope", "likelihood", "score"), [(0.0, -8.070906088787817, 2.125), (0.7, -8.353907816678813, -2.42560085)]
)
def test_the_partial_likelihood_is_that_of_another_program(slope: float, likelihood: float, score: float) -> None:
    """The numbers are those of statsmodels 0.14: PHReg(time, x, status=event, ties="breslow").loglike and .score."""
    time, event = [2, 2, 3, 5, 5, 5, 7, 9], [1, 1, 0, 1, 1, 0, 1, 0]
    x = torch.tensor([0.5, -1.0, 2.0, 0.0, 1.5, -0.5, 1.0, -2.0], dtype=torch.float64)
    b = torch.tensor(slope, dtype=torch.float64, requires_grad=True)
    loss = survival_loss(x * b, {"time": torch.tensor(time), "event": torch.tensor(event)})
    loss.backward()
    assert b.grad is not None
    assert (-5 * loss.item(), -5 * b.grad.item()) == pytest.approx((likelihood, score))  # of five events


def test_a_batch_without_events_has_no_loss_and_no_gradient() -> None:
    hazard = torch.ones(3, 1, requires_grad=True)
    survival_loss(hazard, torch.tensor([[1.0, 0.0], [2.0, 0.0], [3.0, 0.0]])).backward()
    assert hazard.grad is not None
    assert not hazard.grad.any()


@pytest.mark.parametrize("seed", range(3))
def test_concordance_is_that_of_a_loop_over_all_pairs(seed: int) -> None:
    hazard, time, event = lives(30, seed)
    hazard = (hazard * 2).round()  # with ties
    right, known = 0.0, 0
    for i, j in itertools.permutations(range(30), 2):
        sooner = time[i] < time[j] or (time[i] == time[j] and not event[j])
        if event[i] and sooner:
            known += 1
            right += 1.0 if hazard[i] > hazard[j] else 0.5 if hazard[i] == hazard[j] else 0.0
    metric = Concordance()
    metric.update(hazard[:11].unsqueeze(1), {"time": time[:11], "event": event[:11]})
    metric.update(hazard[11:].unsqueeze(1), {"time": time[11:], "event": event[11:]})
    assert float(metric.compute()) == pytest.approx(right / known)


@pytest.mark.parametrize("engine", ["sequential", "batched"])
def test_clients_with_survival_count_by_events(engine: Literal["sequential", "batched"]) -> None:
    """The average of clients with unequal shares of events is the model that is stratified by client; before, it
    weighed by rows.
    """
    rng, parts = np.random.default_rng(0), {}
    for name, rows, slope, seen in (("a", 90, 0.9, 20.0), ("b", 90, 0.2, 0.4), ("none", 40, 0.9, 0.0)):
        x = rng.normal(size=(rows, 1)).astype(np.float32)
        ends, last = rng.exponential(np.exp(-slope * x[:, 0])), seen * rng.exponential(size=rows)
        parts[name] = x, {"time": np.minimum(ends, last), "event": ends <= last}
    clients = piebald.clients_from(parts, test=0.0, validation=0.0)
    referee = piebald.cox(clients, time="time", event="event", ties="breslow")
    assert (referee.informative, referee.clients) == (2, 3)
    recipe = piebald.recipes.fedavg(lr=0.5, batch=1000)
    runtime = {"kind": "simulator", "engine": engine, "workers": 0}
    torch.manual_seed(0)
    run = piebald.run(recipe, clients, nn.Linear(1, 1, bias=False), rounds=40, loss="survival", runtime=runtime)
    assert run.model().weight.item() == pytest.approx(referee.coefficients[0], abs=1e-4)


@pytest.mark.full
def test_survival_trains_where_rows_are_compared_and_is_refused_where_each_must_have_a_loss() -> None:
    rng = np.random.default_rng(0)
    clients = {}
    for name in ("a", "b"):
        x = rng.normal(size=(60, 3))
        time = rng.exponential(np.exp(-2 * x[:, 0])) + 0.01
        clients[name] = (x, {"time": time, "event": rng.random(60) < 0.8})
    torch.manual_seed(0)
    made, model = piebald.clients_from(clients, test=0.3, validation=0.2), nn.Linear(3, 1)
    runs = []
    for engine in ("sequential", "vmapped", "batched"):
        runtime = {"kind": "simulator", "engine": engine, "workers": 0}
        runs.append(piebald.run("fedavg", made, model, rounds=8, loss="survival", runtime=runtime))
    found = [row["value"] for row in runs[0].scores if row["metric"] == "concordance" and row["version"] == 8]
    assert min(found) > 0.7
    for run in runs[1:]:
        torch.testing.assert_close(run.model().weight, runs[0].model().weight, atol=1e-5, rtol=1e-4)
    with pytest.raises(SettingError, match="dp_sgd clips each row's own gradient but the loss 'survival' compares"):
        piebald.run("dp_sgd", made, model, rounds=1, loss="survival")
    with pytest.raises(SettingError, match="compares models row by row, but the loss 'survival'"):
        piebald.run("fedavg", made, model, rounds=1, loss="survival", keep="best_for_each")


@pytest.mark.parametrize(
    ("loss", "targets", "words"),
    [
        ({"name": "classification", "label_smoothing": 1.0}, CLASSES, r"must be a number in \[0, 1\), got 1.0"),
        ({"name": "classification", "smoothing": 0.1}, CLASSES, "there is no setting of loss 'classification' called"),
        ({"name": "huber", "delta": True}, CLASSES.float(), "must be a number above 0, got True"),
        ({"name": "classification", "class_weights": [1, -1]}, CLASSES, "must be a list of numbers of at least 0"),
        ({"label_smoothing": 0.1}, CLASSES, "must be a table with a name"),
        ("survival", CLASSES, "survival needs targets of a time and an event"),
        ("language_modelling", CLASSES, r"language_modelling needs targets \[batch, length\]"),
        (None, {"time": CLASSES, "event": CLASSES}, "need a loss: name one, such as 'survival'"),
    ],
)
def test_losses_that_do_not_fit_are_refused_in_one_sentence(loss: Any, targets: Any, words: str) -> None:
    with pytest.raises(SettingError, match=words) as refused:
        objective_for(targets, loss)
    assert "\n" not in str(refused.value)


def test_a_metric_means_what_its_objective_needs_also_beside_one_of_a_plugin() -> None:
    metrics = USERS.mark(["accuracy", "torch.nn.functional:l1_loss"])
    made = plugins.objective_named(TOKENS, "language_modelling", metrics)
    assert made.metrics["accuracy"] is next_token_accuracy
    assert list(made.metrics) == ["accuracy", "l1_loss"]
