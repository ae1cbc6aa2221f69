"""Score the rows of a table with the model in this folder: `python score.py rows.csv > predictions.csv`.

This file stands alone.  It needs numpy, onnxruntime (model.onnx) or torch (model.pt2), and for text tokenizers.  From
Python:

    from score import Scorer
    Scorer("this/folder").predict(table)  # a pandas DataFrame, or a dict of columns

`preparation.json` says how columns become inputs, and `outputs.json` what outputs mean; both can be read.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np

GAPS = {"", "?", "NA", "N/A", "n/a", "NaN", "nan", "NULL", "null", "None", "<NA>", "NaT"}
TRUE = {"1", *["true", "yes", "y", "t", "ja", "j", "wahr", "oui", "vrai", "si", "sí", "verdadero", "vero"]}
FALSE = {"0", *["false", "no", "n", "f", "nein", "falsch", "non", "faux", "falso"]}
FORMULA = {*"=+-@\uff1d\uff0b\uff0d\uff20"}  # what a formula begins with, in the width of East Asia as well
DATE_PARTS = ("days", "day", "month", "weekday", "hour")
DATE_FORMS = {
    "day.month.year": ("%d.%m.%Y", "%d.%m.%Y %H:%M", "%d.%m.%Y %H:%M:%S"),
    "day/month/year": ("%d/%m/%Y", "%d/%m/%Y %H:%M", "%d/%m/%Y %H:%M:%S"),
    "month/day/year": ("%m/%d/%Y", "%m/%d/%Y %H:%M", "%m/%d/%Y %H:%M:%S"),
    "day-month-year": ("%d-%m-%Y", "%d-%m-%Y %H:%M", "%d-%m-%Y %H:%M:%S"),
    "month-day-year": ("%m-%d-%Y", "%m-%d-%Y %H:%M", "%m-%d-%Y %H:%M:%S"),
    "year/month/day": ("%Y/%m/%d", "%Y/%m/%d %H:%M", "%Y/%m/%d %H:%M:%S"),
    "yearmonthday": ("%Y%m%d",),
    "day, name of the month, year": ("%d-%b-%Y", "%d %b %Y", "%d %B %Y"),
}
DATE = re.compile(
    r"(\d{4})-(\d{1,2})-(\d{1,2})(?:[T ](\d{1,2}):(\d{2})(?::(\d{2})(\.\d+)?)?(Z|([+-])(\d{2}):?(\d{2}))?)?"
)
NUMBER_WITH_UNIT = re.compile(
    r"([$€£¥]?)\s*([+-]?[\d.,'\u2019 \u00a0\u202f]*\d(?:[.,]|[eE][+-]?\d+)?)(\s*(?:[%€$£¥°]|[^\W\d])\S*)?"
)
DECIMAL_COMMA = re.compile(r"[+-]?\d*,(\d{1,2}|\d{4,})")


class UnfitValue(ValueError):
    """A value that cannot be read, and the place of its row."""

    def sentence(self, first: int = 1) -> str:
        """Return what is wrong in which row, where the first one has this number."""
        return f"{self.args[0]} in row {self.args[1] + first}"

    __str__ = sentence


class Scorer:
    """The model of a folder.

    Args:
        folder: where model.onnx or model.pt2, outputs.json and, for tables, preparation.json are.
    """

    def __init__(self, folder: str | Path = ".") -> None:
        self.folder = Path(folder)
        self.meaning: dict[str, Any] = json.loads((self.folder / "outputs.json").read_text("utf-8"))
        path = self.folder / "preparation.json"
        self.preparation: dict[str, Any] | None = json.loads(path.read_text("utf-8")) if path.exists() else None
        self._run = _onnx(path) if (path := self.folder / "model.onnx").exists() else _torch(self.folder / "model.pt2")

    def predict(self, table: Any) -> dict[str, np.ndarray]:
        """Return columns of predictions: probabilities by the names of classes, or numbers.

        Args:
            table: columns [n] by name, of any order, or inputs [n, ...] as an array.
        """
        inputs = self.inputs(table)
        # in parts of 1024, so that memory does not grow with the file; one empty part gives no rows their shape
        outputs = np.concatenate([self._run(inputs[at : at + 1024]) for at in range(0, max(len(inputs), 1), 1024)])
        kind, names, temperature = (self.meaning[name] for name in ("kind", "names", "temperature"))
        if kind == "places":
            return {f"place {n}": np.array(names)[index] for n, index in enumerate(outputs.argmax(-1).T)}
        scores = outputs.reshape(len(outputs), len(names)).astype(np.float64)
        if kind == "classes":
            # less the largest, so that no exponential overflows
            scores = np.exp((scores - scores.max(1, keepdims=True)) / temperature)
            scores /= scores.sum(1, keepdims=True)
        elif kind == "labels":
            scores = np.exp(-np.logaddexp(0, -scores / temperature))  # overflows nowhere
        elif kind == "rates":
            scores = np.exp(scores)
        elif kind == "values":
            scores = scores * np.asarray(self.meaning["deviation"]) + np.asarray(self.meaning["mean"])
        return dict(zip(names, scores.T, strict=True))

    def inputs(self, table: Any) -> np.ndarray:
        """Return the model's inputs [n, ...], float32, or token ids of text, int64."""
        text = next(filter(lambda column: column["kind"] == "text", (self.preparation or {}).get("columns", ())), None)
        if isinstance(table, np.ndarray):
            return table.astype(np.float32 if text is None else np.int64)
        rules = (self.preparation or {}).get("cleaned", {})
        # what is there, and no more, as a column that is not there may be one of gaps
        table = {name: _cleaned(table, name, rules[name]) if name in rules else table[name] for name in table}
        if text is not None:
            cells = _column(table, text["name"])
            gaps = GAPS.union(self.preparation["gaps"] if self.preparation else ())
            return self._token_ids(["" if cell in gaps else cell for cell in cells], text["length"])
        if self.preparation is not None:
            return prepared(self.preparation, table, self.meaning["client"])
        columns = [_numbers(_column(table, name), name, set()) for name in self.meaning["features"] or ()]
        for name, values in zip(self.meaning["features"], columns, strict=True):
            if np.isnan(values).any():
                raise UnfitValue(f"column {name!r} has no value", int(np.argmax(np.isnan(values))))
        return np.stack(columns, 1).astype(np.float32)

    def _token_ids(self, texts: list[str], length: int) -> np.ndarray:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(self.folder / "tokenizer.json"))
        return np.array([tokenizer.encode(text).ids for text in texts], dtype=np.int64).reshape(len(texts), length)


