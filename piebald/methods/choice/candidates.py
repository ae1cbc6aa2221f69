"""The models that a client could use.

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
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from piebald.contracts import ClientContext, Personalizes, TrainInput, Trains
from piebald.methods.choice.alone import plain_sgd, train_alone
from piebald.methods.choice.guard import Verdict, judge

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
            losses = self._losses(models).nan_to_num(math.inf)
            best = zip(losses.min(1).values.tolist(), losses.argmin(1).tolist(), strict=True)
            # group by group, so that a long search need not hold all of its models
            offers = [(loss, start + number, models[number][row]) for row, (loss, number) in enumerate(best)]
            pairs = zip(chosen or offers, offers, strict=True)
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
