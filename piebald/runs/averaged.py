"""An ensemble as one model of a client: the weighted mean of the predictions of runs and of plain models.

Its folder has the runs, `plain.safetensors` with the plain models of each client, and `ensemble.json`, which says how
much each member counts for whom.  As one module it predicts, and is exported, as any other model.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from piebald.core.arguments import PathLike, Positive, checked
from piebald.core.errors import RunFolderError, SettingError, unknown
from piebald.core.files import json_value, read_bytes
from piebald.core.private_files import make_private, write_private
from piebald.core.reading import opened_tensors
from piebald.models import StandardisedInputs
from piebald.models.prediction import AnswerKind, Predictor, mean_outputs
from piebald.report.export import Exported, ExportFormat, export_model
from piebald.report.page.wording import names
from piebald.runs.plain_models import PlainModel
from piebald.runs.run import read_opened
from piebald.storage.store import RunStore

FILE, _PLAIN = "ensemble.json", "plain.safetensors"


class MeanOf(nn.Module):
    """A module whose answers are the weighted mean of those of several modules.

    Args:
        modules: that read the same inputs.
        weights: how much each counts.
        kind: of their answers.
    """

    def __init__(self, modules: Sequence[nn.Module], weights: Sequence[float], kind: AnswerKind) -> None:
        super().__init__()
        self.models, self.kind = nn.ModuleList(modules), kind
        self.register_buffer("weights", torch.tensor(weights, dtype=torch.float64))

    def forward(self, x: Any) -> Tensor:
        """Return outputs [n, ...] of inputs, see `models.prediction.mean_outputs`."""
        return mean_outputs([model(x) for model in self.models], self.kind, self.get_buffer("weights")).float()


@dataclass(frozen=True)
class StoredMember:
    """A member of an ensemble as its folder names it.

    Attributes:
        run: the folder of a run, empty for a plain model.
        plain: the number of a plain model, None for a run.
    """

    run: str = ""
    plain: int | None = None


def write_members(
    folder: Path,
    members: Sequence[StoredMember],
    shares: Mapping[str, Sequence[float]],
    plain: Mapping[int, Mapping[str, PlainModel]],
) -> None:
    """Write how much members count, and the plain models, into the folder of an ensemble.

    Args:
        folder: in which the runs lie.
        members: the runs and plain models.
        shares: of the members, by client; they sum to 1.
        plain: the plain models by their number and client.
    """
    clients = list(shares)
    tensors = {
        f"{number}/{clients.index(client)}/{name}": tensor.contiguous()
        for number, models in plain.items() for client, model in models.items()
        for name, tensor in model.state_dict().items()
    }  # fmt: skip
    if tensors:
        save_file(tensors, str(folder / _PLAIN))
        make_private(folder / _PLAIN)
    named = [{"run": member.run} if member.plain is None else {"plain": member.plain} for member in members]
    text = json.dumps({"members": named, "clients": [[name, *row] for name, row in shares.items()]}, ensure_ascii=False)
    write_private(folder / FILE, text, lasting=False)


@checked
def join_runs(
    runs: Sequence[PathLike],
    out: PathLike,
    *,
    shares: Sequence[Positive] | None = None,
    like: PathLike | None = None,
    plugins: Sequence[str] = (),
) -> Path:
    """Join finished runs of the same clients into an ensemble, as those of a federation.

    Args:
        runs: their folders, which are copied.
        out: a new folder, of which `piebald predict`, `serve` and `export` take the mean.
        shares: how much each run counts, relative to the others; all the same by default.
        like: an ensemble of `advise` in place of shares: each run counts for a client as what was trained by the same
            recipe counts there.  Plain models are left out, which each client fits to its own rows.
        plugins: modules of yours that runs may name, see `resume`.

    Returns:
        `out`.

    Raises:
        SettingError: `out` exists, runs have other clients, columns or classes than the first one, or a recipe of
            `like` is that of no run.
        RunFolderError: a folder cannot be read.
    """
    places, target = [Path(run) for run in runs], Path(out)
    if target.exists():
        raise SettingError(f"{target} is there already: name a new folder")
    if len(places) < 2 or (shares is not None and (like is not None or len(shares) != len(places))):
        raise SettingError("an ensemble has two runs or more, and a share for each, or like in place of shares")
    read = [read_opened(place, lambda run: (run.client_names, run.meta), plugins) for place in places]
    clients, first = read[0]
    for place, (names_in_run, meta) in zip(places, read, strict=True):
        odd = [name for name in ("classes", "features", "target", "preparation") if meta.get(name) != first.get(name)]
        if odd or names_in_run != clients:
            what = " and ".join(odd) or "clients"
            raise SettingError(f"{place} has other {what} than {places[0]}: runs of an ensemble read the same rows")
    recipes = [meta["recipe"]["table"] for _, meta in read]
    alike = [float(share) for share in shares or [1.0] * len(places)]
    counts = {name: alike for name in clients} if like is None else _shares_like(Path(like), recipes, clients)
    partial = target.with_name(f"{target.name}.part")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    members = [StoredMember(run=f"{number}-{place.resolve().name}") for number, place in enumerate(places)]
    for place, member in zip(places, members, strict=True):
        shutil.copytree(place, partial / member.run)
    write_members(partial, members, {name: [x / sum(row) for x in row] for name, row in counts.items()}, {})
    partial.rename(target)
    return target


def _shares_like(folder: Path, recipes: Sequence[Any], clients: Sequence[str]) -> dict[str, list[float]]:
    """How much runs of these recipes count for each client, as in an ensemble: in its mean for a client that it lacks.

    Raises:
        SettingError: a recipe of the ensemble is that of no run, or none of the ensemble is that of a run.
    """
    members, stored = _read(folder)
    places = dict[int, int]()  # of the run that takes a member's place
    for number, member in enumerate(members):
        if member.plain is not None or not any(row[number] for row in stored.values()):
            continue
        with RunStore.open_read_only(folder / member.run) as store:
            recipe = store.meta["recipe"]["table"]
        if recipe not in recipes:
            raise SettingError(f"no run has the recipe of {member.run} in {folder}: train it, or give shares")
        places[number] = recipes.index(recipe)
    if lacking := [number for number in range(len(recipes)) if number not in places.values()]:
        raise SettingError(f"run {lacking[0] + 1} has a recipe that {folder} has not: leave it out, or give shares")
    counts = {
        name: [sum(row[number] for number, place in places.items() if place == run) for run in range(len(recipes))]
        for name, row in stored.items()
    }
    mean = [sum(row[run] for row in counts.values()) / len(counts) for run in range(len(recipes))]
    # a client for whom plain models alone count has the mean of the others as well
    return {name: row if sum(row := counts.get(name, mean)) else mean for name in clients}


@checked
def ensemble_predictor(folder: PathLike, client: str | None, *, plugins: Sequence[str] = ()) -> Predictor:
    """Return the ensemble of a client as one model, with the way from raw rows to answers.

    Args:
        folder: of an ensemble, as `advise` keeps it.
        client: whose models; None for the global ones, where each run has one and counts alike for all clients.
        plugins: modules of yours that its runs may name, see `resume`.

    Raises:
        SettingError: there is no such client.
        RunFolderError: the folder cannot be read.
    """
    path = Path(folder)
    members, shares = _read(path)
    rows = list(shares.values())
    if client is None and (any(row != rows[0] for row in rows) or any(x.plain is not None for x in members)):
        raise SettingError(f"an ensemble has a model for each client: name one of {names([*shares])}")
    if client is not None and client not in shares:
        raise unknown("client", client, [*shares])
    predictors, modules, weights = list[Predictor](), list[nn.Module](), list[float]()
    for member, share in zip(members, rows[0] if client is None else shares[client], strict=True):
        # the first run says how rows become inputs, also where it does not count for this client
        if member.plain is None and (share or not predictors):
            predictor, module = _model_in_run(path / member.run, client, plugins)
            predictors.append(predictor)
            modules += [module] * bool(share)
        elif member.plain is not None and share:
            modules.append(_plain_model(path, member.plain, list(shares).index(str(client))))
        weights += [share] * bool(share)
    if not predictors or not modules:
        raise _unreadable(path)
    first = predictors[0]
    mean, like = MeanOf(modules, weights, first.meaning.kind), first.inputs.like
    if any(isinstance(module, PlainModel) for module in modules):
        try:
            mean(torch.zeros(1, *like.shape[1:], dtype=like.dtype))
        except (RuntimeError, IndexError, AttributeError):  # models of a table with other columns
            raise _unreadable(path) from None
    return replace(first, module=mean.eval(), inputs=replace(first.inputs, standardisation=None))


@checked
def save_ensemble(
    folder: PathLike,
    path: PathLike,
    client: str | None,
    *,
    file_format: ExportFormat | None = None,
    plugins: Sequence[str] = (),
) -> Path:
    """Write the ensemble of a client to a file that other programs read, as `Run.save` writes a model.

    Args:
        folder, client, plugins: see `ensemble_predictor`.
        path, file_format: see `Run.save`.

    Returns:
        The path.

    Raises:
        SettingError: the path exists, there is no such client, or the ensemble cannot be written in this format.
        RunFolderError: the folder cannot be read.
    """
    predictor = ensemble_predictor(folder, client, plugins=plugins)
    like = predictor.inputs.like
    reads_numbers = isinstance(like, Tensor) and predictor.inputs.extractor is None
    exported = Exported(
        predictor.module,
        lambda: torch.zeros(1, *like.shape[1:], dtype=like.dtype),
        lambda: "# The weighted mean of the predictions of several models\n",
        {"architecture": "ensemble", "client": client or ""},
        predictor.scoring if reads_numbers else None,
    )
    return export_model(exported, Path(path), file_format)


def _model_in_run(folder: Path, client: str | None, plugins: Sequence[str]) -> tuple[Predictor, nn.Module]:
    """A client's model in a run, or the global one, and its module, which reads inputs as plain models do."""
    predictor, constants = read_opened(folder, lambda run: (run.predictor(client), run.standardisation), plugins)
    module = predictor.module
    return predictor, module if constants is None else StandardisedInputs(module, constants.mean, constants.deviation)