def _cleaned(table: Any, name: str, rule: Mapping[str, Any]) -> list[str]:
    """Return the cells of a column after what clients agreed on is done to them: gaps, spellings, forms and units."""
    form, units, values = rule["form"], rule["units"], list(table[name])
    texts = any(isinstance(value, str) for value in values)
    # text that a rule says how to read stays as it is written, of which 1.250 may be 1250
    cells = [str(value).strip() for value in values] if texts and units else _column(table, name)
    folded = {_folded(spelling): word for spelling, word in rule["map"].items()}
    absent = {_folded(word) for word in rule["absent"]}
    cells = ["" if cell in GAPS or _folded(cell) in absent else rule["map"].get(cell, folded.get(_folded(cell), cell))
             for cell in cells]  # fmt: skip
    if units:
        read = [_with_unit(cell, form if texts else ".", name, row) for row, cell in enumerate(cells)]
        if rule["alike"] and len(different := sorted({unit for _, unit in read} - {""})) > 1:
            raise ValueError(
                f"column {name!r} has numbers in {', '.join(different)}, and no rule makes one unit of them"
            )
        return [_in_unit(number, unit, units, name, row) for row, (number, unit) in enumerate(read)]
    for row, cell in enumerate(cells):
        if form and cell and not DATE.fullmatch(cell):
            cells[row] = _read_dates({cell}, DATE_FORMS[form]).get(cell, "")
            if not cells[row]:
                raise UnfitValue(f"column {name!r} must have a date of the form {form} in each row, got {cell!r}", row)
    return cells


def _with_unit(cell: str, point: str, name: str, row: int) -> tuple[float, str]:
    """Return a number, NaN for a gap, and the unit that it is written with in small letters; 12 % is 0.12."""
    match = NUMBER_WITH_UNIT.fullmatch(cell.replace("\u2212", "-"))
    number = match[2] if match else ""
    if point:
        number = re.sub(f"[{'.,'.replace(point, '')}'\u2019 \u00a0\u202f]", "", number).replace(",", ".")
    try:
        value = float(number) if cell else np.nan
    except ValueError:
        raise UnfitValue(f"column {name!r} must have a number in each row, got {cell!r}", row) from None
    unit = re.sub("[°º.]", "", match[1] + (match[3] or "")).strip().lower() if match else ""
    unit = unit.replace("\u00b5", "u").replace("\u03bc", "u")
    return (value / 100, "") if unit == "%" else (value, unit)


