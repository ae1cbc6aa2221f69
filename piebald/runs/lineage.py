"""What runs take over that go on from a finished one, where it is kept, and models of clients without an input.

    start.safetensors   in the folder of the new run: what it took over, so that it no longer needs the other folder

Server steps, tables, limits and budgets begin anew.  A run takes over what both runs have in common; the value
`lineage` of the run folder says what was taken and what is new.

A client that lacks an input has a model in which what only that input reaches stays as it began.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from piebald.contracts import Checkpoint, Clients, Rows, TakesClientState
from piebald.contracts.data import LacksInputs, ModelSpec, lacked_inputs, without_inputs
from piebald.core import pytree
from piebald.core.client_models import ClientModels, part_without
from piebald.core.errors import RunFolderError, SettingError
from piebald.core.files import read_bytes
from piebald.core.randomness import torch_seed
from piebald.core.reading import opened_tensors
from piebald.core.tensor_store import by_client
from piebald.engines.stack import PRIVATE
from piebald.methods.client_work import ClientWork
from piebald.methods.recipe import Recipe
from piebald.server.cluster_state import fitting_models
from piebald.storage.run_folder import START
from piebald.storage.schema import explained
from piebald.storage.store import RunStore

_STATE = "client_state"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class FinishedRun:
    """The folder of a finished run, opened to go on from it.

    Attributes:
        path: its folder.
        meta: what describes it.
        version: the server step whose models it kept.
        checkpoint: the state after that step, with that of its clients where they were simulated.
        names: the names of its clients by number, empty where there were too many to write down.
    """

    path: Path
    meta: Mapping[str, Any]
    version: int
    checkpoint: Checkpoint
    names: Sequence[str]

    @classmethod
    def at(cls, path: Path) -> FinishedRun:
        """Read what the run in a folder left.

        Raises:
            RunFolderError: there is no finished run, or it is damaged.
        """
        with RunStore.open_read_only(path) as store:
            meta = store.meta
            if meta.get("status") != "finished":
                raise RunFolderError(
                    f"the run in {path} is not finished, so nothing can go on from it: finish it with piebald resume "
                    f"{path}"
                )
            version = meta.get("best") or store.version
            names = [str(row["name"]) for row in store.rows("client")]
            return cls(path, meta, version, store.checkpoint_of(version), names)

    @property
    def seeds(self) -> set[int]:
        """The seeds of this run and of those that it goes on from."""
        return {int(self.meta["seed"] or 0), *(self.meta.get("lineage") or {}).get("seeds", ())}

    @property
    def federation(self) -> str | None:
        """The number under which the sites of a real federation keep their part of this run."""
        number = self.checkpoint.values["runtime"].get("run")
        return None if number is None else str(number)

    def fresh_seed(self, wanted: int) -> int:
        """Return a seed that no earlier run had: the same one would repeat its batches and its simulated noise."""
        seed = wanted
        while seed in self.seeds:
            seed += 1
        if seed != wanted:
            log.warning(
                "the run in %s, or one before it, had seed %d already, so this one has seed %d and other batches",
                self.path, wanted, seed,
            )  # fmt: skip
        return seed


@dataclass(frozen=True, slots=True, eq=False)
class Inheritance:
    """Models and state that a run takes over.

    Attributes:
        taken: models and state as in a checkpoint, see `cluster_models.fitting_models`.
        about: what the run folder records (`lineage`).
        body: the same as the bytes of `start.safetensors`.
    """

    taken: Checkpoint
    about: Mapping[str, Any]
    body: bytes

    @classmethod
    def of_folder(cls, folder: Path, meta: Mapping[str, Any]) -> Inheritance | None:
        """Read what the run in a folder took over; None if it began with a model of its own.

        Raises:
            RunFolderError: it is missing or damaged.
        """
        lineage = meta.get("lineage")
        if lineage is None:
            return None
        # The digest is checked before the bytes are parsed: the file may have been changed since.
        with explained(f"{folder / START} cannot be read"):
            body = read_bytes(folder / START, most=None, links=False)
        if hashlib.sha256(body).hexdigest() != lineage["sha256"]:
            raise RunFolderError(f"{folder / START} is damaged: its SHA-256 is not the one recorded")
        try:
            with opened_tensors(folder / START) as file:
                values = json.loads(file.metadata()["values"])
            return cls(Checkpoint(load(body), values), lineage, body)
        except (SafetensorError, ValueError, KeyError, TypeError) as error:
            raise RunFolderError(f"{folder / START} cannot be read: {type(error).__name__}") from None


def inherit(finished: FinishedRun, recipe: Recipe, work: ClientWork, clients: Clients) -> Inheritance:
    """Choose what a prepared run takes over from a finished one.

    Raises:
        SettingError: the models do not fit.
    """
    _check_fit(finished, recipe, work, clients)
    names = [str(clients.names[client]) for client in range(len(clients))]
    # of very many clients no names are on the disk, and they count by their numbers
    before = finished.names or names[: int(finished.meta["clients"])]
    place = {name: number for number, name in enumerate(names)}
    numbers = {old: place[name] for old, name in enumerate(before) if name in place}
    same = _same_components(finished.meta["recipe"]["table"], recipe)
    models, kinds = fitting_models(finished.checkpoint, work, same, names[: len(before)] == list(before))
    states = _client_states(finished, work, same, numbers)
    # The private layers of these clients exist already, so no initial ones are drawn.
    held = sorted({client for client in states if PRIVATE in states[client]})
    named = {f"{_STATE}/{client}/{name}": tensor for client, state in states.items() for name, tensor in state.items()}
    checkpoint = Checkpoint({**models.tensors, **named}, {"cluster_models": dict(models.values), "initialized": held})
    body = save(
        {n: t.detach().cpu().contiguous().clone() for n, t in checkpoint.tensors.items()}, _metadata(checkpoint)
    )
    if states:
        kinds = [*kinds, f"the state of {len(states)} clients"]
    return Inheritance(checkpoint, _origin_of(finished, kinds, sorted(set(names) - set(before)), body), body)


def hand_out(taken: Checkpoint, runtime: Any) -> None:
    """Give a runtime that keeps the state of clients what they take over."""
    states = {name: tensor for name, tensor in taken.tensors.items() if name.startswith(f"{_STATE}/")}
    if states and isinstance(runtime, TakesClientState):
        runtime.take_client_state(states)


def _metadata(checkpoint: Checkpoint) -> dict[str, str]:
    return {"values": json.dumps(dict(checkpoint.values), sort_keys=True)}


def _origin_of(finished: FinishedRun, kinds: Sequence[str], newcomers: Sequence[str], body: bytes) -> dict[str, Any]:
    meta, before = finished.meta, finished.meta.get("lineage") or {}
    return {
        "run": meta["id"],
        "folder": str(finished.path),
        "recipe": meta["recipe"]["name"],
        "step": finished.version,
        "steps_before": finished.version + int(before.get("steps_before", 0)),
        "federation": finished.federation,
        "seeds": sorted(finished.seeds),
        "taken": list(kinds),
        "newcomers": list(newcomers),
        "privacy": meta.get("privacy"),
        "sha256": hashlib.sha256(body).hexdigest(),
        "before": before or None,
    }


def _check_fit(finished: FinishedRun, recipe: Recipe, work: ClientWork, clients: Clients) -> None:
    """Refuse another model, other private layers, another loss or other classes."""
    meta, path = finished.meta, finished.path
    shapes = {slot.name: list(slot.shape) for slot in work.layout.slots}
    theirs = {str(name): list(shape) for name, shape in meta["layout"]}
    for name in {**theirs, **shapes}:
        if shapes.get(name) != theirs.get(name):
            has = [
                f"has {name} of shape {named_shapes[name]}" if name in named_shapes else f"has no {name}"
                for named_shapes in (theirs, shapes)
            ]
            raise SettingError(f"the model of the run in {path} {has[0]}, this one {has[1]}: take the same [model]")
    keeps = work.layout.shared < work.layout.size or work.initial_state()  # state of clients that goes on
    if keeps and (None if work.own_models is None else work.own_models.plain()) != meta.get("own_models"):
        raise SettingError("the models of single clients are not those of the finished run: give it the same again")
    if list(shapes) != list(theirs) or meta["shared"] != work.layout.shared:
        raise SettingError(
            f"the run in {path} shares {meta['shared']:,} numbers of the model and {recipe.name} shares "
            f"{work.layout.shared:,}: take a recipe with the same private layers"
        )
    for name, now in (("objective", work.objective.name), ("classes", clients.classes and list(clients.classes))):
        if meta[name] != now:
            raise SettingError(f"the run in {path} has {name} {meta[name]!r}, this one {now!r}: take the same")


def _same_components(table: Mapping[str, Any], recipe: Recipe) -> set[str]:
    """The axes on which both recipes have the same component with the same settings."""
    # through JSON, as the folder's table went: tuples become lists, or equal settings would differ
    components = json.loads(json.dumps(recipe.model_dump(), sort_keys=True))
    axes = {axis for axis in Recipe.axes if json.loads(json.dumps(table.get(axis))) == components[axis]}
    theirs = table.get("training") or {}
    return axes | ({"trainer"} if theirs.get("kind") == recipe.training.kind else set())


def _client_states(
    finished: FinishedRun, work: ClientWork, same: set[str], numbers: Mapping[int, int]
) -> dict[int, dict[str, Tensor]]:
    """Return the state of clients by their new numbers, as far as its form is that of this run."""
    form = {name: tuple(tensor.shape) for name, tensor in work.initial_state().items()}
    if work.layout.shared < work.layout.size:
        form[PRIVATE] = (work.layout.size - work.layout.shared,)
    if not form or "trainer" not in same:
        return {}
    # under masks as at sites, which do not know what an earlier run was
    if work.needs_protected_state and (work.masking is not None or not {"training", "transforms"} <= same):
        log.warning(
            "clients begin with a state of their own, since that of %s was not protected as this run protects",
            finished.path,
        )
        return {}
    return {
        numbers[client]: state
        for client, state in by_client(finished.checkpoint.tensors, _STATE).items()
        if client in numbers and {name: tuple(tensor.shape) for name, tensor in state.items()} == form
    }


def models_without_inputs(recipe: Recipe, spec: ModelSpec, clients: Clients, rows: Rows) -> ClientModels | None:
    """Return the models of clients that lack an input, without what only that input reaches; None where nobody does.

    A parameter is theirs if a gradient reaches it without the input, and a buffer if its layer runs.  They have no say
    for those that the recipe's sharing says belong to the input.

    Args:
        recipe: how clients train.
        spec: the run's model.
        clients: who has which inputs.
        rows: training rows of a client that has all of them.

    Raises:
        SettingError: the model cannot do without an input, or the recipe takes every update as one of the whole model.
    """
    # inputs without names are all there
    named = isinstance(clients, LacksInputs) and isinstance(rows.x, Mapping)
    lacked = [lacked_inputs(clients, client) for client in range(len(clients) if named else 0)]
    kinds = sorted({names for names in lacked if names}, key=sorted)
    known = rows.x.keys() if isinstance(rows.x, Mapping) else ()
    for name in recipe.sharing.inputs or ():
        if name not in known:
            raise SettingError(
                f"inputs of sharing must name inputs, which are {', '.join(known) or 'not named'}, got {name!r}"
            )
    if not kinds:
        return None
    if reason := recipe.parts_reason():
        raise SettingError(f"some clients lack an input: {reason}")
    reached = _reached(spec.model, rows.x)
    models = []
    for names in kinds:
        client = str(clients.names[lacked.index(names)])
        try:
            gone = reached - _reached(spec.model, without_inputs(rows.x, names))
        except Exception as error:  # whatever the user's own model may raise
            raise SettingError(
                f"client {client!r} lacks {' and '.join(sorted(names))}, and the model cannot do without: "
                f"{type(error).__name__}: {error}; give that argument of its forward a default"
            ) from error
        silent = recipe.sharing.belonging(spec.model, names)
        models.append(part_without(spec.model, spec.layout, spec.outputs, gone, names, silent))
    return ClientModels(tuple(models), tuple(kinds.index(names) if names else None for names in lacked))


def _reached(module: nn.Module, x: pytree.Tree) -> set[str]:
    """Return the names of the parameters that a gradient reaches from some inputs, and of the buffers of layers that
    run.
    """
    trial, ran = copy.deepcopy(module).train(), set[str]()
    for name, layer in trial.named_modules():
        layer.register_forward_hook(lambda *_, name=name: ran.add(name))
    few = pytree.take(x, [0, 0])  # batch norm refuses a single row
    parameters = {name: parameter for name, parameter in trial.named_parameters() if parameter.requires_grad}
    with torch.enable_grad(), torch_seed(0):
        outputs = [leaf for leaf in pytree.leaves(pytree.run(trial, few)) if isinstance(leaf, Tensor)]
        total = sum((leaf.float().sum() for leaf in outputs if leaf.requires_grad), start=torch.zeros(()))
        gradients = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
    reached = {name for name, gradient in zip(parameters, gradients, strict=True) if gradient is not None}
    return reached | {name for name, _ in trial.named_buffers() if name.rpartition(".")[0] in ran}
