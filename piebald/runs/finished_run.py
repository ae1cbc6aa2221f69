"""A finished run in memory: its tables and its models."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from piebald.contracts import Clients, OwnChoice, Personalizes, Rows, RowsAtSites, Split
from piebald.contracts.data import blank_row
from piebald.core import pytree
from piebald.core.arguments import PathLike, checked, checked_class
from piebald.core.errors import SettingError, unknown
from piebald.core.metrics import METRICS, best_on_validation, best_threshold, checked_criterion, is_pooled, rates
from piebald.core.pytree import Tree
from piebald.data.clients.prepared import Standardisation, constants_of_run
from piebald.data.clients.sites import RecordedClients
from piebald.data.preparation import Preparation
from piebald.data.preparation.tokens import with_kept_tokenizer
from piebald.engines.engine_choice import make_engine
from piebald.engines.outgoing import personal_model
from piebald.engines.stack import PRIVATE
from piebald.methods.choice.candidates import SHARED
from piebald.methods.choice.knn_per import NEIGHBOURS
from piebald.methods.client_work import ClientWork
from piebald.methods.sharing.base import Sharing
from piebald.models import NearestNeighbours, StandardisedInputs
from piebald.models.prediction import HOTTEST, OutputMeaning, Predictor, RawInputs
from piebald.report.export import Exported, ExportFormat, export_model, model_card
from piebald.report.export.raw_rows import Scoring
from piebald.report.page.wording import names
from piebald.report.tables import History
from piebald.server.cluster_state import ModelSnapshot
from piebald.storage.run_folder import read_chosen_model, read_fitted, write_fitted
from piebald.storage.store import RunStore

if TYPE_CHECKING:
    import pandas as pd

_LISTED = 8  # names of clients in a message


@checked_class
class Run(History):
    """A finished run: its tables and its models.  Its run folder stays open for reading until `close`.

    The models are those of the last server step, or of the best version where the run keeps that.

    Attributes:
        work: the model, its layout and objective, as clients received them.
        cluster_models: the global models [s] by the number of their cluster.
        main: the number of the main cluster, whose model is the global model of the run.

    Examples:
        >>> import piebald as pb
        >>> clients = pb.partition.Iid(clients=3, limit=300).split(pb.data.digits())
        >>> model = pb.models.build_model("logistic", (1, 8, 8), 10)
        >>> run = pb.run("fedavg", clients, model, rounds=1, runtime=pb.Simulator(engine="sequential"))
        >>> run.model()(clients.rows(0, "test").x).shape
        torch.Size([20, 10])
    """

    def __init__(
        self,
        source: RunStore | Path,
        work: ClientWork,
        clients: Clients,
        version: int,
        models: ModelSnapshot,
        sharing: Sharing,
        chosen: Mapping[int, Tensor] | None = None,
    ) -> None:
        super().__init__(source)
        self.meta = self.meta if self.path is None else with_kept_tokenizer(self.meta, self.path)
        self.work = work
        self.main = models.main
        first = {0: work.initial[: work.layout.shared]}  # where no client is in a cluster yet
        self.cluster_models: Mapping[int, Tensor] = dict(sorted((first | dict(models.clusters)).items()))
        self._clients = clients
        self._version = version
        self._cluster_of, self._own_buffers = models.cluster_of, models.own_buffers
        self._sharing = sharing
        self._chosen = chosen or {}

    @checked
    def number(self, client: int | str) -> int:
        """The number of a client, given its name or its number.

        Raises:
            SettingError: no client has this name or number.
        """
        names = list(self._clients.names)
        if isinstance(client, str):
            if client in names:
                return names.index(client)
            if not client.isdecimal():
                raise unknown("client", client, names)
            client = int(client)
        if not 0 <= client < len(names):
            raise SettingError(f"client must be a number from 0 to {len(names) - 1}, got {client}")
        return client

    @checked
    def model(self, client: int | str | None = None) -> nn.Module:
        """A copy of the user's module, ready to use; it reads standard scores where the run has a `standardisation`.

        Args:
            client: None gives the global model (of the main cluster where there are several), with its initial private
                layers, if any.  A name or number gives that client's model: the one that it has chosen (`keep =
                "best_for_each"`, see `choices`), else its personal model: with its private layers, fine-tuned, or
                trained beside the global model (Ditto), as the recipe defines.  With `keep = "knn_per"` it is a
                `models.NearestNeighbours` where the client's own rows help.

        Raises:
            SettingError: the recipe makes personal models and the run was not kept in a folder, or the model never
                leaves its site.
        """
        number = None if client is None else self.number(client)
        work = self.work if number is None else self.work.of(number)
        module = copy.deepcopy(work.model)
        work.layout.load(module, self.start() if number is None else self._personal(number))
        near = None if number is None else self._choice_of(number).get(NEIGHBOURS)
        if number is None or near is None:
            return module.eval()
        rows = self._clients.rows(number, "train")
        return NearestNeighbours(module, rows.x, pytree.single(rows.y, "classes of remembered rows"), **near)

    @checked
    def start(self, cluster: int | None = None) -> Tensor:
        """The model vector [p] that a newcomer starts from: a cluster's model with the initial private parameters."""
        number = self.main if cluster is None else cluster
        if number not in self.cluster_models:
            raise SettingError(f"cluster must be one of {sorted(self.cluster_models)}, got {number}")
        shared = self.cluster_models[number]
        return torch.cat([shared, self.work.initial[self.work.layout.shared :]])

    @checked
    def predictor(
        self,
        client: int | str | None = None,
        *,
        cluster: int | None = None,
        calibrate: bool = False,
        threshold: str | None = None,
        pooled: bool = False,
    ) -> Predictor:
        """Return a model with the way from raw rows to its inputs, and from its outputs to answers.

        Args:
            client: whose model, see `model`; None takes the global model (of the main cluster where there are several).
            cluster: the number of the cluster whose model it is, instead of a client's.
            calibrate: divide scores by the temperature of the lowest loss on the validation rows of the client, or of
                all clients; it is kept in the run folder, so that the rows are needed once.
            threshold, pooled: also name the class, see `threshold`.

        Raises:
            SettingError: the run has no such model, every client has private layers and none is named, or there are no
                validation rows here to calibrate with.
        """
        number = None if client is None else self._number_of_model(client)
        if number is not None and cluster is not None:
            raise SettingError("client and cluster both say which model it is: leave one of them out")
        if number is None and self.work.layout.private:
            raise SettingError(
                f"{self.recipe} keeps layers at its clients, so that there is no global model to predict with: name "
                f"a client ({names(self.client_names)}), or fit the model to a new one with piebald adapt"
            )
        module = self.model(number)
        if cluster is not None:
            self.work.layout.load(module, self.start(cluster))
        work = self.work if number is None else self.work.of(number)
        meaning = OutputMeaning.of(work.objective, work.outputs, self._clients.classes, self.meta.get("target"))
        if self.preparation is not None:
            meaning = meaning.in_unit_of(self.preparation)
        inputs = replace(self._raw_inputs(), client=None if number is None else self.client_names[number])
        predictor = Predictor(module, inputs, meaning)
        if threshold is not None:
            if cluster is not None:
                raise SettingError("threshold is chosen for the global model or that of a client: leave cluster out")
            checked_text = checked_criterion(threshold, pooled)
            criterion = best_on_validation(checked_text, "all clients" if number is None else self.client_names[number])
            chosen = self.threshold(threshold, number, pooled=pooled)
            predictor = replace(predictor, threshold=chosen, criterion=criterion)
        if not calibrate:
            return predictor
        model = f"client {number}" if number is not None else "global" if cluster is None else f"cluster {cluster}"
        kept = None if self.path is None else read_fitted(self.path, self._version, model)
        # a folder is data that may have been changed, so only what a fit can give is taken from it
        if kept is not None and 1 / HOTTEST <= kept <= HOTTEST:
            return replace(predictor, meaning=replace(predictor.meaning, temperature=kept))
        if isinstance(self._clients, RowsAtSites) and self._clients.elsewhere:
            raise SettingError("calibrate needs validation rows, which are at the sites: leave it out")
        calibrating = range(len(self._clients)) if number is None else [number]
        calibrated = predictor.calibrated(self._clients.rows(place, "validation") for place in calibrating)
        if self.path is not None:
            write_fitted(self.path, self._version, model, calibrated.meaning.temperature)
        return calibrated

    @checked
    def predict(
        self,
        rows: Any,
        client: int | str | None = None,
        *,
        cluster: int | None = None,
        calibrate: bool = False,
        threshold: str | None = None,
        pooled: bool = False,
    ) -> pd.DataFrame:
        """Predict for raw rows.

        Args:
            rows: a pandas DataFrame, the path of a table or of an .npz file with an array x, or inputs as arrays, as
                the run's source has them.  Columns are found by their names; others, like the target, are not used.
            client, cluster, calibrate: see `predictor`.
            threshold, pooled: also name the class, see `threshold`; by default with the run's own threshold, if it has
                one (`usual_criterion`).

        Returns:
            A row for each of them, with the probability of each class by its name, or the numbers to predict.

        Raises:
            SettingError: see `predictor`, or rows that do not fit the run.

        Examples:
            >>> import piebald as pb
            >>> clients = pb.partition.Iid(clients=3, limit=300).split(pb.data.digits())
            >>> model = pb.models.build_model("logistic", (1, 8, 8), 10)
            >>> run = pb.run("fedavg", clients, model, rounds=1, runtime=pb.Simulator(engine="sequential"))
            >>> run.predict(clients.rows(0, "test").x, client=0).shape
            (20, 10)
        """
        settings: dict[str, Any] = {"cluster": cluster, "calibrate": calibrate}
        criterion = self.usual_criterion(client, cluster) if threshold is None else threshold
        return self.predictor(client, **settings, threshold=criterion, pooled=pooled).predict(rows)

    @checked
    def usual_criterion(self, client: int | str | None = None, cluster: int | None = None) -> str | None:
        """Return the criterion of the run's own thresholds (`threshold` of `run`), by which predictions name the class.

        None where the run has none, the model has no threshold by it, or sites keep their thresholds.

        Args:
            client, cluster: whose model, see `predictor`.
        """
        criterion = self.meta.get("threshold")
        number = None if client is None else self._number_of_model(client)
        if criterion is None or cluster is not None or (number is None and self.work.layout.private):
            return None
        try:
            chosen = self._threshold(checked_criterion(criterion), number)
        except SettingError:  # rows that are gone are no reason to predict nothing
            return None
        return None if chosen is None else checked_criterion(criterion)

    def keep_thresholds(self) -> None:
        """Keep the run's own thresholds in its folder, while the rows are there by which they are chosen."""
        criterion = self.meta.get("threshold")
        if criterion is None or self.path is None or not self.threshold_scores:
            return
        scored = self.naive("at_threshold", METRICS[0])
        for number in [*scored] if self.work.layout.private else [None, *scored]:
            self._threshold(checked_criterion(criterion), number)

    @checked
    def threshold(self, criterion: str, client: int | str | None = None, *, pooled: bool = False) -> float:
        """Return the probability of the second of two classes from which a row is to be taken for it.

        It is the best by the criterion on validation rows, and is kept in the run folder, so that they are needed once.

        Args:
            criterion: "accuracy", "balanced_accuracy" or "f1", as the metrics of these names; or a least share, such as
                "sensitivity=0.9", at which the specificity is as large as can be, or "specificity=0.9".
            client: whose model and rows; None takes the global model and all rows.
            pooled: take one threshold for all clients' own models on all their rows, where each has few.

        Raises:
            SettingError: there is no such criterion, there are not two classes, or no validation rows of both here.
        """
        number = None if client is None else self._number_of_model(client)
        pooled = pooled or is_pooled(checked_criterion(criterion))
        chosen = self._threshold(checked_criterion(criterion, pooled), number)
        if chosen is None:
            who = f"{self.client_names[number]} has" if number is not None and not pooled else "the clients have"
            raise SettingError(
                f"threshold needs validation rows of both classes, and {who} not both: give more with validation in "
                "[split], or take one for all clients with pooled"
            )
        return chosen

    def _threshold(self, criterion: str, number: int | None) -> float | None:
        """Return the best threshold, as `threshold` does; None without validation rows of both classes."""
        pooled = is_pooled(criterion)
        whose = "global" if number is None else "all clients" if pooled else f"client {number}"
        name = f"{whose}, threshold for {criterion}"
        stored = None if self.path is None else read_fitted(self.path, self._version, name)
        # the log-odds of 0 and 1 are infinite
        if stored is not None and 0 < stored < 1:
            return stored
        stated = self.meta.get("threshold")
        if pooled and stated is not None and criterion == checked_criterion(stated):
            # of all clients' models, which are the global one where nobody has another
            of_all = self.naive("at_threshold", "threshold")
            if of_all and (number is not None or not self.has_personal_models):
                return next(iter(of_all.values()))
        judged = range(len(self._clients)) if number is None or pooled else [number]
        parts = [self._leads(place, "validation", by_global=number is None) for place in judged]
        leads, positive = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        chosen = best_threshold(leads, positive, criterion)
        if self.path is not None and chosen is not None:
            write_fitted(self.path, self._version, name, chosen)
        return chosen

    @checked
    def at_thresholds(self, criterion: str, *, pooled: bool = False, split: Split = "test") -> pd.DataFrame:
        """Score each client's model at its threshold, and at a half.

        Args:
            criterion, pooled: see `threshold`.
            split: of the rows that are scored; thresholds are chosen on validation rows in any case.

        Returns:
            A row for each client that has rows, and validation rows of both classes, by name: its `threshold`, its
            `rows`, and for each of accuracy, balanced_accuracy, f1, sensitivity and specificity the value there and, as
            "f1 at 0.5", at a half.  Sites keep their rows and thresholds, and tell the scores where the run was started
            with this criterion (`threshold` of `run`).

        Raises:
            SettingError: see `threshold`, or sites were not asked for these scores.
        """
        import pandas as pd

        criterion = checked_criterion(criterion, pooled)
        if isinstance(self._clients, RowsAtSites) and self._clients.elsewhere:
            stated = self.meta.get("threshold")
            if split != self.split or stated is None or criterion != checked_criterion(stated):
                raise SettingError(
                    "rows and thresholds are at the sites, which tell scores only by the threshold of the run's "
                    f"[evaluate], {stated!r} here, on its {self.split} rows"
                )
            return pd.DataFrame.from_dict(self.threshold_scores, orient="index")
        table = {}
        for number, name in enumerate(self.client_names):
            leads, positive = self._leads(number, split)
            chosen = self._threshold(criterion, number) if len(leads) else None
            if chosen is not None:
                # a probability exceeds t where the lead of its logit exceeds the log-odds of t
                at, half = (rates(np.array([cut]), leads, positive) for cut in (np.log(chosen / (1 - chosen)), 0.0))
                table[name] = {"threshold": chosen, "rows": len(leads), **{metric: at[metric][0] for metric in at}}
                table[name] |= {f"{metric} at 0.5": half[metric][0] for metric in half}
        return pd.DataFrame.from_dict(table, orient="index")

    def _leads(self, client: int, split: Split, by_global: bool = False) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """The second class's lead in a client's rows [n], and whether they are of it [n]."""
        outputs, targets = self.outputs(client, split, by_global=by_global)
        if len(self._clients.classes or ()) != 2 or outputs.shape[1:] != (2,):
            raise SettingError(
                "a threshold is for two classes and a model with an output for each, which this run has not"
            )
        labels = pytree.single(targets, "a threshold")
        return (outputs[:, 1] - outputs[:, 0]).double().numpy(), (labels == 1).numpy()

    def _keep_row_scores(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Keep further rows of `row_scores` with the run, as of models that it is held against."""
        with nullcontext(self._store) if self.path is None else RunStore.open(self.path) as store:
            store.row_scores(rows)
        self.__dict__.pop("row_scores", None)  # what was read before lacks them

    @checked
    def outputs(self, client: int | str, split: Split, *, by_global: bool = False) -> tuple[Tensor, Tree]:
        """Return the outputs [n, ...] of a client's model for its own rows that have a target, and their targets.

        Args:
            client: whose rows, and whose model.
            split: of the rows.
            by_global: take the global model instead.

        Raises:
            SettingError: see `model`, or the rows are at their sites.
        """
        number = self.number(client)
        if isinstance(self._clients, RowsAtSites) and self._clients.elsewhere:
            raise SettingError(f"the rows of client {number} are at its site, and none are here")
        rows, domain = self._clients.rows(number, split), self.work.objective.domain
        if domain is not None and len(rows):
            rows = rows[domain.known_rows(rows.y)]
        return self.predictor(None if by_global else number).outputs(rows.x), rows.y

    def _raw_inputs(self) -> RawInputs:
        """Return the way from rows as the source has them to the models' inputs."""
        like = pytree.take(self._row().x, slice(0, 0))
        features, extractor = self.meta.get("features"), (self.meta.get("settings") or {}).get("extractor")
        columns = None if features is None else tuple(features)
        return RawInputs(like, columns, self.preparation, self.standardisation, extractor)

    def _number_of_model(self, client: int | str) -> int:
        """Return the number of a client, or say which models there are."""
        try:
            return self.number(client)
        except SettingError as error:
            models = f"models of {names(self.client_names, _LISTED)}"
            if self.work.layout.private:
                advice = "and no global one: fit one to a new client with piebald adapt"
            else:
                clusters = f"and of clusters {names([*map(str, self.cluster_models)])}, " * (
                    len(self.cluster_models) > 1
                )
                advice = f"{clusters}and a global one: leave client out for that, or fit one with piebald adapt"
            raise SettingError(f"{str(error).removesuffix('?')}; the run has {models} {advice}") from None

    @property
    def client_names(self) -> list[str]:
        """The names of all clients, in the order of their numbers."""
        return [str(name) for name in self._clients.names]

    @property
    def has_personal_models(self) -> bool:
        """True if clients may have models that differ from the global one, and from one another."""
        work = self.work
        varied = work.choice is not None or work.own_models is not None or len(self.cluster_models) > 1
        varied = varied or (self.preparation is not None and bool(self.preparation.harmonised))
        return varied or bool(work.layout.private) or isinstance(work.trainer, Personalizes)

    @property
    def standardisation(self) -> Standardisation | None:
        """The constants of the standard scores that the models read, None where they read inputs as they are."""
        return constants_of_run(self.meta)

    @property
    def preparation(self) -> Preparation | None:
        """The preparation of tables that clients have agreed on, None where models read rows as they are."""
        recorded = self.meta.get("preparation")
        return None if recorded is None else Preparation(**recorded)

    @checked
    def save(
        self,
        path: PathLike,
        client: int | str | None = None,
        *,
        file_format: ExportFormat | None = None,
        example: Tree | None = None,
        calibrate: bool = False,
    ) -> Path:
        """Write a model to a file that other programs read.

        Where the run's inputs are standard scores, the model is written inside a `models.StandardisedInputs` with the
        run's constants, so that it reads inputs as they are.

        Args:
            path: a new file, whose suffix chooses the format: .safetensors, .pt (state dict), .pt2 (torch.export) or
                .onnx, which takes raw columns and returns predictions where the run prepares a table;
                or a new folder, for Hugging Face, with a model card, and with `score.py`, which scores raw rows
                without Piebald.
            client: whose model, see `model`.
            file_format: the format, where the suffix should not choose it.
            example: rows of inputs [n, ...] for torch.export and ONNX, which run the model once; by default a
                blank row.  Inputs of several tensors have their names, or are called input_0, input_1, ...
            calibrate: divide scores by a temperature, in a folder and in ONNX of raw columns, see `predictor`.

        Returns:
            The path.

        Raises:
            SettingError: the path exists, or the model cannot be written in this format.
        """
        number = None if client is None else self.number(client)
        description = {
            "piebald": str(self.meta.get("piebald")),
            "recipe": self.recipe,
            "label": self.label,
            "architecture": type(self.work.model).__name__,
            "server_steps": str(self._version),
            "client": "" if number is None else str(self._clients.names[number]),
        }
        constants, module = self.standardisation, self.model(client)
        exported = Exported(
            module if constants is None else StandardisedInputs(module, constants.mean, constants.deviation),
            lambda: self._row().x if example is None else example,
            lambda: model_card(self, number),
            description,
            self._scoring(number, calibrate),
        )
        return export_model(exported, Path(path), file_format)

    def _scoring(self, client: int | None, calibrate: bool) -> Callable[[], Scoring] | None:
        """Return what describes how a client's model scores raw rows, None where it needs more than one tensor."""
        plain = isinstance(self._raw_inputs().like, Tensor) and not (self.meta.get("settings") or {}).get("extractor")
        if not plain or (client is None and self.work.layout.private):
            return None
        return lambda: self.predictor(client, calibrate=calibrate).scoring()

    def _row(self) -> Rows:
        """Return a blank row, as models read it."""
        return blank_row(self.meta["rows"])

    def _personal(self, client: int) -> Tensor:
        if self._at_sites and self.path is not None:
            tried = self.path / "federation" / f"site-{client + 1}" / "model.safetensors"  # of a trial on this machine
            if tried.is_file():
                return self.work.of(client).layout.read(tried)
        choice = self.work.choice
        if choice is not None and (chosen := self._chosen_by(client, choice)) is not None:
            return chosen
        work, layout = self.work.of(client), self.work.of(client).layout
        state = work.initial_state()
        if layout.private:
            state[PRIVATE] = self._sharing.initial_private(work.initial[layout.shared :], layout, client)
        if state:
            if self._at_sites:
                raise SettingError(
                    f"the state of client {client} never leaves its site: its personal model is in the site's folder"
                )
            if self.path is None:
                raise SettingError("the state of clients is only kept in a run folder: run with out='some/folder'")
            # a client that never took part keeps the initial state
            state |= self._store.client_state(client, self._version)
        clients = getattr(self._clients, "unchanged", self._clients)
        with clients.forms() if isinstance(clients, RecordedClients) else nullcontext():
            engine = make_engine("sequential", self.work, self._clients, torch.device("cpu"), bfloat16=False)
        return personal_model(engine, client, self._version, self._shared_with(client), state)

    def _shared_with(self, client: int, cluster: int | None = None) -> Tensor:
        """The model [s] of a cluster, by default the client's own, as far as the client's model has its numbers."""
        chosen = self._cluster_of.get(client, self.main) if cluster is None else cluster
        model, number = self.cluster_models[chosen], self.work.number(client)
        buffers = self._own_buffers.get(chosen, {}).get(str(number))
        if number is not None and buffers is not None:
            model = self.work.with_buffers(number, model, buffers)
        held = self.work.held(number)
        return model if held is None else model[held]

    def _chosen_by(self, client: int, choice: OwnChoice) -> Tensor | None:
        """Return the model [p] that a client has chosen, None if it keeps the one that the recipe gives it."""
        if self._at_sites:
            raise SettingError(
                f"client {client} chooses its model at its site, which does not send it: it is in the site's folder"
            )
        name = self._choice_of(client).get("chosen")
        if name in SHARED:
            return self._shared_with(client, self.main if name == "global" else None)
        if name is None or self.path is None or not choice.is_new(name):
            return self._chosen.get(client)
        return read_chosen_model(self.path, client)

    def _choice_of(self, client: int) -> Mapping[str, Any]:
        """The record of a client's choice, empty where it has made none."""
        return next((row for row in self.choices if row["client"] == client), {})

    @property
    def _at_sites(self) -> bool:
        return bool(self.meta.get("runtime", {}).get("kind") == "federation")
