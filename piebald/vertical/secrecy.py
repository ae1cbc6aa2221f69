"""What a run says about its own secrecy before it starts and in its results: keys, randomness, connection, method."""

from __future__ import annotations

from pathlib import Path

from piebald.vertical.party_store import SECRET
from piebald.vertical.protocol import ROLES
from piebald.vertical.transfer_settings import TransferSettings

CONNECTIONS = {
    "memory": "inside one process",
    "sockets": "not encrypted: whoever listens reads the losses, the translator, and all that the backend leaves open",
    "federation": "encrypted, both parties identified by certificates (TLS 1.3)",
}


def secrecy(settings: TransferSettings, simulated: bool, partner: str | None = None) -> dict[str, str]:
    """Sentences by subject.

    Args:
        settings: settings of the run.
        simulated: whether one user runs both parties, with secrets that follow from the seed.
        partner: the name in the other party's certificate, once it is known.
    """
    runtime = settings.runtime
    kind = "sockets" if runtime.kind == "memory" and runtime.address is not None else runtime.kind
    named = {} if partner is None else {"other party": f"{partner}, by its certificate"}
    return {
        "keys": settings.backend.security,
        "weights, batches, noise": (
            "from the seed, as both parties are simulated by one user: this run protects nobody"
            if simulated
            else "from each party's own secret"
        ),
        "connection": CONNECTIONS[kind],
        **named,
        "method": settings.method.told,
    }


def is_simulated(folder: Path | None) -> bool:
    """Whether a run folder was made by one user for both parties."""
    return folder is None or not any((folder / role / SECRET).exists() for role in ROLES)
