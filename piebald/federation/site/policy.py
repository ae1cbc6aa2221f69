"""A site's policy: what it allows, checked against a run's terms and against each update before it leaves."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from piebald.contracts import Hiding, Personalizes, Query, Split, SumDemands, Task
from piebald.core.errors import unknown
from piebald.core.parameters import matching
from piebald.data.preparation.cleaning import Cleaning
from piebald.federation.site.claims import Jobs
from piebald.federation.site.work_limits import WorkLimits
from piebald.methods.catalog.registry import find, unknown_recipe
from piebald.methods.client_work import ClientWork
from piebald.methods.transforms.base import Transform
from piebald.methods.transforms.compression import Compressor
from piebald.methods.transforms.gaussian import Gaussian
from piebald.privacy import SecureAggregation, accounting
from piebald.privacy.ledger import LARGEST, LARGEST_SHARE, LEAST_ROWS, DisclosureRules, Limit, noise_for
from piebald.privacy.spending import task_mechanism

ASK = "ask"
UNTRAINED = 64  # versions that a site may see between two updates of its own, where cohorts leave it out


class RowBudget(BaseModel):
    """A privacy budget of single rows, for all runs together.

    Attributes:
        epsilon, delta: of differential privacy; of answers where one row takes the place of another, and of training
            where a row is there or not.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    epsilon: float = Field(gt=0, le=LARGEST)
    delta: float = Field(gt=0, lt=1)

    @property
    def limit(self) -> Limit:
        """The budget as a ledger takes it."""
        return Limit(self.epsilon, self.delta)


# What all scores with noise may spend where a policy has no budget: as much as one answer with noise as large as a row.
ONE_ROW = Limit(accounting.gaussian_epsilon(1.0, 1e-5), 1e-5)


# What a policy by name says, where its other settings do not.
PRESETS: dict[str, dict[str, Any]] = {
    "noise": {
        "queries": ["evaluate", "noisy_sums", "noisy_model_sums"],
        "budget": {"epsilon": 8.0, "delta": 1e-6},
        "training": {"epsilon": 8.0, "delta": 1e-6},
        "least_rows": 10,
    }
}


