"""The TOML file of a transfer: what may stand in it, and what is refused with its reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    field_serializer,
    field_validator,
    model_validator,
)

from piebald.component import build, sentence
from piebald.errors import SettingError, unknown
from piebald.toml_document import Document, Key, dotted, dumps
from piebald.vertical import encryption as backends
from piebald.vertical.encryption.backend import Backend
from piebald.vertical.loss_terms import LabelTerm, Term
from piebald.vertical.protocol import Role
from piebald.vertical.transfer_methods import Method, Smmd


class TransferSection(BaseModel):
    """A table with fixed keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class TransferData(TransferSection):
    """Who holds what.

    Attributes:
        name: a table of `piebald data`.
        overlap: co-occurring rows, which both parties hold.
        source: names of the source's features; None for the set's own division, or every other one.
        common: names of those that the target has, too.
        source_share: share of the other rows that the source holds.
        test: share of the rows kept for testing, where the set has no published test part; with `files`, of the
            target's labelled rows without a key.
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
        key: the column that names co-occurring rows, alike at both parties; empty in all other rows.
        columns: the features; by default all other columns.  Numbers become standard scores, words 0/1 columns.
        label: the column to predict, with two values.  The target may leave it out: there it only judges the result.
        positive: which of its values is the positive one, said for each party's own column; by default the last one in
            order, like 1 or "yes".
    """

    path: str
    key: str
    columns: tuple[str, ...] | None = None
    label: str | None = None
    positive: str | int | None = None

    @field_validator("columns")
    @classmethod
    def _once(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if value is not None and (not value or len(set(value)) < len(value)):
            raise ValueError(f"must name at least one column, and none twice, got {list(value)}")
        return value


class PartyFiles(TransferSection):
    """Both parties' own tables, in place of a data set; a party alone needs only its own."""

    source: PartyFile | None = None
    target: PartyFile | None = None


class Networks(TransferSection):
    """Each party's network.

    Attributes:
        hidden: units of its own layers.
        aligned: units of the layers that are pulled together; the last one is scored.
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
    """Where the parties run.

    Attributes:
        kind: "memory" for two threads, "sockets" for two processes, "federation" for two whose connection is encrypted
            and proves who they are.
        address: for "sockets", host:port at which the target listens; by default a free port of this machine.
        credentials: for "federation", a party's credentials, as `piebald provision` makes it; by default credentials that last as long as both
            processes on this machine.
        timeout: seconds that a party waits for a message.
    """

    kind: Literal["memory", "sockets", "federation"] = "memory"
    address: str | None = None
    credentials: str | None = None
    timeout: float = Field(default=600.0, gt=0)

    @model_validator(mode="after")
    def _check_place(self) -> Self:
        if self.credentials is not None and (self.kind != "federation" or self.address is not None):
            raise ValueError('credentials is for kind = "federation", and says the address, too')
        if self.address is not None and self.kind == "federation":
            raise ValueError('address is for kind = "sockets": with "federation" the credentials says it')
        return self

    @property
    def apart(self) -> bool:
        """Whether this is one party's, who meets the other somewhere."""
        return self.address is not None or self.credentials is not None


class _Invalid(SettingError):
    """Settings that pydantic refused, with all that it said."""

    def __init__(self, error: ValidationError, fields: Mapping[str, Any]) -> None:
        super().__init__(sentence(error, "transfer", fields))
        self.error = error


class TransferSettings(TransferSection):
    """A transfer as its file says it, checked.

    Attributes:
        steps: of training.
        seed: of the split, the first weights and the batches.
        lr: Adam's rate, at both parties.
        beta: weight of half the squared weights in the loss.
        batch: rows of each party whose moments are compared.
        overlap_batch: co-occurring rows of a step.
        balanced: the translator gives both classes the same weight.
        own: weight of the source's own loss, of its own batch under its own translator; it stays at the source.
        watch_every: steps between two looks at the losses, which cost about as much as another step.
        checkpoint_every: steps between two that can be resumed.
        out: the run folder.
        files: both parties' own tables, `[files.source]` and `[files.target]`, in place of `[data]`'s set.
        method: see below.
        backend: see below.
    """

    steps: int = Field(default=200, ge=1)
    seed: int = Field(default=0, ge=0)
    lr: float = Field(default=0.003, gt=0)
    beta: float = Field(default=0.0001, ge=0)
    batch: int = Field(default=256, ge=1)
    overlap_batch: int = Field(default=256, ge=1)
    balanced: bool = True
    own: float = Field(default=1.0, ge=0)
    watch_every: int = Field(default=20, ge=1)
    checkpoint_every: int = Field(default=20, ge=1)
    out: str | None = None
    data: TransferData = TransferData()
    files: PartyFiles | None = None
    network: Networks = Networks()
    method: Method = Smmd()
    backend: Backend = backends.Bfv()
    runtime: TransferRuntime = TransferRuntime()

    _document: Document = PrivateAttr(default_factory=lambda: Document("", "settings"))

    @field_validator("method", "backend", mode="before")
    @classmethod
    def _built(cls, value: Any, info: Any) -> Any:
        return build(info.field_name, value)

    @field_serializer("method", "backend")
    def _table(self, part: Method | Backend) -> dict[str, Any]:
        return part.table()

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise _Invalid(error, type(self).model_fields) from None
        self._check()

    @classmethod
    def load(cls, path: str | Path, flags: Sequence[str] = (), out: str | None = None) -> Self:
        """Settings from a file, with the command line's flags on top."""
        try:
            document = Document(Path(path).read_text(encoding="utf-8-sig"), str(path))
        except UnicodeDecodeError:
            raise SettingError(f"{path} is not a text file in UTF-8") from None
        except OSError as error:
            raise SettingError(f"{path} cannot be read: {(error.strerror or str(error)).lower()}") from None
        for flag in flags:
            document.set(flag)
        if out is not None:
            document.put("out", out, "--out")
        return cls.of(document)

    @classmethod
    def of(cls, document: Document) -> Self:
        """Settings from a document; the first thing that is wrong is said with its line."""
        try:
            made = cls(**document.values)
        except _Invalid as invalid:
            raise _reject_reason(invalid.error, document) from None
        except SettingError as error:
            word = next((word for word in str(error).split() if word in cls.model_fields), "")
            key = next((key for key in ("method", "backend") if str(error).startswith(key)), word)
            raise SettingError(f"{document.origin((key,))}: {error}") from None
        return made

    def table(self) -> dict[str, Any]:
        """Plain values, which `dumps` writes and `of` reads."""
        return self.model_dump(exclude_none=True, mode="json")

    def text(self) -> str:
        """The file that says the same."""
        return dumps(self.table())

    def lasting(self) -> dict[str, Any]:
        """What a run folder keeps from its start to its end: all but where a party runs and writes."""
        return {key: value for key, value in self.table().items() if key not in ("out", "runtime")}

    def agreed(self) -> dict[str, Any]:
        """What must be the same at both parties.  A party's own file is its own affair."""
        return {key: value for key, value in self.lasting().items() if key != "files"}

    def terms(self, role: Role) -> list[Term]:
        """The loss, from one party's side."""
        widths = self.network.aligned
        return [
            LabelTerm(role, self.overlap_batch, widths[-1]),
            self.method.term(role, self.batch, self.overlap_batch, widths),
        ]

    def _check(self) -> None:
        """Refuse what would give rows away, and what cannot be computed."""
        least = 2 * max(self.network.aligned)
        for name in ("batch", "overlap_batch"):
            rows = getattr(self, name)
            if rows < least:
                raise SettingError(
                    f"{name} must be at least {least}, twice the units of the widest aligned layer, got {rows}: "
                    "gradients show the other party's moments, and moments of so few rows show single rows"
                )
        if self.files is not None:
            if self.data != TransferData(test=self.data.test):
                raise SettingError("files take the place of a data set: of data, give only data.test with them")
        elif self.overlap_batch > self.data.overlap:
            raise SettingError(
                f"overlap_batch must be at most data.overlap = {self.data.overlap}, got {self.overlap_batch}"
            )
        for term in self.terms("source"):
            for size in (*term.owned, *term.asked):
                self.backend.check(size)


def _reject_reason(error: ValidationError, document: Document) -> SettingError:
    """The first reject_reason about a document, with its place."""
    first = min(error.errors(), key=lambda one: one["type"] != "extra_forbidden")
    key: Key = tuple(word for word in first["loc"])
    place = document.origin(key)
    if first["type"] == "extra_forbidden":
        sections: Mapping[str | int, type[TransferSection]] = {
            "data": TransferData, "files": PartyFiles if len(key) == 2 else PartyFile, "network": Networks, "runtime": TransferRuntime,
        }  # fmt: skip
        fields = TransferSettings.model_fields if len(key) == 1 else sections[key[0]].model_fields
        return SettingError(f"{place}: {unknown('setting of a transfer called', key[-1], fields)}")
    if first["type"] == "missing":
        return SettingError(f"{place}: {dotted(key)} is missing, and {dotted(key[:-1])} needs it")
    if first["type"].startswith("model_"):
        return SettingError(f"{place}: {dotted(key)} must be a table, [{dotted(key)}], got {first['input']!r}")
    if first["type"] == "value_error":
        said = str(first["ctx"]["error"])
        whole = said.startswith((str(key[0]), "there is no"))
        return SettingError(f"{place}: {said if whole else f'{dotted(key)} {said}'}")
    return SettingError(
        f"{place}: {sentence(error, 'transfer', TransferSettings.model_fields).removeprefix('transfer: ')}"
    )
