"""Predictions over HTTP: rows as JSON come in, and what `piebald predict` says of the same rows goes out.

Rows become a table that takes the way of every table to predict: the same cleaning, and the same sentences about
columns that are unlike those of training.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from piebald.core.errors import PiebaldError, SettingError, shown, unknown
from piebald.data.preparation.column_models import BooleanColumn, CategoryColumn, Column, NumericColumn
from piebald.data.preparation.preparation import Preparation, Tell
from piebald.federation.operate.page_server import Guarded, PageAddress, Token, check_installed, serve_until_stopped

if TYPE_CHECKING:
    import pandas as pd

MOST_ROWS = 10_000  # of a request
MOST_BYTES = 1 << 23  # of a request's body

log = logging.getLogger("piebald.federation")


@dataclass(frozen=True, slots=True)
class Answerer:
    """A model that answers for raw rows, wherever it was trained.

    Attributes:
        answer: returns predictions for a table, the path of one, or inputs; it gives sentences about the rows away.
        model: whose it is, in words.
        naming: how predictions name the class, in words; empty where they name none.
        preparation: how the columns of a table become inputs, None where they are numbers already.
        features: the columns that are read, None where inputs have no names.
    """

    answer: Callable[[Any, Tell], pd.DataFrame]
    model: str
    naming: str = ""
    preparation: Preparation | None = None
    features: Sequence[str] | None = None

    @property
    def names(self) -> Sequence[str] | None:
        """The names of the columns that are read, None where inputs have none."""
        return self.features if self.preparation is None else self.preparation.names_in

    def about(self, rows: Any) -> tuple[pd.DataFrame, dict[str, Any]]:
        """Return the predictions for rows, and what there is to say with them, as JSON values."""
        told = dict[str, None]()  # several models of one plan say the same
        predictions = self.answer(rows, lambda sentence: told.update({sentence: None}))
        about = {"rows": len(predictions), "model": self.model}
        about |= {"naming": self.naming} if self.naming else {}
        return predictions, about | ({"warnings": [*told]} if told else {})

    def schema(self) -> dict[str, Any]:
        """Return what the body of a request must be, as JSON Schema."""
        row: dict[str, Any] = {"type": "array"}
        if (names := self.names) is not None:
            columns = {name: {"type": ["number", "null"]} for name in names}
            required = [*names]
            if (agreed := self.preparation) is not None:
                columns = {column.name: _cell(column, column.name in agreed.as_written) for column in agreed.columns}
                required = [column.name for column in agreed.columns if not column.gaps]
            row = {"type": "object", "properties": columns, "required": required, "additionalProperties": False}
        rows = {"type": "array", "minItems": 1, "maxItems": MOST_ROWS, "items": row}
        return {
            "$schema": "https://json-schema.org/draft/2020-12/schema", "title": f"Rows to predict with {self.model}",
            "type": "object", "properties": {"rows": rows}, "required": ["rows"], "additionalProperties": False,
        }  # fmt: skip


def _cell(column: Column, as_written: bool) -> dict[str, Any]:
    """Return what a cell of a column may be, as JSON Schema."""
    words = ["string"] * (as_written or not isinstance(column, NumericColumn))
    several = isinstance(column, CategoryColumn | BooleanColumn)  # which are compared as text
    kinds = ["number"] * (several or isinstance(column, NumericColumn)) + ["boolean"] * several
    cell: dict[str, Any] = {"type": [*kinds, *words, "null"]}
    return cell | ({"examples": column.categories[:100]} if isinstance(column, CategoryColumn) else {})


def rows_in(body: bytes, names: Sequence[str] | None) -> Any:
    """Return the rows in the body of a request: a pandas DataFrame, or an array where inputs have no names.

    Args:
        body: JSON, {"rows": [...]}, each row by the names of its columns; a column that is not there is a gap.
        names: of the columns that are read.

    Raises:
        SettingError: it is no such JSON, or a value is none that a cell of a table can have.
    """
    from pydantic_core import from_json

    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise SettingError(f"the body must be JSON in UTF-8: {shown(str(error))[1:-1]}") from None
    rows = value.get("rows") if isinstance(value, dict) and len(value) == 1 else None
    if not isinstance(rows, list) or not 1 <= len(rows) <= MOST_ROWS:
        count = f", got {len(rows):,}" if isinstance(rows, list) else ""
        raise SettingError(f'the body must be {{"rows": [...]}} with 1 to {MOST_ROWS:,} rows{count}')
    if names is None:
        try:
            inputs = np.asarray(rows)
        except ValueError:
            inputs = np.asarray(None)
        if inputs.dtype.kind not in "iuf" or not np.isfinite(inputs).all():
            raise SettingError("rows must be arrays of numbers, all of one shape")
        return inputs
    import pandas as pd

    columns = dict[str, list[Any]]()
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise SettingError(f"row {number + 1} must be an object with the columns {shown(', '.join(names), 100)}")
        for name, cell in row.items():
            columns.setdefault(name, [None] * len(rows))[number] = cell
    known = {*names}
    if odd := next((name for name in columns if name not in known), None):
        raise unknown("column", odd, names)
    return pd.DataFrame({name: _cells(name, cells) for name, cells in columns.items()}, index=range(len(rows)))


def _cells(name: str, cells: Sequence[Any]) -> Any:
    """Return the cells of a column [n]: float64 numbers with NaN for null, or texts or truths with None."""
    kinds = {type(cell) for cell in cells if cell is not None}
    # a number among texts would be read in the form of these: 1.234 as 1234 where they have decimal commas
    if not any(kinds <= allowed for allowed in ({int, float}, {str}, {bool})):
        raise SettingError(
            f"column {shown(name, 40)} must have numbers, or texts, or truths, and null for gaps, and not "
            "several of them, or others"
        )
    if not kinds & {int, float}:
        return np.array(cells, dtype=object)
    try:
        numbers = np.array([math.nan if cell is None else float(cell) for cell in cells])
    except OverflowError:
        numbers = np.array([math.inf])
    if np.isinf(numbers).any():
        raise SettingError(f"column {shown(name, 40)} has a number that is too large")
    return numbers


def prediction_app(model: Answerer, token: Token, loopback: bool) -> Any:
    """The application (ASGI).

    Args:
        model: answers.
        token, loopback: see `page_server.page_app`.
    """
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, PlainTextResponse, Response
    from starlette.routing import Route

    one_by_one = threading.Lock()  # so that many requests take the memory of one

    def answered(body: bytes) -> Response:
        from pydantic_core import to_json

        try:
            with one_by_one:
                predictions, about = model.about(rows_in(body, model.names))
        except PiebaldError as error:
            return JSONResponse({"error": str(error)}, 422)
        except Exception as error:
            log.warning("a request could not be answered: %s", type(error).__name__)
            return JSONResponse({"error": "these rows cannot be predicted; the server's log says more"}, 500)
        content = to_json(about | {"predictions": predictions.to_dict("list")}, inf_nan_mode="null", fallback=str)
        return Response(content, media_type="application/json")

    async def predict(request: Request) -> Response:
        # no page of another web site may send this kind without being asked for leave by the browser
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            return JSONResponse({"error": "the body must be JSON: send Content-Type: application/json"}, 415)
        body = bytearray()
        try:
            async for block in request.stream():
                body += block
                if len(body) > MOST_BYTES:
                    raise HTTPException(413, f"the body must have at most {MOST_BYTES:,} bytes: send fewer rows")
        except ClientDisconnect:
            return Response(status_code=400)
        return await run_in_threadpool(answered, bytes(body))

    async def refused(request: Request, error: Any) -> Response:
        words = {404: "there is no such page: POST rows to /predict, and GET /schema.json says what they are",
                 405: "POST rows to /predict, and GET the other pages"}  # fmt: skip
        return JSONResponse({"error": words.get(error.status_code, error.detail)}, error.status_code, error.headers)

    routes = [
        Route("/predict", predict, methods=["POST"]),
        Route("/schema.json", lambda request: JSONResponse(model.schema()), methods=["GET"]),
        Route("/healthz", lambda request: PlainTextResponse("ok\n"), methods=["GET"]),
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: refused})
    return Guarded(app, "default-src 'none'; frame-ancestors 'none'", token, loopback)


def serve(model: Answerer, address: PageAddress, credentials: Path, tell: Callable[[Mapping[str, Any]], None]) -> None:
    """Serve predictions until the process is asked to end.

    Args:
        model: answers.
        address: where to listen.
        credentials: the folder with the token, and with the certificate of a server that others can reach.
        tell: takes the address, once requests are answered.

    Raises:
        SettingError: an extra is missing, rows have several inputs, or the address or token cannot be used.
    """
    check_installed()
    if not address.loopback and not (credentials / "certificate.pem").is_file():
        raise SettingError(
            f"--host {address.host} can be reached by others, and {credentials} has no certificate.pem: give "
            "--credentials, the folder of a server or a site, or leave --host out"
        )
    token = Token(credentials, address.loopback)
    about = {"model": model.model} | ({"token": str(credentials / "status-token")} if token.needed else {})
    app = prediction_app(model, token, address.loopback)
    serve_until_stopped(app, address, credentials, "--port", lambda url: tell({"url": url, **about}))