class Policy(BaseModel):
    """A site's privacy policy.  A field that is not set demands nothing.

    Attributes:
        preset: the name of a policy whose settings hold where no others are given; `policy = "noise"` is the same as a
            policy with nothing else.  "noise": all answers have noise, and so has training, each with an epsilon of 8
            at a delta of 1e-6 in all runs together.
        private: layers that must stay at the site, as patterns of `parameters.matching`.
        clip: the largest norm to which updates must be clipped.
        noise: the least standard deviation of Gaussian noise that is added at this site, in clips.
        uploads: the named vectors that an update may carry.
        queries: the kinds of queries that are answered, besides those about the keys of a secure aggregation.  Not set:
            all but "statistics", "noisy_sums", "masked_sums", "model_sums", "masked_model_sums", "noisy_model_sums",
            "confusion", "trees", "tree_scores", "masked_tree_sums", "prepare", "prepare_names" and "masked_prepare",
            which must be named; none where the policy or the run protects rows or updates, since no privacy budget
            counts answers.
        budget: what answers with noise may spend, in all runs together: "noisy_sums", "noisy_model_sums", and scores
            (`score_noise`).  Not set: none are given but scores, which spend as much as one answer with noise as large
            as a row (`ONE_ROW`).
        training: what training may spend, in all runs together: a task that would spend more is refused, and a run
            whose training or updates get no noise at this site.
        questions: how many different questions of a kind are answered about the same rows, in all runs together;
            "any" for any number, and for scores without noise.  Not set: what `Query.most_asked` says of the kind.
        least_rows: the fewest rows that a number which leaves without noise may be about: a count, a sum, by the
            effective number of rows that contribute to it, a leaf of a tree, a class or category that is named.  An
            answer with one that is about fewer, and more than none, stays at this site.  Not set: 10.  1 is said by
            who wants no rules of disclosure, also none about shares.  Where it is set to 2 or more, the site also
            answers one question about moments and one about counts, since the difference of two may be about a single
            row, tells scores with noise (`score_noise`) and no masked sums without; "noisy_sums" are told if it has
            so many rows.
        largest_share: the largest share of one row in a sum that leaves without noise, of all absolute contributions.
        splits: the rows that answers may depend on.  Not set: all; without "train" where something protects, but for
            sums under masks, noisy ones, and names ("prepare_names").
        models_per_version: how many different models are examined at one version, on the same rows.  The server chooses
            which model a query brings, and from scores of two it has a directional derivative.  It says which version
            a model is of, too, so between two updates of its own a site examines `UNTRAINED` times as many, and no
            more.  Not set: any number; one where something protects.
        plugins: modules that may be imported for a run, besides Piebald; they must be installed at the site.
        updates: the most updates that leave this site, in all runs together; each one spends privacy budget.
        secure_aggregation: the least number of clients in a secure aggregation, outside of which no update leaves; or
            a table of all that is demanded of it.  Runs with secure aggregation must meet its defaults in any case.
        work: what one task may cost this site.
        jobs: how many runs it takes part in at once, and what it has for all of them.
        accept: names of the recipes that this site takes part in; with "ask" among them, or alone, any other experiment
            waits until somebody at the site approves it, and a site answers only questions that the terms name with
            their arguments.  Not set: all.
        accept_split: whether the run's [split] may say how this site's rows are divided.  Not set: where nothing
            protects, since rows that one run trains on could be those that another one scores.
        accept_cleaning: whether the run's [prepare] may have rules of cleaning; or the digest of those that it must
            have, at least 12 of its digits.  Not set: where nothing protects, since whether a value can be read, and
            how many rows are left, may tell of a single row that the rules name.
        carry: whether a run may go on with the private layers and the state that this site kept of an earlier run.

    Examples:
        The section [policy] of a `site.toml`:

        >>> import tomllib
        >>> section = tomllib.loads("policy = { clip = 1.0, noise = 0.5, updates = 100 }")["policy"]
        >>> policy = Policy.model_validate(section)
        >>> policy.clip, policy.noise, policy.updates, policy.accept
        (1.0, 0.5, 100, None)
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    preset: Literal["noise"] | None = None
    private: list[str] = []
    clip: float | None = Field(default=None, gt=0)
    noise: float | None = Field(default=None, gt=0)
    uploads: list[str] | None = None
    queries: list[str] | None = None
    budget: RowBudget | None = None
    training: RowBudget | None = None
    questions: dict[str, Annotated[int, Field(ge=1)] | Literal["any"]] = {}
    least_rows: int | None = Field(default=None, ge=1)
    largest_share: float = Field(default=LARGEST_SHARE, gt=0, le=1)
    splits: list[Split] | None = None
    models_per_version: int | None = Field(default=None, ge=1)
    plugins: list[str] = []
    updates: int | None = Field(default=None, ge=1)
    secure_aggregation: Annotated[int, Field(ge=2)] | SumDemands | None = None
    work: WorkLimits = WorkLimits()
    jobs: Jobs = Jobs()
    accept: Annotated[list[str], BeforeValidator(lambda names: [ASK] if names == ASK else names)] | None = None
    accept_split: bool | None = None
    accept_cleaning: bool | Annotated[str, Field(pattern="^[0-9a-f]{12,64}$")] | None = None
    carry: bool = True

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, settings: Any) -> Any:
        if isinstance(settings, str):
            settings = {"preset": settings}
        named = PRESETS.get(str(settings.get("preset")), {}) if isinstance(settings, dict) else {}
        return {**named, **settings} if named else settings

    @model_validator(mode="after")
    def _known_names(self) -> Self:
        import piebald.methods.queries  # noqa: F401 - registers them

        if self.plugins:  # whose names come with a run
            return self
        for name in self.queries or ():
            if name not in Query.registry["query"]:
                raise ValueError(str(unknown("query", name, Query.registry["query"])))
        for name in self.accept or ():
            if name != ASK and find(name) is None:
                raise ValueError(str(unknown_recipe(name, ASK)))
        return self

    @property
    def digest(self) -> str:
        """The SHA-256 of the policy, by which the audit log names it."""
        # sorted, so that the order of settings in a file does not change it
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def answers(self) -> Limit:
        """What answers with noise may spend of the rows' privacy, in all runs together."""
        return ONE_ROW if self.budget is None else self.budget.limit

    @property
    def training_limit(self) -> Limit | None:
        """What training may spend of the rows' privacy, in all runs together, None for any."""
        return None if self.training is None else self.training.limit

    @property
    def hides_rows(self) -> bool:
        """Whether the policy itself says that small numbers of rows are hidden."""
        return self.least_rows is not None and self.least_rows > 1

    def disclosure(self, rows_per_person: int = 1) -> DisclosureRules | None:
        """Return the rules of sums that leave without noise, None where the site's owner has taken them away.

        Args:
            rows_per_person: the most rows of one person at this site.
        """
        if self.least_rows == 1:
            return None
        return DisclosureRules(self.least_rows or LEAST_ROWS, self.largest_share, rows_per_person)

    def most_asked(self, query: Query) -> int | None:
        """Return how many questions like this one are answered about the same rows, None for any number."""
        stated = self.questions.get(query.topic(), self.questions.get(query.kind))
        most = query.most_asked(self.hides_rows) if stated is None else stated
        approved = query.most_asked(hides=False) if ASK in (self.accept or ()) and query.later else None
        return approved if most == "any" else min(int(most), approved or int(most))

    def score_noise(self, query: Query) -> float:
        """Return the standard deviation of the noise in scores, in units of what one row changes; 0 for none.

        It grows with the number of questions that are answered: all of a kind together spend what `answers` allows.
        Those of several kinds share it, and the ledger refuses the one that would spend more.
        """
        most = self.most_asked(query)
        if most is None or not (query.blurred or self.hides_rows):
            return 0.0
        once = 1.0 if self.budget is None else noise_for(self.budget.epsilon, self.budget.delta)
        return once * math.sqrt(most)

    def reject_reason(self, work: ClientWork) -> str | None:
        """Return the reason why this site does not work under a run's terms, or None."""
        if self.private:
            leaving = matching(work.model, self.private) - work.layout.private
            if leaving:
                return f"{sorted(leaving)[0]} must stay at this site but the recipe would send it"
        if self.uploads is not None:
            for name in ("model", *work.uploads()):
                if name not in self.uploads:
                    return f"updates would carry {name!r}, this site sends only {', '.join(self.uploads) or 'nothing'}"
        if (disclosure := work.trainer.discloses()) and (hiding := self.protection(work)):
            return f"the trainer would disclose {disclosure}, which this site does not allow beside {hiding}"
        if work.own_query is not None and (reason := self.query_reject_reason(work.own_query, work)):
            return f"updates would answer a query: {reason}"
        if work.own_query is not None and self.hides_rows:
            return f"updates would answer {work.own_query.kind!r} exactly, at a site that hides small numbers of rows"
        # for one row: what counts here is only whether there is any noise to count
        if self.training is not None and work.trains and task_mechanism(work, 1) is None:
            return "training has a privacy budget at this site but the recipe adds no noise here: use 'dp_sgd'"
        last = work.transforms[-1] if work.transforms else None
        # as the last one only: a transform behind it would change the masks, which then leave a rest in the sum
        masking = last if isinstance(last, SecureAggregation) else None
        if masking is None and self.secure_aggregation is not None:
            return (
                "updates leave this site only inside secure aggregation but the recipe has none: add transform "
                "'secure_aggregation'"
            )
        if masking is not None and (
            reason := masking.demands_reject_reason(self.sum_demands)
            or masking.clip_reject_reason(work.transforms, work.uploads(), self.sum_demands.clip)
        ):
            return reason
        return self._noise_reject_reason(work.transforms[:-1] if masking else work.transforms, work.uploads())

    def split_reject_reason(self, work: ClientWork) -> str | None:
        """Return the reason why a run does not say how this site's rows are divided, or None."""
        hiding = None if self.accept_split else self.protection(work)
        if self.accept_split is False:
            return "this site divides its rows itself, and takes part in no run whose terms have [split]"
        if hiding is None:
            return None
        return (
            f"rows that {hiding} protects in one run could be scored in another one with another [split]: this site "
            "takes part if its policy says accept_split = true, or if the terms have no [split]"
        )

    def cleaning_reject_reason(self, protects: bool, rules: Cleaning | None) -> str | None:
        """Return the reason why a run's rules of cleaning are not applied, or None.

        Args:
            protects: whether the run hides rows or updates.
            rules: those of the run, None where it has none.
        """
        rules = None if rules is None or rules.is_empty else rules
        if isinstance(self.accept_cleaning, str) and (
            rules is None or not rules.sha256.startswith(self.accept_cleaning)
        ):
            has = "none" if rules is None else f"those of the digest {rules.sha256}"
            return (
                f"this site's rows are cleaned by the rules {self.accept_cleaning} and by no others, and the run has "
                f"{has}: look at its [prepare], and write its digest in accept_cleaning of [policy] if you agree"
            )
        if rules is None:
            return None
        if self.accept_cleaning is False:
            return "this site cleans its rows itself, and takes part in no run whose terms have rules of cleaning"
        if self.accept_cleaning or not (protects or self.demanded):
            return None
        return (
            "a run's rules of cleaning could tell by what they refuse or leave out whether a single row is among those "
            "that are protected: this site takes part if its policy says accept_cleaning = true, or if the terms have "
            "none, as its own rules are in cleaning of [data] in site.toml"
        )

    def _noise_reject_reason(self, transforms: Sequence[Transform], uploads: Sequence[str]) -> str | None:
        """Return the reason why clipping and noise do not suffice, or None.

        They must come from the last transform, since a later one could undo them; only a secure aggregation may follow,
        or a compressor that makes nothing longer or packs what is noised already.
        """
        if self.clip is None and self.noise is None:
            return None
        if uploads:
            return f"updates would carry {uploads[0]!r} beside the model, which nothing clips"
        # works last wherever it is
        packing = next((transform for transform in transforms if isinstance(transform, Compressor)), None)
        transforms = [transform for transform in transforms if not isinstance(transform, Compressor)]
        last = transforms[-1] if transforms else None
        if not isinstance(last, Gaussian):
            return (
                "updates must be clipped by the last transform but the recipe does not do that: "
                "add transform 'gaussian'"
            )
        noised = last.noises_update()
        if packing is not None and not noised and not packing.keeps_clip:
            return f"what {packing.kind} sends may be longer than the clip of this site's policy"
        if self.clip is not None and last.clip > self.clip:
            return f"updates would be clipped to norm {last.clip:g}, this site allows at most {self.clip:g}"
        if self.noise is None:
            return None
        if last.where != "client":
            return "noise must be added at this site but the recipe adds it at the server: set where = 'client'"
        if last.multiplier < self.noise:
            return f"updates would get noise of {last.multiplier:g} clips, this site demands at least {self.noise:g}"
        return None

    @property
    def demanded(self) -> str | None:
        """The name of a protection of rows or updates that this policy demands, or None."""
        demands = {"clip": self.clip, "noise": self.noise, "secure_aggregation": self.secure_aggregation}
        return next((name for name, value in demands.items() if value is not None), None)

    def protection(self, work: ClientWork) -> str | None:
        """Return the name of a protection of rows or updates, by this policy or in a run, or None."""
        return work.protection or self.demanded

    def rounds(self, work: ClientWork) -> bool:
        """Return whether exact numbers leave with few digits in a run: where anything protects rows or updates."""
        return any((self.disclosure(), self.budget, self.training, self.protection(work)))

    def query_reject_reason(self, query: Query, work: ClientWork) -> str | None:
        """Return the reason why a query about this site's rows is not answered in a run, or None."""
        if query.asked_of == "server":
            return f"{query.kind!r} is for rows of the server, and no site answers it"
        if query.asked_of == "itself":
            return f"{query.kind!r} is what a site asks itself, and no server gets its answer"
        if ASK in (self.accept or ()) and not _is_stated(query, work):
            return f"nobody has approved {query.kind!r} with these arguments: the run's terms do not name them"
        hiding = self.protection(work)
        if query.by_name and self.queries is None:
            return f"this site answers {query.kind!r} only if its policy names it: queries = [{query.kind!r}, ...]"
        if self.queries is None and hiding:
            return f"this site answers no queries beside {hiding}, unless its policy names them"
        if self.queries is not None and query.kind not in self.queries:
            return f"this site does not answer {query.kind!r}"
        hidden = query.hiding()
        if hidden is not None and (reason := self._hidden_reject_reason(hidden, work)):
            return reason
        hides = hiding and not hidden and not query.names_only
        splits = ["validation", "test"] if self.splits is None and hides else self.splits
        if splits is not None and (closed := sorted(rows_read(query, work) - {*splits})):
            return f"this site answers no queries that depend on its {closed[0]} rows"
        return None

    def _hidden_reject_reason(self, hidden: Hiding, work: ClientWork) -> str | None:
        """Return the reason why an answer is not given although noise or masks hide rows in it, or None."""
        if hidden.masked and work.masking is None:
            return "this run masks nothing, so nothing can leave under its masks"
        if not hidden.masked and self.secure_aggregation is not None:
            return "this site sends sums only inside secure aggregation"
        if not hidden.noise and self.hides_rows:
            return f"this site cannot know that a sum is about at least the {self.least_rows} rows that it demands"
        if hidden.noise and self.budget is None:
            return "this site's policy has no budget for noisy answers: budget = { epsilon = ..., delta = ... }"
        return None

    def few_rows_reason(
        self, query: Query, work: ClientWork, rows: Mapping[Split, int], rules: DisclosureRules | None
    ) -> str | None:
        """Return the reason why a noisy answer is not given by a site that has so many rows of each split, or None."""
        fewest = min((rows[split] for split in rows_read(query, work)), default=0)
        if query.hiding() is None or rules is None or fewest >= rules.least_rows:
            return None
        return f"this site has fewer than the {rules.least_rows} rows that an answer must be about"

    def most_models(self, work: ClientWork) -> int | None:
        """Return how many different models are examined at one version, None for any number."""
        return 1 if self.models_per_version is None and self.protection(work) else self.models_per_version

    @property
    def sum_demands(self) -> SumDemands:
        """Demands of this site on a secure aggregation."""
        demanded = self.secure_aggregation
        if isinstance(demanded, SumDemands):
            return demanded
        return SumDemands() if demanded is None else SumDemands(least=demanded)


