"""One party: its data, its network and its training loop.  Parties exchange messages and nothing else."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from piebald.core.arguments import checked_class
from piebald.core.errors import RuntimeFault
from piebald.storage.store import RunStore
from piebald.vertical.chunks import common_chunks, own_chunks
from piebald.vertical.disclosure_ledger import DisclosureKind, DisclosureLedger, Spend, plan
from piebald.vertical.loss_terms import PartyView
from piebald.vertical.party_data import PartyHolding
from piebald.vertical.party_messages import MessageFault, MessageKind
from piebald.vertical.party_network import PartyNetwork, Trace, taylor_loss, translator, unit_rows
from piebald.vertical.party_secret import PartySecret
from piebald.vertical.protocol import PartySession, Products, Role, receive_numbers, send_numbers
from piebald.vertical.transfer_settings import TransferSettings


@dataclass(frozen=True, slots=True)
class TransferStep:
    """Record of a step: losses that both parties know, time and traffic.

    Attributes:
        step: number of the step, from 0.
        seconds: duration.
        sent: number of bytes sent by this party.
        received: number of bytes received from the other party.
        losses: values of the terms by name; None at steps that do not compute them.
    """

    step: int
    seconds: float
    sent: int
    received: int
    losses: dict[str, float] | None = None

    def table(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


@checked_class
class Party:
    """The source or the target.

    Args:
        role: "source" or "target".
        data: its data.
        settings: settings that both parties have agreed on.
        secret: this party's secret, from which its first weights and the chunks of its rows are drawn.
        store: its run folder, for its ledger of disclosures; None keeps the ledger in memory.
        spend: counts in the ledger of its rows, see `DisclosureLedger`.
    """

    summary_kind: ClassVar[DisclosureKind] = "whole"  # what is handed over at the end

    def __init__(
        self, role: Role, data: PartyHolding, settings: TransferSettings, secret: PartySecret,
        store: RunStore | None = None, spend: Spend = lambda kind, noise: None,
    ) -> None:  # fmt: skip
        data.check(role, settings)
        self.role, self.data, self.settings = role, data, settings
        self.network = self._network(secret)
        by_label = not settings.method.hides_rows
        self.own = [] if settings.method.joint else own_chunks(data, settings.batch, secret, by_label)
        self.common = common_chunks(data.overlap, settings.overlap_batch, settings.seed)
        # beta/2 |w|^2 in the loss, so it goes through Adam like every other gradient
        make = torch.optim.Adam if settings.optimizer == "adam" else torch.optim.SGD
        self.optimizer = make(self.network.parameters(), lr=settings.lr, weight_decay=settings.beta)
        self.terms = settings.terms(role)
        self.ledger = DisclosureLedger(plan(settings.steps, len(self.own), len(self.common)), store, spend)
        self.noise = settings.method.row_noise(settings.balanced, secret, self.ledger)
        self.done = 0
        self.phi: Tensor | None = None
        self.rate = 0.5

    def _network(self, secret: PartySecret) -> nn.Module:
        shape = self.settings.network
        return PartyNetwork(self.data.x.shape[1], shape.hidden, shape.aligned, secret)

    def train(self, session: PartySession) -> Iterator[TransferStep]:
        """Take all remaining steps, then give the target what it needs to predict alone.

        Args:
            session: a session after its handshake.
        """
        owned = [size for term in self.terms for size in term.owned]
        requested = [size for term in self.terms for size in term.requested]
        # an error that depends on own rows would be a release of them without noise
        products = Products(session, self.settings.backend, owned, requested, clamp=self.settings.method.hides_rows)
        while self.done < self.settings.steps:
            yield self._step(session, products)
        self._hand_over(session)

    def count_abort(self) -> None:
        """Count an error with which this party ends the run, as a release with the run's noise or without any."""
        self.ledger.count_abort(self.done, 0.0 if self.noise is None else self.noise.noise)

    def predict(self, x: Tensor) -> Tensor:
        """Return the target's own scores of rows of its features: sigmoid(Phi.u) [n], higher for positives."""
        if self.phi is None:
            raise RuntimeFault("the target can predict only after training, with the source's translator")
        with torch.no_grad():
            return torch.sigmoid(self.network(x)[-1] @ self.phi)

    def test_scores(self) -> Tensor:
        """Return the target's scores of its held-out rows [n]."""
        return self.predict(self.data.test)

    # ---------------------------------------------------------------------------------------------------------- a step

    def _step(self, session: PartySession, products: Products) -> TransferStep:
        began, sent, received = time.perf_counter(), session.channel.sent, session.channel.received
        watch = self.settings.watches(self.done)
        view = self._disclosed(self.view())
        statistics = [part for term in self.terms for part in term.statistics(view)]
        coefficients = [matrix for term in self.terms for matrix in term.coefficients(view)]
        extra = self._extra() if watch else []
        if self.role == "source":
            probes = [matrix for term in self.terms for matrix in term.probe(view)] if watch else []
            results = products.exchange(statistics, [*coefficients, *probes], repeats=extra)
        else:
            results = products.exchange(statistics, coefficients, repeated=extra)
        # before the update: the losses belong to the weights that the view was computed with
        losses = self._watch(session, view, results) if watch else None
        self._update(view, results)
        self.done += 1
        channel = session.channel
        seconds = time.perf_counter() - began
        return TransferStep(self.done - 1, seconds, channel.sent - sent, channel.received - received, losses)

    def view(self) -> PartyView:
        """Return this party's data of the next step."""
        settings, data = self.settings, self.data
        batch, common = self.own[self.done % len(self.own)], self.common[self.done % len(self.common)]
        traces: tuple[Trace, Trace] = ([], [])
        rows = self.network(data.x[batch], traces[0])
        both = self.network(data.x[common], traces[1])
        layers, u = both if settings.method.aligns_common else rows, both[-1]
        layers = [unit_rows(layer) for layer in layers] if settings.method.unit else layers
        if data.y is None:
            return PartyView(layers, u, traces=traces)
        phi = translator(rows[-1], data.y[batch], settings.balanced)
        own_loss = settings.own * taylor_loss(rows[-1] @ phi, data.y[batch]) if settings.own else None
        return PartyView(layers, u, data.y[common], phi, own_loss, traces)

    def _disclosed(self, view: PartyView) -> PartyView:
        """Return the data of the next step as it may be disclosed: counted, and with noise if the method adds it."""
        step = self.done
        # from the same weights and chunks follow the same sums, so that they are counted once
        weights = torch.cat([part.detach().ravel() for part in self.network.parameters()])
        content = step.to_bytes(8, "little") + weights.numpy().tobytes()
        # counted before any message is formed from it: a disclosure that the plan does not allow must not be sent
        self.ledger.count("common", step % len(self.common), step, content)
        if not self.own:
            return view
        chunk = step % len(self.own)
        if self.noise is None:
            self.ledger.count("own", chunk, step, content)
            return view
        labels = None if self.data.y is None else self.data.y[self.own[chunk]]
        hidden = self.noise.hide(view, labels, self.share if labels is not None else 0.5, chunk, step)
        if labels is None or hidden.phi is None or not self.settings.own:
            return hidden
        return replace(hidden, own_loss=self.settings.own * taylor_loss(hidden.rows @ hidden.phi, labels))

    @cached_property
    def share(self) -> float:
        """The source's share of positives in its chunks, as it is disclosed."""
        assert self.data.y is not None, "only the source has labels"
        labels = self.data.y[np.concatenate(self.own)]
        return float((labels > 0).double().mean()) if self.noise is None else self.noise.share(labels)

    def _update(self, view: PartyView, results: list[Any]) -> None:
        tensors: list[Tensor] = []
        gradients: list[Tensor | None] = []
        for term in self.terms:
            part, results = results[: len(term.requested)], results[len(term.requested) :]
            for tensor, gradient in term.gradients(view, part):
                tensors.append(tensor)
                # copied into torch's own memory: the alignment of an array can change the last bit of a product
                gradients.append(torch.tensor(gradient))
            local = term.local(view)
            if local is not None:
                tensors.append(local)
                gradients.append(None)
        if view.own_loss is not None:
            tensors.append(view.own_loss)
            gradients.append(None)
        self.optimizer.zero_grad()
        if self.noise is None:
            torch.autograd.backward(tensors, gradients)
        else:
            released = self.noise.gradient(view, tensors, gradients, self.done % len(self.own), self.done)
            for parameter, noisy in zip(self.network.parameters(), released, strict=True):
                parameter.grad = noisy
        self.optimizer.step()

    # -------------------------------------------------------------------------------------------------------- watching

    def _extra(self) -> list[int]:
        """Return the numbers of the products that the source requests once more: of its own, or of the target's."""
        numbers, start = [], 0
        for term in self.terms:
            numbers += [start + place for place in term.probes]
            start += len(term.requested if self.role == "source" else term.owned)
        return numbers

    def _watch(self, session: PartySession, view: PartyView, results: list[Any]) -> dict[str, float]:
        """Compute the losses at the source and send them to the target."""
        names = [term.name for term in self.terms]
        if self.role == "target":
            send_numbers(session, MessageKind.WATCH, np.array([term.target_value(view) for term in self.terms]))
            losses = receive_numbers(session, MessageKind.WATCH, len(names))
        else:
            # the target speaks first, as its part is in the losses that the source replies with
            target_values = receive_numbers(session, MessageKind.WATCH, len(names))
            probed = results[sum(len(term.requested) for term in self.terms) :]
            values = []
            for term, target_value in zip(self.terms, target_values, strict=True):
                part, results = results[: len(term.requested)], results[len(term.requested) :]
                extra, probed = probed[: len(term.probes)], probed[len(term.probes) :]
                values.append(term.value(view, part, extra, float(target_value)))
            losses = np.array(values)
            send_numbers(session, MessageKind.WATCH, losses)
        return dict(zip(names, losses.tolist(), strict=True))

    # ------------------------------------------------------------------------------------------------------- at the end

    def _hand_over(self, session: PartySession) -> None:
        """Give the target what it needs of the source to predict, and the source's share of positives."""
        if self.role == "source":
            self.phi, self.rate = self.summary()
            numbers = np.append(self.phi.numpy(), self.rate)
            if self.noise is None:  # else each is a release that was counted
                self.ledger.count(self.summary_kind, 0, self.done, numbers.tobytes())
            send_numbers(session, MessageKind.HANDOVER, numbers)
        else:
            self.phi, self.rate = self._receive_summary(session)
        session.finish()

    def _receive_summary(self, session: PartySession) -> tuple[Tensor, float]:
        width = self.settings.network.aligned[-1]
        numbers = receive_numbers(session, MessageKind.HANDOVER, width + 1, most=1.0)  # means of units in (0, 1)
        if numbers[-1] < 0:
            raise MessageFault("the other party's HANDOVER message gives a negative share of positives")
        return torch.from_numpy(numbers[:-1]), float(numbers[-1])

    def summary(self) -> tuple[Tensor, float]:
        """Return the translator of all chunks of the source's own rows, and their share of positives.

        Rows in no chunk are left out: the difference to the disclosures about the chunks would be those few rows alone.
        """
        assert self.data.y is not None, "only the source has labels"
        used = np.concatenate(self.own)
        labels = self.data.y[used]
        with torch.no_grad():
            rows = self.network(self.data.x[used])[-1]
            if self.noise is not None:
                return self.noise.final_translator(rows, labels, self.share, self.done), self.share
            return translator(rows, labels, self.settings.balanced), self.share
