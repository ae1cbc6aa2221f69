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
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from piebald.contracts import ClientContext, Personalizes, TrainInput, Trains
from piebald.methods.choice.alone import plain_sgd, train_alone

CANDIDATES = ("global", "cluster", "personal", "fine_tuned", "mixed", "local")
SHARED = ("global", "cluster")
TUNE_EPOCHS = 5
SHARES = (0.25, 0.5, 0.75)  # of a client's own model in a mixture


class Candidates:
    """The candidates of a stack of clients.

    Args:
        inputs, context, trainer: as `Query.answer` gets them.
        tasks, passes: the clients' work, see `train_alone`.

    Attributes:
        models: [c, p] by name, those that are shared first.
        shared: how many of them are shared.
        fallback: the name of the shared one that fits the clients best.
        about: [c] by name, what else is known: "NAME/epochs", passes after the run; "mixed/of" and "mixed/share".
    """

    def __init__(
        self, inputs: TrainInput, context: ClientContext, trainer: Trains, tasks: Sequence[str], passes: Sequence[int]
    ) -> None:
        self._inputs, self._context, self._trainer = inputs, context, trainer
        self.about: dict[str, Tensor] = {}
        shared, own = self._given()
        if inputs.shared:  # else the model that was not sent is the local one
            own["fine_tuned"] = self._best_pass("fine_tuned", self._tuned(inputs.model), 1)
            if tasks:
                alone = train_alone(trainer, inputs, context, tasks, passes)
                own["local"] = self._best_pass("local", [alone, *self._tuned(alone)], 0)
            own["mixed"] = self._mixed(own)
        self.shared = len(shared)
        self.models = {name: (shared | own)[name] for name in CANDIDATES if name in shared | own}
        self.fallback = list(self.models)[max(self.shared - 1, 0)]

    def _given(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The models that are there without training: shared ones, and others."""
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
        """Models after 1, 2, ... `TUNE_EPOCHS` more passes over the clients' rows."""
        plain, model = plain_sgd(self._trainer).model_copy(update={"epochs": 1, "steps": None}), start
        state = {name: part.expand(len(model), *part.shape) for name, part in plain.initial_state(model[0], 0).items()}
        tried: list[Tensor] = []
        for _ in range(TUNE_EPOCHS):
            output = plain.train(replace(self._inputs, model=model, state=state, vectors={}), self._context)
            model, state = output.model, dict(output.state)
            tried.append(model)
        return tried

    def _best_pass(self, name: str, models: Sequence[Tensor], first: int) -> Tensor:
        """The models after the number of passes with the lowest validation loss; the first is after `first` passes."""
        best = self._lowest(models)
        self.about[f"{name}/epochs"] = torch.tensor([float(first + number) for number in best])
        return torch.stack([models[number][row] for row, number in enumerate(best)])

    def _mixed(self, own: Mapping[str, Tensor]) -> Tensor:
        """The mixture with the lowest validation loss."""
        base, kinds = self._inputs.model, [(name, share) for name in own for share in SHARES]
        tried = [share * own[name] + (1 - share) * base for name, share in kinds]
        best = self._lowest(tried)
        self.about["mixed/of"] = torch.tensor([float(CANDIDATES.index(kinds[number][0])) for number in best])
        self.about["mixed/share"] = torch.tensor([kinds[number][1] for number in best])
        return torch.stack([tried[number][row] for row, number in enumerate(best)])

    def _lowest(self, models: Sequence[Tensor]) -> list[int]:
        """The number of the model with the lowest validation loss, for each client; the first of equals."""
        losses = self._context.losses(models, "validation")
        return [int(number) for number in losses.nan_to_num(math.inf).argmin(1).tolist()]
