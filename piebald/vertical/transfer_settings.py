"""The settings of a transfer and its TOML file, checked when they are read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from piebald.contracts.component import WordedModel
from piebald.core.arguments import STRICT, settled
from piebald.core.errors import SettingError
from piebald.core.files import settings_text
from piebald.data.preparation.cleaning import Cleaning, Rules
from piebald.federation.credentials.provisioning import Credentials, read
from piebald.settings.toml_document import Document, dumps, of_document
from piebald.vertical import encryption as backends
from piebald.vertical.encryption.backend import Backend
from piebald.vertical.loss_terms import LabelTerm, LossTerm
from piebald.vertical.protocol import Role
from piebald.vertical.transfer_methods import Method, Smmd, Split


class TransferSection(BaseModel):
    """A table with a fixed set of keys, whose values have the types that they should have."""

    model_config = ConfigDict(frozen=True, extra="forbid", **STRICT)

    @model_validator(mode="before")
    @classmethod
    def _settle(cls, values: Any) -> Any:
        return settled(values)


class TransferData(TransferSection):
    """The data of both parties.

    Attributes:
        name: name of a table of `piebald data`.
        overlap: number of co-occurring rows, which both parties hold.
        source: names of the source's features; None for the data set's own division, or every other feature.
        common: names of the source's features that the target has, too.
        source_share: share of the other rows that the source holds.
        test: share of held-out rows, if the data set has no published test part; with `files`, the share of the
            target's rows without a key, or of the co-occurring ones where both parties predict together.
    """

    name: str = "credit"
    overlap: int = Field(default=2000, ge=1)
    source: tuple[str, ...] | None = None
    common: tuple[str, ...] | None = None
    source_share: float = Field(default=0.5, gt=0, lt=1)
    test: float = Field(default=0.2, gt=0, lt=1)


class PartyFile(TransferSection):
    """A party's own table; each party reads only its own.

    Attributes:
        path: a CSV, TSV or Parquet file.
        key: the column that identifies co-occurring rows at both parties; empty in all other rows.
        columns: the features; by default all other columns.  Numbers become standard scores, text becomes 0/1 columns.
        label: the column to predict, with two values.  At the target it is optional and only scores the result.
        positive: the positive value of the label column; by default the last one in sorted order, like 1 or "yes".
        bounds: the least and the largest value of columns of numbers, which become numbers from -1 to 1; what lies
            beyond counts as the bound.  Without, a column's mean and deviation are taken from the rows.
        rows: the table that `path` was made from by a match of keys, beside which the ledger of its rows lies.
        values: the values of columns of text; any other one counts as none of them.  Without, the rows say them.
        prepare: how columns are cleaned before all else, as `map`, `unit`, `absent` and `parse` of an experiment's
            [prepare] say.
    """

    path: str
    key: str
    columns: tuple[str, ...] | None = None
    label: str | None = None
    positive: str | int | None = None
    bounds: dict[str, tuple[float, float]] = Field(default_factory=dict)
    values: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    rows: str | None = None
    prepare: Rules | None = None

    @property
    def cleaning(self) -> Cleaning | None:
        """The rules of `prepare`, None for none."""
        return None if self.prepare is None else Cleaning(**self.prepare.model_dump())

    @field_validator("prepare", mode="before")
    @classmethod
    def _as_lists(cls, value: Any) -> Any:
        absent = value.get("absent") if isinstance(value, Mapping) else None
        if not isinstance(absent, Mapping):
            return value
        # lists of settings are tuples here, which strict rules refuse
        return {**value, "absent": {k: [*words] if isinstance(words, tuple) else words for k, words in absent.items()}}

    @field_validator("bounds")
    @classmethod
    def _ordered(cls, value: dict[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
        for name, (least, largest) in value.items():
            if not -math.inf < least < largest < math.inf:
                raise ValueError(f"of {name!r} must be two numbers, the smaller first, got {[least, largest]}")
        return value

    @field_validator("columns")
    @classmethod
    def _once(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if value is not None and (not value or len(set(value)) < len(value)):
            raise ValueError(f"must name at least one column, and none twice, got {list(value)}")
        return value


class PartyFiles(TransferSection):
    """Both parties' own tables, instead of a data set; a party alone needs only its own."""

    source: PartyFile | None = None
    target: PartyFile | None = None

    def of(self, role: Role) -> PartyFile:
        """Return a party's own table.

        Raises:
            SettingError: there is none.
        """
        file: PartyFile | None = getattr(self, role)
        if file is None:
            raise SettingError(f"files.{role} is missing: give path and key of the {role}'s table under [files.{role}]")
        return file


