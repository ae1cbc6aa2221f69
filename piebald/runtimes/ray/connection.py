"""A connection to Ray: the one that the user has, one to a cluster, or a Ray that is started here.

It stays until the process ends or `ray.shutdown()` is called, and so do actors that rest between two runs, since both
take seconds to start.  Ray is imported when the first run needs it.  What passes through it is pickled and unpickled
by Ray: whoever can reach a cluster can run code there, and Ray's own means (TLS, tokens, a closed network) keep others
out.
"""

from __future__ import annotations

import importlib
import os
import socket
import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from piebald.errors import PiebaldError, RuntimeFault, SettingError

_PATIENCE = 300.0  # seconds to wait while there is no actor at all: a cluster may have to start a node
_TRIES = 2  # to start a Ray here: on a busy machine it may take longer than Ray itself waits


def imported() -> Any:
    """The package, or the command that installs it."""
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise SettingError(
            "runtime 'ray' needs Ray: pip install 'piebald[ray]', or take runtime = 'simulator'"
        ) from None


def connected() -> bool:
    """Whether this process already speaks to a Ray."""
    return bool(imported().is_initialized())


class RayConnection:
    """Actors and objects of a Ray.

    Args:
        address: of a running cluster; None takes the connection that there is, or starts a Ray on this machine.
        cores: how many a Ray that is started here says it has.
        store: bytes of its object store, Ray's default where None.
        gpus: of a GPU that each actor takes.
    """

    _resting: tuple[Any, list[Any]] = (None, [])  # what they belong to, and the actors
    _resting_on: tuple[Any, dict[str, list[Any]]] = (None, {})  # the same for those that are to be on certain nodes

    def __init__(self, address: str | None, cores: int, store: int | None, gpus: float) -> None:
        self.ray = imported()
        self.gpus = gpus
        if not self.ray.is_initialized():
            self._connect(address, cores, store)
        context = self.ray.get_runtime_context()
        self._belongs = (context.get_node_id(), context.get_job_id(), gpus)

    def _connect(self, address: str | None, cores: int, store: int | None) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a Ray that we start tells nobody of it
        own = {"num_cpus": cores, "object_store_memory": store, "include_dashboard": False} if address is None else {}
        try:
            _knock(address)
            self._init(_TRIES if address is None else 1, address=address or "local", **own)
        except Exception as error:  # Ray raises what it meets: ConnectionError, ValueError, RuntimeError, OSError
            said = (str(error).strip() or type(error).__name__).splitlines()[0]
            if address is None:
                raise RuntimeFault(f"Ray does not start here: {said}") from error
            raise SettingError(
                f"no Ray cluster answers at {address!r}: {said}; start one with `ray start --head`, set "
                "RAY_AUTH_MODE=token here, too, if it wants a token, or leave the address out"
            ) from error

    def _init(self, tries: int, **how: Any) -> None:
        try:
            self.ray.init(log_to_driver=False, logging_level="ERROR", **how)
        except Exception:
            self.ray.shutdown()
            if tries == 1:
                raise
            self._init(tries - 1, **how)

    # -- actors

    def take(self, count: int) -> list[Any]:
        """Up to so many actors that rest; those that are too many, or of another kind, make room."""
        belongs, actors = RayConnection._resting
        if belongs is not None and belongs[:2] != self._belongs[:2]:
            actors = []  # of a connection that is gone, and so are they
        fit = count if belongs == self._belongs else 0
        for actor in actors[fit:]:
            self.stop(actor)
        RayConnection._resting = (None, [])
        return actors[:fit]

    def rest(self, actors: Sequence[Any]) -> None:
        """Keep actors for the next run."""
        for actor in actors:
            actor.forget.remote()
        before = RayConnection._resting[1] if RayConnection._resting[0] == self._belongs else []
        RayConnection._resting = (self._belongs, [*before, *actors])

    def start(self, kind: type) -> Any:
        """A new actor; it is not ready yet."""
        return self.ray.remote(kind).options(**self.needs()).remote()

    def start_on(self, node: str, kind: type) -> Any:
        """An actor that takes no core, on a certain node: one that rests, or a new one, which dies if the node has."""
        belongs, resting = RayConnection._resting_on
        if belongs == self._belongs[:2] and resting.get(node):
            return resting[node].pop()
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        # a soft wish would be forgotten wherever a node has not heard of the others yet
        there = strategies.NodeAffinitySchedulingStrategy(node, soft=False)
        return self.ray.remote(kind).options(num_cpus=0, scheduling_strategy=there).remote()

    def rest_on(self, node: str, actor: Any) -> None:
        """Keep an actor of `start_on` for the next run; there is only one kind of them."""
        if RayConnection._resting_on[0] != self._belongs[:2]:
            RayConnection._resting_on = (self._belongs[:2], {})
        RayConnection._resting_on[1].setdefault(node, []).append(actor)

    def nodes(self) -> list[str]:
        """The nodes that are there."""
        return sorted(node["NodeID"] for node in self.ray.nodes() if node["Alive"])

    def stop(self, actor: Any) -> None:
        """Kill an actor, if it lives."""
        with suppress(Exception):
            self.ray.kill(actor)

    def needs(self) -> dict[str, Any]:
        """What each actor takes of its node."""
        return {"num_cpus": 1, "num_gpus": self.gpus}

    def offers(self) -> int:
        """How many actors there is room for."""
        there = self.ray.cluster_resources()
        cores = int(there.get("CPU", 0))
        return min(cores, int(there.get("GPU", 0) / self.gpus)) if self.gpus else cores

    # -- what they say

    def first(self, serving: Sequence[Any], starting: Sequence[Any]) -> Any:
        """The first answer that is there, of actors that serve and may take their time, or of some that start.

        Raises:
            RuntimeFault: none serves, and for minutes none has started.
        """
        while True:
            there, _ = self.ray.wait([*serving, *starting], num_returns=1, timeout=_PATIENCE, fetch_local=False)
            if there:
                return there[0]
            if not serving:
                needs = ", ".join(f"{name[4:]}: {count:g}" for name, count in self.needs().items() if count)
                raise RuntimeFault(
                    f"Ray found no room for an actor in {_PATIENCE:g} seconds; each needs {needs}: see `ray status`"
                )

    def answer(self, reference: Any) -> tuple[bool, Any]:
        """Whether an answer came, and what it says.  None comes from an actor that died, or whose node did.

        Raises:
            RuntimeFault: what was asked could not be done.
        """
        errors = self.ray.exceptions
        try:
            return True, self.ray.get(reference)
        except errors.RayTaskError as error:
            cause = getattr(error, "cause", None) or error
            if gone(error):
                return False, None
            if isinstance(cause, PiebaldError):
                raise RuntimeFault(str(cause)) from None
            said = (str(cause).strip() or type(cause).__name__).splitlines()[-1]
            raise RuntimeFault(
                f"a Ray actor could not take the run up: {said}; Piebald, and your own modules, must be installed on "
                "every node, in the same versions"
            ) from None
        except errors.RayError:
            return False, None

    def put(self, value: Any) -> Any:
        """Keep a value where all actors can read it, for as long as the reference to it is kept."""
        return self.ray.put(value)

    def put_rows(self, clients: Any) -> Any:
        """The same for clients: their tensors are kept as arrays, which actors of a node read where they lie."""
        getattr(clients, "x", None)  # a pool is converted here, once, and not by every actor
        self.ray.util.register_serializer(Tensor, serializer=as_array, deserializer=as_tensor)
        try:
            return self.ray.put(clients)
        finally:
            self.ray.util.deregister_serializer(Tensor)


def gone(error: BaseException) -> bool:
    """Whether what Ray raised says that an actor, a node or what they held is gone; a task may have met that, too."""
    errors = imported().exceptions
    met = getattr(error, "cause", None) or error
    kinds = (errors.RayActorError, errors.ActorUnschedulableError, errors.ObjectLostError, errors.NodeDiedError)
    return isinstance(met, kinds)


def _knock(address: str | None) -> None:
    """Fail at once where nobody listens: Ray would try for minutes."""
    host, colon, port = (address or "").rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()


def as_array(tensor: Tensor) -> Any:
    """A tensor as an array over the same memory, where that is possible."""
    return tensor.detach().cpu().contiguous().numpy()


def as_tensor(array: Any) -> Tensor:
    """An array as a tensor over the same memory, not to be written to where that may only be read."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)
