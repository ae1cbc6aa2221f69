"""What has been measured: a JSON file that is written after each measurement, and its Markdown tables."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shared import markdown

Row = dict[str, Any]
SEEN = "Last seen on"
SPEED = "Seconds a round, beside a bare loop on the same device"


def commit() -> str:
    """The commit of this copy, or the package's version where it is no repository."""
    import piebald

    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=Path(__file__).parent, capture_output=True, text=True
    )
    return done.stdout.strip() if done.returncode == 0 else f"version {piebald.__version__}"


class Ledger:
    """Rows by table and name, kept in a file; a later run adds what is missing.

    Args:
        folder: of results.json and RESULTS.md; made if it is not there.
        about: what must be the same for rows to belong together, such as the device's name.
    """

    def __init__(self, folder: Path, about: Mapping[str, Any]) -> None:
        self.file, self.page = folder / "results.json", folder / "RESULTS.md"
        folder.mkdir(parents=True, exist_ok=True)
        kept: dict[str, Any] = json.loads(self.file.read_text()) if self.file.exists() else {}
        if kept and kept["about"] != dict(about):
            raise SystemExit(f"{self.file} holds other measurements ({kept['about']}): name another folder with --out")
        self.about = dict(about)
        self.tables: dict[str, dict[str, Row]] = kept.get("tables", {})

    def has(self, table: str, name: str) -> bool:
        """Whether a row has been measured; one that did not fit or failed is measured again."""
        row = self.tables.get(table, {}).get(name)
        return row is not None and "not measured" not in row

    def get(self, table: str, name: str) -> Row:
        """A row, empty where there is none."""
        return self.tables.get(table, {}).get(name, {})

    def put(self, table: str, name: str, row: Row) -> None:
        """Add a row, and write both files."""
        self.tables.setdefault(table, {})[name] = row
        _write(self.file, json.dumps({"about": self.about, "tables": self.tables}, indent=1))
        _write(self.page, self.markdown())

    def saw(self, part: str, card: str) -> None:
        """Note that a part has been measured now."""
        self.put(SEEN, part, {"commit": commit(), "card": card, "date": f"{datetime.date.today()}"})

    def markdown(self) -> str:
        """All tables."""
        lines = ["# Measurements", "", ", ".join(f"{name}: {value}" for name, value in self.about.items()), ""]
        for table, rows in self.tables.items():
            columns = list(dict.fromkeys(column for row in rows.values() for column in row))
            cells = [[name, *map(markdown.of_any, map(row.get, columns))] for name, row in rows.items()]
            lines += [f"## {table}", "", markdown.table(["", *columns], cells, "---"), ""]
        return "\n".join(lines)


def _write(file: Path, text: str) -> None:
    """Write a file so that whoever is killed meanwhile leaves the old one or the new one."""
    half = file.with_suffix(".part")
    half.write_text(text)
    os.replace(half, file)
