"""FedMD, at the client: learn from the mean outputs of all clients' models for public rows, then from its own rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal, Self

import torch
from pydantic import Field
from torch import Tensor

from piebald.contracts import ClientContext, LocalStep, LossBatch, SgdConfig, StepContext, TrainInput, TrainOutput
from piebald.contracts.component import RecipeComponents
from piebald.contracts.data import ModelSpec
from piebald.core.pytree import logits
from piebald.methods.training.sgd import Sgd


@dataclasses.dataclass(frozen=True)
class OnPublicRows(LocalStep):
    """Steps on the rows that all clients have."""

    rows = "public"


class PublicDistillation(Sgd):
    """SGD on the public rows towards the mean of all clients' outputs for them, then on the client's own rows (Li and
    Wang 2019, "FedMD: heterogenous federated learning via model distillation", algorithm 1).

    The server sends the consensus, the plain mean of what clients' models said of each public row (line "aggregate").
    A client digests it, in steps along the mean absolute difference between its own outputs and the consensus, as in
    the authors' program; revisits its own rows; and sends the outputs of the model that it then has.  So the consensus
    of the paper's round j is what the clients of the run's round j send, and the first round digests nothing.  All
    public rows take part in every round.

    With `public_steps`, a client's first task begins with steps on the public rows and their targets, the transfer
    learning of the paper, which there lasts until convergence.

    Models may be unlike, as long as their outputs have one shape: nothing of a model is sent.

    Attributes:
        digest_steps: steps of each task towards the consensus, at least 0; with 0, clients train alone.
        digest_batch: public rows in each of these steps and of `public_steps`, by default `batch`.
        digest_lr: learning rate of these steps, by default `lr`.
        distance: what is minimized, the mean absolute difference "l1" or the mean squared one "l2".
        public_steps: steps of a client's first task towards the public rows' targets, at least 0.
        rows, outputs: how many public rows there are, and the shape of a model's outputs for one; set by the recipe.
    """

    digest_steps: int = Field(default=20, ge=0)
    digest_batch: int | None = Field(default=None, ge=1)
    digest_lr: float | None = Field(default=None, gt=0)
    distance: Literal["l1", "l2"] = "l1"
    public_steps: int = Field(default=0, ge=0)
    rows: int | None = Field(default=None, ge=1)
    outputs: tuple[int, ...] | None = None

    def adapted_to(self, recipe: RecipeComponents, spec: ModelSpec) -> Self:
        has_shapes = spec.public_rows > 0 and len(spec.outputs) > 0
        return self.model_copy(update={"rows": spec.public_rows, "outputs": spec.outputs}) if has_shapes else self

    def unsupported_model(self, spec: ModelSpec) -> str | None:
        if not spec.public_rows:
            return (
                f"{self.kind} compares models on rows that all clients have, and there are none: set the partition's "
                "public_rows = 100, public = 'rows.npz' of [data], or public_rows = (x, y) of clients_from"
            )
        if not spec.outputs:
            return (
                f"{self.kind} averages outputs, so a model must return a tensor [rows, outputs]: choose another model"
            )
        if self.public_steps and spec.objective.compares_rows:
            return f"{self.kind} takes the loss of single rows, which {spec.objective.name!r} has not: public_steps = 0"
        return super().unsupported_model(spec)

    def max_steps(self, examples: int) -> int:
        return super().max_steps(examples) + self.digest_steps + self.public_steps

    def initial_state(self, model: Tensor, shared: int) -> dict[str, Tensor]:
        return super().initial_state(model, shared) | ({"begun": torch.zeros(1)} if self.public_steps else {})

    def uploads(self) -> tuple[str, ...]:
        # "known" is only sent to clients: it says whether there is a consensus yet
        averaged = [name for name in super().uploads() if name not in ("outputs", "known")]  # of the optimizer's state
        return (*averaged, "outputs")

    def upload_shapes(self, spec: ModelSpec) -> Mapping[str, tuple[int, ...]]:
        return {"outputs": (spec.public_rows, *spec.outputs)}

    def server_vectors(self, shared: int) -> dict[str, Tensor]:
        if self.rows is None or self.outputs is None:
            return super().server_vectors(shared)
        vectors = {"outputs": torch.zeros(self.rows, *self.outputs), "known": torch.zeros(1)}
        return super().server_vectors(shared) | vectors

    def update_server_vectors(
        self, vectors: Mapping[str, Tensor], means: Mapping[str, Tensor], context: StepContext
    ) -> dict[str, Tensor]:
        renewed = {"outputs": means["outputs"].to(torch.float32), "known": torch.ones(1)}
        return super().update_server_vectors(vectors, means, context) | renewed

    def train(self, inputs: TrainInput, context: ClientContext) -> TrainOutput:
        model, steps, begun = self._begin(inputs, context)
        model, digested = self._digest(model, inputs, context)
        end = context.run_sgd(model, self.sgd_config(inputs), state=self.start_state(inputs))
        answers = {"outputs": context.public_outputs(end.model)}
        done = self.output(end, vectors=answers, state=begun)
        return dataclasses.replace(done, steps=end.steps + steps + digested)

    def batch_loss(self, batch: LossBatch) -> Tensor:
        places = batch.targets  # of public rows, see `LocalStep.rows`
        if "targets" in batch.own:
            return batch.losses(batch.outputs, batch.own["targets"][places])
        away = (logits(batch.outputs) - batch.own["outputs"][places]).flatten(1)
        return away.abs().mean(1) if self.distance == "l1" else away.square().mean(1)

    def _begin(self, inputs: TrainInput, context: ClientContext) -> tuple[Tensor, Tensor | int, dict[str, Tensor]]:
        """The models [c, p] after steps on the public targets where it is the first task, these steps, and the state
        that tells the next task.
        """
        if not self.public_steps:
            return inputs.model, 0, {}
        begun = inputs.state["begun"]
        state = {"begun": torch.ones_like(begun)}
        # saves a whole run on the public rows once all clients of the stack have begun
        if not bool((begun == 0).any()):
            return inputs.model, 0, state
        tensors = {"targets": context.public_targets()}
        # another stream than the digestion's, which draws the same numbers whether this happens or not
        aside = context.with_rng().with_rng()
        end = aside.run_sgd(inputs.model, self._public_config(inputs, self.public_steps), local_loss=self, own=tensors)
        # a stack runs as one: clients that had begun before compute along, and their result is thrown away
        return torch.where(begun == 0, end.model, inputs.model), end.steps * (begun[:, 0] == 0), state

    def _digest(self, model: Tensor, inputs: TrainInput, context: ClientContext) -> tuple[Tensor, Tensor | int]:
        """The models [c, p] after steps towards the consensus where there is one, and these steps."""
        has_consensus = inputs.vectors["known"] > 0
        if not self.digest_steps or not bool(has_consensus.any()):
            return model, 0
        tensors = {"outputs": inputs.vectors["outputs"]}
        config = self._public_config(inputs, self.digest_steps)
        end = context.with_rng().run_sgd(model, config, local_loss=self, own=tensors)
        return torch.where(has_consensus, end.model, model), end.steps * has_consensus[:, 0]

    def _public_config(self, inputs: TrainInput, steps: int) -> SgdConfig:
        config = self.sgd_config(inputs)
        # relative to the trainer's rate, so that its schedule applies to these steps as well
        lr = config.lr if self.digest_lr is None else config.lr * (self.digest_lr / self.lr)
        batch = self.digest_batch or self.batch
        return dataclasses.replace(config, step=OnPublicRows(), steps=steps, lr=lr, batch=batch, augmentation=())
