"""What lies in files of strangers, and what we write of it: absurd numbers, formulas, invisible letters, open modes."""

from __future__ import annotations

import csv
import json
import os
import re
import resource
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest

import piebald
from piebald.cli import main
from piebald.core.errors import SettingError
from piebald.core.plain_text import csv_text
from piebald.data.clients.table_files import read_table
from piebald.data.measures import pictures
from piebald.models.weights_folder import read_config
from piebald.report.export import score

DIGITS = "1" * 200_000
CELLS = {
    "many digits": DIGITS,
    "many digits and decimals": f"{DIGITS},5",
    "many digits per cent": f"{DIGITS}%",
    "many digits of a unit": f"{DIGITS} kg",
    "many digits of a date": f"{DIGITS}-01-01",
    "an exponent": "1e999999999999",
    "an exponent of a comma": "1,5e999999999",
    "an exponent below zero": "-1e-999999999",
    "an exponent and a unit": "1e999999999 kg",
    "an exponent and per cent": "1e308%",
    "a late date": "9999999999-01-01",
    "a date of a long year": "31.12." + "9" * 1000,
    "a time": "99999999999:99:99",
    "many signs": "+" * 200_000 + "1",
    "a long quotation": '"' + "x" * 600_000 + '"',
    "hexadecimal": "0x" + "f" * 100_000,
    "digits of Arabic": "\u0663" * 5000,
    "a thousand separators": "1" + ".234" * 10_000 + ",5",
    "brackets": f"({DIGITS})",
}
OTHERS = ("2,5", "3", "4,25 kg", "5%", "01.02.2020")


@pytest.mark.full
@pytest.mark.parametrize("name", CELLS)
def test_an_absurd_cell_is_text_or_one_sentence(name: str, tmp_path: Path) -> None:
    """Before, "1e999999999 kg" was a raw decimal.Overflow."""
    for other in OTHERS:
        rows = "".join(f"{cell};{n % 2};{'ab'[n % 2]}\n" for n, cell in enumerate([CELLS[name], other] * 6))
        (tmp_path / "t.csv").write_text(f"a;y;site\n{rows}")
        told = ""
        try:
            assert len(read_table(tmp_path / "t.csv")) == 12
            piebald.clients_from(tmp_path / "t.csv", client="site", target="y")
        except SettingError as error:
            told = str(error)
        assert told.isprintable()
        assert len(told) < 1500


# ------------------------------------------------------------------------------------------------------ configurations

SIZES = {
    "num_labels": 10**9,
    "id2label": 10**9,
    "hidden_sizes": [10**13],
    "vocab_size": 1e13,
    "dim": "1" * 5000,
    "n_layers": 10**9,
    "num_hidden_layers": 1e9,
    "encoder_layers": "1000000000",
    "depths": [2, 10**9],
    "num_experts": 10**9,
    "text_config": {"num_labels": 10**9},
    "vision_config": {"backbone_config": {"depths": [10**9]}},
}