def _is_stated(query: Query, work: ClientWork) -> bool:
    """Return whether the run's terms name a question with its arguments: those that name none approve none."""
    return json.loads(json.dumps(query.stated())) in work.questions


def rows_read(query: Query, work: ClientWork) -> set[Split]:
    """The rows of a site that the answer to a query depends on in a run."""
    return query.rows_read(isinstance(work.trainer, Personalizes) or bool(work.layout.private))


class ExaminedModels:
    """Counts the models that a server had a site examine, by version and rows; the same model tells nothing new.

    From scores of two models a server has a directional derivative.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[int, Split], set[bytes]] = {}

    def reject_reason(self, task: Task, rows: Collection[Split], most: int | None) -> str | None:
        """Take note of a query's model, or say why it is not examined.

        Args:
            task: the query.
            rows: what the answer depends on.
            most: how many different models at one version, None for any number.
        """
        if most is None:
            return None
        # a forest is a model, too
        models = [task.vectors[name] for name in ("model", "forest") if name in task.vectors]
        digest = hashlib.blake2b(
            b"".join(model.detach().cpu().contiguous().numpy().tobytes() for model in models)
        ).digest()
        # all are checked before any is noted, so that a model that is refused does not count as examined
        for split in rows:
            if len(self._seen.get((task.version, split), set()) | {digest}) > most:
                return f"this site examines {most} of the models of one version on its {split} rows, and no more"
        for split in rows:
            self._seen.setdefault((task.version, split), set()).add(digest)
        return None
