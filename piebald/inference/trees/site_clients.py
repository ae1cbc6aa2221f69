"""Boosted trees of a table, of an experiment file, or of clients who are asked through a runtime."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
import torch
from torch import Tensor

from piebald.contracts import Clients, Query, Rows, Runtime, Split, Update
from piebald.contracts.data import ModelSpec
from piebald.core import pytree
from piebald.core.arguments import PathLike, Seed, Share, checked
from piebald.core.errors import RuntimeFault, SettingError, check_names
from piebald.core.moments import Ints
from piebald.data.clients.client_tables import is_table
from piebald.data.clients.prepared import preparation_of
from piebald.data.partition.split import SplitSettings
from piebald.data.preparation.preparation import PrepareSettings
from piebald.experiments.file import ExperimentSettings
from piebald.inference.columns import TARGET, input_names
from piebald.inference.experiment import QuestionExperiment, agreed_at_sites, open_sites
from piebald.inference.queries.trees import Ask, MaskedTreeSumsQuery, TreeScoresQuery, TreesQuery
from piebald.inference.simulated import AskedSites, TableClients, simulated
from piebald.inference.trees.boosted_trees import BoostedTrees, Done, Scores, each_round, fingerprint, open_folder
from piebald.inference.trees.client_rows import alone, split_rows, xgboost
from piebald.inference.trees.encoding import Encoding, TreeData, target_of, tree_data
from piebald.inference.trees.forest import (
    MOST_COLUMNS,
    SCORES,
    Floats32,
    Forest,
    Objective,
    Target,
    TargetSums,
    TreeSettings,
)
from piebald.inference.trees.rounds import Boosted, Boosting, Growing, Start, SummedBoosting
from piebald.methods.client_work import ClientWork
from piebald.methods.recipe import Recipe
from piebald.methods.transforms.base import MaskingTransform
from piebald.privacy import SecureAggregation
from piebald.settings.toml_document import Document

log = logging.getLogger("piebald.trees")


class SiteTreeClients:
    """Clients that are asked to grow trees (`rounds.TreeClients`).

    The first question says who takes part.  A client that does not answer a later one is left out of that round.

    Args:
        sites: reaches the clients.
        target: the objective.
        settings: of boosting.
        seed: of subsampling.

    Attributes:
        numbers: the client numbers of those who take part.
    """

    def __init__(self, sites: AskedSites, target: Target, settings: TreeSettings, seed: int) -> None:
        self._sites, self._target, self._settings = sites, target, settings
        self._objective: dict[str, Any] = {"objective": target.objective, "classes": target.classes, "seed": seed}
        self.numbers = list(sites.runtime.clients())

    def sums(self) -> list[TargetSums]:
        """See `rounds.TreeClients`.

        Raises:
            SettingError: nobody answers.
        """
        query = TreesQuery(ask="sums", boosting=self._settings, **self._objective)
        answers = self._answers(query, self.numbers)
        pairs = zip(self.numbers, answers, strict=True)
        taking_part = [(number, answer) for number, answer in pairs if answer is not None]
        if not taking_part:
            raise self._sites.refusal("no client grows trees")
        # whoever does not answer now is asked nothing more: places in later rounds count on this list
        self.numbers = [number for number, _ in taking_part]
        self._sites.leave_out(self.numbers)
        return [TargetSums(answer.examples, tuple(answer.vectors["sums"].tolist())) for _, answer in taking_part]

    def grow(self, forest: Forest, start: Start, number: int, who: Sequence[int]) -> list[Forest | None]:
        """See `rounds.TreeClients`."""
        query = self._query(start, "grow", number, "train")
        answers = self._answers(query, [self.numbers[client] for client in who], forest, number)
        for client, answer in zip(who, answers, strict=True):
            # a client could give its trees more weight than the start granted it
            if answer is not None and answer.examples > start.rows[client]:
                raise RuntimeFault(f"client {self.numbers[client] + 1} has more rows than it said: ask again")
        depth = self._settings.max_depth
        return [None if answer is None else Forest(answer.vectors["forest"].numpy(), depth) for answer in answers]

    def losses(self, forest: Forest, start: Start, split: Split) -> list[tuple[float, int] | None]:
        """See `rounds.TreeClients`."""
        answers = self._answers(self._query(start, "loss", 0, split), self.numbers, forest)
        return [None if answer is None else (answer.metrics.get("loss", 0.0), answer.examples) for answer in answers]

    def scores(self, boosted: Boosted, split: Split) -> list[Scores]:
        """Return each client's scores of a model."""
        return self._scores(self._query(boosted.start, "scores", 0, split), boosted.forest)

    def alone(self, start: Start, split: Split) -> list[Scores]:
        """Return each client's scores of the trees that it grows by itself."""
        return self._scores(self._query(start, "alone", 0, split), None)

    def _scores(self, query: TreesQuery, forest: Forest | None) -> list[Scores]:
        undefined = dict.fromkeys(SCORES[self._target.objective], math.nan)
        answers = self._answers(query, self.numbers, forest)
        return [undefined if answer is None else {**undefined, **answer.metrics} for answer in answers]

    def _query(self, start: Start, ask: Ask, number: int, split: Split) -> TreesQuery:
        kind = TreeScoresQuery if self._settings.form == "histogram" else TreesQuery
        return kind(
            ask=ask, boosting=self._settings, round=number, split=split, **_start_fields(start), **self._objective
        )  # fmt: skip

    def _answers(
        self, query: TreesQuery, numbers: Sequence[int], forest: Forest | None = None, version: int = 0
    ) -> list[Update | None]:
        # gains and counts stay at the server: predictions do not need them, and they tell of other sites' rows
        sent = torch.from_numpy((forest or Forest.empty(self._settings.max_depth)).sent)
        answers = self._sites.ask(query, numbers, {"forest": sent}, version)
        self._sites.leave_out(answers, numbers)
        return [answers.get(number) for number in numbers]


