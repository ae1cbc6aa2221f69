"""DistFL: clients whose models know the same distribution are averaged with one another."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from piebald.contracts import Cohort, ModelSpec, ServerContext
from piebald.contracts.component import RecipeComponents
from piebald.core import pytree
from piebald.core.cohort_matrix import median, too_many_pairs
from piebald.core.machine import moved
from piebald.core.parameters import copied
from piebald.core.randomness import generator, torch_generator
from piebald.methods.clustering.absent_clusters import absent_clusters, adopted
from piebald.methods.clustering.base import Clustering
from piebald.methods.clustering.distribution_knowledge import (
    BatchNormTarget,
    Synthesis,
    batch_norm_targets,
    moment_targets,
    synthesise,
)
from piebald.methods.clustering.divergence_history import FEW, believed, isolated, pair_means
from piebald.methods.clustering.normal_cluster import Criterion, normal_cluster
from piebald.methods.clustering.partitioning import (
    ClusterSearch,
    Matrix,
    by_gap,
    by_links,
    by_silhouette,
    tracked,
    with_outliers,
)
from piebald.methods.clustering.response_divergence import divergences, responses
from piebald.methods.queries.scores import Validate
from piebald.methods.training.base import Trainer

_OF_SILHOUETTE = ("threshold", "clusters", "accept", "agree", "deviations", "least", "far", "apart", "forget")
_SHOWN = 200  # clients up to which the divergence matrix is kept for the report


class Distfl(Clustering):
    """Clusters by distribution knowledge (Liu et al. 2021, "DistFL: Distribution-aware federated learning for mobile
    scenarios").

    At a step the uploads' mean (eq. 3) is made; `probes` inputs are synthesised from its batch-norm statistics (eq. 2
    and 4); every upload answers them (eq. 5); the answers' KL divergences (eq. 6) say who belongs together; and each
    cluster's models are averaged (eq. 7: the plain mean, which is the aggregation `equal_weighted`).

    The threshold between near and far is found, not given.  `find = "silhouette"`: divergences are made correlations
    (`divergence.unlikeness`), the mean over all rounds so far is taken, and average linkage is cut where the silhouette
    is best.  The cut is believed if the silhouette reaches `accept`, or if odd and even rounds, each by themselves,
    lead to the same clusters (adjusted Rand index from `agree` up); and, from twelve clients on, only if its clusters
    explain more of the spread than those of one cloud would, by `deviations` (`cluster_evidence.evidence`).  Else there
    is one cluster.  A far outlier, `far` times as far from its nearest client as others are from theirs, is a cluster
    of one.  Two or three clients have no spread to compare with: they are linked below a divergence of `apart`, from
    the second grouping on.

    `find = "gap"` is the plain reading of the paper: this round's largest gap between sorted divergences.
    `find = "linked"` is the rule of the authors' program: pairs with a divergence below `threshold`, 0.2 by default,
    are linked, and who is linked belongs together.  It does so once, with the uploads of the fifth round, on batch
    norms' running statistics: `Distfl(find="linked", first=5, every=0, statistics="running", loss="published")`.

    A client that was not asked keeps its cluster and model.  An uploaded model over `reach` times as long as the median
    one, or with a running variance below 0, is left out of the mean and trains on alone.  Clusters keep their numbers
    from round to round.  One of them is the normal cluster: its model represents the run, and newcomers start from it.
    Private layers keep the run's first numbers in the comparison, since only their clients know them.  Without batch
    norm, the trainer `with_moments` uploads what is needed.

    Attributes:
        probes: z, inputs to compare answers on.
        channels: E, share of channels of each layer that are matched, in (0, 1].
        knowledge: "synthesis", or "noise" to compare on plain noise (the paper's ablation).
        statistics: what models' batch norms normalise the probes by: the "probes" themselves, or their own "running"
            statistics, as a plain reading of the paper has it.  Running statistics of a few rows are mostly noise.
        steps: of synthesis at a step, at most.
        lr: of the synthesis, by Adam.
        fit: mismatch at which the statistics fit, see `knowledge.distance`.
        loss: of the synthesis, "squared" or as "published", see `knowledge.distance`.
        first: step whose uploads are grouped first; before, all clients are one cluster.
        every: server steps from one grouping to the next, 0 for only once; in between clusters stay, and newcomers join
            the normal one.
        find: "silhouette", "gap" or "linked".
        accept: silhouette from which several clusters are believed at once, in [-1, 1].
        agree: agreement of odd and even rounds from which fainter ones are believed, in (0, 1]; 1 hardly ever.
        deviations: by which clusters must explain more than those of one cloud, in standard deviations of the latter.
        least: fewest clients of a cluster, but of 2 or 3 clients one is enough.
        far: isolation from which a client is a cluster of one, above 1.
        apart: divergence in nats from which two or three clients are not linked.
        clusters: this many clusters instead, besides far outliers.
        threshold: cut at this average unlikeness instead, in (0, 2]; with "linked", link below this divergence in nats.
        forget: what earlier rounds count from one grouping to the next, in [0, 1]: 1 is the mean of all, 0 this alone.
        reach: models longer than this many median lengths are left out.
        normal: which cluster is the normal one: "largest"; "vote", see `ballot`; or "server_rows", the one with the
            smallest loss on rows that the server holds.  If half of the clients or more attack, only "server_rows" can
            find it.
        remember: clients whose pairs are remembered from round to round, 4 bytes for each of five numbers of a pair; of
            more, those that were absent longest are forgotten.
        layers: whose input moments clients send, where the trainer makes them send some; set by the recipe.
        voters: with "vote", ask only so many of a step's clients, a seeded choice; None asks all.
    """

    on_device: ClassVar[bool] = True
    compares_changes: ClassVar[bool] = False
    from_current_model: ClassVar[bool] = True

    probes: int = Field(default=200, ge=1)
    channels: float = Field(default=0.5, gt=0, le=1)
    knowledge: Literal["synthesis", "noise"] = "synthesis"
    statistics: Literal["probes", "running"] = "probes"
    steps: int = Field(default=50, ge=0)
    lr: float = Field(default=0.1, gt=0)
    fit: float = Field(default=0.2, ge=0)
    loss: Literal["squared", "published"] = "squared"
    first: int = Field(default=1, ge=1)
    every: int = Field(default=1, ge=0)
    find: Literal["silhouette", "gap", "linked"] = "silhouette"
    accept: float = Field(default=0.35, ge=-1, le=1)
    agree: float = Field(default=0.5, gt=0, le=1)
    deviations: float = Field(default=2.5, ge=0)
    least: int = Field(default=2, ge=1)
    far: float = Field(default=2.5, gt=1)
    apart: float = Field(default=1.0, gt=0)
    clusters: int | None = Field(default=None, ge=1)
    threshold: float | None = Field(default=None, gt=0)
    forget: float = Field(default=1.0, ge=0, le=1)
    reach: float = Field(default=5.0, gt=1)
    normal: Criterion = "largest"
    voters: int | None = Field(default=None, ge=1)
    remember: int = Field(default=1000, ge=2)
    layers: tuple[str, ...] | None = None

    @model_validator(mode="after")
    def _check_probes(self) -> Self:
        if self.statistics == "probes" and self.probes < 2:
            raise ValueError("probes must be 2 or more to normalise by, got 1: raise it, or statistics = 'running'")
        return self

    @model_validator(mode="after")
    def _check_find(self) -> Self:
        if self.find == "silhouette":
            if self.clusters is not None and self.threshold is not None:
                raise ValueError("clusters and threshold each say where to cut: leave one of them out")
            return self
        unused = [name for name in _OF_SILHOUETTE if name != "threshold" or self.find == "gap"]
        for name in unused:
            if (value := getattr(self, name)) != type(self).model_fields[name].default:
                raise ValueError(
                    f"find = {self.find!r} makes no use of {name}, got {value!r}: leave it out, or take find = "
                    "'silhouette'"
                )
        return self

    @property
    def _afresh(self) -> bool:
        return self.statistics == "probes"

    def unsupported_cohort(self, count: int) -> str | None:
        return too_many_pairs(self.kind, count, 8)

    def needs_server_rows(self) -> bool:
        return self.normal == "server_rows"

    def needs_validation_rows(self) -> bool:
        return self.normal == "vote"

    def asks(self, spec: ModelSpec) -> Sequence[Validate]:
        return (Validate(),) if self.normal == "vote" else ()

    def discloses(self) -> str | None:
        return "losses of every cluster's model on their validation rows" if self.normal == "vote" else None

    def unsupported_model(self, spec: ModelSpec) -> str | None:
        advice = "choose another clustering, like ifca"
        if spec.objective.name != "classification":
            return f"distfl compares what models make of classes but this is {spec.objective.name}: {advice}"
        if not pytree.is_single(spec.shape):
            several = pytree.plain(spec.shape)
            return f"distfl makes up inputs of one tensor but the model takes {several}: {advice}"
        if not _reads_real_numbers(spec):
            return f"distfl makes up inputs of real numbers, which this model cannot read: {advice}"
        if self.knowledge == "noise" or self.layers or _shared(batch_norm_targets(spec.model, 1.0), spec):
            return None
        reason = "keeps its batch norms private" if batch_norm_targets(spec.model, 1.0) else "has no batch norm"
        return (
            f"distfl reads the statistics of batch norms but this model {reason}: let clients upload some with "
            "training = { kind = 'with_moments', layers = [...] }, or take a model that shares batch norms"
        )

    def adapted_to(self, recipe: RecipeComponents, spec: ModelSpec) -> Self:
        assert isinstance(recipe.training, Trainer)
        return self.model_copy(update={"layers": recipe.training.moment_layers() or None})

    def main_cluster(self, state: Mapping[str, Any]) -> int:
        return int(state.get("normal", 0))

    def assign(self, cohort: Cohort, known: Mapping[int, int], context: ServerContext) -> list[int]:
        state = context.state
        # None, not 0, for newcomers: `tracked` must not count them as members of cluster 0
        before = [known.get(client) for client in cohort.clients]
        if not self._groups_at(cohort.version + 1):
            return [self.main_cluster(state) if number is None else number for number in before]
        began = time.perf_counter()
        sound, far_rows = self._split(cohort, context)
        used = [int(number) for number in state.get("used", [0])]
        labels: dict[int, int] = {}
        if sound:
            synthesis, answers, module = self._knowledge(cohort, sound, context)
            # one divergence that is not a number would spread to the means of all pairs
            answered = answers.flatten(1).isfinite().all(1)
            mute = [row for row, finite in zip(sound, answered.tolist(), strict=True) if not finite]
            for row in mute:
                context.exclude_update(cohort.clients[row], "model whose answers are not finite: it trains alone")
            sound, far_rows = [row for row in sound if row not in mute], sorted([*far_rows, *mute])
            answers = answers[answered]
        if sound:
            matrix = divergences(answers)
            clients = [cohort.clients[row] for row in sound]
            search = self._search(matrix.numpy(), clients, cohort.version, context)
            names = tracked(search.labels, [before[row] for row in sound] if known else [0] * len(sound), used)
            names = self._with_absent(names, clients, search, answers, known, synthesis.x, module, context)
            labels = dict(zip(sound, names, strict=True))
            state["normal"] = normal_cluster(self.normal, labels, cohort, known, self.voters, context)
            self._report(context, clients, names, matrix, search, synthesis, began)
        # numbers that were ever used count too: one that is used again would inherit another cluster's model
        fresh = max([*used, *labels.values()]) + 1
        for row in far_rows:
            # a client that already was a cluster of its own keeps that number, and with it its model
            earlier, client = before[row], cohort.clients[row]
            alone = earlier is not None and earlier not in {
                number for member, number in known.items() if member != client
            }
            labels[row] = earlier if earlier is not None and alone and earlier not in labels.values() else fresh
            fresh = max(fresh, labels[row] + 1)
        state["used"] = sorted({*used, *labels.values()})
        return [labels[row] for row in range(len(cohort.clients))]

    def _groups_at(self, step: int) -> bool:
        """Return whether the uploads of this step, from 1 up, are grouped."""
        # with `every` 0 the modulus would divide by it, and the only grouping is that of `first`
        since = step - self.first
        return since == 0 if self.every == 0 else since >= 0 and since % self.every == 0

    # -- who is compared

    def _split(self, cohort: Cohort, context: ServerContext) -> tuple[list[int], list[int]]:
        """Rows that are compared, and rows of models that can be nobody's: far too long, or with a variance below 0.

        Whole models are looked at, not changes: where one cluster has settled and another has not, changes differ by
        orders of magnitude in all honesty.  So do batch norms' statistics, which are left out of the length.
        """
        layout = context.spec.layout
        trained = [part for part in layout.trained if part.start < layout.shared]
        # one model at a time, since a second cohort may not fit; and a GPU is waited for once
        zero = torch.zeros((), dtype=torch.float64, device=cohort.sent[0].device)
        measures = []
        for row in range(len(cohort.clients)):
            model = cohort.model(row)
            square = sum((model[part].square().sum() for part in trained), start=zero)
            measures.append(torch.stack([square.sqrt(), layout.least_variance(model).double()]))
        lengths, variances = torch.stack(measures).T.tolist()
        limit = self.reach * float(torch.tensor(lengths).median())
        # where at least half of the models are all zeros the limit is 0, which would shut everybody else out
        reasons = {
            row: f"model of length {length:.3g} is over {self.reach:g} times the median one: it trains alone"
            for row, length in enumerate(lengths)
            if length > limit > 0
        }
        # its answers would be no numbers, or, raised to 0, those of no model that anybody trained
        impossible = [row for row, least in enumerate(variances) if least < 0]
        reasons |= dict.fromkeys(impossible, "model with a running variance below 0: it trains alone")
        for row, reason in reasons.items():
            context.exclude_update(cohort.clients[row], reason)
        return [row for row in range(len(lengths)) if row not in reasons], sorted(reasons)

    # -- what they know

    def _knowledge(
        self, cohort: Cohort, rows: Sequence[int], context: ServerContext
    ) -> tuple[Synthesis, Tensor, nn.Module]:
        """The probes, the answers [n, z, classes] of the uploads in `rows`, and a module to ask others with."""
        spec, device = context.spec, context.device
        module = copied(spec.model, device).eval()
        rng = torch_generator("distfl", spec.seed, cohort.version)
        noise = moved(torch.randn((self.probes, *spec.shape), generator=rng), device)
        if self.knowledge == "noise":
            synthesis = Synthesis(noise, float("nan"), 0)
        else:
            spec.layout.load(module, self._pre_aggregated(cohort, rows, spec))
            probes = context.state.get("probes")
            # a warm start: the models of two steps in turn are much alike, so that few steps of Adam are left
            start = moved(probes, device) if isinstance(probes, Tensor) and probes.shape == noise.shape else noise
            targets = self._targets(module, cohort, rows, spec)
            synthesis = synthesise(module, targets, start, self.steps, self.lr, self.fit, self.loss)
            # on the host, since the component's state goes into checkpoints
            context.state["probes"] = synthesis.x.cpu()
        return (
            synthesis,
            responses(module, spec.layout, self._uploads(cohort, rows, spec), synthesis.x, self._afresh),
            module,
        )

    def _pre_aggregated(self, cohort: Cohort, rows: Sequence[int], spec: ModelSpec) -> Tensor:
        """One model [p] for all (eq. 3): the mean of trained parameters, and the median of the running statistics."""
        mean_model = torch.zeros(spec.layout.size, device=cohort.sent[0].device)
        for model in self._uploads(cohort, rows, spec):
            # a running sum: the whole cohort is never stacked a second time
            mean_model += model / len(rows)
        here = slice(spec.layout.shared_trained, spec.layout.shared)
        # a median, as probes are fitted to these numbers: a single upload could move a mean of them as far as it likes
        mean_model[here] = median(torch.stack([cohort.model(row)[here] for row in rows]))
        return mean_model

    def _uploads(self, cohort: Cohort, rows: Sequence[int], spec: ModelSpec) -> Iterator[Tensor]:
        """Whole models [p], one at a time."""
        private = moved(spec.initial[spec.layout.shared :], cohort.sent[0].device)
        for row in rows:
            model = cohort.model(row)
            yield torch.cat([model, private]) if len(private) else model

    def _targets(
        self, module: nn.Module, cohort: Cohort, rows: Sequence[int], spec: ModelSpec
    ) -> list[BatchNormTarget]:
        layers = self.layers
        uploaded = [cohort.updates[row].vectors["moments"] for row in rows if "moments" in cohort.updates[row].vectors]
        # a mean over some clients only would describe other rows than those that the mean model has seen
        if layers and len(uploaded) == len(rows):
            moments = moved(torch.stack(uploaded).mean(0), next(module.parameters()).device)
            return moment_targets(module, layers, moments, self.channels)
        return _shared(batch_norm_targets(module, self.channels, self.loss == "published"), spec)

    # -- who belongs together

    def _search(self, matrix: Matrix, clients: Sequence[int], version: int, context: ServerContext) -> ClusterSearch:
        """Clusters of these clients, from this round's divergences [n, n] and the rounds before."""
        state = context.state
        if self.find == "gap":
            return by_gap(matrix)
        if self.find == "linked":
            return by_links(matrix, 0.2 if self.threshold is None else self.threshold)
        # outliers leave before means are taken: one row of huge divergences would shift the centre of all others
        isolation = isolated(state, matrix, clients, version, self.remember, self.forget)
        inside = np.flatnonzero(isolation <= self.far)
        near = matrix[np.ix_(inside, inside)]
        means = pair_means(
            state, near, [clients[index] for index in inside.tolist()], version, self.remember, self.forget
        )
        if len(clients) < FEW and self.clusters is None and self.threshold is None:
            # infinity links everybody: models of a first round differ by chance as much as by their data
            search = by_links(near, self.apart if means.rounds > 1 else math.inf)
        else:
            rng = generator("one cloud", context.spec.seed, version)
            is_given = self.clusters is not None or self.threshold is not None
            search = self._cut(means.unlike, self.accept)
            # a cut that the user asked for is not put to the test
            if not is_given:
                search = believed(search, means, self._cut, self.accept, self.agree, self.deviations, rng)
        return with_outliers(search, inside, matrix)

    def _cut(self, distances: Matrix, accept: float) -> ClusterSearch:
        # two or three clients may each be a cluster of their own
        least = min(self.least, max(1, len(distances) // 2))
        return by_silhouette(distances, accept, least, self.clusters, self.threshold)

    def _with_absent(
        self,
        names: list[int],
        clients: Sequence[int],
        search: ClusterSearch,
        answers: Tensor,
        known: Mapping[int, int],
        probes: Tensor,
        module: nn.Module,
        context: ServerContext,
    ) -> list[int]:
        """The names with those of clusters none of whose clients was asked given to newcomers who belong there."""
        absent = absent_clusters(names, clients, known)
        if not absent:
            return names
        spec, count = context.spec, len(names)
        private = moved(spec.initial[spec.layout.shared :], probes.device)
        models = (torch.cat([moved(context.models[number], probes.device), private]) for number in absent)
        # the same probes and the same way to normalise as for the uploads, or the divergences could not be compared
        theirs = responses(module, spec.layout, models, probes, self._afresh)
        # an attacker may be alone in a cluster whose model answers no numbers
        answered = theirs.flatten(1).isfinite().all(1)
        absent, theirs = (
            [number for number, finite in zip(absent, answered.tolist(), strict=True) if finite],
            theirs[answered],
        )
        if not absent:
            return names
        whole = divergences(torch.cat([answers, theirs]))
        return adopted(names, [known.get(client) for client in clients], search, absent, whole.numpy(), count, self.far)

    # -- what is put on record

    def _report(
        self,
        context: ServerContext,
        clients: list[int],
        names: list[int],
        matrix: Tensor,
        search: ClusterSearch,
        synthesis: Synthesis,
        began: float,
    ) -> None:
        # n^2 numbers of text at every step
        if len(clients) <= _SHOWN:
            # four significant digits, since the record of a run is text
            rounded = [[float(f"{value:.4g}") for value in row] for row in matrix.tolist()]
            context.note("divergence", {"clients": clients, "matrix": rounded})
        context.note("clusters", {"clients": clients, "labels": names})
        context.note(
            "clustering",
            {
                "score": search.score,
                "agreement": search.agreement,
                "surplus": search.surplus,
                "threshold": search.threshold,
                "tried": {str(count): score for count, score in search.tried.items()},
                # NaN, which plain noise has for a mismatch, and infinity, where nothing fits, are no JSON
                "mismatch": synthesis.mismatch if math.isfinite(synthesis.mismatch) else None,
                "steps": synthesis.steps,
                "seconds": time.perf_counter() - began,
            },
        )


def _reads_real_numbers(spec: ModelSpec) -> bool:
    """Return whether a model takes inputs that are made up, as one of tokens does not."""
    assert isinstance(spec.shape, tuple)
    try:
        # a trial pass must not move the global random state, on which a seeded run depends
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            copied(spec.model).eval()(torch.zeros(1, *spec.shape))
    except (RuntimeError, TypeError, ValueError, IndexError):  # also PiebaldError of a model that says why
        return False
    return True


def _shared(targets: list[BatchNormTarget], spec: ModelSpec) -> list[BatchNormTarget]:
    """Those whose statistics leave the clients."""
    return [target for target in targets if f"{target.layer}.running_mean" not in spec.layout.private]
