"""Run several recipes on the same clients and seeds, after checking all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

from piebald.contracts import Clients, HoldsRows
from piebald.core.arguments import PathLike, Seeds, checked
from piebald.core.errors import RunFolderError, SettingError, check_names
from piebald.core.result_table import ResultTable
from piebald.data.clients.prepared import rows_of_recipe
from piebald.data.clients.sources import clients_of
from piebald.data.partition.split import division_of
from piebald.experiments.run_settings import ComparedKeywords, RunSettings, takes
from piebald.methods.catalog import recipes
from piebald.methods.recipe import Recipe
from piebald.report.callbacks import Callback
from piebald.report.comparison import Comparison
from piebald.report.tables import History, load
from piebald.runs.finished_run import Run
from piebald.runs.plain_models import PlainModels, score_beside
from piebald.runs.prepare import Model, PreparedRun, check_repeats, prepare
from piebald.runs.run import opened, resume, run
from piebald.storage.schema import DATABASE
from piebald.storage.store import RunStore


@takes(ComparedKeywords)
def compare(
    methods: Mapping[str, Recipe | str] | Sequence[Recipe | str],
    clients: Clients | Any,
    model: Model | Mapping[str, Model],
    *,
    on_all_rows: Sequence[str] = (),
    pooled: Sequence[str] = (),
    seeds: Seeds = (0,),
    out: PathLike | None = None,
    start_from: PathLike | None = None,
    progress: bool = False,
    settings: Mapping[str, Any] | None = None,
    callbacks: Sequence[Callback] = (),
    **keywords: Unpack[ComparedKeywords],
) -> Comparison:
    """Run several recipes on the same clients and seeds, so that their results can be paired.

    All recipes are prepared and checked before the first one trains.  Where Local is among them and the rows are a
    table, each client fits the plain models of scikit-learn alone as well, and whether training together pays is said
    against the best of all that are alone, which validation rows choose, see `report.verdict.ScoreVerdict`.

    Args:
        methods: recipes or their names, by label or in a list.
        clients: see `run`.  If they are a function of the seed, each seed has its own partition, the same for all
            recipes.  A list of `data.cross_validation` has the same clients with other divisions of their rows; all
            recipes run on each.
        model: see `run`, for all recipes; or a mapping from labels to models, where recipes need different ones.  If it
            is a function of the seed, each seed has its own initial model, the same for all recipes that share it.
        on_all_rows: labels of recipes that need no validation rows and whose clients train on theirs as well, as FedAvg
            beside a recipe that holds some out; the clients' rows must be in memory.
        pooled: labels of recipes that have all training rows in one place, where they were sent compressed: the
            centralised model of `Comparison.against_pooled`; rows must be in memory, and no client has a model of its
            own.
        seeds: each recipe runs once for each seed; they must differ.
        out: a folder for the run folders; finished runs in it are not repeated, interrupted ones are resumed.
        start_from, progress, settings, callbacks: see `run`, for each run.
        keywords: the settings of the runs, see `RunSettings`; all have the same.

    Raises:
        SettingError: an option is wrong, or a recipe cannot be run on these clients: the message names the recipe.
            Nothing has been trained then.

    Examples:
        >>> import piebald as pb
        >>> clients = pb.partition.Shards(clients=3, limit=300).split(pb.data.digits())
        >>> model = pb.models.build_model("logistic", (1, 8, 8), 10)
        >>> here = pb.Simulator(engine="sequential")
        >>> comparison = pb.compare(["fedavg", "local"], clients, model, rounds=1, runtime=here)
        >>> sorted(run.label for run in comparison.runs)
        ['fedavg', 'local']
    """
    if isinstance(clients, list) and clients and all(isinstance(division, HoldsRows) for division in clients):
        divided: list[History] = []
        for title, division in [(_title(division), division) for division in clients]:
            place = None if out is None else Path(out) / folder_name(title)
            divided += compare(
                methods, division, model, on_all_rows=on_all_rows, pooled=pooled, seeds=seeds, out=place,
                start_from=start_from, progress=progress, settings=settings, callbacks=callbacks, **keywords,
            ).runs  # fmt: skip
        return Comparison(divided)
    methods = recipes_by_label(methods)
    if out is not None and len({folder_name(label) for label in methods}) < len(methods):
        raise SettingError("two labels would share a run folder: choose labels that differ in letters or digits")
    if out is not None and (Path(out) / DATABASE).exists():
        raise SettingError(
            f"{out} holds a run, and a comparison has a folder for each of its own: choose another folder"
        )
    planned = list(_planned(methods, clients, model, on_all_rows, pooled, seeds, out))
    for run_plan in planned:
        run_plan.check(keywords, settings)
    plain: dict[int, PlainModels] = {}
    of_call = {"start_from": start_from, "progress": progress, "settings": settings, "callbacks": callbacks}
    runs = list[Run]()
    for run_plan in planned:
        runs.append(made := run_plan.made(keywords, of_call))
        if made.recipe == "local":  # the same rows under several seeds have the same plain models
            if id(run_plan.clients) not in plain:
                plain[id(run_plan.clients)] = PlainModels(run_plan.clients, made.work.objective)
            score_beside(made, plain[id(run_plan.clients)])
    return Comparison(runs)


def dry_run(
    methods: Mapping[str, Recipe | str] | Sequence[Recipe | str],
    clients: Clients | Any,
    model: Model | Mapping[str, Model],
    *,
    on_all_rows: Sequence[str] = (),
    pooled: Sequence[str] = (),
    seeds: Seeds = (0,),
    settings: Mapping[str, Any] | None = None,
    **keywords: Unpack[ComparedKeywords],
) -> ResultTable:
    """Check a comparison as `compare` does before it trains, and describe each of its methods in a row.

    Args:
        methods, clients, model, on_all_rows, pooled, seeds, settings, keywords: see `compare`.

    Returns:
        A row for each method with its clients, its rows under the first seed, its network and the numbers in it, how
        many of them are shared, and how long it trains.

    Raises:
        SettingError: what `compare` would refuse.
    """
    rows = []
    for planned in _planned(recipes_by_label(methods), clients, model, on_all_rows, pooled, seeds, None):
        described = planned.check(keywords, settings).described()
        if planned.seed == seeds[0]:
            rows.append({"method": planned.label, **described, "seeds": len(seeds)})
    return ResultTable(rows)


@dataclass(frozen=True, slots=True)
class _Planned:
    """One run of a comparison."""

    label: str
    recipe: Recipe
    clients: Clients
    model: Model
    seed: int
    folder: Path | None

    @property
    def exists(self) -> bool:
        return self.folder is not None and (self.folder / "run.db").exists()

    def check(self, keywords: ComparedKeywords, settings: Mapping[str, Any] | None) -> PreparedRun:
        """Prepare it; what could not be run, or was run otherwise, is refused in a sentence that names the recipe."""
        options = RunSettings.of_call({**keywords, "seed": self.seed, "label": self.label}, settings)
        try:
            if self.folder is not None and self.exists:
                with RunStore.open_read_only(self.folder) as store:
                    check_repeats(self.folder, store.meta, self.recipe, options)
            return prepare(self.recipe, self.clients, self.model, options)
        except SettingError as error:
            advice = f"nothing was trained: correct {self.label!r}, or leave it out of the comparison"
            raise SettingError(f"recipe {self.label!r}: {error}; {advice}") from error

    def made(self, keywords: ComparedKeywords, of_call: Mapping[str, Any]) -> Run:
        """Run it, or resume it where its folder has begun; `of_call` has the arguments of `run` beside settings."""
        if self.folder is not None and self.exists:
            # these may be functions, which no folder keeps; all else is in it
            given: dict[str, Any] = {**of_call, **keywords}
            again = {name: given[name] for name in ("progress", "callbacks", "loss", "metrics") if name in given}
            return resume(self.folder, self.clients, self.model, recipe=self.recipe, **again)
        named: dict[str, Any] = {"seed": self.seed, "label": self.label, "out": self.folder}
        return run(self.recipe, self.clients, self.model, **named, **of_call, **keywords)


def _planned(
    methods: Mapping[str, Recipe],
    clients: Any,
    model: Model | Mapping[str, Model],
    on_all_rows: Sequence[str],
    pooled: Sequence[str],
    seeds: Sequence[int],
    out: Path | str | None,
) -> Iterator[_Planned]:
    check_names("recipe of this comparison", [*on_all_rows, *pooled], methods)
    models = _models(model, methods)
    federation = None if callable(clients) else clients_of(clients)
    for seed in seeds:
        if callable(clients):
            federation = clients_of(clients(seed))
        assert federation is not None
        for label, recipe in methods.items():
            folder = None if out is None else Path(out) / folder_name(label) / f"seed-{seed}"
            own = rows_of_recipe(federation, label in on_all_rows, label in pooled)
            yield _Planned(label, recipe, own, models[label], seed, folder)


def recipes_by_label(methods: Mapping[str, Recipe | str] | Sequence[Recipe | str] | Recipe | str) -> dict[str, Recipe]:
    """Return recipes by label, from a mapping, a list of recipes or names, or one of them.

    Raises:
        SettingError: there is none, or two have one name.
    """
    if isinstance(methods, Recipe | str):
        methods = [methods]
    if isinstance(methods, Mapping):
        by_label = {str(label): _as_recipe(method) for label, method in methods.items()}
    else:
        in_order = [_as_recipe(method) for method in methods]
        by_label = {recipe.name: recipe for recipe in in_order}
        if len(by_label) < len(in_order):
            raise SettingError("two recipes have the same name: give a mapping from labels to recipes")
    if not by_label:
        raise SettingError("there is no recipe: give at least one")
    return by_label


def _as_recipe(method: Any) -> Recipe:
    built = recipes.make(method) if isinstance(method, str) else method
    if not isinstance(built, Recipe):
        raise SettingError(f"a recipe must be a Recipe or the name of one, got {type(built).__name__}")
    return built


def _models(model: Model | Mapping[str, Model], labels: Mapping[str, Recipe]) -> Mapping[str, Model]:
    """The model of each recipe."""
    if not isinstance(model, Mapping):
        return dict.fromkeys(labels, model)
    check_names("recipe of this comparison", model, labels)
    return {label: model_of(label, model) for label in labels}


def model_of(label: str, model: Model | Mapping[str, Model]) -> Model:
    """Return the model of a label, from one for all or one for each label.

    Raises:
        SettingError: there is none.
    """
    if not isinstance(model, Mapping):
        return model
    if label not in model:
        raise SettingError(
            f"model must have a model for each label, but has none for {label!r}: add it, or give one for all"
        )
    return model[label]


def _title(clients: Clients) -> str:
    """Return the division of the rows of clients in words."""
    division = division_of(clients)
    if division is None or not division.title:
        raise SettingError(
            "clients in a list must be those of piebald.data.cross_validation: pass one Clients otherwise"
        )
    return division.title


def folder_name(label: str) -> str:
    """Return a label as the name of a folder, in letters that all file systems allow."""
    name = "".join(letter if letter.isalnum() or letter in "-_.=" else "-" for letter in label).strip(".-")
    # Two labels may differ in other characters only, which `compare` refuses.
    if len(name) > 200:  # file systems allow 255 bytes
        raise SettingError(f"a label names a folder, so it must have at most 200 characters, got {len(name)}")
    return name or "run"


@checked
def open(folder: PathLike, *, plugins: Sequence[str] = ()) -> Run | History | Comparison:
    """Open what is kept of runs, for reading, without their clients and their rows.

    Args:
        folder: of a run, or of several, as a comparison and a search keep them.
        plugins: modules of yours that a run may name, see `resume`.

    Returns:
        The run, with its tables and, where it was started from an experiment file and is finished, its models and
        predictions; or the comparison of all finished runs in the folder.  `write_report` takes the same folder.

    Raises:
        RunFolderError: there is no run, or it cannot be read.
    """
    place = Path(folder)
    if (place / DATABASE).exists():
        history = History(place)
        # without the form of rows they would have to be read, from wherever the folder says
        if history.meta.get("status") != "finished" or None in map(history.meta.get, ("settings", "rows")):
            return history
        history.close()
        return opened(place, plugins=plugins, rows=False)
    finished = list[History]()
    for history in load([place]):
        if history.meta.get("status") == "finished":
            finished.append(history)
        else:
            history.close()
    if not finished:
        raise RunFolderError(f"{place} holds no finished run: give the folder that --out of a run or comparison named")
    return Comparison(finished)