@pytest.mark.parametrize("name", SIZES)
def test_a_configuration_of_absurd_sizes_takes_no_memory(name: str, tmp_path: Path) -> None:
    """Before, `num_labels = 10**9` took 66 seconds and ended in a raw MemoryError."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "distilbert", name: SIZES[name]}))
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(SettingError) as raised:
        read_config(tmp_path)
    assert "\n" not in str(raised.value)
    assert time.monotonic() - began < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # KiB


# ------------------------------------------------------------------------------------------------------ what is written

HOSTILE = "=cmd|' /C calc'!A0\x1b[31m\u202e\x9b2J\x07"


@pytest.mark.parametrize(
    "begin", ["=", "+", "-", "@", "\t=", "\r=", "\n@", " +", "\u202e=", "\x1b[1m=", "\uff1d", "\ufeff="]
)
def test_no_cell_and_no_heading_is_a_formula(
    begin: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before, headings of predicted.csv began as classes do, and what `score.py` prints of an exported folder."""
    table = pd.DataFrame({f"{begin}1+1": [f"{begin}HYPERLINK(1)", "plain"], "n": [-1.5, 2.0]})
    monkeypatch.setattr(
        score, "Scorer", lambda folder: SimpleNamespace(preparation=None, predict=lambda rows: dict(table))
    )
    monkeypatch.setattr(score, "read", lambda file, as_written: str(file))
    monkeypatch.setattr("sys.argv", ["score.py", "rows.csv"])
    score.main()
    by_program = capsys.readouterr().out
    assert by_program.splitlines()[2] == "plain,2.0"
    for row in csv.reader([*csv_text(table).splitlines(), *by_program.splitlines()]):
        for cell in row:
            assert cell.isprintable()
            assert cell.lstrip()[:1] not in {*"=+-@\uff1d"} or float(cell) == -1.5


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """All that commands write about rows whose classes, clients and columns a stranger has named; in an open folder."""
    folder, before = tmp_path_factory.mktemp("open"), os.umask(0)
    folder.chmod(0o755)
    rows = pd.DataFrame({"age": range(60), HOSTILE: [1.5, 2.5] * 30, "site": [f"{HOSTILE}a", f"{HOSTILE}b"] * 30})
    rows["ill"] = [f"{HOSTILE}yes", f"{HOSTILE}no", f"{HOSTILE}no"] * 20
    rows.to_parquet(folder / "rows.parquet")
    (folder / "e.toml").write_text(
        'rounds = 1\nmodel = { name = "logistic" }\nrecipe = { name = "fedavg" }\n'
        'data = { source = "rows.parquet", client = "site", target = "ill" }\n'
    )
    try:
        for line in (
            "run {0}/e.toml --out {0}/run --quiet",
            "report {0}/run --out {0}/report",
            "predict {0}/run {0}/rows.parquet --out {0}/predicted.csv",
            "predict {0}/run {0}/rows.parquet --out {0}/predicted.csv.gz",
            "export {0}/run --out {0}/model.safetensors",
            "adapt {0}/run --data {0}/rows.parquet --target ill --out {0}/adapted.safetensors --quiet",
            "backup {0}/run {0}/backup.tar",
            "restore {0}/backup.tar {0}/restored",
            "compare {0}/e.toml --out {0}/both --quiet --set seeds=[0]",
            "tune {0}/e.toml --out {0}/tuned --quiet --set tune.budget={{rounds=2}}",
        ):
            assert main(line.format(folder).split()) == 0, line
        pictures.draw(piebald.clients_from(folder / "rows.parquet", client="site", target="ill"), folder / "pictures")
        yield folder
    finally:
        os.umask(before)


GIVEN = {"rows.parquet", "e.toml"}


@pytest.mark.full
def test_what_is_written_is_its_owners_alone(written: Path) -> None:
    """Before, run.db and its journals were 644 in a folder of 755, and predicted.csv as the umask was."""
    files = [path for path in written.rglob("*") if path.is_file() and path.name not in GIVEN]
    open_to_others = [path for path in files if stat.S_IMODE(path.stat().st_mode) & 0o077]
    assert open_to_others == []
    names = {"run.db", "run.lock", "predicted.csv", "report.html", "backup.tar", "adapted.safetensors", "classes.png"}
    assert names <= {path.name for path in files}
    assert any(path.parent.name == "report" and path.suffix == ".png" for path in files)


def test_the_files_of_a_run_that_goes_on_are_its_owners_alone(written: Path, tmp_path: Path) -> None:
    """Journals of SQLite are there while it runs; what an older Piebald left open is closed."""
    from piebald.storage.store import RunStore

    run = Path(shutil.copytree(written / "restored", tmp_path / "run"))
    for path in run.iterdir():
        path.chmod(0o644)
    before = os.umask(0)
    try:
        with RunStore.open(run) as store:
            store.set_meta(label="x")
            assert (run / "run.db-wal").exists()
            for path in run.glob("run.*"):
                assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    finally:
        os.umask(before)


@pytest.mark.full
def test_nothing_that_is_written_has_invisible_letters(
    written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before, report.html had the bytes of ESC."""
    monkeypatch.chdir(tmp_path)  # where a report is written
    for path in written.rglob("*"):
        if path.suffix in (".html", ".csv", ".md", ".txt", ".log"):
            text = path.read_text("utf-8")
            assert "cmd|" in text
            assert not any(letter in text for letter in "\x1b\x9b\x07\u202e"), path
            for data in re.findall('<script type="application/json"[^>]*>(.*?)</script>', text, re.S):
                shown = str(json.loads(data))  # where JavaScript would write them otherwise
                assert "cmd|" in shown
                assert not any(repr(letter)[1:-1] in shown for letter in "\x1b\x9b\x07\u202e"), path
    for line in ("report {0}/run", "errors {0}/run", "predict {0}/run {0}/rows.parquet"):
        assert main(line.format(written).split()) == 0
        said = capsys.readouterr()
        assert not any(letter in said.out + said.err for letter in "\x1b\x9b\x07\u202e"), line
