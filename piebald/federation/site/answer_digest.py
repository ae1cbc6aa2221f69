"""Digests of what an answer follows from, besides its question: the run as a site computes it, and the site's rows."""

from __future__ import annotations

from piebald.contracts import Clients, shown_digest
from piebald.core import pytree
from piebald.core.parameters import frozen_digest
from piebald.data.clients.owner import Owner
from piebald.federation.site.site_rows import SPLITS, UnpreparedRows
from piebald.methods.client_work import ClientWork


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
