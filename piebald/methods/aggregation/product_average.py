"""Averages of low-rank adapters by what they compute: the mean of their products, which may have unlike ranks."""

from __future__ import annotations

from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from piebald.contracts import Cohort, ModelSpec, ServerContext
from piebald.core.client_models import adapter_pairs
from piebald.core.cohort_matrix import weighted_sum
from piebald.core.parameters import Layout, Slot
from piebald.methods.aggregation.base import Aggregator

_ROUNDING = 1e-6  # singular values below this share of the largest one are what float32 leaves of zeros


class ProductAverage(Aggregator):
    """The mean of clients' adapters as layers, sum_k p_k B_k A_k, with p_k by training examples; all other numbers are
    averaged as in FedAvg.

    The mean of the A_k times that of the B_k is another matrix, and where ranks differ it has no meaning at all.  The
    products are added by stacking, [p_1 B_1, p_2 B_2, ...] times [A_1; A_2; ...], which is exact (Wang et al. 2024,
    "FLoRA: federated fine-tuning large language models with heterogeneous low-rank adaptations", section 3.2).  The
    stack is then brought back to the model's rank R by its singular values, B = U S^(1/2) and A = S^(1/2) V^T, as the
    server of FlexLoRA does (Bai et al. 2024, "Federated fine-tuning of large language models under heterogeneous tasks
    and client resources", section 3.2): the nearest matrix of rank R (Eckart and Young 1936), and its first r rows and
    columns, which a client of rank r gets, are the nearest of rank r.  Nothing is lost where the sum has no higher rank
    than R; the note "lost_share" says how much of its squared length is.  No product is formed: a stack of rank N costs
    (inputs + outputs) N^2 operations.

    A direction in which the mean is zero gets the run's first numbers in A and zeros in B, or nothing could be learned
    along it again.

    Attributes:
        average: of the clients' "models", as in FlexLoRA, or of their "changes", B A + sum_k p_k (B_k A_k - B_k0 A_k0)
            with what the client started from.  With models, a client of low rank contributes zeros for what it was not
            sent, so that it decays; with changes it stays.  Where all have one rank and the same start, both are the
            same.
    """

    takes_parts: ClassVar[bool] = True

    average: Literal["models", "changes"] = "models"

    def unsupported_model(self, spec: ModelSpec) -> str | None:
        pairs = adapter_pairs(slot.name for slot in spec.layout.slots)
        if not pairs:
            return (
                f"{self.kind} averages low-rank adapters, and this model has none: load it with adapter = 'lora', or "
                "choose another aggregation"
            )
        shared = {slot.name for slot in spec.layout.slots if slot.stop <= spec.layout.shared}
        # a product needs both factors: one that is averaged beside a private one means nothing
        if half := next((pair for pair in pairs if len(shared & {*pair}) == 1), None):
            private = half.inner if half.outer in shared else half.outer
            return (
                f"{self.kind} needs both matrices of an adapter, but {private} is private: share both, keep both "
                "private, or choose another aggregation"
            )
        return None

    def aggregate(self, cohort: Cohort, context: ServerContext) -> tuple[Tensor, list[float]]:
        assert cohort.matrix is not None
        weights = [float(update.counts) for update in cohort.updates]
        whole = sum(weights)
        if whole <= 0:
            return torch.zeros(cohort.matrix.shape[1]), [0.0] * len(weights)
        shares = [weight / whole for weight in weights]
        average, lost = (weighted_sum(cohort.matrix, weights) / whole).float(), dict[str, float]()
        for pair in _pairs(context.spec.layout):
            inner, outer, lost[pair.inner.name] = self._merged(pair, cohort, context, shares)
            for slot, new in ((pair.inner, inner), (pair.outer, outer)):
                here = slice(slot.start, slot.stop)
                # an average is a change, and the factors are models
                average[here] = new.float().flatten() - context.model[here]
        if lost:
            context.note("lost_share", {name: round(share, 6) for name, share in lost.items()})
        return average, shares

    def _merged(
        self, pair: _Pair, cohort: Cohort, context: ServerContext, shares: list[float]
    ) -> tuple[Tensor, Tensor, float]:
        """A [R, inputs] and B [outputs, R] of the mean, float64, and the share of its squared length that is lost."""
        inners, outers = list[Tensor](), list[Tensor]()

        def stack(model: Tensor, rank: int, weight: float) -> None:
            inners.append(_view(model, pair.inner)[:rank].double())
            outers.append(_view(model, pair.outer)[:, :rank].double() * weight)

        rank = pair.inner.shape[0]
        if self.average == "changes":
            # the server's own product B A, to which weighted differences are added
            stack(context.model, rank, 1.0)
        for row, share in enumerate(shares):
            held_rank = _held_rank(pair.inner, cohort.held[row] if cohort.held else None)
            stack(cohort.model(row), held_rank, share)
            if self.average == "changes":
                # the same factor negative: the stack subtracts what the client started from without forming a product
                stack(cohort.sent[row], held_rank, -share)
        return truncated(torch.cat(inners), torch.cat(outers, 1), _view(context.spec.initial, pair.inner).double())


class _Pair(NamedTuple):
    inner: Slot
    outer: Slot


def truncated(inner: Tensor, outer: Tensor, fresh: Tensor) -> tuple[Tensor, Tensor, float]:
    """The nearest product of rank R to outer @ inner, as A [R, inputs] and B [outputs, R], by singular values.

    Args:
        inner: [n, inputs].
        outer: [outputs, n].
        fresh: [R, inputs], the rows of A where the product has no more directions; B is 0 there.

    Returns:
        A, B, and the share of the product's squared length that is lost.
    """
    # the singular values of a product of thin matrices are those of a small one between their bases
    (left, above), (right, below) = torch.linalg.qr(outer), torch.linalg.qr(inner.T)
    u, values, v = torch.linalg.svd(above @ below.T)
    # numerical zeros would become directions of noise, scaled up by the root
    count = min(len(fresh), int((values > _ROUNDING * values[0]).sum()))
    # the scale is split evenly, as in FlexLoRA, so that neither factor dwarfs the other
    roots = values[:count].sqrt()
    a, b = fresh.clone(), outer.new_zeros(len(outer), len(fresh))
    a[:count] = roots[:, None] * (v[:count] @ right.T)
    b[:, :count] = (left @ u[:, :count]) * roots
    signs = torch.sign(b.gather(0, b.abs().argmax(0, keepdim=True)))[0, :count]  # u and v are determined but for them
    a[:count] *= signs[:, None]
    b[:, :count] *= signs
    energy = values.square()
    return a, b, float(energy[count:].sum() / energy.sum().clamp(min=1e-300))


def _pairs(layout: Layout) -> list[_Pair]:
    """The adapters of which both matrices are shared."""
    shared = {slot.name: slot for slot in layout.slots if slot.stop <= layout.shared}
    return [_Pair(shared[pair.inner], shared[pair.outer]) for pair in adapter_pairs(shared)]


def _view(model: Tensor, slot: Slot) -> Tensor:
    return model[slot.start : slot.stop].view(slot.shape)


def _held_rank(inner: Slot, held: Tensor | None) -> int:
    """Return how many rows of A a client has."""
    if held is None:
        return inner.shape[0]
    # the rows held are the first ones, so their number says which
    return int(((held >= inner.start) & (held < inner.stop)).sum()) // inner.shape[1]
