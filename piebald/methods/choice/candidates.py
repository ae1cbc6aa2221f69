"""The models that a client could use, and the guard against choosing one by luck.

The most widely shared first:

- `global`: the global model, of the main cluster where there are several.
- `cluster`: the model of the client's cluster, where there are several.
- `personal`: what the recipe gives the client, beyond the model that it was sent: with its private layers, trained
  beside the shared one (Ditto), or fine-tuned by the recipe.
- `fine_tuned`: the client's shared model after 1 to `TUNE_EPOCHS` more passes over its rows, the number with the lowest
  validation loss.
- `mixed`: a mixture of the shared model and one of its own, parameter by parameter: a * own + (1 - a) * shared (Deng
  et al. 2020, APFL, eq. 2; for models fine-tuned from the shared one, Wortsman et al. 2022, WiSE-FT).  Mansour et al.
  2020 (MAPPER) mix outputs instead.  Mixed parameters are a model of the user's own architecture, which is saved,
  loaded and deployed like any other; mixed outputs would need two models forever.
- `local`: what the client would have trained alone, with the same work: its tasks from the run's initial model, and 0
  to `TUNE_EPOCHS` more passes, as many as the fine-tuned model may have.

A client compares models on the same validation rows, so the loss of one row is compared with the loss of the same row
under another model: whatever makes a row hard for both cancels out.  The rule (Breiman et al. 1984, section 3.4.3)
takes the simplest model that is at most one standard error worse than the best one; simpler is here what more clients
share, and of models that nobody shares the one that the client would have without the others: it is left only for what
is better beyond one standard error, so that nobody loses by joining where luck decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from piebald.contracts import ClientContext, Personalizes, TrainInput, Trains
from piebald.methods.choice.alone import plain_sgd, train_alone

CANDIDATES = ("global", "cluster", "personal", "fine_tuned", "mixed", "local")
SHARED = ("global", "cluster")
TUNE_EPOCHS = 5
SHARES = (0.25, 0.5, 0.75)  # of a client's own model in a mixture


class Candidates:
    """Models that the clients of a stack could use: of several of a kind, the one that fits the validation rows best.

    Args:
        losses: returns the clients' validation losses [c, k] under each of k models [c, p].

    Attributes:
        models: [c, p] by name.
        epochs: passes over each client's rows by name, of models that are the best of several passes.
        mixture: for each client, the name of the model that is mixed with the base, and its share.
    """

    def __init__(self, losses: Callable[[Sequence[Tensor]], Tensor]) -> None:
        self.models: dict[str, Tensor] = {}
        self.epochs: dict[str, list[int]] = {}
        self.mixture: list[tuple[str, float]] = []
        self._losses = losses

    def add_best_pass(self, name: str, passes: Iterable[Sequence[Tensor]], first: int = 0) -> None:
        """Add the models after the number of passes with the lowest validation loss.

        Args:
            name: the candidate's name.
            passes: groups of models that are compared at once, after `first`, `first` + 1, ... passes.
            first: passes behind the first model.
        """
        self.models[name], best = self._lowest(passes)
        self.epochs[name] = [first + number for number in best]

    def add_mixture(self, base: Tensor, names: Sequence[str]) -> None:
        """Add as "mixed" the mixture of `base` [c, p] and one of these candidates with the lowest validation loss."""
        kinds = [(name, share) for name in names for share in SHARES]
        mixtures = [share * self.models[name] + (1 - share) * base for name, share in kinds]
        self.models["mixed"], best = self._lowest([mixtures])
        self.mixture = [kinds[number] for number in best]

    def put_in_order(self, names: Sequence[str]) -> None:
        """Put the models in the order of these names."""
        self.models = {name: self.models[name] for name in names if name in self.models}

    def verdict(self, losses: Tensor, shared: int, errors: float = 1.0) -> Verdict:
        """Return the guard's verdict for one client.

        Args:
            losses: [models, rows], of the models in their order.
            shared: how many of the models, from the first, are shared.
            errors: see `judge`.
        """
        names = list(self.models)
        return judge(losses, shared, errors, names.index("local") if "local" in names else None)

    def _lowest(self, groups: Iterable[Sequence[Tensor]]) -> tuple[Tensor, list[int]]:
        """Return each client's model with the lowest validation loss [c, p], the first of equals, and its number."""
        chosen: list[tuple[float, int, Tensor]] = []
        start = 0
        for models in groups:
            # `min` returns NaN where there is one, and the model that overflowed would be chosen
            losses = self._losses(models).nan_to_num(math.inf)
            best = zip(losses.min(1).values.tolist(), losses.argmin(1).tolist(), strict=True)
            # group by group, so that a long search need not hold all of its models
            offers = [(loss, start + number, models[number][row]) for row, (loss, number) in enumerate(best)]
            pairs = zip(chosen or offers, offers, strict=True)
            # strictly below: of equal losses the first stays, which in tuning has the fewest passes
            chosen = [offer if offer[0] < earlier[0] else earlier for earlier, offer in pairs]
            start += len(models)
        return torch.stack([model for _, _, model in chosen]), [number for _, number, _ in chosen]


