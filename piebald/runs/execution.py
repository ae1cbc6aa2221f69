"""Run a prepared run to its end."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from piebald.contracts import Clients, DismissesSites, Fleet
from piebald.core.errors import RunFolderError
from piebald.core.machine import HOST, existing_objects_frozen, float64_device, free_memory, moved, naming_lost
from piebald.core.private_files import write_private
from piebald.core.progress import Bar
from piebald.core.tensor_store import file_of_start, mapped
from piebald.data.clients.prepared import gaps_by_client, preparation_of
from piebald.data.measures.heterogeneity import measure_heterogeneity
from piebald.data.preparation.tokens import keep_tokenizer
from piebald.report.callbacks import Callback, ObservedRecorder
from piebald.runs import adaptation
from piebald.runs.finished_run import Run
from piebald.runs.lineage import Inheritance, hand_out
from piebald.runs.prepare import PreparedRun
from piebald.runtimes.base import SimulatesDevices
from piebald.server import RoundProgress, ServerLoop
from piebald.server.cluster_state import Keep, ModelSnapshot
from piebald.storage.store import RunStore

_log = logging.getLogger(__name__)
_DESCRIBED_CLIENTS = 10_000  # above this, the run folder keeps no rows about clients


@existing_objects_frozen()
def describe(plan: PreparedRun, store: RunStore) -> None:
    """Record the clients, and how they differ."""
    agreed = preparation_of(plan.clients)
    if store.path is not None and agreed is not None and agreed.text is not None:
        keep_tokenizer(agreed.text, store.path)
    if len(plan.clients) > _DESCRIBED_CLIENTS or store.rows("measure"):
        return
    store.clients(list(_client_rows(plan.clients, plan.runtime)))
    if store.path is not None and agreed is not None:
        write_private(store.path / "preparation.json", agreed.to_json())
        store.set_meta(gaps_by_client=gaps_by_client(plan.clients))
    extent = store.meta.get("measure", "none")
    if measured := measure_heterogeneity(plan.clients, _fleet(plan.runtime), plan.work, extent):
        store.set_meta(units=measured.units)
        store.measures(measured.records())


def _fleet(runtime: Any) -> Fleet | None:
    return runtime.fleet if isinstance(runtime, SimulatesDevices) else None


def _client_rows(clients: Clients, runtime: Any) -> Iterator[dict[str, Any]]:
    fleet = _fleet(runtime)
    for client in range(len(clients)):
        counts = clients.counts(client, "train")
        device = fleet.device(client) if fleet is not None else None
        yield {
            "client": client,
            "name": str(clients.names[client]),
            "train": clients.size(client, "train"),
            "validation": clients.size(client, "validation"),
            "test": clients.size(client, "test"),
            "counts": None if counts is None else list(counts),
            "device": device,
        }


def with_mapped_start(plan: PreparedRun, folder: Path | None) -> PreparedRun:
    """The same run, whose first numbers lie in a file where they are long (`file_of_start`)."""
    initial = file_of_start(plan.work.initial, folder, plan.runtime.map_above)
    plan.work.layout.lend(plan.work.model, initial)
    return replace(plan, work=replace(plan.work, initial=initial))


def _keep(plan: PreparedRun, folder: Path | None) -> Keep:
    """Return the place of the server's vectors: memory, or files in the run's folder."""
    return functools.partial(mapped, above=plan.runtime.map_above, folder=folder)


_COPIES = 8  # of a cohort's updates: those that steps make, and as much again for the clients that train


def _server_device(plan: PreparedRun) -> torch.device:
    """Return the device of the server: the engine's if a step's updates are added up or compared, else the host.

    Where updates are kept from step to step, hidden or limited one by one, where there is no room for them, and where
    models lie in files or differ in their numbers, it needs what is on the host.
    """
    recipe, work = plan.recipe, plan.work
    device, elsewhere = plan.runtime.server_device(), work.own_models is not None or work.choice is not None
    alone = plan.check.limits_weights or bool(recipe.transforms)
    files = work.initial.nbytes > plan.runtime.map_above
    if alone or files or elsewhere or float64_device(device) != device:
        return HOST
    if recipe.requires_individual_updates:
        free, known = free_memory(device), len(plan.clients)
        count = recipe.scheduling.expected_updates(known) or known
        if not recipe.compares_on_device or (free is not None and _COPIES * count * work.initial.nbytes > free):
            return HOST
    return device


def execute(
    plan: PreparedRun, store: RunStore, progress: bool, listeners: Sequence[Callback], started: Inheritance | None
) -> Run:
    """Open the runtime, begin with what was taken over or the last checkpoint if there is one, and run to the end."""
    # a resumed run goes on with its noise, with whatever numbers the model begins that it is given again
    plan = replace(plan, work=replace(plan.work, noise_key=store.meta.get("noise_key") or ""))
    settings = plan.runtime if store.path is None else plan.runtime.with_folder(store.path)
    runtime, device = settings.open(plan.work, plan.clients), _server_device(plan)
    recorder = ObservedRecorder(store, listeners)
    with (
        existing_objects_frozen(),
        naming_lost(),
        _ending(store, runtime, recorder, plan),
        Bar(f"{plan.meta['label']} (seed {plan.meta['seed']})", plan.most_rounds, progress) as bar,
    ):
        server = ServerLoop(
            plan.recipe,
            runtime,
            plan.work,
            recorder,
            known=len(plan.clients),
            rounds=plan.most_rounds,
            stop=plan.stop,
            evaluation=plan.measuring,
            checkpoint_every=plan.checkpoint_every,
            check=plan.check,
            watch=lambda step: bar.show(step.version, _score(step, plan.work.objective.metric)),
            secret=not plan.runtime.simulates,
            names=plan.clients.names,
            rows=lambda client: plan.clients.size(client, "train"),
            keep=_keep(plan, store.path) if device == HOST else functools.partial(moved, device=device),
            device=device,
            evaluates_on=plan.runtime.server_device(),
            spending=plan.spending if plan.spending.hides else None,
        )
        for client in plan.untrained:
            server.client_pool.exclude(client, "it only tests")
        last = store.last_checkpoint()
        for note in store.notes:
            _log.warning("%s", note)
        if started is not None:
            # also before a checkpoint is restored, which lacks these models: clusters that appear later begin there
            server.begin_with(started.taken)
        if last is not None:
            server.restore(last[1])
        elif started is not None:
            # a checkpoint has a newer state of clients already
            hand_out(started.taken, runtime)
        recorder.start(server.version)
        server.run()
        if notes := getattr(runtime, "step_notes", None):
            store.set_meta(recorded_steps=dict(notes))
        version, models = _final_models(store, server)
        chosen: dict[int, Tensor] = {}
        if plan.work.choice is not None and plan.runtime.simulates:  # else each site does it
            chosen = adaptation.choose(
                server,
                store,
                plan.clients,
                plan.work.choice,
                lambda chosen, clients: bar.show(note=f"{chosen} of {clients} clients have chosen"),
            )
        if plan.unseen is not None:
            ended = Run(store, plan.work, plan.clients, version, models, plan.recipe.sharing)
            numbers = range(len(plan.unseen))
            store.set_meta(newcomers=[adaptation.fit(ended, plan.unseen, client).table() for client in numbers])
    if store.path is not None:
        store.close()  # releases the lock: the run is only read from here on
    source = store if store.path is None else store.path
    finished = Run(source, plan.work, plan.clients, version, models, plan.recipe.sharing, chosen)
    if plan.runtime.simulates:
        finished.keep_thresholds()
    return finished


def _score(step: RoundProgress, metric: str) -> str:
    """Return the newest mean of a metric over clients, of their personal models or else of the global model."""
    names = (f"personal/{metric}", f"global/{metric}")
    score = next((step.scores[name] for name in names if name in step.scores), None)
    return "" if score is None else f"{metric} {score:.3f}"


def _final_models(store: RunStore, server: ServerLoop) -> tuple[int, ModelSnapshot]:
    """The version that the run ends with, and its global models."""
    best = server.best
    if best.version is None:
        return server.version, server.models.on_host()
    store.set_meta(best=best.version)
    if best.models is not None:
        return best.version, best.models.on_host()
    return best.version, ModelSnapshot.of(store.server_checkpoint(best.version))


@contextmanager
def _ending(store: RunStore, runtime: Any, recorder: ObservedRecorder, plan: PreparedRun) -> Iterator[None]:
    """Record how the run ended and what it has spent, tell the callbacks, and close runtime and store, in any case."""
    status = "failed"
    try:
        yield
        status = "finished"
    except KeyboardInterrupt:
        status = "stopped"
        raise
    finally:
        dismissed = status != "finished"  # only a finished run sends its sites home
        try:
            if not dismissed and isinstance(runtime, DismissesSites):
                runtime.dismiss()  # sites may go home
            dismissed = True
        finally:  # also if the user interrupts the dismissal: a server that still listens would keep its sites
            runtime.close()
            try:
                if plan.spending.hides and store.version:
                    store.set_meta(privacy=plan.spent(store.version))
                store.finish(status)
            except RunFolderError:  # a full disk: the error that ended the run is already being raised
                if status == "finished":
                    raise
            recorder.end(status)
            if status != "finished" or not dismissed:
                store.close()
