"""Who keeps what clients remember between tasks, and until then what came of those under way.

An task's result is held under its id, since it may arrive long after it was computed, beside others of the same
client; only once it arrives, and counts, does the client remember it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from piebald.client_work import ClientWork
from piebald.contracts import Task
from piebald.runtimes.engines.serving import PRIVATE
from piebald.tensor_store import TensorStore


class ClientStateStore:
    """Everything lies in this process, beyond a budget in a file of its own.

    Args:
        work: says what a client remembers that was never asked.
        budget: bytes of client memory kept in RAM.

    Attributes:
        fresh: what a rule gives a client to remember before its first task.
        kept: what clients remember that have taken part.
    """

    def __init__(self, work: ClientWork, budget: int) -> None:
        self.work, self.budget = work, budget
        self.fresh = work.initial_state()
        self.kept = TensorStore(budget)
        self._held: dict[int, Mapping[str, Tensor]] = {}

    @property
    def needed(self) -> bool:
        """Whether clients have anything to remember."""
        return self.work.layout.shared < self.work.layout.size or bool(self.fresh)

    def recall(self, task: Task) -> Mapping[str, Tensor]:
        """What a task's client remembers, by name."""
        client = task.client
        return self.kept.get(client) if client in self.kept else self.first(task)

    def first(self, task: Task) -> Mapping[str, Tensor]:
        """At the first contact: what the rule says, and the private part that was sent along."""
        shared = self.work.layout.shared
        if shared == self.work.layout.size:
            return self.fresh
        return self.fresh | {PRIVATE: task.vectors.get(PRIVATE, self.work.initial[shared:])}

    def hold(self, task: Task, tensors: Mapping[str, Tensor]) -> None:
        """What a task's client will remember, if its result counts."""
        if self.needed:
            self._held[task.id] = tensors

    def settle(self, task: Task, kept: bool) -> None:
        """From now on the client remembers what was held for a task, or that is forgotten."""
        tensors = self._held.pop(task.id, None)
        if kept and tensors is not None:
            self.kept.set(task.client, tensors)

    # -- for checkpoints

    def held(self, tasks: Sequence[Task]) -> Mapping[int, Mapping[str, Tensor]]:
        """What is held for tasks that will count, by id."""
        return {task.id: self._held.get(task.id, {}) for task in tasks}

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