class ClientCandidates(Candidates):
    """The candidates of a stack of clients when a run has ended.

    Args:
        inputs, context, trainer: as `Query.answer` gets them.
        tasks, passes: the clients' work, see `train_alone`.

    Attributes:
        shared: how many of the models, from the first, are shared.
        fallback: the name of the shared one that fits the clients best.
    """

    def __init__(
        self, inputs: TrainInput, context: ClientContext, trainer: Trains, tasks: Sequence[str], passes: Sequence[int]
    ) -> None:
        super().__init__(lambda models: context.losses(models, "validation"))
        self._inputs, self._context, self._trainer = inputs, context, trainer
        shared, personal = self._untrained()
        self.models = {**shared, **personal}
        if inputs.shared:  # else the model that was not sent is the local one
            self.add_best_pass("fine_tuned", [self._tuned(inputs.model)], first=1)
            if tasks:
                alone = train_alone(trainer, inputs, context, tasks, passes)
                # further passes, as for "fine_tuned": the local model must not lose for having trained less
                self.add_best_pass("local", [[alone, *self._tuned(alone)]])
            self.add_mixture(inputs.model, [name for name in self.models if name not in shared])
        self.put_in_order(CANDIDATES)
        self.shared = len(shared)
        self.fallback = list(self.models)[max(self.shared - 1, 0)]

    def _untrained(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the models that are there without training: shared ones, and others."""
        inputs, trainer = self._inputs, self._trainer
        if inputs.shared == 0:
            return {}, {"local": inputs.model}
        personal = trainer.personalize(inputs, self._context) if isinstance(trainer, Personalizes) else None
        if inputs.shared < inputs.model.shape[-1]:  # shared layers are of use only together with the client's own
            return {"personal": inputs.model if personal is None else personal}, {}
        # beside a cluster's model the run's comes along; without clusters the model that was sent is the global one
        wide = inputs.vectors.get("global")
        shared = {"global": inputs.model} if wide is None else {"global": wide, "cluster": inputs.model}
        return shared, {} if personal is None else {"personal": personal}

    def _tuned(self, start: Tensor) -> list[Tensor]:
        """Return the models after 1, 2, ... `TUNE_EPOCHS` more passes over the clients' rows."""
        plain, model = plain_sgd(self._trainer).model_copy(update={"epochs": 1, "steps": None}), start
        state = {name: part.expand(len(model), *part.shape) for name, part in plain.initial_state(model[0], 0).items()}
        models: list[Tensor] = []
        for _ in range(TUNE_EPOCHS):
            output = plain.train(replace(self._inputs, model=model, state=state, vectors={}), self._context)
            model, state = output.model, dict(output.state)
            models.append(model)
        return models


FEWEST_ROWS = 10  # with fewer rows a standard error is itself a matter of luck


@dataclass(frozen=True, slots=True)
class Verdict:
    """The guard's verdict about one client.

    Attributes:
        chosen: the number of the chosen model.
        best: the number of the model with the lowest mean loss, that of the fallback where there are too few rows.
        difference: mean over rows of the fallback's loss minus that of the best model.
        error: its standard error; both are NaN where there are too few rows.
    """

    chosen: int
    best: int
    difference: float = math.nan
    error: float = math.nan


def judge(losses: Tensor, shared: int, errors: float = 1.0, alone: int | None = None) -> Verdict:
    """Choose among models by their losses on the same rows.

    Args:
        losses: [models, rows]; the models that several clients share come first, the most widely shared one before the
            others.  A model whose loss of any row is not finite is never chosen by its loss.
        shared: how many of the models are shared.  The last of them, the one that fits the client best, is the
            fallback.  With 0 there is nothing to guard, and the lowest mean loss decides.
        errors: how many standard errors a shared model may be worse than the best one and still be chosen.  Of two
            equally good models, luck passes by one standard error once in six times (a normal variable above 1), in
            which case nothing is lost.
        alone: the number of the model that the client would have trained alone, if it is among them.  Where no shared
            model is chosen, it is, unless another one is better by more than `errors` standard errors.

    Examples:
        >>> import torch
        >>> shared, tuned = torch.full((20,), 1.0), torch.linspace(0.4, 0.6, 20)
        >>> judge(torch.stack([shared, tuned]), shared=1).chosen
        1
    """
    fallback, rows = max(shared - 1, 0), losses.shape[1]
    # minus infinity as well, or a loss that is no number would be the lowest
    means = losses.double().mean(1).nan_to_num(math.inf, posinf=math.inf, neginf=math.inf)
    # with nothing shared there is nothing to keep instead, and any row is better than none
    enough = rows >= (FEWEST_ROWS if shared else 1)
    if not enough or not math.isfinite(float(means.min())):
        return Verdict(fallback, fallback)
    best = int(means.argmin())
    gaps = {number: paired(losses[number], losses[best]) for number in range(max(shared, 1))}
    # the most widely shared model first, as it has seen the most rows
    preferred = range(shared) if alone is None else [*range(shared), alone]
    near = (n for n in preferred if _within(gaps.get(n) or paired(losses[n], losses[best]), errors))
    # nobody preferred is near enough, so the lowest loss decides
    chosen = next(near, best)
    return Verdict(chosen, best, *gaps[fallback])


def paired(losses: Tensor, others: Tensor) -> tuple[float, float]:
    """The mean of the differences of two models' losses on the same rows, and its standard error (NaN for one row)."""
    differences = losses.double() - others.double()
    if len(differences) < 2:
        return float(differences.mean()) if len(differences) else math.nan, math.nan
    return float(differences.mean()), float(differences.std()) / math.sqrt(len(differences))


def _within(gap: tuple[float, float], errors: float) -> bool:
    # without a standard error, as of a single row, no model counts as near
    return math.isfinite(gap[0]) and math.isfinite(gap[1]) and gap[0] <= errors * gap[1]