class SiteSums:
    """Clients that send sums (`rounds.SummedClients`), from sites under masks.

    Each question is summed over those who answer it; one that falls silent is left out of it, as long as the masks can
    be taken off.

    Args:
        sites: reaches the clients.
        work: the run, with `SecureAggregation` of 64 bits, but for clients on this machine.
        columns: how many inputs they have.
        target: the objective.
        settings: of boosting.
        seed: of subsampling.
        here: whether clients are on this machine, which send sums in the open where the run masks nothing.

    Raises:
        SettingError: sums of sites would come in the open.

    Attributes:
        columns: how many inputs they have.
        taking_part: client numbers of those who answered the first question.
    """

    def __init__(
        self, sites: AskedSites, work: ModelSpec, columns: int, target: Target, settings: TreeSettings, seed: int,
        here: bool = False,
    ) -> None:  # fmt: skip
        masking = work.masking if isinstance(work, ClientWork) and settings.secure else None
        self._masking = masking if isinstance(masking, SecureAggregation) else None
        # a histogram of a small node tells of single rows, so sites never send one in the open
        if self._masking is None and not here:
            raise SettingError("sites send sums to grow trees from under masks alone: write trees.secure = true")
        self._sites, self.columns = sites, columns
        self._target, self._settings, self._seed = target, settings, seed
        self.taking_part: list[int] = []

    def targets(self) -> Ints:
        """See `SummedClients`."""
        return self._answers("targets", {})

    def at_most(self, thresholds: Floats32) -> Ints:
        """See `SummedClients`."""
        columns, count = thresholds.shape
        return self._answers("at_most", {"thresholds": thresholds}, columns=columns, thresholds=count)

    def histograms(self, growing: Growing) -> Ints:
        """See `SummedClients`."""
        sent = {"forest": growing.forest.sent, "grown": growing.grown.sent, "thresholds": growing.thresholds}
        columns, count = growing.thresholds.shape
        return self._answers(
            "histograms", sent, growing.number, columns=columns, thresholds=count, nodes=growing.nodes,
            level=growing.level, round=growing.number, **_start_fields(growing.start),
        )  # fmt: skip

    def loss(self, forest: Forest, start: Start) -> Ints:
        """See `SummedClients`."""
        # the number of the round that the last trees are of, as questions about its histograms had
        rounds = len(forest) // self._target.groups
        return self._answers("loss", {"forest": forest.sent}, rounds - 1, **_start_fields(start))

    def _answers(self, ask: Any, sent: Mapping[str, Floats32], version: int = 0, **fields: Any) -> Ints:
        query = MaskedTreeSumsQuery(
            ask=ask, boosting=self._settings, objective=self._target.objective, classes=self._target.classes,
            seed=self._seed, **fields,
        )  # fmt: skip
        vectors: dict[str, Tensor] = {name: torch.from_numpy(array) for name, array in sent.items()}
        answered, total = self._sites.sums(query, self._masking, vectors, version, self.taking_part)
        self.taking_part = self.taking_part or answered
        self._sites.leave_out(answered)
        # sums came as float64, in which whole numbers up to 2^53 are exact
        return np.rint(total).astype(np.int64).reshape(query.shape)