def _in_unit(number: float, unit: str, units: Mapping[str, Any], name: str, row: int) -> str:
    """Return a number in the unit of training rows as text, "" for a gap."""
    change = units.get("*") or units.get(unit)
    if change is None:
        raise UnfitValue(f"column {name!r} has a number in {unit!r}, which no rule converts,", row)
    return "" if np.isnan(number) else repr(float(change[0] * number + change[1]))


def _folded(word: str) -> str:
    return " ".join(word.split()).casefold()


def prepared(preparation: Mapping[str, Any], table: Any, client: str | None = None) -> np.ndarray:
    """Return the inputs [n, d] that the columns of a client's table become, float32."""
    lines = preparation.get("harmonised", {}).get(client, {})
    gaps, groups = set(preparation.get("gaps", ())), dict[str, list[list[np.ndarray]]]()
    for column in preparation["columns"]:
        name, kind = column["name"], column["kind"]
        if name not in table and not column["gaps"]:
            raise ValueError(f"the table has no column {name!r}")
        cells = _column(table, name) if name in table else [""] * _length(table)
        missing = [np.array([cell in GAPS | gaps for cell in cells], dtype=np.float64)] if column["gaps"] else []
        if kind == "number":
            slope, offset = lines.get(name, (1.0, 0.0))
            numbers = _numbers(cells, name, gaps, column.get("unit", ""))
            values = slope * numbers + offset
            if column["values"]["scale"] == "log" and (values <= -1).any():
                raise UnfitValue(
                    f"column {name!r} has a number without a logarithm of 1 + x", int(np.argmax(values <= -1))
                )
            values = _scaled(values, column["values"])
            _put(groups, f"numbers {column['values']['scale']}", [values], missing)
        elif kind == "date":
            parts = _dates(_in_iso_form(cells, gaps, column.get("forms", ())), name, gaps)
            for index, part in enumerate(part for part in DATE_PARTS if part in column["values"]):
                learnt = column["values"][part]
                group = f"parts {learnt['scale']}" if index else f"numbers {learnt['scale']}"
                _put(groups, group, [_scaled(parts[part], learnt)], [] if index else missing)
        elif kind == "boolean":
            truths = [_truth(cell, name, row, gaps) for row, cell in enumerate(cells)]
            filled = [float(column["common"]) if truth is None else truth for truth in truths]
            _put(groups, "boolean", [np.array(filled, dtype=np.float64)], missing)
        else:
            _put(groups, f"category {column['coding']}", _coded(cells, column, gaps), [])
    order = ("numbers", "parts", "boolean", "category one-hot", "category embedding")
    blocks = [
        block
        for kind in order
        for group, (values, missing) in groups.items()
        if group.startswith(kind)
        for block in (*values, *missing)
    ]
    return np.stack(blocks, 1).astype(np.float32)


def _put(groups: dict[str, Any], group: str, values: list[np.ndarray], missing: list[np.ndarray]) -> None:
    """Add columns to a group, which has its values first and its indicators of gaps after them."""
    known = groups.setdefault(group, [[], []])
    known[0] += values
    known[1] += missing


def _scaled(values: np.ndarray, learnt: Mapping[str, Any]) -> np.ndarray:
    """Return numbers with gaps filled in, on the scale that clients agreed on."""
    values = np.where(np.isnan(values), learnt["median"], values)
    scale = learnt["scale"]
    if scale == "rank":
        quantiles = np.array(learnt["quantiles"])
        ranks = np.linspace(0, 1, len(quantiles))
        # values that fill several quantiles take the middle of their ranks, as scikit-learn's QuantileTransformer does
        below = np.interp(values, quantiles, ranks)
        above = -np.interp(-values, -quantiles[::-1], -ranks[::-1])
        middle = np.where(values == quantiles[-1], 1.0, (below + above) / 2)
        return np.where(values == quantiles[0], 0.0, middle)
    if scale == "none":
        return values
    if scale == "log":
        values = np.log1p(values)
    if scale == "power":  # Yeo and Johnson (2000), eq. 2.1
        low, high, exponent = np.minimum(values, 0), np.maximum(values, 0), learnt["exponent"]
        high = np.log1p(high) if exponent == 0 else ((high + 1) ** exponent - 1) / exponent
        low = -np.log1p(-low) if exponent == 2 else -((1 - low) ** (2 - exponent) - 1) / (2 - exponent)
        values = np.where(values < 0, low, high)
    return np.asarray((values - learnt["mean"]) / learnt["deviation"])


