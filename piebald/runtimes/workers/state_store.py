"""The store of client state: between tasks, and until the results of tasks under way arrive.

New state is held under the id of its task, since a result may arrive long after it was computed, next to others of the
same client; it becomes the client's state once the result arrives and counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from piebald.contracts import Task
from piebald.core.tensor_store import TensorStore
from piebald.engines.stack import PRIVATE
from piebald.methods.client_work import ClientWork


class ClientStateStore:
    """Keeps client state in this process, and beyond a budget in a temporary file.

    Args:
        work: gives the state of a client that was never asked.
        budget: bytes of client state kept in RAM.

    Attributes:
        fresh: state that the trainer gives a client before its first task.
        kept: the state of clients that have taken part.
    """

    def __init__(self, work: ClientWork, budget: int) -> None:
        self.work, self.budget = work, budget
        self.fresh = work.initial_state()
        self.kept = TensorStore(budget)
        self._held: dict[int, Mapping[str, Tensor]] = {}

    @property
    def needed(self) -> bool:
        """True if clients have any state."""
        return self.work.layout.shared < self.work.layout.size or bool(self.fresh)

    def recall(self, task: Task) -> Mapping[str, Tensor]:
        """The state of a task's client, by name."""
        client = task.client
        return self.kept.get(client) if client in self.kept else self.first(task)

    def first(self, task: Task) -> Mapping[str, Tensor]:
        """The state at the first contact: the trainer's, and the private parameters that were sent with the task."""
        work = self.work.of(task.client)
        fresh, shared = self.fresh if work is self.work else work.initial_state(), work.layout.shared
        if shared == work.layout.size:
            return fresh
        return fresh | {PRIVATE: task.vectors.get(PRIVATE, work.initial[shared:])}

    def hold(self, task: Task, tensors: Mapping[str, Tensor]) -> None:
        """Hold the new state of a task's client until it is known whether the result counts."""
        if self.needed:
            self._held[task.id] = tensors

    def settle(self, task: Task, kept: bool) -> None:
        """Make the state that is held for a task the client's state, or discard it."""
        tensors = self._held.pop(task.id, None)
        if kept and tensors is not None:
            self.kept.set(task.client, tensors)

    # -- for checkpoints

    def held(self, tasks: Sequence[Task]) -> Mapping[int, Mapping[str, Tensor]]:
        """The state that is held for some tasks, by id."""
        return {task.id: self._held.get(task.id, {}) for task in tasks}

    def changed(self) -> dict[str, Tensor]:
        """State that has changed since the last call, as "client_state/CLIENT/NAME"."""
        return self.kept.changed()

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `changed` returned, over all calls."""
        self.kept.restore(tensors)

    def adopt(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over state as `changed` names it, which the next checkpoint holds."""
        self.kept.adopt(tensors)

    def close(self) -> None:
        """Forget everything."""
        self.kept.close()
        self._held.clear()


def under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin with a prefix, which is removed."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