def _start_fields(start: Start) -> dict[str, Any]:
    """Return the fields of a query about the start of boosting."""
    return {"start": tuple(start.margins.tolist()), "class_weights": start.class_weights}


def trees_at_sites(
    runtime: Runtime, spec: ModelSpec, clients: Clients, settings: TreeSettings, *, seed: int = 0,
    split: Split = "test", features: Sequence[str] | None = None, compare: bool = True, out: Path | None = None,
    done: Done | None = None, say: Callable[[str], None] = log.warning,
) -> BoostedTrees:  # fmt: skip
    """Grow boosted trees of clients who are asked through a runtime.

    Args:
        runtime: the runtime that reaches the clients.
        spec: the model that a task carries; for trees from sums, the run with its masks.
        clients: their names, and the form of their rows.
        settings: of boosting.
        seed: of subsampling.
        split: the rows that trees are scored on.
        features: names of the inputs, "x0", "x1", ... by default.
        compare: also ask each client for the scores of trees that it grows by itself.
        out, done: as of `trees`.
        say: called with a sentence about each client that is left out.

    Raises:
        SettingError: nobody grows trees, or rows have a form that trees are not for.
        RunFolderError: `out` has something else, or cannot be written.
    """
    xgboost()
    agreed = preparation_of(clients)
    # a prepared target of amounts is a standard score, in which target bounds and errors would mislead
    if agreed is not None and agreed.classes is None:
        raise SettingError("trees of a number at sites need its own unit: give inputs, and prepare = 'none'")
    columns = list(input_names(_width(clients), features if agreed is None else agreed.feature_names_out))
    target, classes = target_of(clients)
    encoding = Encoding(columns, settings.missing, agreed, scaled=agreed is not None)
    about = {"clients": [str(clients.names[client]) for client in range(len(clients))]}
    data = TreeData([], encoding, target, TARGET, classes, 0)
    return grown_trees(
        runtime, spec, clients, settings, data, about, seed=seed, split=split, compare=compare, out=out, done=done,
        say=say,
    )  # fmt: skip


def grown_trees(
    runtime: Runtime, spec: ModelSpec, clients: Clients, settings: TreeSettings, data: TreeData,
    about: Mapping[str, Any], *, seed: int, split: Split, compare: bool, out: Path | None, done: Done | None,
    say: Callable[[str], None] = log.warning, pooled: Callable[[], Sequence[Scores]] = tuple,
) -> BoostedTrees:  # fmt: skip
    """Grow trees of clients that are asked.

    Args:
        runtime, spec, clients, settings, seed, split, compare, out, done, say: as of `trees_at_sites`.
        data: the columns and the objective; with the rows of clients where these are on this machine.
        about: what a folder of trees is known by besides settings, columns, objective and seed.
        pooled: returns scores of trees of all rows in one place.
    """
    encoding, target, columns = data.encoding, data.target, data.encoding.columns
    sites = AskedSites(runtime, spec, clients.names, say)
    growing = SiteTreeClients(sites, target, settings, seed)
    # what makes a resumed call another one
    description = {"settings": settings.table(), "objective": target.objective, "columns": columns,
                   "classes": list(data.classes), "seed": seed, **about}  # fmt: skip
    with open_folder(out, description) as folder:
        done, summed = each_round(folder, done), None
        if settings.form == "histogram":
            summed = SiteSums(sites, spec, len(columns), target, settings, seed, here=bool(data.clients))
        boosting = (
            Boosting(growing, target, settings, done)
            if summed is None
            else SummedBoosting(summed, target, settings, seed, done)
        )
        first = boosting.started()  # which also says who takes part
        if summed is not None:
            growing.numbers = summed.taking_part
        state = None if folder is None else folder.read(len(columns), settings.max_depth, target.groups)
        # a resumed forest has weights by these numbers of rows, and places of these clients
        if state is not None and state.start.rows != first.start.rows:
            raise SettingError(f"{out} has trees of other clients, or of other rows: choose another folder")
        boosted = boosting.run(state or first)
        alone = growing.alone(boosted.start, split) if compare else ()
        names = [sites.names[number] for number in growing.numbers]
        # of sites under masks only the total of rows is known
        rows: Sequence[int | None] = boosted.start.rows if summed is None else [None] * len(names)
        if data.clients:
            rows = [len(data.clients[number].y["train"]) for number in growing.numbers]
        grown = BoostedTrees(
            boosted, encoding, target, data.name, data.classes, names, rows, growing.scores(boosted, split), alone,
            pooled() if compare else (), data.dropped, sites.left_out,
        )  # fmt: skip
        if folder is not None:
            folder.finish(grown)
        return grown


def stated_questions(clients: Clients, settings: TreeSettings, seed: int) -> list[Query]:
    """Return the questions that growing trees takes, as far as they are known before the first one."""
    target, _ = target_of(clients)
    fields: dict[str, Any] = {"boosting": settings, "objective": target.objective, "classes": target.classes}
    fields["seed"] = seed
    if settings.form != "histogram":
        return [TreesQuery(ask=ask, **fields) for ask in get_args(Ask)]
    sums = [MaskedTreeSumsQuery(ask=ask, **fields) for ask in ("targets", "at_most", "histograms", "loss")]
    return [*sums, *(TreeScoresQuery(ask=ask, **fields) for ask in ("scores", "alone"))]


def _width(clients: Clients) -> int:
    """Return the number of inputs of clients.

    Raises:
        SettingError: trees are not for their rows.
    """
    blank = clients.rows(0, "train")
    width = math.prod(pytree.single(blank.x, "trees").shape[1:])
    y = pytree.single(blank.y, "trees")
    if math.prod(y.shape[1:]) != 1 or not 0 < width <= MOST_COLUMNS:
        raise SettingError(
            f"trees are for rows of 1 to {MOST_COLUMNS:,} numbers with one target, got {width:,} numbers and targets "
            f"of the form {list(y.shape[1:])}"
        )
    return width


@checked
def trees(
    clients: Any,
    *,
    target: str | None = None,
    columns: Sequence[str] | None = None,
    objective: Objective | None = None,
    client: str | None = None,
    row_weights: str | None = None,
    features: Sequence[str] | None = None,
    validation: Share | None = None,
    test: Share | None = None,
    split: SplitSettings | Mapping[str, Any] | str | None = None,
    prepare: PrepareSettings | Mapping[str, Any] | None = None,
    evaluate_split: Split = "test",
    compare: bool = True,
    seed: Seed = 0,
    out: PathLike | None = None,
    done: Callable[[Boosted], None] | None = None,
    **settings: Any,
) -> BoostedTrees:
    """Grow gradient-boosted trees on the rows of all clients, which stay where they are.

    In each round every client grows a tree on its own rows, from the model so far, with xgboost; the trees of a round
    count together as one forest, in which each has the weight of its client.  Under form="histogram", a round is one
    tree from sums over all clients, which leave them under masks with secure=True.

    Args: Rows
        clients: as of `statistics`: a table with a column `client`, a table for each client, or `Clients`.  Gaps are
            allowed, and a column of text becomes a column for each of its categories.
        target: the column to predict; "target" by default, as `Clients` have it.
        columns: the columns to predict it from, all others by default.
        objective: "binary", "multiclass" or "regression"; by default what the target is to `clients_from`:
            classes, or amounts.
        client: the column that names the client of each row.
        row_weights: a column of a table that says how much each row counts, as xgboost's `weight`; no input.  It may
            also be named in place of how clients count, weights="w".
        features: names of the inputs of `Clients`.
        validation, test: shares of each client's rows that are held out, of tables; 0 and 0.2 by default.
        split: how rows of a table are divided, in place of these, see `clients_from`.

        prepare: how columns of tables are read, see `PrepareSettings`; trees need no scale, and gaps stay gaps.

    Args: Training
        **settings: those of `TreeSettings`, like rounds=100, max_depth=4, learning_rate=0.1, patience=10.
        seed: of the division of rows and of subsampling.
        out: a folder for the model; a call that was interrupted goes on from its last round when it is repeated.
        done: called with the state after each round.

    Args: Evaluation
        evaluate_split: the rows that trees are scored on, at each client.
        compare: also score trees that each client grows alone, and those of all rows in one place.

    Returns:
        The trees, with their scores at each client.

    Raises:
        SettingError: an argument is wrong, rows do not fit together, or xgboost is missing.
        RunFolderError: `out` has something else, or cannot be written.

    Examples:
        >>> import pandas as pd
        >>> import piebald
        >>> doses = [float(dose) for dose in range(40)]
        >>> table = pd.DataFrame({"clinic": ["A", "B"] * 20, "dose": doses, "ill": [0] * 20 + [1] * 20})
        >>> model = piebald.trees(table, client="clinic", target="ill", rounds=2, max_depth=1, compare=False)
        >>> model.rounds, len(model.boosted.forest), model.metric
        (2, 4, 'auc')
    """
    of_clients = get_args(TreeSettings.model_fields["weights"].annotation)
    if row_weights is None and isinstance(named := settings.get("weights"), str) and named not in of_clients:
        row_weights = settings.pop("weights")
    chosen = TreeSettings(**settings)
    # a missing package is told before rows are read and split
    xgboost()
    data = tree_data(
        clients, client=client, target=target, columns=columns, features=features, objective=objective,
        validation=validation, test=test, seed=seed, missing=chosen.missing,
        split=None if split is None else SplitSettings.of(split), prepare=prepare, weights=row_weights,
    )  # fmt: skip
    held = TableClients(
        [rows.name for rows in data.clients], data.encoding.columns,
        [{split: Rows(torch.from_numpy(x), torch.from_numpy(rows.y[split]),
                      torch.from_numpy(rows.weights[split]) if split in rows.weights else None)
          for split, x in rows.x.items()} for rows in data.clients], {}, data.classes or None,
    )  # fmt: skip
    # rows are a digest, so that the folder has no copy of them
    about = {"rows": fingerprint(data.clients)}
    with simulated(held, [SecureAggregation(bits=64)] * chosen.secure) as (runtime, work):
        return grown_trees(
            runtime, work, held, chosen, data, about, seed=seed, split=evaluate_split, compare=compare,
            out=None if out is None else Path(out), done=done,
            pooled=lambda: _pooled(data, chosen, seed, evaluate_split),
        )  # fmt: skip


def _pooled(data: TreeData, settings: TreeSettings, seed: int, split: Split) -> list[Scores]:
    """Return scores at each client of the trees of all rows in one place."""
    model = alone(data.clients[0].pooled(data.clients[1:]), data.target, settings, seed)
    if model is None:
        return [dict.fromkeys(SCORES[data.target.objective], math.nan)] * len(data.clients)
    return [split_rows(rows, split, data.target, settings).scores(model) for rows in data.clients]


def trees_of_table(file: Path, flags: Sequence[str], **options: Any) -> BoostedTrees:
    """Grow boosted trees of a table.

    Args:
        file: the table.
        flags: settings like "trees.max_depth=4" and "seed=3".
        options: as of `trees`.

    Raises:
        SettingError: an argument is wrong.
    """
    document = Document("", str(file))
    for flag in flags:
        document.set(flag)
    values = document.values
    for name in values:
        if name not in ("trees", "seed", "split"):
            raise SettingError(
                f"--set of a table must be about trees, the split or the seed, like trees.max_depth=4, got {name!r}"
            )
    settings = values.get("trees", {})
    if not isinstance(settings, dict):
        raise SettingError(f"--set trees must be a table of settings, got {settings!r}")
    check_names("setting of trees", settings, TreeSettings.model_fields)
    # the flag names the split that is scored, and the file's table says how rows are divided
    options["evaluate_split"] = options.pop("split")
    return trees(str(file), seed=values.get("seed", 0), split=values.get("split"), **options, **settings)