def _coded(cells: list[str], column: Mapping[str, Any], gaps: set[str]) -> list[np.ndarray]:
    """Return a column for each category, or one with their numbers: -1 for others and -2 for gaps."""
    numbers = {name: index for index, name in enumerate(column["categories"])}
    count, empty = len(numbers), -2 if column["gaps"] else -1
    codes = np.array([empty if cell in GAPS | gaps else numbers.get(cell, -1) for cell in cells], dtype=np.float64)
    if column["coding"] == "embedding":
        return [codes]
    coded = [codes == index for index in range(count)]
    coded += [codes == -2] if column["gaps"] else []
    coded += [codes == -1] if column["rare"] else []
    return [part.astype(np.float64) for part in coded]


def _numbers(cells: list[str], name: str, gaps: set[str], unit: str = "") -> np.ndarray:
    """Return numbers, which may have the unit that training rows have; 12 % is 0.12.

    A comma before three digits may stand between thousands, unless another cell tells that commas are of decimals.
    """
    plain = [cell.replace("\u2212", "-") for cell in cells]  # as typesetters write it
    if unit:
        plain = [cell.replace(unit, "").replace(" ", "") for cell in plain]
    if any(map(DECIMAL_COMMA.fullmatch, plain)):
        plain = [cell.replace(",", ".") for cell in plain]
    numbers = np.full(len(cells), np.nan)
    for row, cell in enumerate(cells):
        try:
            if cell not in GAPS | gaps:
                numbers[row] = float(plain[row] + "e-2" * (unit == "%" and unit in cell))
        except ValueError:
            form = " with a point before decimals and nothing between thousands" if "," in cell else ""
            raise UnfitValue(f"column {name!r} must have a number{form} in each row, got {cell!r}", row) from None
    return numbers


def _truth(cell: str, name: str, row: int, gaps: set[str]) -> float | None:
    if cell in GAPS | gaps:
        return None
    if cell.lower() not in TRUE | FALSE:
        raise UnfitValue(f"column {name!r} must have true or false in each row, got {cell!r}", row)
    return float(cell.lower() in TRUE)


def _dates(cells: list[str], name: str, gaps: set[str]) -> dict[str, np.ndarray]:
    """Return the parts of dates: days since 1970, and those of the calendar in UTC."""
    rows = [[np.nan] * 5 if cell in GAPS | gaps else _date(cell, name, row) for row, cell in enumerate(cells)]
    columns = np.array(rows, dtype=np.float64).reshape(len(rows), 5).T
    return dict(zip(DATE_PARTS, columns, strict=True))


def _in_iso_form(cells: list[str], gaps: set[str], forms: Collection[str]) -> list[str]:
    """Return dates like 2024-05-31 where all are written in one other form; of several, the forms of training count."""
    different = {cell for cell in cells if cell not in GAPS | gaps}
    readings = {form: dates for form, styles in DATE_FORMS.items() if (dates := _read_dates(different, styles))}
    some = [readings[form] for form in forms if form in readings] or [*readings.values()]
    dates = some[0] if some and all(other == some[0] for other in some) else {}
    return [dates.get(cell, cell) for cell in cells]


def _read_dates(cells: Collection[str], styles: Collection[str]) -> dict[str, str]:
    """Return all dates in ISO form by their text, none unless one of these styles fits each."""
    dates = {}
    for cell in cells:
        for style in styles:
            with suppress(ValueError):
                dates[cell] = datetime.strptime(cell, style).isoformat()
        if cell not in dates:
            return {}
    return dates


def _date(cell: str, name: str, row: int) -> list[float]:
    match = DATE.fullmatch(cell)
    try:
        *numbers, fraction, _, sign, hours, minutes = match.groups(default="0")  # type: ignore[union-attr]
        year, month, day, hour, minute, second = map(int, numbers)
        moment = datetime(year, month, day, hour, minute, second, tzinfo=UTC)
    except (AttributeError, ValueError):
        raise UnfitValue(f"column {name!r} must have a date like 2024-05-31, got {cell!r}", row) from None
    zone = timedelta(hours=int(hours), minutes=int(minutes)) * (-1 if sign == "-" else 1)
    moment += timedelta(seconds=float(fraction)) - zone
    parts = moment + timedelta(seconds=0.5)  # to the nearest second
    return [moment.timestamp() / 86_400, parts.day, parts.month, parts.weekday(), parts.hour]


