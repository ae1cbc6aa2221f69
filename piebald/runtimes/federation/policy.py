"""A site's policy: what it allows, checked against a run's terms and against each update before it leaves."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pydantic import BaseModel, ConfigDict, Field

from piebald.client_work import ClientWork
from piebald.contracts import Query, Update
from piebald.parameters import matching
from piebald.privacy import SecureAggregation
from piebald.privacy.secure_aggregation.key_queries import KeyQuery
from piebald.transforms.base import Transform
from piebald.transforms.gaussian import Gaussian


class Policy(BaseModel):
    """A site's privacy policy.  A field that is not set demands nothing.

    Attributes:
        private: layers that must stay at the site, as patterns of `parameters.matching`.
        clip: the largest norm to which updates must be clipped.
        noise: the least standard deviation of Gaussian noise that is added at this site, in clips.
        uploads: the named vectors that an update may carry.
        queries: the kinds of queries that are answered, besides those about the keys of a secure aggregation.
        plugins: modules that may be imported for a run, besides Piebald; they must be installed at the site.
        updates: the most updates that leave this site, in all runs together; each one spends privacy budget.
        secure_aggregation: the least number of clients in a secure aggregation, outside of which no update leaves.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    private: list[str] = []
    clip: float | None = Field(default=None, gt=0)
    noise: float | None = Field(default=None, gt=0)
    uploads: list[str] | None = None
    queries: list[str] | None = None
    plugins: list[str] = []
    updates: int | None = Field(default=None, ge=1)
    secure_aggregation: int | None = Field(default=None, ge=2)

    def reject_reason(self, work: ClientWork) -> str | None:
        """The reason why this site does not work under a run's terms, or None."""
        if self.private:
            leaving = matching(work.model, self.private) - work.layout.private
            if leaving:
                return f"{sorted(leaving)[0]} must stay at this site but the recipe would send it"
        if self.uploads is not None:
            for name in declared_vectors(work):
                if name not in self.uploads:
                    return f"updates would carry {name!r}, this site sends only {', '.join(self.uploads) or 'nothing'}"
        last = work.transforms[-1] if work.transforms else None
        masking = last if isinstance(last, SecureAggregation) else None
        if self.secure_aggregation is not None:
            if masking is None:
                return (
                    "updates leave this site only inside secure aggregation but the recipe has none: add transform "
                    "'secure_aggregation'"
                )
            if masking.least < self.secure_aggregation:
                return (
                    f"sums could be of {masking.least} clients, this site demands {self.secure_aggregation}: "
                    "set secure_aggregation's least"
                )
        return self._noise_reject_reason(work.transforms[:-1] if masking else work.transforms, work.trainer.uploads())

    def _noise_reject_reason(self, transforms: Sequence[Transform], uploads: Sequence[str]) -> str | None:
        """The reason why clipping and noise do not suffice, or None.

        They must come from the last transform (except a secure aggregation), since a later one could undo them.
        """
        if self.clip is None and self.noise is None:
            return None
        if uploads:
            return f"updates would carry {uploads[0]!r} beside the model, which nothing clips"
        last = transforms[-1] if transforms else None
        if not isinstance(last, Gaussian):
            return (
                "updates must be clipped by the last transform but the recipe does not do that: "
                "add transform 'gaussian'"
            )
        if self.clip is not None and last.clip > self.clip:
            return f"updates would be clipped to norm {last.clip:g}, this site allows at most {self.clip:g}"
        if self.noise is None:
            return None
        if last.where != "client":
            return "noise must be added at this site but the recipe adds it at the server: set where = 'client'"
        if last.multiplier < self.noise:
            return f"updates would get noise of {last.multiplier:g} clips, this site demands at least {self.noise:g}"
        return None

    def update_reject_reason(self, update: Update, declared: Collection[str], shared: int) -> str | None:
        """The reason why an update must not leave this site, or None.

        It holds whatever engine and trainer made the update: what a transform clips, or what stays private, is decided
        by names and lengths that were known when the terms were accepted.

        Args:
            update: the update as the transforms made it, before it is masked.
            declared: names of the vectors that were declared when the site accepted the terms.
            shared: how many numbers of the model are shared.
        """
        allowed = set(declared) if self.uploads is None else set(declared) & set(self.uploads)
        undeclared = sorted(update.vectors.keys() - allowed)
        if undeclared:
            return f"the update carries {undeclared[0]!r}, which was not declared"
        model = update.vectors.get("model")
        if model is None or model.shape != (shared,):
            return "the update does not have the length of the shared model"
        return None

    def allows(self, query: Query) -> bool:
        """Whether a query is answered."""
        return self.queries is None or isinstance(query, KeyQuery) or query.kind in self.queries


def declared_vectors(work: ClientWork) -> tuple[str, ...]:
    """Names of the vectors that an update carries, as its trainer declares them."""
    return ("model", *work.trainer.uploads())