def _read(folder: Path) -> tuple[list[StoredMember], dict[str, list[float]]]:
    """The members, and their shares by client."""
    try:
        table = json_value(read_bytes(folder / FILE, links=False), folder / FILE)
        members = [StoredMember(str(row.get("run", "")), row.get("plain")) for row in table["members"]]
        shares = {str(name): [float(share) for share in row] for name, *row in table["clients"]}
        is_sound = len(shares) == len(table["clients"]) > 0 and all(_is_inside(folder, member) for member in members)
        fits = all(len(row) == len(members) and min(row) >= 0 and 0 < sum(row) < math.inf for row in shares.values())
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError):
        raise _unreadable(folder) from None
    if not (is_sound and fits):
        raise _unreadable(folder)
    return members, shares


def _is_inside(folder: Path, member: StoredMember) -> bool:
    """Return whether a member is a number, or names a folder in that of the ensemble."""
    if not member.run:
        return type(member.plain) is int and member.plain >= 0
    is_name = member.run not in (".", "..") and Path(member.run).name == member.run
    return member.plain is None and is_name and not (folder / member.run).is_symlink()


def _plain_model(folder: Path, number: int, client: int) -> PlainModel:
    """A client's plain model of a number."""
    start = f"{number}/{client}/"
    try:
        with opened_tensors(folder / _PLAIN, links=False) as file:
            stored = [name for name in list(file.keys()) if name.startswith(start)]
            state = {name.removeprefix(start): file.get_tensor(name) for name in stored}
        return PlainModel.of(state)
    except (OSError, SafetensorError, ValueError):
        raise _unreadable(folder) from None


def _unreadable(folder: Path) -> RunFolderError:
    return RunFolderError(f"{folder} holds no ensemble that can be read: make it again with piebald advise")