def _column(table: Any, name: str) -> list[str]:
    """Return the cells of a column as text without blanks around it; "3" for 3.0 where all of them are numbers."""
    if name not in table:
        raise ValueError(f"the table has no column {name!r}")
    values = list(table[name])
    # only NaN is unequal to itself
    cells = ["" if value is None or value != value else str(value).strip() for value in values]
    # a column with one word keeps "3.0" as it is, since there it may be a name
    numeric = all(not isinstance(value, str) for value in values) or all(map(_is_number, cells))
    return [_plain(cell) if numeric and cell not in GAPS and _is_number(cell) else cell for cell in cells]


def _is_number(cell: str) -> bool:
    try:
        float(cell or 0)
    except ValueError:
        return cell in GAPS
    # Python reads 1_000 as a number, and leading zeros are of codes such as postal ones
    return "_" not in cell and re.match(r"0\d", cell) is None


def _plain(cell: str) -> str:
    number = float(cell)
    return str(int(number)) if number.is_integer() else repr(number)


def _length(table: Any) -> int:
    return len(table[next(iter(table))])


def _onnx(path: Path) -> Callable[[np.ndarray], np.ndarray]:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path))
    name = session.get_inputs()[0].name
    return lambda inputs: np.asarray(session.run(None, {name: inputs})[0])


def _torch(path: Path) -> Callable[[np.ndarray], np.ndarray]:
    import torch

    module: Any = torch.export.load(str(path)).module()
    return lambda inputs: np.asarray(module(torch.from_numpy(inputs)).detach().numpy())


def read(path: str | Path, as_written: Collection[str] = ()) -> Any:
    """Return the columns of a table of text, or the array x of an .npz file.

    Args:
        path: of the file.
        as_written: columns whose commas stay as they are, since rules of cleaning say how they are read.
    """
    if str(path).endswith(".npz"):
        return np.load(path)["x"]
    opened = gzip.open(path, "rb") if str(path).endswith(".gz") else open(path, "rb")  # noqa: SIM115 - closed below
    with opened as file:
        text = io.TextIOWrapper(io.BytesIO(file.read()), encoding="utf-8-sig", newline="").read()
    if said := re.match(r'"?sep=(.)"?\r?\n', text):  # a line for Excel
        text = text[said.end() :]
    header = text.partition("\n")[0]
    separator = said[1] if said else max(",;\t", key=header.count)
    names, *rows = [row for row in csv.reader(io.StringIO(text), delimiter=separator) if row]
    commas = separator == ";"  # of decimals, in files with semicolons
    columns = zip(*rows, strict=True) if rows else [[] for _ in names]
    return {name: [re.sub(r"^([+-]?\d+),(\d+)$", r"\1.\2", cell) if commas else cell for cell in cells]
            if name not in as_written else [*cells]
            for name, cells in zip(names, columns, strict=True)}  # fmt: skip


def main() -> None:
    """Print the predictions for the rows of a file."""
    if len(sys.argv) != 2:
        sys.exit("give the file of rows: python score.py rows.csv")
    try:
        scorer = Scorer(Path(__file__).parent)
        rules = (scorer.preparation or {}).get("cleaned", {})
        as_written = {name for name, rule in rules.items() if rule["units"] or rule["form"]}
        predictions = scorer.predict(read(sys.argv[1], as_written))
    except UnfitValue as error:
        sys.exit(f"{sys.argv[1]}: {error.sentence(2)}")  # after the names of the columns
    except (OSError, ValueError) as error:
        sys.exit(f"{sys.argv[1]}: {error}")
    writer = csv.writer(sys.stdout)
    writer.writerow(map(_cell, predictions))
    writer.writerows(map(_cell, row) for row in zip(*(values.tolist() for values in predictions.values()), strict=True))


def _cell(value: object) -> object:
    """Return what stands in a cell of a spreadsheet: text that would be a formula there gets an apostrophe."""
    if not isinstance(value, str):
        return value
    text = " ".join("".join(letter for letter in value if letter.isprintable() or letter.isspace()).split())
    return f"'{text}" if text[:1] in FORMULA else text


if __name__ == "__main__":
    main()
