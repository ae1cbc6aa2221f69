"""The models that a server had a site examine: from scores of two of them it has a directional derivative."""

from __future__ import annotations

import hashlib
from collections.abc import Collection

from piebald.contracts import Split, Task


class ExaminedModels:
    """Counts different models by version and rows; the same model again tells nothing new."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, Split], set[bytes]] = {}

    def reject_reason(self, task: Task, rows: Collection[Split], most: int | None) -> str | None:
        """Take note of a query's model, or say why it is not examined.

        Args:
            task: the query.
            rows: what the answer depends on.
            most: how many different models at one version, None for any number.
        """
        if most is None:
            return None
        models = [
            task.vectors[name] for name in ("model", "forest") if name in task.vectors
        ]  # a forest is a model, too
        digest = hashlib.blake2b(b"".join(one.detach().cpu().contiguous().numpy().tobytes() for one in models)).digest()
        for split in rows:
            if len(self._seen.get((task.version, split), set()) | {digest}) > most:
                return f"this site examines {most} of the models of one version on its {split} rows, and no more"
        for split in rows:
            self._seen.setdefault((task.version, split), set()).add(digest)
        return None
