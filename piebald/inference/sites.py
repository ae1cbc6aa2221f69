"""Questions to the sites of a federation, or to the clients of a cluster, over whatever runtime reaches them."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
from torch import Tensor

from piebald.contracts import SUM, ChecksSignatures, Query, QueryRequest, Runtime, Task, Update
from piebald.contracts.model_spec import ModelSpec
from piebald.core.errors import RuntimeFault, SettingError
from piebald.core.moments import Floats
from piebald.core.plain_text import printable
from piebald.methods.client_work import ClientWork
from piebald.privacy import SecureAggregation
from piebald.privacy.secure_aggregation.key_exchange import KeyRound
from piebald.privacy.secure_aggregation.server_side import SecureRound
from piebald.server.client_queries import ClientQueries

log = logging.getLogger("piebald.statistics")
NO_VECTORS: Mapping[str, Tensor] = MappingProxyType({})


class AskedSites:
    """Clients who are asked through a runtime (`contracts.AsksClients`).

    Args:
        runtime: the runtime that reaches the clients.
        spec: the model that a task carries, which the questions are not about; for sums under masks, the run's
            `ClientWork`.
        names: of the clients, by number.
        say: called with a sentence about each client that is left out.

    Attributes:
        runtime: the runtime.
        names: as given.
        left_out: why clients are left out of answers, by name.
        refused: why clients did not answer, by number; the first reason of each client.
        reasons: why clients did not answer the last question, by number.
    """

    def __init__(
        self, runtime: Runtime, spec: ModelSpec, names: Sequence[str] = (), say: Callable[[str], None] = log.warning
    ) -> None:  # fmt: skip
        self.runtime, self._queries = runtime, ClientQueries(runtime, spec)
        self.names, self._say = [printable(str(name)) for name in names], say
        self._work = spec.digest if isinstance(spec, ClientWork) else ""
        self._model = spec.initial[: spec.layout.shared]
        self._ids, self._version = itertools.count(), 0
        self.left_out: dict[str, str] = {}
        self.refused: dict[int, str] = {}
        self.reasons: dict[int, str] = {}

    def query(self, requests: Sequence[QueryRequest]) -> list[Update | None]:
        """See `contracts.AsksClients`."""
        tasks = [
            Task(next(self._ids), request.client, self._version, request.vectors, request.query) for request in requests
        ]
        answers = self._queries.ask(tasks, self._version)
        rows = [row for row in self._queries.take_rows() if row["status"] != "ok"]
        self.reasons = {int(row["client"]): printable(str(row["reason"]), 200) for row in rows}
        # the first reason says why a client is left out; later ones follow from it
        self.refused = {**self.reasons, **self.refused}
        return answers

    def exclude_client(self, client: int, reason: str) -> None:
        """See `contracts.AsksClients`."""
        self.refused[client] = printable(reason, 200)

    def check_signature(self, client: int, text: bytes, signature: bytes) -> bool:
        """See `contracts.AsksClients`."""
        runtime = self.runtime
        return not isinstance(runtime, ChecksSignatures) or runtime.check_signature(client, text, signature)

    def ask(
        self, query: Query, clients: Iterable[int], vectors: Mapping[str, Tensor] = NO_VECTORS, version: int = 0
    ) -> dict[int, Update]:
        """Ask clients the same question and return the answers, by client.

        Args:
            query: the question.
            clients: the clients' numbers.
            vectors: vectors that go along besides the model.
            version: the version of the model, where questions are about several.
        """
        return self._ask(query, dict.fromkeys(clients, vectors), version)

    def leave_out(self, answered: Collection[int], asked: Collection[int] | None = None) -> None:
        """Note why clients are left out of an answer, and say so once of each.

        Args:
            answered: the numbers of those who have a part in it.
            asked: the numbers of those who were to have one; all by default.
        """
        for client in sorted({*(range(len(self.names)) if asked is None else asked)} - {*answered}):
            name = self.names[client]
            if name not in self.left_out:
                self.left_out[name] = self.refused.get(client, "it was not there")
                self._say(f"{name} is left out: {self.left_out[name]}")

    def refusal(self, sentence: str) -> SettingError:
        """Return an error that says that nobody answers, with the first reason."""
        return SettingError(f"{sentence}, the first one says: {next(iter(self.refused.values()), 'no site is there')}")

    def sums(
        self, query: Query, masking: SecureAggregation | None, vectors: Mapping[str, Tensor] = NO_VECTORS,
        version: int = 0, among: Collection[int] = (),
    ) -> tuple[list[int], Floats]:  # fmt: skip
        """Return the numbers of the clients who took part, and the sum of their answers [k] in steps.

        Args:
            query: a question about sums.
            masking: the masks under which answers come, or None where they come in the open.
            vectors: vectors that go along besides the model.
            version: the version of the model, where questions are about several.
            among: the clients who are asked; by default all.

        Raises:
            SettingError: no site answers.
            RuntimeFault: the masks cannot be taken off.
        """
        clients = [client for client in self.runtime.clients() if not among or client in among]
        if masking is None:
            answers = self.ask(query, clients, vectors, version)
            if not answers:
                raise self.refusal("no site answers questions about sums")
            # float64: counts and steps are whole numbers, which it adds exactly up to 2^53
            parts = [answer.vectors[SUM].numpy().astype(np.float64) for answer in answers.values()]
            return sorted(answers), np.stack(parts).sum(0)
        self._version = version
        # keys are agreed on for each sum: with the same masks two sums would show their difference
        about = KeyRound(version, tuple(sorted(query.rows_read(personal=False))), self._work)
        agreed = SecureRound.of(masking, clients, self, about)
        # a client without agreed keys has no masks that the others would cancel
        present = [client for client in clients if client not in agreed.absent]
        self.refused = {**agreed.absent, **self.refused}
        answers = self._ask(query, {client: {**vectors, **agreed.vectors(client)} for client in present}, version)
        total = agreed.total(answers, self) if answers else "no secure aggregation: nobody sent a sum"
        if isinstance(total, str):
            reasons = (self.refused or agreed.absent).items()
            first = "".join(f"; site {client + 1} says: {reason}" for client, reason in itertools.islice(reasons, 1))
            raise RuntimeFault(f"{total}{first}")
        # modulo 2^64 the masks have cancelled, and the sums fit 63 bits and a sign
        return sorted(answers), total.view(np.int64).astype(np.float64)

    def _ask(self, query: Query, vectors: Mapping[int, Mapping[str, Tensor]], version: int) -> dict[int, Update]:
        """Ask with vectors of each client."""
        # tasks of `query`, which key agreement calls as well, take the version from here
        self._version = version
        requests = [QueryRequest(client, query, {"model": self._model, **sent}) for client, sent in vectors.items()]
        answers = self.query(requests)
        return {client: answer for client, answer in zip(vectors, answers, strict=True) if answer is not None}
