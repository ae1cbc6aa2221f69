"""What a site agrees to at the most: it looks at a run's terms before it works under them."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field

from piebald.client_work import ClientWork
from piebald.contracts import Query
from piebald.parameters import matching
from piebald.privacy import SecureAggregation
from piebald.privacy.secure_aggregation.key_queries import KeyQuery
from piebald.transforms.base import Transform
from piebald.transforms.gaussian import Gaussian


class Policy(BaseModel):
    """A site's privacy policy.  What is not set is not asked for.

    Attributes:
        private: layers that must stay, as patterns of `parameters.matching`.
        clip: updates must be clipped to at most this norm.
        noise: and get Gaussian noise at this site of at least this standard deviation, in clips.
        uploads: named vectors that an update may carry.
        questions: kinds of questions that are answered, beside those about a secure aggregation's keys.
        secure_aggregation: updates leave only inside secure aggregation of at least so many clients.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    private: list[str] = []
    clip: float | None = Field(default=None, gt=0)
    noise: float | None = Field(default=None, gt=0)
    uploads: list[str] | None = None
    questions: list[str] | None = None
    secure_aggregation: int | None = Field(default=None, ge=2)

    def reject_reason(self, work: ClientWork) -> str | None:
        """Why this site does not work under these terms, or None."""
        if self.private:
            leaving = matching(work.model, self.private) - work.layout.private
            if leaving:
                return f"{sorted(leaving)[0]} must stay at this site but the recipe would send it"
        if self.uploads is not None:
            for name in ("model", *work.trainer.uploads()):
                if name not in self.uploads:
                    return f"updates would carry {name!r}, this site sends only {', '.join(self.uploads) or 'nothing'}"
        sealing = (
            work.transforms[-1] if work.transforms and isinstance(work.transforms[-1], SecureAggregation) else None
        )
        if self.secure_aggregation is not None:
            if sealing is None:
                return "updates leave this site only inside secure aggregation but the recipe has none: add update 'secure_aggregation'"
            if sealing.least < self.secure_aggregation:
                return (
                    f"sums could be of {sealing.least} clients, this site asks for {self.secure_aggregation}: set secure_aggregation's "
                    "least"
                )
        return self._noise(work.transforms[:-1] if sealing else work.transforms, work.trainer.uploads())

    def _noise(self, stages: Sequence[Transform], uploads: Sequence[str]) -> str | None:
        """Why clipping and noise are not enough.  The last stage (a secure aggregation aside) must be the one that adds it:
        what comes later could undo it.
        """
        if self.clip is None and self.noise is None:
            return None
        if uploads:
            return f"updates would carry {uploads[0]!r} beside the model, which nothing clips"
        last = stages[-1] if stages else None
        if not isinstance(last, Gaussian):
            return (
                "updates must be clipped here as the last thing but the recipe does not do that: add update 'gaussian'"
            )
        if self.clip is not None and last.clip > self.clip:
            return f"updates would be clipped to norm {last.clip:g}, this site allows at most {self.clip:g}"
        if self.noise is None:
            return None
        if last.where != "client":
            return "noise must be added at this site but the recipe adds it at the server: set where = 'client'"
        if last.multiplier < self.noise:
            return f"updates would get noise of {last.multiplier:g} clips, this site asks for at least {self.noise:g}"
        return None

    def answers(self, query: Query) -> bool:
        """Whether a question is answered."""
        return self.questions is None or isinstance(query, KeyQuery) or query.kind in self.questions

    @property
    def own_noise(self) -> bool:
        """Whether noise must come from numbers that only this site knows: others could subtract what they can make."""
        return self.noise is not None
