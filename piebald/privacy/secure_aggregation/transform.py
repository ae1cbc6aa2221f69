"""Secure aggregation: the server learns the sum of a round's updates and nothing about any single one.

Bonawitz et al. 2017 ("Practical secure aggregation"), with the neighbours of Bell et al. 2020 (SecAgg+).  Client u adds
to its vector x_u, in the ring Z modulo 2^bits,

    y_u = x_u + PRG(b_u) + sum over neighbours v > u of PRG(s_uv) - sum over neighbours v < u of PRG(s_uv)

where u and v agree on the seed s_uv by X25519, and b_u is u's own seed.  In the sum over all clients the pairwise masks
cancel.  Neighbours hold Shamir shares of b_u and of the private key behind the s_uv: for a client whose update arrived
they send those of b_u, for one whose update did not those of its key, never both: before that, a quorum of them has
signed one list of those who arrived (`key_queries`).

Members announce sizes, which bound how much the largest of them may count.  A size is a whole number of quarters of a
doubling: a member of size s counts at least 2^(s / 4), and less than 2^((s + 1) / 4).  All bounds are for the worst
case: the largest member at the upper end of its size, all others at the lower end, and only the smallest of them there
when the sum is opened.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, Self

import numpy as np
import torch
from pydantic import Field, field_validator
from torch import Tensor

from piebald import contracts
from piebald.contracts.component import Component, RecipeComponents, build
from piebald.contracts.data import ModelSpec
from piebald.core.errors import Declined, SettingError
from piebald.core.parameters import nbytes
from piebald.methods.aggregation.linear import Linear, follows_rows, is_plain_mean
from piebald.methods.client_work import ClientWork
from piebald.methods.scheduling.base import Scheduler
from piebald.methods.sharing.base import Sharing
from piebald.methods.training.base import Trainer
from piebald.methods.transforms.base import MaskingTransform, Transform
from piebald.methods.transforms.compression import SendsSameNumbers, WireContext
from piebald.methods.transforms.gaussian import Gaussian
from piebald.privacy.secure_aggregation import key_queries, masks
from piebald.privacy.secure_aggregation.key_exchange import KeyRound
from piebald.privacy.secure_aggregation.key_queries import all_shares, keep_shares
from piebald.privacy.secure_aggregation.masks import (
    MaskingGraph,
    clients_in,
    numbers,
    round_stochastically,
    rows,
    shares_needed,
    texts,
    unlike_reason,
)
from piebald.privacy.secure_aggregation.security import quorum
from piebald.privacy.secure_aggregation.server_side import SecureRound

_STEPS = 4  # sizes in a doubling
_LARGEST = 32_767  # that is announced in two bytes


def size_of(weight: float) -> int:
    """The size of a weight above 0.

    Examples:
        >>> [size_of(weight) for weight in (1, 1.1, 1.2, 100, 200)]
        [0, 0, 1, 26, 30]
    """
    size = math.floor(_STEPS * math.log2(weight))
    # the logarithm is rounded, and nobody may count less than it has announced
    size += (weight >= least_weight(size + 1)) - (weight < least_weight(size))
    return max(-_LARGEST, min(size, _LARGEST))


def least_weight(size: int) -> float:
    """The smallest weight of a size."""
    return float(2.0 ** (size / _STEPS))


def largest_weight(sizes: Collection[int], fewest: int, share: float) -> float:
    """Return how much one member may count, so that it is no more than a share of any sum that may be opened.

    Heavier members count as that.

    Args:
        sizes: those of all members.
        fewest: members in a sum that may be opened.
        share: of the sum's weights, 1 / `fewest` or more, below 1.

    Examples:
        With five members of whom four may be left, the largest counts as much as the three smallest together:

        >>> largest_weight([size_of(rows) for rows in (64, 128, 128, 256, 4096)], 4, 0.5)
        320.0
    """
    ascending = sorted(sizes)
    bound, others = least_weight(ascending[-1] + 1), [least_weight(size) for size in ascending[: fewest - 1]]
    # those of the others that are heavier than the bound are cut to it as well, so that it is defined by itself:
    # bound * (1 - share) = share * sum(min(other, bound))
    for lighter in range(len(others), 0, -1):
        cut = (1 - share) / share - (len(others) - lighter)
        if cut > 0 and (solution := math.fsum(others[:lighter]) / cut) >= others[lighter - 1]:
            return min(bound, solution)
    return min(bound, others[0])


def balanced(sizes: Mapping[int, int], fewest: Callable[[int], int], share: float) -> list[int]:
    """The largest group of members of whom none is more than a share of any sum that may be opened, as they are.

    Of several groups that are as large, it is the one with the larger sizes.

    Args:
        sizes: by member.
        fewest: returns how many of so many members may be left when a sum is opened.
        share: of the sum's weights.

    Examples:
        >>> balanced({0: size_of(3), 1: size_of(3), 2: size_of(9000), 3: size_of(3)}, lambda members: 3, 0.5)
        [0, 1, 3]
    """
    ascending = sorted(sizes, key=lambda member: (sizes[member], member))
    for count in range(len(ascending), 1, -1):
        for start in range(len(ascending) - count, -1, -1):
            group = ascending[start : start + count]
            if is_balanced([sizes[member] for member in group], fewest(count), share):
                return sorted(group)
    return []


def is_balanced(sizes: Collection[int], fewest: int, share: float) -> bool:
    """Return whether no member is more than a share of any sum that may be opened; arguments as of `largest_weight`."""
    ascending = sorted(sizes)
    others = math.fsum(map(least_weight, ascending[: fewest - 1]))
    return fewest <= len(ascending) and least_weight(ascending[-1] + 1) * (1 - share) <= share * others


_HEAD = 2  # numbers before the model: the weight, and weight times loss
_COARSEST = 1 << 12  # the range must be cut into at least so many steps
_HEAVIEST = 10_000.0
_RANGE = 8.0
_TAIL = 8.6  # Gaussian noise is never longer, in standard deviations (`piebald.core.randomness`)
_FLOAT = 1.001  # a clipped vector may be longer than the clip by an error of float32


class SecureAggregation(MaskingTransform):
    """Secure aggregation: the server sees only sums of updates.

    What is summed are whole numbers: of each number x of an update with weight w, x / range * w / heaviest is rounded
    to one of 2 * unit + 1 steps, where unit is the largest power of two of which as many as there are clients cannot
    wrap around.  Rounding is stochastic: up or down, with the step itself as expectation, so many small numbers add up
    to what they should.  The rounding error of the mean is at most 2 * clients * range * heaviest / (unit * sum of
    weights), its standard deviation a square root of the clients smaller, and no sum wraps around.  A client refuses
    to send a number outside the range or a larger weight; it then counts as one that did not arrive.

    The sum contains the weights, the weighted changes, other named parts of an update (SCAFFOLD's), and the weighted
    training losses (one above `range`, or 8, counts as that).  Nothing else of an update leaves the client: no number
    of rows or steps, no norm, no metric; the run's tables show 0 for them.  Who took part, and that an update was
    refused by its client, the server does see.

    No member dominates.  One without rows takes no part.  Each announces its weight, rounded down to a quarter of a
    doubling, and the heaviest count less, so that none is more than `largest_share` of the weights that a sum may be
    opened with.  Updates are shortened to the norm `clip` before they are masked, unless `gaussian` does that right
    before.

    If fewer clients arrive than the threshold, no mask is removed: the step has no effect, is recorded, and the run
    goes on.

    Attributes:
        threshold: how many of the shares of a key open it, more than half: a share of them, or a number.  The same
            share of all clients must arrive, and sign the list of those who did.
        neighbours: with how many others a client masks, an even number; None for all of them.
            `privacy.secure_aggregation.security.parameters` computes how many are safe.
        least: refuse to open sums of fewer clients; with two, each of them knows the other's update.
        range: the largest absolute value of a number of an update.  None takes it from the clip of the transform
            `gaussian` where there is one (with its noise, if that is added at the client), otherwise 8.
        bits: of a number that travels, 32 or 64.
        largest_share: the largest share of one member in the weights of a sum.  A question about sums leaves out the
            sites that keep it from being so, whose rows are too many or too few.
        clip: the largest Euclidean norm of an update's trained parameters, of its running statistics, and of each other
            vector that it carries; longer ones are shortened.  None is `range`, and behind `gaussian`, which shortens
            the parameters itself, `range` is that of the other vectors.
        heaviest: the largest weight of a client; None is 1 where all weights are equal, otherwise 10,000.
        aggregation: the weights of updates, as the table of an aggregator; set by the recipe.
        vectors: shapes of the other vectors of an update, by name; set by the recipe.
        packing: what says which numbers of an update are sent, as a table, None for all of them; set by the recipe.
    """

    threshold: int | float = Field(default=2 / 3, gt=0)
    neighbours: int | None = Field(default=None, ge=2, multiple_of=2)
    least: int = Field(default=3, ge=2)
    range: float | None = Field(default=None, gt=0)
    bits: Literal[32, 64] = 32
    largest_share: float = Field(default=contracts.LARGEST_MEMBER, gt=0, lt=1)
    clip: float | None = Field(default=None, gt=0)
    heaviest: float | None = Field(default=None, gt=0)
    aggregation: dict[str, Any] | None = None
    vectors: dict[str, tuple[int, ...]] | None = None
    packing: dict[str, Any] | None = None

    @field_validator("threshold")
    @classmethod
    def _check_threshold(cls, threshold: float) -> float:
        if isinstance(threshold, int) and not isinstance(threshold, bool):
            if threshold >= 2:
                return threshold
        elif 0.5 < threshold <= 1:
            return threshold
        raise ValueError(
            f"threshold must be a share above 0.5 and up to 1.0, or a number of clients from 2 up, got {threshold}"
        )

    # -- fitting in

    def incompatible_with(self, recipe: RecipeComponents) -> str | None:
        if (
            recipe.transforms[-1] is not self
            or sum(isinstance(transform, MaskingTransform) for transform in recipe.transforms) > 1
        ):
            return "secure_aggregation hides the update from any transform behind it: put it last, once"
        scheduler, aggregator = recipe.scheduling, recipe.aggregation
        assert isinstance(scheduler, Scheduler)
        tables: dict[str, Any] = {"transforms": [transform.table() for transform in recipe.transforms]}
        others = (recipe.sharing, scheduler, recipe.clustering, aggregator, recipe.server_optimizer)
        tables |= {component.axis: component.table() for component in others}
        if reason := unlike_reason(recipe.training, tables, {}, ()):
            return reason
        if isinstance(aggregator, Linear) and not follows_rows(aggregator):
            return _found_weights(aggregator)
        if scheduler.round_kind() is None:
            return (
                f"secure_aggregation sums clients that agreed on keys beforehand but {scheduler.kind} steps with "
                f"any client that arrives: {scheduler.rounds_advice}"
            )
        sharing = recipe.sharing
        if sharing.overrides(Sharing.initial_private):
            return (
                f"{sharing.kind} lets each client begin with other numbers, and secure_aggregation sums only what "
                "all clients were shown alike: choose another sharing, or drop it"
            )
        trainer = recipe.training
        if isinstance(trainer, Trainer) and trainer.follows_others:
            return (
                f"{trainer.kind} goes by the steps of others, which secure_aggregation hides: choose another "
                "training, or drop it"
            )
        central = [
            transform
            for transform in recipe.transforms
            if isinstance(transform, Gaussian) and transform.where == "server"
        ]
        if central and not is_plain_mean(aggregator):
            return (
                f"{central[0].kind} at the server needs the largest weight, which secure_aggregation hides: choose "
                "aggregation = 'equal_weighted', or where = 'client'"
            )
        return None

    def unsupported_model(self, spec: ModelSpec) -> str | None:
        if spec.layout.shared == 0 and not self.vectors:
            return "secure_aggregation has nothing to sum: every layer of the model is private"
        return None

    def adapted_to(self, recipe: RecipeComponents, spec: ModelSpec) -> Self:
        trainer = recipe.training.adapted_to(recipe, spec)
        assert isinstance(trainer, Trainer)
        sized = trainer.server_vectors(spec.layout.shared)
        for name in trainer.uploads():
            if name not in sized:
                raise SettingError(
                    f"secure_aggregation must know the length of what is summed but {trainer.kind} sends {name!r}: "
                    "drop it"
                )
        heaviest = self.heaviest or (1.0 if is_plain_mean(recipe.aggregation) else _HEAVIEST)
        # sorted as in `encode`: the server cuts the sum into parts by this order and nothing else
        shapes = {name: tuple(sized[name].shape) for name in sorted(trainer.uploads())}
        filled = {"aggregation": recipe.aggregation.table(), "heaviest": heaviest, "vectors": shapes}
        packs = next(
            (transform.table() for transform in recipe.transforms if isinstance(transform, SendsSameNumbers)), None
        )
        bounded = _range_of(recipe.transforms)
        reach = self.range or bounded or self.clip or _RANGE
        filled |= {"packing": packs, "range": reach, "clip": self.clip or (None if bounded else reach)}
        return self.model_copy(update=filled)

    def graph(
        self,
        members: Sequence[int],
        public: Sequence[bytes],
        sizes: Sequence[int] = (),
        about: bytes = bytes(masks.KEY),
    ) -> MaskingGraph:
        """The graph of these clients, with all that they must agree on; arguments are those of `MaskingGraph.of`."""
        # sorted keys: all masks depend on a digest of this text, which all clients must write alike
        graph = MaskingGraph.of(
            members, public, self.threshold, self.neighbours, json.dumps(self.table(), sort_keys=True), sizes, about
        )
        if self.unit(len(members)) < _COARSEST:
            raise Declined(f"{len(members)} clients leave too few steps of {self.bits} bits: set bits = 64")
        if self.largest_share * (fewest := graph.fewest(self.least)) < 1:
            raise Declined(
                f"a sum may be of {fewest} clients, and one of them is more than {self.largest_share:g} of it: raise "
                "secure_aggregation's largest_share or least"
            )
        return graph

    def demands_reject_reason(self, demands: contracts.SumDemands) -> str | None:
        """The reason why a client takes no part in such sums, however many clients there are, or None."""
        if not follows_rows(aggregator := self._weights()):
            return _found_weights(aggregator)
        if self.least < demands.least:
            return (
                f"sums could be of {self.least} clients, this site demands {demands.least}: set secure_aggregation's "
                "least"
            )
        # a number of shares is judged once the graph is known; nine digits, so that 2/3 typed in is no less than 2 / 3
        if isinstance(self.threshold, float) and round(self.threshold, 9) < round(demands.threshold, 9):
            return (
                f"a share of {self.threshold:.3g} of a key's shares opens a mask, this site demands "
                f"{demands.threshold:.3g}: set secure_aggregation's threshold"
            )
        if self.largest_share > demands.largest_share:
            return (
                f"one client could be {self.largest_share:g} of a sum, this site demands at most "
                f"{demands.largest_share:g}: set secure_aggregation's largest_share"
            )
        if self.neighbours is not None and demands.neighbours is not None and self.neighbours < demands.neighbours:
            return (
                f"clients would mask with {self.neighbours} neighbours, this site demands {demands.neighbours}: set "
                "secure_aggregation's neighbours"
            )
        return None

    def clip_reject_reason(
        self, transforms: Sequence[Transform], uploads: Sequence[str], longest: float | None
    ) -> str | None:
        """Return why updates behind these transforms, this one included, are not shortened enough, or None.

        Args:
            transforms: those of the run.
            uploads: names of the vectors that updates carry besides the model.
            longest: the largest norm that is allowed; None for any, as long as there is one.
        """
        noise = transforms[-2] if len(transforms) > 1 else None
        clip = noise.clip if isinstance(noise, Gaussian) else self.clip
        if clip is None:
            return "updates would be masked in any length: set secure_aggregation's clip"
        for name, norm in {"model": clip, **dict.fromkeys(uploads, self.clip or self.reach)}.items():
            if longest is not None and norm > longest:
                return f"{name!r} would be shortened to norm {norm:g}, this site demands {longest:g}: set the clip"
        return None

    # -- sizes

    def size(self, rows: float, questions: bool) -> int:
        """Return what a client with so many rows announces that it counts (`size_of`).

        Args:
            rows: that the sum is about, or how much they count.
            questions: whether it is of answers, in which rows count themselves.

        Raises:
            Declined: it counts nothing.
        """
        weight = float(rows)
        if rows and not questions:
            # a rule of a user's own may ask for rows, which are what counts where none has a weight
            own = {} if weight.is_integer() else {contracts.WEIGHT: weight}
            weight = self._weights().weight(contracts.Update({}, math.ceil(weight), 0, own))
        if not weight > 0:
            raise Declined("this client has no rows that the sum is about, so it would hide nobody")
        return size_of(weight)

    def balanced(self, sizes: Mapping[int, int]) -> list[int]:
        """The clients, of those of these sizes, who may answer a question together; see `balanced`."""
        return balanced(sizes, self._fewest, self.largest_share)

    def unbalanced_reason(self, graph: MaskingGraph) -> str | None:
        """Return why answers of these members, which cannot be shortened, are not added up, or None."""
        if is_balanced(graph.sizes.values(), graph.fewest(self.least), self.largest_share):
            return None
        return (
            f"one client may have more than {self.largest_share:g} of all rows: set secure_aggregation's largest_share"
        )

    def heaviest_of(self, graph: MaskingGraph) -> float:
        """What the heaviest member of a sum counts, at most."""
        most = largest_weight(graph.sizes.values(), graph.fewest(self.least), self.largest_share)
        return min(self.heaviest or _HEAVIEST, most)

    def _fewest(self, clients: int) -> int:
        """Return how many of so many clients may be left when a sum is opened; more than all where they are too few."""
        holders, needed = shares_needed(clients, self.threshold, self.neighbours)
        return max(quorum(clients, holders, needed), needed, self.least)

    # -- numbers

    def bounded(self, vectors: Mapping[str, Tensor], trained: int) -> Mapping[str, Tensor]:
        shorter = {name: _shortened(vector, self.clip or self.reach) for name, vector in vectors.items()}
        # running statistics, at the end, have a scale of their own; without a clip, `gaussian` has shortened the model
        parts = [vectors["model"][:trained], vectors["model"][trained:]]
        shorter["model"] = torch.cat([part if self.clip is None else _shortened(part, self.clip) for part in parts])
        return shorter

    @property
    def reach(self) -> float:
        """The largest absolute value of a number of an update."""
        return self.range or _RANGE

    @property
    def loss_reach(self) -> float:
        """The largest loss that is told; a larger one counts as this."""
        return max(self.reach, _RANGE)

    def unit(self, clients: int) -> int:
        """The whole number that stands for a weight of `heaviest`, or for such a client's number at the range's end."""
        # numbers lie within the unit on either side, so this many clients cannot pass the signed range; a power of two,
        # so that dividing by it in `decode` rounds nothing
        return 1 << (((1 << (self.bits - 1)) - 1) // clients).bit_length() - 1

    def encode(
        self, update: contracts.Update, clients: int, seed: bytes, size: int | None = None, most: float | None = None
    ) -> np.ndarray[Any, Any]:
        """An update as whole numbers.

        What is in whole numbers already, an answer's `SUM`, is added up as it is, modulo 2^64.

        Args:
            update: the update, or the answer.
            clients: members of the sum.
            seed: 32 bytes, which decide what is rounded up.
            size: what it has announced and signed; by default that of its weight.
            most: what the heaviest member counts (`heaviest_of`); by default `heaviest`.

        Raises:
            Declined: it does not fit, or counts nothing.
        """
        if update.vectors.keys() == {contracts.SUM}:
            if self.bits != 64:
                raise Declined(f"sums of whole numbers have 64 bits, this run masks {self.bits}: set bits = 64")
            # a copy, which is masked in place
            return np.array(update.vectors[contracts.SUM].numpy(), dtype=np.int64).view(np.uint64)
        weight = 0.0 if update.is_idle else self._weights().weight(update)
        if not weight > 0 or (size is not None and weight < least_weight(size)):
            raise Declined("fewer of its rows count than it has said, so it would hide nobody")
        if weight > (self.heaviest or _HEAVIEST):
            limit = self.heaviest or _HEAVIEST
            raise Declined(f"its weight is above secure_aggregation's heaviest = {limit:g}: raise that")
        heaviest = most or self.heaviest or _HEAVIEST
        weight = min(weight, heaviest)
        share, loss, reach = weight / heaviest, update.metrics.get("loss", 0.0), self.reach
        # a NaN among whole numbers would spoil the sum for everybody, so a loss that is not finite counts as 0
        loss_share = min(max(loss / self.loss_reach, -1.0), 1.0) if math.isfinite(loss) else 0.0
        # float32's 24 bits are coarser than the steps of a sum of few clients
        numbers_of = {name: part.detach().flatten().double() / reach for name, part in update.vectors.items()}
        if not all(bool((part.abs() <= 1).all()) for part in numbers_of.values()):  # NaN is not, either
            raise Declined(f"a number of its update is outside secure_aggregation's range = {reach:g}: raise that")
        rest = [numbers_of[name] for name in sorted(numbers_of) if name != "model"]
        head = torch.tensor([share, share * loss_share], dtype=torch.float64)
        # only the model carries the weight: the other vectors of an update are summed as they are
        scaled = torch.cat([head, numbers_of["model"] * share, *rest]) * self.unit(clients)
        return round_stochastically(scaled.numpy(), seed).astype(f"<u{self.bits // 8}")

    def decode(self, total: np.ndarray[Any, Any], clients: int) -> np.ndarray[Any, Any]:
        """The sum's numbers, in units of `range` (the weight's: of `heaviest`)."""
        # read as signed: modulo 2^bits, a negative sum is a number in the upper half
        return total.view(f"<i{self.bits // 8}").astype(np.float64) / self.unit(clients)

    def length(self, spec: ModelSpec) -> int:
        """Numbers in a masked update."""
        return _HEAD + self.numbers(spec) + sum(math.prod(shape) for shape in (self.vectors or {}).values())

    def numbers(self, spec: ModelSpec) -> int:
        """Return how many numbers of the model are masked and sent."""
        packs = self._packing()
        return spec.layout.shared if packs is None else packs.sent_numbers(spec.layout)

    def spread(self, sums: Tensor, context: contracts.ServerContext) -> Tensor:
        """The sums of the numbers that are sent, at their places among all shared ones [s]; the others are zero."""
        packs = self._packing()
        if packs is None:
            return sums
        spec = context.spec
        places = packs.sent_places(WireContext(spec.layout, spec.seed, 0, context.version))
        return sums.new_zeros(spec.layout.shared).index_copy(0, torch.from_numpy(places), sums)

    def _packing(self) -> SendsSameNumbers | None:
        transform = None if self.packing is None else build("transforms", self.packing)
        assert transform is None or isinstance(transform, SendsSameNumbers)
        return transform

    def _weights(self) -> Linear:
        aggregator = build("aggregation", self.aggregation or "equal_weighted")
        assert isinstance(aggregator, Linear)
        return aggregator

    # -- the client

    def mask(
        self, update: contracts.Update, task: contracts.Task, secrets: contracts.ClientSecrets
    ) -> contracts.Update:
        graph, root = key_queries.known_graph(secrets, task.vectors, self), key_queries.root_of(secrets)
        senders = clients_in(task.vectors.get(key_queries.SENDERS))
        partners, held = key_queries.partners_among(senders, graph, secrets.client), all_shares(task.vectors, secrets)
        if missing := [partner for partner in partners if partner not in held]:
            raise Declined(f"there is no share from client {missing[0]}, who is said to have sent shares")
        key_queries.check_task(task, secrets)
        vector = self.encode(
            update, len(graph.members), key_queries.rounding_seed(contracts.task_digest(task), secrets.client),
            graph.sizes[secrets.client], self.heaviest_of(graph),
        )  # fmt: skip
        shown = key_queries.shown_to(task, secrets)
        digest = hashlib.blake2b(vector.tobytes() + shown + str(senders).encode(), digest_size=masks.KEY).digest()
        # two vectors under the same masks would give away their difference; the same vector may be sent twice
        if key_queries.MASKED in secrets.kept and texts(secrets.kept[key_queries.MASKED], masks.KEY)[0] != digest:
            raise Declined("its keys have masked another update already")
        keep_shares(secrets, {partner: held[partner] for partner in partners})
        secrets.kept.update(
            {key_queries.MASKED: rows([digest], masks.KEY), key_queries.DIGEST: rows([shown], masks.KEY)}
        )
        secrets.kept[key_queries.SENDERS] = numbers(senders)
        private, own_mask = masks.private_key(root, "masks"), key_queries.own_seed(root, graph)
        seeds = {partner: key_queries.pair_seed(private, graph, shown, secrets.client, partner) for partner in partners}
        # of each pair one adds the mask and the other takes it away, so that it cancels in the sum
        above = [seed for partner, seed in seeds.items() if partner > secrets.client]
        below = [seed for partner, seed in seeds.items() if partner < secrets.client]
        masks.add_masks(vector, [own_mask, *above], below)
        vectors = {contracts.SUM: torch.from_numpy(vector.view(f"<i{self.bits // 8}"))}
        return contracts.Update(vectors, 0, 0, {}, nbytes=nbytes(vectors))

    def nbytes(self, vectors: Mapping[str, Tensor]) -> int:
        return (_HEAD + sum(part.numel() for part in vectors.values())) * self.bits // 8

    # -- the server

    def agree_keys(self, clients: Sequence[int], context: contracts.ServerContext) -> contracts.KeyAgreement:
        work = context.spec
        digest = work.digest if isinstance(work, ClientWork) else ""
        return SecureRound.of(self, clients, context, KeyRound(context.version, work=digest))

    def masked_reject_reason(self, update: contracts.Update, spec: ModelSpec) -> str | None:
        vector, shape = update.vectors.get(contracts.SUM), (self.length(spec),)
        kind = torch.int32 if self.bits == 32 else torch.int64
        if update.vectors.keys() != {contracts.SUM} or vector is None or vector.dtype != kind or vector.shape != shape:
            return f"must send {shape[0]} masked numbers of {self.bits} bits, sent something else"
        return None


def _shortened(vector: Tensor, longest: float) -> Tensor:
    """A vector [n], scaled down where its Euclidean norm is above the longest that is allowed."""
    norm = torch.linalg.vector_norm(vector, dtype=torch.float64)
    # NaN stays what it is, and is refused with what is not finite
    return vector * (longest / norm).to(vector) if norm > longest else vector


def _found_weights(aggregator: Component) -> str:
    return (
        f"secure_aggregation hides contributions of like size, and {aggregator.kind} weighs by more than rows: choose "
        "aggregation = 'equal_weighted' or 'example_weighted', or drop secure_aggregation"
    )


def _range_of(transforms: Sequence[object]) -> float | None:
    """The largest absolute value of a number behind these transforms, None where they do not say it."""
    # the last transform is the masking itself; only a clip right before it still bounds what is masked
    last = transforms[-2] if len(transforms) > 1 else None
    if not isinstance(last, Gaussian):
        return None
    return last.clip * (_FLOAT + (_TAIL * last.multiplier if last.where == "client" else 0.0))