class NetworkSettings(TransferSection):
    """Each party's network.

    Attributes:
        hidden: units of the party's own layers.
        aligned: units of the aligned layers; the last one gives the scores.
    """

    hidden: tuple[int, ...] = (128,)
    aligned: tuple[int, ...] = Field(default=(64,), min_length=1)

    @field_validator("hidden", "aligned")
    @classmethod
    def _positive(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if any(units < 1 for units in value):
            raise ValueError(f"must be numbers of units of at least 1, got {list(value)}")
        return value


class TransferRuntime(TransferSection):
    """Runtime of the parties: without credentials, two threads of this process.

    Attributes:
        credentials: the folder of a party's credentials, as `piebald provision` writes it, for a connection to the
            other party that is encrypted and authenticated.
        partner: with credentials, the name in the other party's certificate; by default the only one that is listed,
            else the first that connects, to which the run then keeps.
        timeout: seconds that a party waits for a message.
        compare: whether a simulation is also run without alignment and by FTL, unencrypted, to say whether it pays.
    """

    credentials: str | None = None
    partner: str | None = None
    timeout: float = Field(default=600.0, gt=0)
    compare: bool = True

    @model_validator(mode="after")
    def _check_partner(self) -> Self:
        if self.partner is not None and self.credentials is None:
            raise ValueError("partner is the name in the other party's certificate, so it needs credentials")
        return self

    def own_credentials(self) -> Credentials:
        """Return the credentials of the party that is here.

        Raises:
            SettingError: none are named, or they cannot be read.
        """
        if self.credentials is None:
            raise SettingError("a party alone needs credentials: --set runtime.credentials=FOLDER")
        return read(Path(self.credentials))

    @property
    def connection(self) -> str:
        """How parties that run with these settings are connected, in words."""
        if self.credentials is None:
            return "inside one process"
        return "encrypted, both parties identified by certificates (TLS 1.3)"


class TransferSettings(TransferSection, WordedModel):
    """Checked settings of a transfer.

    Attributes:
        steps: number of training steps.
        seed: seed of the split and of the co-occurring batches, which both parties know; in a simulation of both
            parties on one machine also of the initial weights and of each party's own batches, which otherwise come
            from secrets of their own.
        optimizer: "adam" or "sgd", at both parties.
        lr: its learning rate.
        beta: weight of half the squared weights in the loss.
        batch: number of each party's own rows in a step, whose moments are compared.  Rows are divided once into
            chunks of this size, a row is always together with the same others, and rows left over are not used.
        overlap_batch: number of co-occurring rows in a step, divided in the same way.
        few_rows: allow `batch` and `overlap_batch` below twice the units of the widest aligned layer, or twice the
            inputs of a split model, although sums of so few rows reveal single rows to the other party.
        balanced: whether the translator gives both classes the same weight.
        own: weight of the source's own loss, on its own batch with its own translator; it stays at the source.
        watch_every: steps between two computations of the losses, each of which costs about as much as a step.
        checkpoint_every: steps between two checkpoints.
        out: the run folder.
        files: both parties' own tables, `[files.source]` and `[files.target]`, instead of the data set of `[data]`.
        method: the method that aligns the hidden layers, see `transfer_methods`.
        backend: the encryption backend, see `encryption`.

    Examples:
        >>> from piebald import vertical
        >>> settings = vertical.TransferSettings(steps=10, backend="plain", watch_every=5)
        >>> settings.method.kind, settings.backend.security
        ('smmd', '0 bits: nothing is encrypted')
        >>> [step for step in range(settings.steps) if settings.watches(step)]
        [0, 5, 9]
    """

    steps: int = Field(default=200, ge=1)
    seed: int = Field(default=0, ge=0)
    optimizer: Literal["adam", "sgd"] = "adam"
    lr: float = Field(default=0.003, gt=0)
    beta: float = Field(default=0.0001, ge=0)
    batch: int = Field(default=256, ge=1)
    overlap_batch: int = Field(default=256, ge=1)
    few_rows: bool = False
    balanced: bool = True
    own: float = Field(default=1.0, ge=0)
    watch_every: int = Field(default=20, ge=1)
    checkpoint_every: int = Field(default=20, ge=1)
    out: str | None = None
    data: TransferData = TransferData()
    files: PartyFiles | None = None
    network: NetworkSettings = NetworkSettings()
    method: Method = Smmd()
    backend: Backend = backends.BfvBackend()
    runtime: TransferRuntime = TransferRuntime()

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self._check()

    @classmethod
    def in_words(cls) -> str:
        return "transfer"

    @classmethod
    def load(
        cls, path: str | Path, flags: Sequence[str] = (), out: str | None = None, scale: str | None = None
    ) -> Self:
        """Read settings from a file, at one of its scales, overridden by the command line's flags."""
        document = Document(settings_text(path), str(path))
        document.choose_scale(scale)
        for flag in flags:
            document.set(flag)
        if out is not None:
            document.put("out", out, "--out")
        return cls.of(document)

    @classmethod
    def of(cls, document: Document) -> Self:
        """Make settings from a document; an error names the line of the first problem."""
        try:
            return cls(**document.values)
        except SettingError as error:
            if isinstance(invalid := error.__context__, ValidationError):  # of pydantic, which knows the place
                raise of_document(invalid, document, cls) from None
            word = next((word for word in str(error).split() if word in cls.model_fields), "")
            key = next((key for key in ("method", "backend") if str(error).startswith(key)), word)
            raise SettingError(f"{document.origin((key,))}: {error}") from None

    def table(self) -> dict[str, Any]:
        """Plain values, which `dumps` writes and `of` reads."""
        return self.model_dump(exclude_none=True, mode="json")

    def text(self) -> str:
        """The settings as a TOML file."""
        return dumps(self.table())

    def lasting(self) -> dict[str, Any]:
        """The settings that stay the same throughout a run: all but the runtime and the run folder."""
        return {key: value for key, value in self.table().items() if key not in ("out", "runtime")}

    def agreed(self) -> dict[str, Any]:
        """The settings that must be the same at both parties: not the files, which each party has for itself."""
        return {key: value for key, value in self.lasting().items() if key != "files"}

    def watches(self, step: int) -> bool:
        """Return whether a step computes the losses: every `watch_every`-th, and the last; none with noise."""
        if self.method.hides_rows:
            return False
        return step % self.watch_every == 0 or step == self.steps - 1

    def terms(self, role: Role) -> list[LossTerm]:
        """The terms of the loss, from one party's side."""
        widths = self.network.aligned
        term = self.method.term(role, self.batch, self.overlap_batch, widths)
        return [term] if self.method.joint else [LabelTerm(role, self.overlap_batch, widths[-1]), term]

    def _check(self) -> None:
        """Refuse settings that would reveal rows, and settings that cannot be computed."""
        least, what = 2 * max(self.network.aligned), "the units of the widest aligned layer"
        if isinstance(self.method, Split):
            least, what = 2 * self.method.inputs, "method.inputs"
        for name in ("overlap_batch",) if self.method.joint else ("batch", "overlap_batch"):
            rows = getattr(self, name)
            if rows < least and not self.few_rows:
                raise SettingError(
                    f"{name} must be at least {least}, twice {what}, got {rows}: "
                    "gradients reveal the other party's moments, and moments of so few rows reveal single rows; "
                    "few_rows = true allows it"
                )
        if self.method.hides_rows and not self.backend.masks:
            raise SettingError(
                f"method.noise needs a backend that masks products, got {self.backend.kind}: use fixed or bfv"
            )
        if self.files is not None:
            if self.data != TransferData(test=self.data.test):
                raise SettingError("files replace the data set: of [data], give only data.test with them")
        elif self.overlap_batch > self.data.overlap:
            raise SettingError(
                f"overlap_batch must be at most data.overlap = {self.data.overlap}, got {self.overlap_batch}"
            )
        # what the source owns the target requests and the other way round, so these are all products
        for term in self.terms("source"):
            for size in (*term.owned, *term.requested):
                self.backend.check(size)
