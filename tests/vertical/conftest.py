"""What tests of transfers share: small settings, real data that is always there, and backends that may be missing."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from piebald.federation.credentials.provisioning import Credentials, Description, provision, read
from piebald.federation.hub.local_federation import free_port
from piebald.storage.tensor_files import pick
from piebald.vertical.channel import Channel, InMemoryChannel
from piebald.vertical.disclosure_ledger import DisclosureLedger
from piebald.vertical.kernels import Floats, GaussianKernel, Kernel, LinearKernel, PolynomialKernel
from piebald.vertical.party import Party, TransferStep
from piebald.vertical.party_data import PartyHolding, load
from piebald.vertical.party_secret import PartySecret
from piebald.vertical.party_store import PartyStore
from piebald.vertical.protocol import ROLES, PartySession, Role
from piebald.vertical.split_model import party_class
from piebald.vertical.transfer_settings import TransferSettings

LIBRARY = {"bfv": "tenseal"}


def encrypted(kind: str, **settings: object) -> object:
    """A backend for parametrize, skipped where its library is not installed."""
    missing = importlib.util.find_spec(LIBRARY[kind]) is None
    reason = f"{LIBRARY[kind]} is not installed: pip install '.[he]'"
    return pytest.param({"kind": kind, **settings}, marks=pytest.mark.skipif(missing, reason=reason), id=kind)


KERNELS = [
    LinearKernel(),
    PolynomialKernel(),
    PolynomialKernel(c=0.7),
    PolynomialKernel(degree=3),
    PolynomialKernel(c=0.7, degree=3),
    GaussianKernel(),
    GaussianKernel(sigma=2),
]


def cross_gradient(kernel: Kernel, x: Floats, y: Floats) -> Floats:
    """Return the gradient of K_st with respect to x [n, d] through the moments of y, without encryption."""
    results = [c @ s.matrix + s.constant for c, s in zip(kernel.coefficients(x), kernel.statistics(y), strict=True)]
    return kernel.gradient(x, results)


def credentials(folder: Path, port: int | None = None) -> dict[str, Credentials]:
    """Credentials of two parties, of which the server listens."""
    described = Description(name="two", host="127.0.0.1", port=port or free_port(), days=2, sites=["bank"])
    provision(described, folder)
    return {party: read(folder / party) for party in ("server", "bank")}


def inject_secrets(folders: dict[str, Path]) -> None:
    """Give parties alone the secrets of a simulation, so that their runs can be compared with one."""
    for role, folder in folders.items():
        with PartyStore.of(folder, role) as store:
            store.set_meta(secret=PartySecret.simulated(0, role).key.hex())


def checkpoint(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """Weights and optimizer of a party after so many steps."""
    return pick(folder, f"vectors-{step}.safetensors")


def told(folder: Path) -> DisclosureLedger:
    """The ledger of a party's folder."""
    with PartyStore.open_read_only(folder) as store:
        return DisclosureLedger({}, store)


def unit(seed: int, n: int, d: int) -> Floats:
    """Rows [n, d] of positive numbers and length 1, as hidden rows are."""
    rows = np.random.default_rng(seed).random((n, d))
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def small(**changes: object) -> TransferSettings:
    """A quick transfer on a real table of 569 rows: 8 aligned units, batches of 20."""
    table: dict[str, object] = {
        "steps": 3,
        "batch": 20,
        "overlap_batch": 18,
        "watch_every": 2,
        "checkpoint_every": 2,
        "lr": 0.01,
        "data": {"name": "breast_cancer", "overlap": 100},
        "network": {"hidden": [10], "aligned": [8]},
        "backend": "fixed",
        "runtime": {"compare": False},
    }
    return TransferSettings(**(table | changes))


Trained = tuple[dict[Role, Party], dict[Role, list[TransferStep]]]


def party(role: Role, data: PartyHolding, settings: TransferSettings) -> Party:
    """A party whose secret follows from the seed, so that two runs can be compared."""
    return party_class(settings.method)(role, data, settings, PartySecret.simulated(settings.seed, role))


def train_both(
    settings: TransferSettings,
    data: dict[Role, PartyHolding] | None = None,
    ends: tuple[Channel, Channel] | None = None,
) -> Trained:
    """Both parties, in two threads; an error of either is raised."""
    held = data or load(settings.data, settings.seed)
    parties = {role: party(role, held[role], settings) for role in ROLES}
    return parties, run_steps(settings, parties, ends)


def run_steps(
    settings: TransferSettings, parties: dict[Role, Party], ends: tuple[Channel, Channel] | None = None
) -> dict[Role, list[TransferStep]]:
    """Both parties' steps, in two threads."""
    steps: dict[Role, list[TransferStep]] = {}

    def one(role: Role, session: PartySession) -> None:
        session.handshake(settings.agreed())
        steps[role] = list(parties[role].train(session))

    errors = talk(one, ends)
    for error in errors.values():
        raise error
    return steps


def talk(
    act: Callable[[Role, PartySession], None],
    ends: tuple[Channel, Channel] | None = None,
) -> dict[Role, BaseException]:
    """Let both parties act in threads of their own; the errors they end with."""
    import torch._dynamo  # optimizers import it when first used, which two threads must not do at once

    errors: dict[Role, BaseException] = {}

    def guarded(role: Role, channel: Channel) -> None:
        torch.set_num_threads(1)  # the setting is per thread
        session = PartySession(channel, role, timeout=20)
        try:
            with session.closing():
                act(role, session)
        except Exception as error:
            errors[role] = error

    threads = [
        threading.Thread(target=guarded, args=given)
        for given in zip(ROLES, ends or InMemoryChannel.pair(), strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors
