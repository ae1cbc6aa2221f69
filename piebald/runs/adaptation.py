"""What each client chooses at the end of a run, and adaptation of a finished run to clients that took no part in it.

Each client's choice is a note of the run's last step, and the chosen models that are no shared ones lie beside them as
`chosen-<client>.safetensors`.  Clients are asked in groups that are always the same, and a group is recorded at once,
so a run that was killed meanwhile asks the groups that are missing, to the same bits.

Newcomers are held out of a run until its end, or their rows come from a file, a folder or a function, and are read in
the same way as the run's own data.  A newcomer starts as every client did, from the global model with the initial
private parameters.  Each of several methods then fits some of the parameters to the newcomer's training rows by plain
SGD and keeps the epoch with the lowest loss on its validation rows.  Beside them stands what the newcomer would have
without the run: a model trained alone.  The method with the lowest validation loss is the best, unless a shared model
is as good by the guard of `choice.judge`.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from piebald.contracts import Clients, OwnChoice, Result, SgdConfig, Split
from piebald.contracts.data import blank_row
from piebald.core import pytree
from piebald.core.errors import ParameterError, SettingError
from piebald.core.metrics import mean_over_rows
from piebald.core.parameters import copied, matching
from piebald.core.randomness import torch_seed
from piebald.core.references import USERS, of_folder
from piebald.data.clients.data_source import DataSource, RunRows, client_among
from piebald.data.clients.owner import is_frame, read_owners
from piebald.data.clients.view import ClientsView
from piebald.data.embeddings import embedded_by
from piebald.data.partition.split import SplitSettings, unseen_numbers
from piebald.data.preparation import Preparation
from piebald.data.preparation.preparation import PrepareSettings
from piebald.engines.batched_layers import KeyedDropout
from piebald.engines.engine_choice import make_engine, stack_limit
from piebald.engines.row_loader import augmented, batches
from piebald.engines.sequential import SequentialEngine, step_key
from piebald.methods.choice import local_work, plain_sgd, reason
from piebald.methods.choice.candidates import Candidates
from piebald.methods.client_work import ClientWork
from piebald.methods.queries.scores import counted
from piebald.methods.training.optimizers import Optimizer
from piebald.server import ServerLoop
from piebald.storage.run_folder import CHOICE_AXIS, recorded_choices, write_chosen_model
from piebald.storage.store import RunStore

if TYPE_CHECKING:
    from piebald.runs.finished_run import Run


def hold_out(clients: Clients, unseen: float | Sequence[str], seed: int) -> tuple[Clients, Clients | None]:
    """Divide clients into those that take part and those that stay unseen until the end, or None.

    Args:
        clients: all clients.
        unseen: a number of clients, or a share of them below 1, or their names.
        seed: of the choice.

    Raises:
        SettingError: no client would take part, `unseen` is not a number, or a client that is held out has no rows to
            be adapted with.
    """
    held_out = unseen_numbers(clients.names, unseen, seed)
    if not held_out:
        return clients, None
    taking_part = [client for client in range(len(clients)) if client not in held_out]
    return ClientsView(clients, taking_part), ClientsView(clients, sorted(held_out))


def check_newcomers(newcomers: Clients) -> None:
    """Refuse clients that are held out and cannot be adapted to, before a whole run trains without them.

    Raises:
        SettingError: one of them has no validation rows.
    """
    for client, name in enumerate(newcomers.names):
        if newcomers.size(client, "validation") == 0:
            raise SettingError(
                f"unseen holds out the client {name!r}, which needs validation rows to be adapted and has none: give "
                "[split] validation = 0.1"
            )


GROUP = 256  # clients that are asked at once, or fewer where their models are large
_COUNTED = ("ok", "late", "excluded")  # results for which a client has worked


def choose(
    server: ServerLoop, store: RunStore, clients: Clients, query: OwnChoice, show: Callable[[int, int], None]
) -> dict[int, Tensor]:
    """Let each client choose its model, and record the choices.

    Args:
        server: the loop, after its run.
        store: where the choices are recorded.
        clients: who holds what.
        query: the query, without the clients' tasks.
        show: is called with the number of clients that have chosen, and of all.

    Returns:
        The chosen models [p] by client that are no shared ones, where the store keeps none.
    """
    done, work = recorded_choices(store.rows("note")), _work(store)
    plan, seed = server.evaluation, server.work.seed
    classes = 0 if plan.count is None else plan.count.classes
    counted = {client: query.model_copy(update={"classes": classes}) for client, _ in plan.counting(server.known, seed)}
    models: dict[int, Tensor] = {}
    size = max(1, min(GROUP, stack_limit(server.work)))
    for first in range(0, len(clients), size):
        group = range(first, min(first + size, len(clients)))
        # a group is recorded whole or not at all, so its first client stands for it where a run is resumed
        if group[0] not in done:
            queries = [
                (client, _own_query(server, clients, counted.get(client, query), client, work.get(client, ())))
                for client in group
            ]
            results = {result.task.client: result for result in server.ask_for_report(queries)}
            models |= _recorded(server, store, query, group, results)
        show(group[-1] + 1, len(clients))
    return models


def _work(store: RunStore) -> dict[int, list[tuple[str, int]]]:
    """Return the training tasks that each client has worked on: `Task.rng_version`, and the steps taken."""
    attempts: dict[tuple[int, int], int] = {}
    tasks: dict[int, list[tuple[str, int]]] = {}
    rows = store.query("SELECT client, sent_version, steps, status FROM result WHERE kind = 'train' ORDER BY id")
    for row in rows:
        attempt = attempts.get(index := (row["client"], row["sent_version"]), 0)
        attempts[index] = attempt + 1
        if row["status"] in _COUNTED:
            name = f"{row['sent_version']}.{attempt}" if attempt else str(row["sent_version"])
            tasks.setdefault(row["client"], []).append((name, row["steps"] or 0))
    return tasks


def _own_query(
    server: ServerLoop, clients: Clients, query: OwnChoice, client: int, tasks: Sequence[tuple[str, int]]
) -> OwnChoice:
    rows = clients.size(client, "train") or 0
    passes = tuple(local_work(server.work.trainer_of(client), rows, steps) for _, steps in tasks)
    return query.model_copy(update={"tasks": tuple(name for name, _ in tasks), "passes": passes})


def _recorded(
    server: ServerLoop, store: RunStore, query: OwnChoice, group: Sequence[int], results: Mapping[int, Result]
) -> dict[int, Tensor]:
    """Record the choices of a group of clients; returns the chosen models that are not written to a folder."""
    notes: list[dict[str, Any]] = []
    scores: list[dict[str, Any]] = []
    counts: list[dict[str, Any]] = []
    models: dict[int, Tensor] = {}
    for client in group:
        update = results[client].update if client in results else None
        if update is None:
            value: dict[str, Any] = {"chosen": None, "why": "it gave no usable answer, so it keeps the shared model"}
        else:
            value = query.record(update.metrics, update.examples)
            scores += _scores(server, query, client, value)
            if (matrix := update.vectors.get("confusion")) is not None and query.split is not None:
                counts += counted(server.version, client, "chosen", query.split, matrix)
            if query.is_new(value["chosen"]):
                models[client] = update.vectors["model"]
        notes.append({"axis": CHOICE_AXIS, "cluster": 0, "name": f"client-{client}", "value": value})
    if store.path is not None:
        for client, model in models.items():
            write_chosen_model(store.path, client, model)
    store.scores(scores)
    store.confusion(counts)
    # last, since they mark the group as done: a run that is killed before them asks it again
    store.add_notes(notes)
    return {} if store.path is not None else models


def _scores(server: ServerLoop, query: OwnChoice, client: int, choice: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of the table `score` that judge the chosen model."""
    judged, split = choice.get("judged"), query.split
    if judged is None or split is None:
        return []
    key = {"version": server.version, "client": client, "model": "chosen", "split": split}
    rows = judged["chosen"].items()
    return [key | {"metric": name, "value": value, "examples": judged["rows"]} for name, value in rows]


_SIZES = ("side", "channels", "seconds", "rate")  # of images and recordings


def from_file(
    source: str,
    target: str | None,
    meta: Mapping[str, Any],
    validation: float = 0.2,
    test: float = 0.2,
    plugins: Sequence[str] = (),
) -> Clients:
    """A newcomer's rows as a client, read in the same way as the data of the run that `meta` describes.

    Args:
        source: see `DataSource.source`; a folder has one folder for each class.
        target: the column of a table to predict, by default the one of the run.  The inputs are the run's features, or
            else all other columns in the order of the file, without the run's client column.
        meta: the description of the run.
        validation, test: the shares of validation and test rows.
        plugins: modules of the user's that the run may name, see `piebald.resume`.

    Raises:
        SettingError: the rows cannot be read, or have unexpected content.
    """
    settings = of_folder("", plugins).mark(meta.get("settings") or {})
    about, extractor = settings.get("data") or {}, settings.get("extractor")
    # those of a named data set are in the form of its rows
    sizes = {name: about[name] for name in _SIZES if name in about and about.get("source") is not None}
    given = DataSource(source=USERS.mark(source), **sizes)
    if Path(source).is_dir():
        # an extractor reads images as the run's data have them, and hides their shape
        given = given if extractor is not None else given.of_shape(pytree.form(blank_row(meta["rows"]).x))
    elif Path(source).suffix != ".npz":
        given = given.model_copy(update={"client": about.get("client")})
    as_written = () if meta.get("preparation") is None else Preparation(**meta["preparation"]).as_written
    newcomer = _client(given.read(as_written), source, target, about, meta, validation, test)
    return newcomer if extractor is None else embedded_by(newcomer, extractor)


def from_table(frame: Any, target: str | None, meta: Mapping[str, Any], validation: float, test: float) -> Clients:
    """Return the rows of a table as a client, which are to be prepared as those of the run that `meta` describes.

    Args:
        frame: a pandas DataFrame with the columns of the run's tables, in any order.
        target, meta, validation, test: as of `from_file`.

    Raises:
        SettingError: a column is missing, or a target is none of the run's classes.
    """
    return _client(frame, "the newcomer", target, {}, meta, validation, test)


def _client(
    content: Any, source: str, target: str | None, about: Mapping[str, Any], meta: Mapping[str, Any],
    validation: float, test: float,
) -> Clients:  # fmt: skip
    """Return rows as a client; `about` is the run's section [data]."""
    agreed = None if meta.get("preparation") is None else Preparation(**meta["preparation"])
    split = SplitSettings.of(meta.get("split"))
    content = agreed.cleaned(content) if agreed is not None and is_frame(content) else content
    owner = read_owners(content, pair=True)[0]
    if owner.name is not None or owner.clients is not None:
        return DataSource(source=source).rows_of(content)  # type: ignore[return-value]  # they are clients already
    division = _like_the_run(split, owner.columns, validation, test)
    regression, goal, features = bool(about.get("regression")), target or about.get("target"), about.get("features")
    if owner.is_table and agreed is not None:
        goal = goal or agreed.target_columns
        features = [name for name in agreed.names_in if name in owner.columns] or agreed.names_in
        regression = agreed.classes is None
    if owner.is_table and goal is None:
        raise SettingError(f"{source} is a table: name the column to predict with --target COLUMN")
    if is_frame(content):  # columns that say how rows are divided are no inputs
        gone = [name for name in split.columns if name in owner.columns and name not in division.columns]
        content = content.drop(columns=gone)
    run = RunRows(
        meta.get("classes") if agreed is None else agreed.classes,
        columns={"client": about.get("client"), "tokens": about.get("tokens")},
        prepare=None if agreed is None else PrepareSettings(),
        split=division,
    )
    named: dict[str, Any] = {"target": goal, "features": features} if owner.is_table else {}
    given = DataSource(source=source, regression=regression, **named)
    return client_among(read_owners(content, pair=True), given, "newcomer", run, division)[0]


def _like_the_run(split: SplitSettings, columns: list[str], validation: float, test: float) -> SplitSettings:
    """Return how a newcomer's rows are divided: as the run's, by those of its columns that the newcomer has."""
    group = [name for name in split.groups if name in columns] or None
    order = split.order if split.order in columns else None
    stratify = None if isinstance(split.stratify, str) and split.stratify not in columns else split.stratify
    return SplitSettings(validation=validation, test=test, seed=split.seed, group=group, order=order, stratify=stratify)


EPOCHS = 20
_WORDS = {
    "global": "the global model",
    "cluster": "the cluster's model",
    "private": "the model with fitted private layers",
    "head": "the model with a fitted last layer",
    "fine_tune": "the fine-tuned model",
    "mixed": "the mixed model",
    "local": "the model trained alone",
}
_BATCH_NORMS = nn.modules.batchnorm._BatchNorm


@dataclass(frozen=True, slots=True)
class AdaptationMethod:
    """The result of one adaptation method.

    Attributes:
        name: "global" (nothing is fitted), "private" (only the private layers: CGAU's conditioning, HDAFL's head),
            "head" (the last linear layer), "fine_tune" (all parameters), or "cluster" (nothing is fitted, but the
            newcomer takes the model of the cluster with the lowest loss on its training rows; the other methods then
            start there), "mixed" (a mixture, parameter by parameter, of that start and one of the other models), or
            "local" (trained alone from the run's initial model, with at least as many passes as a client of the run
            made).
        fitted: the number of fitted parameters.
        epochs: passes over the training rows up to the epoch that was kept, 0 for the start.
        loss: the loss on validation rows.
        validation, test: the metric on these rows, None where it is not defined.
        gain: the gain of the metric on validation rows over "global", positive where this method is better.
        of, share: the method in a mixture, and its share in it; else None.
    """

    name: str
    fitted: int
    epochs: int
    loss: float
    validation: float | None
    test: float | None
    gain: float | None
    of: str | None = None
    share: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Adaptation:
    """A newcomer's model, and the methods that were tried.

    Attributes:
        client: the newcomer's name.
        metric: the metric of `held_out`.
        methods: the results of all methods.
        best: the name of the chosen method.
        why: the reason, in one sentence.
        cluster: the number of the cluster that the newcomer starts from.
        model: the newcomer's model, ready to use.
        vector: the same model as a vector [p].
    """

    client: str
    metric: str
    methods: tuple[AdaptationMethod, ...]
    best: str
    cluster: int
    model: nn.Module
    vector: Tensor
    why: str = ""

    def table(self) -> dict[str, Any]:
        """The adaptation as plain values, without the model."""
        methods = [asdict(method) for method in self.methods]
        named: dict[str, Any] = {"client": self.client, "metric": self.metric, "best": self.best, "why": self.why}
        named |= {"cluster": self.cluster}
        return {**named, "methods": methods}

    @property
    def chosen(self) -> AdaptationMethod:
        """The best method."""
        return next(method for method in self.methods if method.name == self.best)


def fit(run: Run, clients: Clients, client: int = 0, *, epochs: int = EPOCHS, lr: float | None = None) -> Adaptation:
    """Adapt a finished run to one client that took no part in it.

    Args:
        run: the run.
        clients: the clients that include the newcomer; its validation rows choose the method, its test rows are only
            reported.
        client: the newcomer's number among them.
        epochs: the maximum number of passes over the training rows.
        lr: learning rate, by default that of the run's recipe.

    Raises:
        SettingError: there are no training or validation rows, or they do not fit the model.
    """
    for split in ("train", "validation"):
        if not len(clients.rows(client, split)):
            raise SettingError(f"the newcomer {clients.names[client]!r} has no {split} rows: give it some")
    trial = _Trial(run, clients, client, epochs, lr)
    return trial.run_all()


class _Trial:
    """All methods for one newcomer."""

    def __init__(self, run: Run, clients: Clients, client: int, epochs: int, lr: float | None) -> None:
        self.finished, self.clients, self.client, self.epochs = run, clients, client, epochs
        sgd = plain_sgd(run.work.trainer)
        rate = sgd.lr if lr is None else lr
        self.config = SgdConfig(
            rate, sgd.momentum, sgd.weight_decay, sgd.clip, sgd.batch, sgd.batches, augmentation=sgd.augmentation,
            passes=sgd.passes,
        )  # fmt: skip
        self.optimizer = sgd.optimizer
        # on the CPU, one after another: what the run was made with need not be on this machine
        self.engine = make_engine("sequential", run.work, clients, torch.device("cpu"), bfloat16=False)
        self.offer = Candidates(lambda models: self.engine.losses([client], models, "validation"))
        self.fitted: dict[str, int] = {}  # how many numbers each method fits

    def run_all(self) -> Adaptation:
        """Try every method and choose the best."""
        run, offer, cluster = self.finished, self.offer, 0
        start = run.start(0)
        offer.models["global"] = start[None]
        if len(run.cluster_models) > 1:
            # by training rows: the validation rows are kept for the choice among methods
            cluster = min(run.cluster_models, key=lambda number: self._score(run.start(number), "train")["loss"])
            start = run.start(cluster)
            offer.models["cluster"] = start[None]
        shared = 0 if run.work.layout.private else len(offer.models)  # with initial private layers it is of no use
        for name, tensors in fitted_tensors(run.work).items():
            self.fit(name, start, tensors, self.epochs)
        everything = frozenset(slot.name for slot in run.work.layout.slots if not slot.buffer)
        self.fit("local", run.work.initial, everything, max(self.epochs, self._passes()))
        offer.add_mixture(start[None], list(self.fitted))
        offer.put_in_order(list(_WORDS))
        return self._chosen(shared, cluster)

    def fit(self, name: str, start: Tensor, tensors: frozenset[str], epochs: int) -> None:
        """Add the model that results from fitting some tensors, after the pass with the lowest validation loss."""
        training = _PartialSgd(self.engine, start, tensors, self.config, self.optimizer)
        passes = (training.epoch(self.client, number)[None] for number in range(1, epochs + 1))
        self.offer.add_best_pass(name, ([model] for model in chain([start[None]], passes)))
        slots = self.finished.work.layout.slots
        self.fitted[name] = sum(slot.stop - slot.start for slot in slots if slot.name in tensors)

    def _chosen(self, shared: int, cluster: int) -> Adaptation:
        models, names = self.offer.models, list(self.offer.models)
        rows = [self.engine.row_losses([self.client], model, "validation")[0] for model in models.values()]
        losses = torch.cat(rows)
        verdict = self.offer.verdict(losses, shared)
        vector = models[names[verdict.chosen]][0]
        module = copy.deepcopy(self.finished.work.model)
        self.finished.work.layout.load(module, vector)
        return Adaptation(
            client=str(self.clients.names[self.client]),
            metric=self.finished.metric,
            methods=tuple(self._evaluated()),
            best=names[verdict.chosen],
            cluster=cluster,
            model=module.eval(),
            vector=vector,
            why=reason(verdict, names, shared, losses.shape[1], _WORDS),
        )

    def _passes(self) -> int:
        """Return the passes over its rows that the most active client of the run made."""
        tasks = Counter(
            row["client"] for row in self.finished.results if row["kind"] == "train" and row["status"] == "ok"
        )
        return max(tasks.values(), default=0) * plain_sgd(self.finished.work.trainer).epochs

    def _evaluated(self) -> list[AdaptationMethod]:
        has_test = bool(len(self.clients.rows(self.client, "test")))
        metric, sign = self.finished.metric, 1 if self.finished.higher_is_better else -1
        methods: list[AdaptationMethod] = []
        for name, model in self.offer.models.items():
            scores = self._score(model[0], "validation")
            value = _number(scores[metric])
            test = _number(self._score(model[0], "test")[metric]) if has_test else None
            # the global model comes first (`put_in_order`), and gains are over it
            first = methods[0].validation if methods else value
            gain = None if value is None or first is None else sign * (value - first)
            of, share = self.offer.mixture[0] if name == "mixed" else (None, None)
            trained = of or name
            (epochs,) = self.offer.epochs.get(trained, [0])
            fitted = self.fitted.get(trained, 0)
            methods.append(AdaptationMethod(name, fitted, epochs, scores["loss"], value, test, gain, of, share))
        return methods

    def _score(self, vector: Tensor, split: Split) -> dict[str, float]:
        scores, _ = self.engine.score([self.client], vector.unsqueeze(0), split)
        return {name: float(value[0]) for name, value in scores.items()}


def fitted_tensors(work: ClientWork) -> dict[str, frozenset[str]]:
    """Return the names of the tensors that each method fits, without methods that would repeat another."""
    trained = frozenset(slot.name for slot in work.layout.slots if not slot.buffer)
    try:
        head = matching(work.model, ["classifier"])
    except ParameterError:  # no linear layer
        head = frozenset()
    methods: dict[str, frozenset[str]] = {}
    for name, tensors in {"private": work.layout.private, "head": head, "fine_tune": trained}.items():
        if tensors & trained and tensors & trained not in methods.values():
            methods[name] = tensors & trained
    return methods


class _PartialSgd:
    """SGD on some tensors of a model; all others, including batch norm statistics, stay unchanged."""

    def __init__(
        self, engine: SequentialEngine, start: Tensor, fitted: frozenset[str], config: SgdConfig, optimizer: Optimizer
    ) -> None:
        self.engine, self.config = engine, config
        self.module = copied(engine.work.model).train()
        engine.work.layout.load(self.module, start)
        self.parameters: list[Tensor] = []
        for name, parameter in self.module.named_parameters():
            parameter.requires_grad_(name in fitted)
            if name in fitted:
                self.parameters.append(parameter)
        for layer in self.module.modules():
            if isinstance(layer, _BATCH_NORMS) and not any(one.requires_grad for one in layer.parameters()):
                layer.eval()
        assert not isinstance(config.lr, Tensor)
        self.optimiser = optimizer.as_torch(
            [{"params": self.parameters}], config.lr, config.weight_decay, config.momentum
        )

    def epoch(self, client: int, number: int) -> Tensor:
        """Make one pass over the client's rows and return the model vector [p] after it."""
        engine = self.engine
        gathered = engine.row_loader.gather([client], "train")
        rng_key = engine.row_loader.rng_key(engine.work.seed, client, number, 0)
        seeded = torch_seed(step_key(rng_key, 0), engine.device)
        with KeyedDropout() if engine.traits.dropout else nullcontext() as dropout, seeded:
            for step, batch in enumerate(batches(gathered.positions[0], self.config, engine.traits.mixes, *rng_key)):
                if isinstance(dropout, KeyedDropout):
                    dropout.start(torch.tensor(step_key(rng_key, step)))
                rows = augmented(gathered.take(batch), self.config, step, rng_key)
                losses = engine.loss(pytree.run(self.module, rows.x), rows.y)
                loss = mean_over_rows(losses, engine.row_loader.counted(rows.y)) if losses.dim() else losses
                self.optimiser.zero_grad()
                torch.autograd.backward(loss)
                if self.config.clip is not None:
                    torch.nn.utils.clip_grad_norm_(self.parameters, self.config.clip)
                self.optimiser.step()
        return self._vector()

    def _vector(self) -> Tensor:
        """The current model vector [p], including tensors that are not fitted."""
        layout = self.engine.work.layout
        tensors = dict(self.module.named_parameters()) | dict(self.module.named_buffers())
        vector = torch.empty(layout.size)
        for name, view in layout.views(vector).items():
            view.copy_(tensors[name].detach())
        return vector


def _number(value: float) -> float | None:
    # NaN alone differs from itself
    return None if value != value else value
