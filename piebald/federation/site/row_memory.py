"""Values of judged rows that a site remembers of its last runs, to tell how far two runs err on the same rows."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save
from torch import Tensor

from piebald.contracts import MOST_REMEMBERED, Clients, shown_digest
from piebald.core import pytree
from piebald.core.parameters import frozen_digest
from piebald.core.private_files import write_private
from piebald.core.reading import opened_tensors
from piebald.data.clients.owner import Owner
from piebald.federation.site.site_rows import SPLITS, UnpreparedRows
from piebald.methods.client_work import ClientWork

FILE = "row-values.safetensors"
MOST_VALUES = 1 << 20  # of a run: nothing is remembered of more rows, whose standard errors are small in any case
_BITS = 48  # of a number, which a float holds exactly

log = logging.getLogger("piebald.federation")


class RowMemory:
    """The values of rows under the last runs, in a file that only the site reads.

    Args:
        path: the file; without it values are remembered as long as this object.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        # by number, the oldest first: the rows and the run that they are of, their name, and the values [n]
        self._entries: dict[int, tuple[str, str, str, Tensor]] = {} if path is None else _read(path)

    def remember(self, rows: str, run: str, vectors: Mapping[str, Tensor]) -> tuple[dict[str, int], dict[int, Tensor]]:
        """Remember values of rows under a run, in place of those that it had before.

        Values that are already remembered of the same rows keep their number.

        Args:
            rows: digest of the rows and of what is measured.
            run: digest of the run's terms.
            vectors: the values [n], by name.

        Returns:
            The numbers by name, and all values of these rows that are remembered, by number, the newest first.

        Raises:
            OSError: they cannot be written.
        """
        numbers = {}
        for name, vector in vectors.items():
            if len(vector) > MOST_VALUES:
                continue
            same = (n for n, (of, *_, held) in self._entries.items() if of == rows and torch.equal(held, vector))
            number = next(same, secrets.randbits(_BITS))
            before = [n for n, (*source, _) in self._entries.items() if source == [rows, run, name] and n != number]
            for old in [*before, number]:
                # its own number as well: what is added anew below becomes the newest, and the oldest are dropped
                self._entries.pop(old, None)
            self._entries[number] = rows, run, name, vector.detach().cpu()
            numbers[name] = number
        self._entries = dict([*self._entries.items()][-MOST_REMEMBERED:])
        if self._path is not None:
            sources = {str(number): [*entry[:3]] for number, entry in self._entries.items()}
            tensors = {str(number): entry[3].contiguous() for number, entry in self._entries.items()}
            self._path.parent.mkdir(mode=0o700, exist_ok=True)
            write_private(self._path, save(tensors, {"sources": json.dumps(sources)}))
        newest_first = reversed(self._entries.items())
        return numbers, {number: vector for number, (of, *_, vector) in newest_first if of == rows}


def _read(path: Path) -> dict[int, tuple[str, str, str, Tensor]]:
    """Return what a file holds; nothing where it cannot be read, since comparisons do without it."""
    if not path.exists():
        return {}
    try:
        with opened_tensors(path, links=False) as file:
            sources = json.loads(file.metadata()["sources"])
            return {
                int(number): (str(rows), str(run), str(name), file.get_tensor(number))
                for number, (rows, run, name) in sources.items()
            }
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("%s cannot be read (%s): no run is compared with earlier ones by row", path, type(error).__name__)
        return {}


def work_digest(work: ClientWork) -> str:
    """Return the digest of a run as a site has rebuilt it from the terms: of the model, and what is done with it."""
    objective = work.objective
    values = {
        "model": [repr(work.model), frozen_digest(work.model)],
        "layout": [[slot.name, *slot.shape] for slot in work.layout.slots],
        "private": sorted(work.layout.private),
        "objective": [objective.name, repr(objective.domain), *objective.metrics],
        "components": [work.trainer.table(), *(transform.table() for transform in work.transforms)],
        "queries": [None if query is None else query.table() for query in (work.own_query, work.choice)],
        "form": [pytree.plain(work.shape), work.outputs, work.seed, work.public_rows, work.public_digest],
        "asked": [work.questions, work.trains],
    }  # fmt: skip
    return shown_digest(values, {"initial": work.initial}).hex()


def site_rows_digest(clients: Clients, client: int) -> str:
    """Return the digest of a client's rows as the run's questions see them, prepared by its terms."""
    # before they are prepared, the run's questions see tables and the rows are blank
    tables = [clients.table(client, split) for split in SPLITS] if isinstance(clients, UnpreparedRows) else []
    return Owner(None, clients).fingerprint(client, tables)
