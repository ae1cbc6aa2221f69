"""DistFL: clients whose models know the same distribution are averaged with one another."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from piebald.contracts import CENTRE, Centre, Question, Work
from piebald.controller.group.clusters import Found, by_gap, by_silhouette, tracked
from piebald.controller.group.divergence import divergences, responses, symmetric
from piebald.controller.group.knowledge import Synthesis, batch_norm_targets, moment_targets, synthesise
from piebald.controller.group.loss import RootLoss
from piebald.errors import SettingError
from piebald.parts import Cohort, Group
from piebald.randomness import torch_generator

_SHOWN = 200  # clients up to which the divergence matrix is kept for the report


class Distfl(Group):
    """Groups by distribution knowledge (Liu et al. 2021, "DistFL: Distribution-aware federated learning for mobile
    scenarios").

    At a commit the uploads' mean (eq. 3) is made; `probes` inputs are synthesised from its batch-norm statistics (eq. 2
    and 4); every upload answers them (eq. 5); the answers' KL divergences (eq. 6) say who belongs together; and each
    group's models are averaged (eq. 7, with `by_examples`).

    The threshold between near and far is found, not given.  `find = "silhouette"`: the mean of the symmetrised matrices
    of all rounds so far, average linkage, and the cut of the best silhouette if it reaches `accept`; else one group.
    `find = "gap"` is the plain reading of the paper: this round's largest gap between sorted divergences.

    A client that was not asked keeps its group and model.  An uploaded model over `reach` times as long as the median one is left
    out of the mean and trains on alone.  Groups keep their numbers from round to round.  Group 0 is the one that
    is taken for normal, and whose model stands for the run.  Private layers keep the run's first numbers in the
    comparison, since nobody else knows them.  Without batch norm, the rule `with_moments` uploads what is needed.

    Attributes:
        probes: z, inputs to compare answers on.
        channels: E, share of channels of each layer that are matched, in (0, 1].
        knowledge: "synthesis", or "noise" to compare on plain noise (the paper's ablation).
        steps: of synthesis at a commit, at most.
        lr: of the synthesis, by Adam.
        fit: misfit at which the statistics fit, see `knowledge.distance`.
        every: commits from one grouping to the next; in between groups stay, and newcomers join group 0.
        find: "silhouette" or "gap".
        accept: least silhouette of several groups, in [-1, 1].
        least: fewest clients of a group.
        groups: this many groups instead.
        threshold: this average divergence instead.
        forget: what earlier matrices count at each grouping, in [0, 1]: 1 is the mean of all, 0 this one alone.
        reach: models longer than this many median lengths are left out.
        normal: which group is normal: "largest", or "root", the one with the least loss on rows of the centre's own.
            With half of the clients or more attacking only "root" can tell; nothing in the updates can.
    """

    from_now: ClassVar[bool] = True

    probes: int = Field(default=200, ge=1)
    channels: float = Field(default=0.5, gt=0, le=1)
    knowledge: Literal["synthesis", "noise"] = "synthesis"
    steps: int = Field(default=50, ge=0)
    lr: float = Field(default=0.1, gt=0)
    fit: float = Field(default=0.2, ge=0)
    every: int = Field(default=1, ge=1)
    find: Literal["silhouette", "gap"] = "silhouette"
    accept: float = Field(default=0.35, ge=-1, le=1)
    least: int = Field(default=2, ge=1)
    groups: int | None = Field(default=None, ge=1)
    threshold: float | None = Field(default=None, gt=0)
    forget: float = Field(default=1.0, ge=0, le=1)
    reach: float = Field(default=5.0, gt=1)
    normal: Literal["largest", "root"] = "largest"

    def assign(self, cohort: Cohort, known: Mapping[int, int], centre: Centre) -> list[int]:
        if cohort.version % self.every:
            return [known.get(client, 0) for client in cohort.clients]
        began = time.perf_counter()
        sound, odd = self._told_apart(cohort, centre)
        memory = centre.memory
        used = [int(number) for number in memory.get("used", [0])]
        labels: dict[int, int] = {}
        if sound:
            made, answers = self._knowledge(cohort, sound, centre)
            matrix = divergences(answers)
            found = self._found(matrix, [cohort.clients[row] for row in sound], centre)
            before = [known.get(cohort.clients[row]) for row in sound]
            names = tracked(found.labels, before if known else [0] * len(sound), used)
            names = self._normal_first(names, cohort, sound, known, used, centre)
            labels = dict(zip(sound, names, strict=True))
            self._report(centre, [cohort.clients[row] for row in sound], names, matrix, found, made, began)
        for row in odd:
            own = known.get(cohort.clients[row])
            shared = [n for client, n in known.items() if n == own and client != cohort.clients[row]]
            taken = max([*used, *labels.values()]) + 1
            labels[row] = taken if own is None or shared or own in labels.values() else own
        memory["used"] = sorted({*used, *labels.values()})
        return [labels[row] for row in range(len(cohort.clients))]

    # -- who is compared

    def _told_apart(self, cohort: Cohort, centre: Centre) -> tuple[list[int], list[int]]:
        """Rows that count in the mean model, and rows whose model is far too long.

        Whole models are looked at, not changes: where one group has settled and another has not, changes differ by
        orders of magnitude in all honesty.
        """
        lengths = [float(torch.linalg.vector_norm(cohort.model(row))) for row in range(len(cohort.clients))]
        limit = self.reach * float(torch.tensor(lengths).median())
        odd = [row for row, length in enumerate(lengths) if length > limit > 0]
        for row in odd:
            centre.leave_out(
                cohort.clients[row],
                f"model of length {lengths[row]:.3g} is over {self.reach:g} times the median one: it trains alone",
            )
        return [row for row in range(len(lengths)) if row not in set(odd)], odd

    # -- what they know

    def _knowledge(self, cohort: Cohort, rows: Sequence[int], centre: Centre) -> tuple[Synthesis, Tensor]:
        """The probes, and the answers [n, z, classes] of the uploads in `rows`."""
        work = centre.work
        module = copy.deepcopy(work.model).eval()
        dice = torch_generator("distfl", work.seed, cohort.version)
        noise = torch.randn((self.probes, *work.shape), generator=dice)
        if self.knowledge == "noise":
            made = Synthesis(noise, float("nan"), 0)
        else:
            mean = torch.zeros(work.layout.size)
            for model in self._uploads(cohort, rows, work):
                mean += model / len(rows)
            work.layout.load(module, mean)
            kept = centre.memory.get("probes")
            start = kept if isinstance(kept, Tensor) and kept.shape == noise.shape else noise
            made = synthesise(module, self._targets(module, cohort, rows, work), start, self.steps, self.lr, self.fit)
            centre.memory["probes"] = made.x
        return made, responses(module, work.layout, self._uploads(cohort, rows, work), made.x)

    def _uploads(self, cohort: Cohort, rows: Sequence[int], work: Work) -> Iterator[Tensor]:
        """Whole models [p], one at a time."""
        for row in rows:
            yield torch.cat([cohort.model(row), work.initial[work.layout.shared :]])

    def _targets(self, module: nn.Module, cohort: Cohort, rows: Sequence[int], work: Work) -> Any:
        layers = getattr(work.rule, "layers", None)
        uploaded = [cohort.updates[row].parts["moments"] for row in rows if "moments" in cohort.updates[row].parts]
        if layers and len(uploaded) == len(rows):
            return moment_targets(module, layers, torch.stack(uploaded).mean(0), self.channels)
        targets = batch_norm_targets(module, self.channels)
        private = work.layout.private
        if not targets or all(f"{target.layer}.running_mean" in private for target in targets):
            why = "keeps its batch norms private" if targets else "has no batch norm"
            raise SettingError(
                f"distfl reads batch-norm statistics but this model {why}: use learn = {{ kind = 'with_moments', "
                "layers = [...] }, or a model that shares batch norms"
            )
        return [target for target in targets if f"{target.layer}.running_mean" not in private]

    # -- who belongs together

    def _found(self, matrix: Tensor, clients: Sequence[int], centre: Centre) -> Found:
        """Groups of these clients, from this round's divergences [n, n] and the rounds before."""
        if self.find == "gap":
            return by_gap(matrix.numpy())
        memory, known = centre.memory, centre.known
        if "sums" not in memory:
            memory["sums"], memory["counts"] = torch.zeros(known, known), torch.zeros(known, known)
        places = torch.tensor(list(clients))
        pairs = (places[:, None], places[None, :])
        sums = self.forget * memory["sums"][pairs] + symmetric(matrix).float()
        counts = self.forget * memory["counts"][pairs] + 1
        memory["sums"][pairs], memory["counts"][pairs] = sums, counts
        mean = (sums.double() / counts.double()).numpy()
        return by_silhouette(mean, self.accept, self.least, self.groups, self.threshold)

    def _normal_first(
        self,
        names: list[int],
        cohort: Cohort,
        rows: Sequence[int],
        known: Mapping[int, int],
        used: Sequence[int],
        centre: Centre,
    ) -> list[int]:
        """The names with that of the normal group changed into 0, and 0 into that."""
        sizes = {name: names.count(name) for name in sorted(set(names))}
        if self.normal == "largest":
            normal = max(sizes, key=lambda name: (sizes[name], -name))
        else:
            losses = self._losses(names, cohort, rows, centre)
            normal = min(losses, key=lambda name: (losses[name], name))
            centre.remark("root_loss", {str(name): loss for name, loss in losses.items()})
        if normal == 0:
            return names
        other = normal if 0 in sizes else None
        return [0 if name == normal else other if name == 0 and other is not None else name for name in names]

    def _losses(self, names: list[int], cohort: Cohort, rows: Sequence[int], centre: Centre) -> dict[int, float]:
        """The loss of each group's mean model on the centre's own rows."""
        questions, order = [], sorted(set(names))
        for name in order:
            own = [row for row, mine in zip(rows, names, strict=True) if mine == name]
            mean = torch.zeros_like(cohort.sent[0])
            for row in own:
                mean += cohort.model(row) / len(own)
            questions.append(Question(CENTRE, RootLoss(), {"model": mean}))
        answers = centre.ask(questions)
        losses = {}
        for name, answer in zip(order, answers, strict=True):
            if answer is None:
                raise SettingError(
                    "normal = 'root' needs rows that the centre may look at: set the partition's centre = 100, "
                    "or choose normal = 'largest'"
                )
            losses[name] = answer.metrics["loss"]
        return losses

    # -- what is put on record

    def _report(
        self,
        centre: Centre,
        clients: list[int],
        names: list[int],
        matrix: Tensor,
        found: Found,
        made: Synthesis,
        began: float,
    ) -> None:
        if len(clients) <= _SHOWN:
            rounded = [[float(f"{value:.4g}") for value in row] for row in matrix.tolist()]
            centre.remark("divergence", {"clients": clients, "matrix": rounded})
        centre.remark("groups", {"clients": clients, "labels": names})
        centre.remark(
            "grouping",
            {
                "score": found.score,
                "threshold": found.threshold,
                "tried": {str(count): score for count, score in found.tried.items()},
                "misfit": made.misfit if made.misfit == made.misfit else None,
                "steps": made.steps,
                "seconds": time.perf_counter() - began,
            },
        )
