"""Sharing by layers: which are shared and which stay private."""

from __future__ import annotations

from torch import Tensor, nn

from piebald.core.errors import SettingError
from piebald.core.parameters import Layout, matching
from piebald.methods.sharing.base import Patterns, Sharing, as_tuple


class Full(Sharing):
    """The whole model is shared."""

    def private(self, model: nn.Module) -> frozenset[str]:
        return frozenset()


class AllExcept(Sharing):
    """All layers are shared except some, which stay private: HDAFL's classifier, FedBN's batch norm.

    Attributes:
        private_layers: roles, layer names or patterns, see `parameters.matching`; none means that everything is shared.
    """

    private_layers: Patterns = ()

    def private(self, model: nn.Module) -> frozenset[str]:
        return matching(model, as_tuple(self.private_layers))


class Only(Sharing):
    """Only some layers are shared: LG-FedAvg's head.

    Attributes:
        shared_layers: roles, layer names or patterns, see `parameters.matching`.
    """

    shared_layers: Patterns

    def private(self, model: nn.Module) -> frozenset[str]:
        return frozenset(slot.name for slot in Layout.of(model).slots) - matching(model, as_tuple(self.shared_layers))


class Nothing(Sharing):
    """Nothing is shared: every client trains alone and sends nothing."""

    def private(self, model: nn.Module) -> frozenset[str]:
        return frozenset(slot.name for slot in Layout.of(model).slots)


class OneHot(Sharing):
    """Everything is shared except each client's identity: the one-hot buffers called `client`, which select a client's
    columns of matrices that all clients share (`models.Conditioning` with a number of clients).

    This is how CGAU's paper simulates conditioning.  A column has a gradient at one client only, so averaging shrinks
    what that client learned to its weight in the average: with n equal clients, to 1/n of its steps.  A private vector
    (`all_except` with "conditioning") keeps all of them.
    """

    def private(self, model: nn.Module) -> frozenset[str]:
        # by the last word, as each gated unit has a buffer of this name
        buffers = frozenset(name for name, _ in model.named_buffers() if name.rpartition(".")[2] == "client")
        if not buffers:
            raise SettingError(
                "one_hot needs a model with a conditioning matrix of all clients: give it clients = how many there are"
            )
        return buffers

    def initial_private(self, private: Tensor, layout: Layout, client: int) -> Tensor:
        # all clients start from the same private numbers, which must not be written to
        numbers = private.clone()
        for slot in layout.slots:
            if slot.start >= layout.shared:
                # or the 1 would land in the next unit's buffer, and the client be somebody else there
                if client >= slot.stop - slot.start:
                    raise SettingError(
                        f"the model's conditioning has clients = {slot.stop - slot.start}, too few for {client + 1} "
                        "clients: give it as many as there are"
                    )
                numbers[slot.start - layout.shared + client] = 1.0
        return numbers