def trees_of_experiment(
    file: Path,
    flags: Sequence[str],
    *,
    client: str | None = None,
    target: str | None = None,
    columns: Sequence[str] | None = None,
    objective: Objective | None = None,
    row_weights: str | None = None,
    validation: float | None = None,
    test: float | None = None,
    split: Split = "test",
    compare: bool = True,
    out: Path | None = None,
    done: Done | None = None,
) -> BoostedTrees:
    """Grow boosted trees of the clients of an experiment file, on this machine; arguments are those of `trees`.

    Where the file's source is a table with a client column, it is read as it is, with gaps and text.

    Raises:
        SettingError: an argument is wrong, or the recipe of the file hides what trees would show.
    """
    settings = QuestionExperiment.load(file, flags)
    boosting = cast("TreeSettings", settings.section("trees"))
    check_unprotected(settings.built_recipes().values(), boosting)
    data, fields = settings.data, {name: value for name, value in boosting.table().items() if name != "kind"}
    client_column = client or data.client
    options: dict[str, Any] = {"validation": validation, "test": test, "evaluate_split": split, "compare": compare}
    options |= {"out": out, "done": done, "seed": settings.first_seed, **fields}
    if data.source is not None and client_column is not None and is_table(data.source):
        # flags of the command line win over the file
        if columns is None and data.features is not None:
            columns = [*data.features]
        if objective is None and data.regression:
            objective = "regression"
        return trees(
            data.source, client=client_column, target=target or data.only_target, columns=columns, objective=objective,
            split=settings.split, prepare=settings.wanted, row_weights=row_weights or data.weights, **options,
        )  # fmt: skip
    if client is not None or target is not None or row_weights is not None:
        raise SettingError("--client, --target and --weights name columns of a table, and these rows are in "
                           "none: leave them out")  # fmt: skip
    options["prepare"] = settings.wanted
    return trees(settings.source_clients(), features=data.features, columns=columns, objective=objective, **options)


def trees_of_sites(
    file: Path,
    flags: Sequence[str],
    credentials: Path | None,
    *,
    split: Split = "test",
    compare: bool = True,
    out: Path | None = None,
    done: Done | None = None,
) -> BoostedTrees:
    """Grow boosted trees of the sites of a federation.

    Sites take part as they would in a run of the experiment, under its terms and their policies.

    Args:
        file: the experiment file, which needs no recipe.
        flags: settings on top of it.
        credentials: the server's; None starts a federation of processes on this machine.
        split, compare, out, done: as of `trees`.

    Raises:
        SettingError: a setting is wrong, no site answers, or the recipe of the file hides what trees would show.
    """
    boosting = cast("TreeSettings", QuestionExperiment.load(file, flags).section("trees"))
    masks = (SecureAggregation(bits=64),) if boosting.secure else ()

    def questions(settings: ExperimentSettings, clients: Clients) -> list[Query]:
        return stated_questions(clients, boosting, settings.first_seed)

    with open_sites(file, flags, credentials, "trees", masks, questions, agreed_at_sites) as sites:
        check_unprotected(sites.recipes, boosting)
        return trees_at_sites(
            sites.runtime, sites.work, sites.clients, boosting, seed=sites.settings.first_seed, split=split,
            features=sites.settings.data.features, compare=compare, out=out, done=done,
        )  # fmt: skip


def check_unprotected(recipes: Iterable[Recipe], settings: TreeSettings) -> None:
    """Refuse recipes that hide rows or updates: no noise covers trees, and only sums can be sent under masks.

    Raises:
        SettingError: a recipe has a component that protects.
    """
    for recipe in recipes:
        for component in (recipe.training, *recipe.transforms):
            if component.protects and not (settings.secure and isinstance(component, MaskingTransform)):
                raise SettingError(
                    f"trees cannot be hidden by {component.kind!r}: their thresholds are numbers of rows, so they are "
                    "for clients who may see each other's trees; take another file, or the recipe without it"
                )
