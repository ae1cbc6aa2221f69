"""Who keeps what clients remember between assignments, and until then what came of those under way.

An assignment's result is held under its id, since it may arrive long after it was computed, beside others of the same
client; only once it arrives, and counts, does the client remember it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from piebald.client_work import Work
from piebald.contracts import Assignment
from piebald.runtimes.engines.serving import PRIVATE
from piebald.tensor_store import Memory


class Keeper:
    """Everything lies in this process, beyond a budget in a file of its own.

    Args:
        work: says what a client remembers that was never asked.
        budget: bytes of client memory kept in RAM.

    Attributes:
        fresh: what a rule gives a client to remember before its first assignment.
        kept: what clients remember that have taken part.
    """

    def __init__(self, work: Work, budget: int) -> None:
        self.work, self.budget = work, budget
        self.fresh = work.rule.remember(work.initial, work.layout.shared)
        self.kept = Memory(budget)
        self._held: dict[int, Mapping[str, Tensor]] = {}

    @property
    def needed(self) -> bool:
        """Whether clients have anything to remember."""
        return self.work.layout.shared < self.work.layout.size or bool(self.fresh)

    def recall(self, assignment: Assignment) -> Mapping[str, Tensor]:
        """What an assignment's client remembers, by name."""
        client = assignment.client
        return self.kept.get(client) if client in self.kept else self.first(assignment)

    def first(self, assignment: Assignment) -> Mapping[str, Tensor]:
        """At the first contact: what the rule says, and the private part that was sent along."""
        shared = self.work.layout.shared
        if shared == self.work.layout.size:
            return self.fresh
        return self.fresh | {PRIVATE: assignment.parts.get(PRIVATE, self.work.initial[shared:])}

    def hold(self, assignment: Assignment, tensors: Mapping[str, Tensor]) -> None:
        """What an assignment's client will remember, if its arrival counts."""
        if self.needed:
            self._held[assignment.id] = tensors

    def settle(self, assignment: Assignment, kept: bool) -> None:
        """From now on the client remembers what was held for an assignment, or that is forgotten."""
        tensors = self._held.pop(assignment.id, None)
        if kept and tensors is not None:
            self.kept.set(assignment.client, tensors)

    # -- for checkpoints

    def held(self, assignments: Sequence[Assignment]) -> Mapping[int, Mapping[str, Tensor]]:
        """What is held for assignments that will count, by id."""
        return {assignment.id: self._held.get(assignment.id, {}) for assignment in assignments}

    def changed(self) -> dict[str, Tensor]:
        """What clients remember since this was last asked, as "memory/CLIENT/NAME"."""
        return self.kept.changed()

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take up what `changed` gave, over all calls."""
        self.kept.restore(tensors)

    def close(self) -> None:
        """Forget everything."""
        self.kept.close()
        self._held.clear()


def under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin with a prefix, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
