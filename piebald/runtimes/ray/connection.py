"""A connection to Ray: an existing one, one to a cluster, or a Ray that is started here.

It stays until the process ends or `ray.shutdown()` is called, and so do actors that are idle between two runs, since
both take seconds to start.  Ray is imported when the first run needs it.  Ray pickles and unpickles what it transports:
anybody who can reach a cluster can run code there, and Ray's own means (TLS, tokens, a closed network) keep others out.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from piebald.contracts import Clients, InMemory
from piebald.core.errors import PiebaldError, RuntimeFault, SettingError, install
from piebald.core.references import files
from piebald.methods.client_work import ClientWork

_TIMEOUT = 300.0  # seconds to wait while there is no actor at all: a cluster may have to start a node
_IN_ARRAYS = (torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool)
_TRIES = 2  # to start a Ray here: on a busy machine this may take longer than Ray waits


def imported() -> Any:
    """The `ray` package; a missing one is an error with the command that installs it."""
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise SettingError(f"runtime 'ray' needs Ray: {install('ray')}, or take runtime = 'simulator'") from None


def connected() -> bool:
    """Return whether this process is already connected to a Ray."""
    return bool(imported().is_initialized())


class RayConnection:
    """Actors and objects of a Ray.

    Args:
        address: address of a running cluster; None takes the existing connection, or starts a Ray on this machine.
        cores: cores of a Ray that is started here.
        store: bytes of its object store; None is Ray's default.
        gpus: GPUs, or a share of one, that each actor takes.
    """

    _resting: tuple[Any, list[Any]] = (None, [])  # their connection, and the actors

    def __init__(self, address: str | None, cores: int, store: int | None, gpus: float) -> None:
        self.ray = imported()
        self.gpus = gpus
        if not self.ray.is_initialized():
            self._connect(address, cores, store)
        context = self.ray.get_runtime_context()
        self._belongs = (context.get_node_id(), context.get_job_id(), gpus)

    def _connect(self, address: str | None, cores: int, store: int | None) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a Ray that is started here reports nothing
        options = (
            {"num_cpus": cores, "object_store_memory": store, "include_dashboard": False} if address is None else {}
        )
        try:
            _knock(address)
            self._init(_TRIES if address is None else 1, address=address or "local", **options)
        except Exception as error:  # Ray raises what it meets: ConnectionError, ValueError, RuntimeError, OSError
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            if address is None:
                raise RuntimeFault(f"Ray does not start here: {reason}") from error
            raise SettingError(
                f"no Ray cluster answers at {address!r}: {reason}; start one with `ray start --head`, set "
                "RAY_AUTH_MODE=token here, too, if it wants a token, or leave the address out"
            ) from error

    def _init(self, tries: int, **options: Any) -> None:
        before = signal.getsignal(signal.SIGTERM)
        try:
            self.ray.init(log_to_driver=False, logging_level="ERROR", job_config=_job(), **options)
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, before)  # Ray replaces it by one that does not tell how the run ended
        except Exception:
            self.ray.shutdown()
            if tries == 1:
                raise
            self._init(tries - 1, **options)

    # -- actors

    def take(self, count: int) -> list[Any]:
        """Take up to `count` idle actors; others, and those of another kind, are stopped."""
        belongs, actors = RayConnection._resting
        if belongs is not None and belongs[:2] != self._belongs[:2]:
            actors = []  # of a closed connection, so they are gone
        fit = count if belongs == self._belongs else 0
        for actor in actors[fit:]:
            self.stop(actor)
        RayConnection._resting = (None, [])
        for actor in actors[:fit]:
            actor.list_files.remote(files())
        return actors[:fit]

    def rest(self, actors: Sequence[Any]) -> None:
        """Keep actors for the next run."""
        for actor in actors:
            actor.forget.remote()
        before = RayConnection._resting[1] if RayConnection._resting[0] == self._belongs else []
        RayConnection._resting = (self._belongs, [*before, *actors])

    def start(self, kind: type) -> Any:
        """Start an actor; it is not ready yet."""
        actor = self.ray.remote(kind).options(**self.needs()).remote()
        actor.list_files.remote(files())  # before anything comes that is defined in them
        return actor

    def stop(self, actor: Any) -> None:
        """Kill an actor, if it is alive."""
        with suppress(Exception):
            self.ray.kill(actor)

    def needs(self) -> dict[str, Any]:
        """Resources that each actor takes."""
        return {"num_cpus": 1, "num_gpus": self.gpus}

    def offers(self) -> int:
        """Return the number of actors that the cluster has resources for."""
        return actors_that_fit([node["Resources"] for node in self.ray.nodes() if node["Alive"]], self.gpus)

    # -- answers

    def first(self, serving: Sequence[Any], starting: Sequence[Any]) -> Any:
        """Wait for the first answer, of actors that serve, which may take long, or of actors that start.

        Raises:
            RuntimeFault: no actor serves, and none has started for minutes.
        """
        while True:
            ready, _ = self.ray.wait([*serving, *starting], num_returns=1, timeout=_TIMEOUT, fetch_local=False)
            if ready:
                return ready[0]
            if not serving:
                needs = ", ".join(f"{name[4:]}: {count:g}" for name, count in self.needs().items() if count)
                raise RuntimeFault(
                    f"Ray found no room for an actor in {_TIMEOUT:g} seconds; each needs {needs}: see `ray status`"
                )

    def answer(self, reference: Any) -> tuple[bool, Any]:
        """Return whether an answer came, and the answer.  None comes from an actor that died, or whose node died.

        Raises:
            RuntimeFault: the actor raised an error.
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
            reason = (str(cause).strip() or type(cause).__name__).splitlines()[-1]
            raise RuntimeFault(
                f"a Ray actor could not take the run up: {reason}; Piebald, and your own modules, must be installed on "
                "every node, in the same versions"
            ) from None
        except errors.RayError:
            return False, None

    def put(self, value: Any) -> Any:
        """Put a value into Ray's store; returns a reference, which keeps it there."""
        return self.ray.put(value)

    def put_work(self, work: ClientWork) -> Any:
        """Put the work of a run into Ray's store; the actors of a node read frozen parameters without copying them."""
        frozen = [parameter for parameter in work.model.parameters() if not parameter.requires_grad]
        arrays = all(tensor.dtype in _IN_ARRAYS for tensor in [*work.model.parameters(), *work.model.buffers()])
        return self._put_as_arrays(work) if frozen and arrays else self.put(work)

    def put_rows(self, clients: Clients) -> Any:
        """Put clients into Ray's store, their tensors as arrays, which the actors of a node read without copying."""
        if isinstance(clients, InMemory) and clients.in_memory():
            clients.pool()  # is converted here, once, and not by every actor
        return self._put_as_arrays(clients)

    def _put_as_arrays(self, value: Any) -> Any:
        # for this value alone: what actors read without copying it cannot be written to
        self.ray.util.register_serializer(Tensor, serializer=as_array, deserializer=as_tensor)
        try:
            return self.ray.put(value)
        finally:
            self.ray.util.deregister_serializer(Tensor)


def _job() -> Any:
    """Return Ray's settings of a connection, with which actors search no folder that this process does not search."""

    class Job(importlib.import_module("ray.job_config").JobConfig):  # type: ignore[misc]
        def _serialize(self) -> Any:
            searched = {os.path.realpath(place) for place in sys.path}
            # Ray adds the current folder, in front of all others
            places = self._py_driver_sys_path  # type: ignore[has-type]
            self._py_driver_sys_path = [place for place in places if os.path.realpath(place) in searched]
            return super()._serialize()

    return Job()


def actors_that_fit(nodes: Sequence[Mapping[str, float]], gpus: float) -> int:
    """Return the number of actors that nodes have room for, each with a core and so much of a GPU."""
    actors = 0
    for node in nodes:
        cores, node_gpus = int(node.get("CPU", 0)), int(node.get("GPU", 0))
        # 1e-6, since rounding may leave the quotient just below a whole number
        actors += min(cores, node_gpus * int(1 / gpus + 1e-6)) if gpus else cores
    return actors


def gone(error: BaseException) -> bool:
    """Return whether an error says that an actor, a node or an object is gone, also where a task met that."""
    errors = imported().exceptions
    met = getattr(error, "cause", None) or error
    kinds = (errors.RayActorError, errors.ActorUnschedulableError, errors.ObjectLostError, errors.NodeDiedError)
    return isinstance(met, kinds)


def _knock(address: str | None) -> None:
    """Fail at once where nothing listens at an address: Ray would try for minutes."""
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
