"""Own rows from the experiment file, for every command: tables, arrays, folders, functions."""

from __future__ import annotations

import itertools
import json
import sys
import wave
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from sklearn.datasets import load_breast_cancer

from piebald.core import references

from .conftest import Command

THREE_LINES = """\
data = { source = "patients.csv", client = "hospital", target = "benign" }
model = { name = "mlp" }
recipe = { name = "fedavg" }
"""


@pytest.fixture(autouse=True)
def undone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Modules and folders that a test adds are forgotten after it."""
    monkeypatch.setattr(references, "_files", {})
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("my_"):
            del sys.modules[name]


@pytest.fixture
def patients(tmp_path: Path) -> pd.DataFrame:
    """A table of three hospitals, in patients.csv."""
    found = load_breast_cancer()
    x = (found.data - found.data.mean(0)) / found.data.std(0)
    frame = pd.DataFrame(x[:300, :6], columns=[f"m{number}" for number in range(6)])
    frame["hospital"] = np.array(["north", "south", "west"])[np.arange(300) % 3]
    frame["benign"] = np.where(found.target[:300] == 1, "yes", "no")
    frame.to_csv(tmp_path / "patients.csv", index=False)
    return frame


def write(folder: Path, text: str) -> Path:
    file = folder / "mine.toml"
    file.write_text(text)
    return file


@pytest.mark.full
def test_three_lines_and_a_table(command: Command, tmp_path: Path, patients: pd.DataFrame) -> None:
    file = write(tmp_path, THREE_LINES)
    said = command("run", file, "--set", "rounds=2", "--out", "run", "--json")
    assert said.code == 0, said.err
    shown = command("report", "run", "--json")
    assert shown.code == 0, shown.err
    page = Path(json.loads(shown.out)["page"]).read_text()
    assert all(hospital in page for hospital in ("north", "south", "west"))
    again = command("resume", "run", "--json")
    assert (again.code, json.loads(again.out)["accuracy"]) == (0, json.loads(said.out)["accuracy"])


@pytest.mark.full
def test_other_commands_take_it_too(command: Command, tmp_path: Path, patients: pd.DataFrame) -> None:
    file = write(tmp_path, THREE_LINES + "rounds = 1\nseeds = [0, 1]\n".replace("rounds", "rounds", 1))
    said = command("compare", file, "--out", "both", "--json")
    assert said.code == 0, said.err
    said = command("data", "show", "patients.csv", "--client", "hospital", "--target", "benign", "--json")
    assert [row["client"] for row in json.loads(said.out)["clients"]] == ["north", "south", "west"]
    patients.drop(columns="hospital").iloc[:60].to_csv(tmp_path / "new.csv", index=False)
    patients.iloc[:60].to_csv(tmp_path / "with_client.csv", index=False)
    runs = sorted((tmp_path / "both").glob("*/seed-0"))
    tables = [command("adapt", runs[0], "--data", name, "--json") for name in ("new.csv", "with_client.csv")]
    assert [said.code for said in tables] == [0, 0], tables
    assert json.loads(tables[0].out)["methods"] == json.loads(tables[1].out)["methods"]


def test_the_partition_divides_a_table_without_clients(
    command: Command, tmp_path: Path, patients: pd.DataFrame
) -> None:
    patients.drop(columns="hospital").to_csv(tmp_path / "patients.csv", index=False)
    text = THREE_LINES.replace('client = "hospital", ', "") + 'partition = { kind = "iid", clients = 4 }\nrounds = 1\n'
    said = command("run", write(tmp_path, text), "--out", "run", "--json")
    assert said.code == 0, said.err
    said = command(
        "run", write(tmp_path, text.replace('partition = { kind = "iid", clients = 4 }\n', "")), "--out", "r"
    )
    assert said.code == 2
    assert "needs a section [partition] with a kind, or a client in [data]" in said.err


def parquet(folder: Path, frame: pd.DataFrame) -> str:
    pytest.importorskip("pyarrow")
    frame.to_parquet(folder / "rows.parquet")
    return 'source = "rows.parquet", client = "hospital", target = "benign"'


def tsv(folder: Path, frame: pd.DataFrame) -> str:
    frame.to_csv(folder / "rows.tsv", sep="\t", index=False)
    return 'source = "rows.tsv", client = "hospital", target = "benign", features = ["m1", "m3"]'


def arrays(folder: Path, frame: pd.DataFrame) -> str:
    x = frame[[f"m{number}" for number in range(6)]].to_numpy(np.float32)
    np.savez(folder / "rows.npz", x=x, y=(frame.benign == "yes").to_numpy(), owner=frame.hospital.to_numpy(str))
    return 'source = "rows.npz"'


def nested(root: Path, owners: Sequence[str], labels: Sequence[str], ending: str) -> Iterator[Path]:
    """Eight files to write for each owner and label, in a folder of each."""
    for owner, label in itertools.product(owners, labels):
        place = root / owner / label
        place.mkdir(parents=True)
        yield from (place / f"{number}{ending}" for number in range(8))


def images(folder: Path, frame: pd.DataFrame) -> str:
    image = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(0)
    for file in nested(folder / "pictures", ("north", "south"), ("cat", "dog"), ".png"):
        image.fromarray(rng.integers(0, 255, (9, 9, 3), dtype=np.uint8)).save(file)
    (folder / "pictures" / "north" / ".ipynb_checkpoints").mkdir()  # what other programs leave is not read
    (folder / "pictures" / "north" / ".ipynb_checkpoints" / "0.png").write_text("no image")
    (folder / "pictures" / "north" / "cat" / "._0.png").write_text("no image")
    return 'source = "pictures", client = "hospital", side = 8'


def recordings(folder: Path, frame: pd.DataFrame) -> str:
    rng = np.random.default_rng(0)
    for file in nested(folder / "sounds", ("a", "b"), ("yes", "no"), ".wav"):
        with wave.open(str(file), "wb") as out:
            out.setnchannels(1)
            out.setsampwidth(2)
            out.setframerate(1000)
            out.writeframes(rng.integers(-9999, 9999, 100, dtype=np.int16).tobytes())
    return 'source = "sounds", client = "room", seconds = 0.1, rate = 1000'


def saved(folder: Path, frame: pd.DataFrame) -> str:
    pytest.importorskip("datasets").Dataset.from_pandas(frame).save_to_disk(str(folder / "saved"))
    return 'source = "saved", client = "hospital", target = "benign"'


RETURNED = {
    "a data set": "data.digits()",
    "clients": "partition.Iid(clients=3, limit=90).split(data.digits())",
    "rows and owners": "(np.random.rand(60, 4), np.arange(60) % 2, np.arange(60) % 3)",
    "columns and owners": "(pd.DataFrame(np.random.rand(60, 4)), pd.Series(np.arange(60) % 2), "
    "pd.Series(list('abc') * 20))",
    "a data set with owners": "data.DataSet('d', torch.rand(60, 4), torch.arange(60) % 2, ['n', 'y'], "
    "owners={'ward': list('abc') * 20, 'sex': list('fm') * 30})",
    "rows": "(np.random.rand(60, 4), np.arange(60) % 2)",
    "a torch data set": "torch.utils.data.TensorDataset(torch.rand(60, 4), torch.arange(60) % 2)",
    "a table": "pd.DataFrame({'who': list('ab') * 20, 'a': range(40), 'b': 1.0, 'label': [0, 0, 1, 1] * 10})",
    "clients' own parts": "{n: {'train': (np.random.rand(9, 4), np.arange(9) % 2), 'test': (np.random.rand(3, 4), "
    "np.arange(3) % 2)} for n in 'ab'}",
}
NEEDS = {
    "a data set": 'partition = { kind = "iid", clients = 3, limit = 90 }',
    "rows": 'partition = { kind = "iid", clients = 3 }',
    "a torch data set": 'partition = { kind = "iid", clients = 3 }',
}
COLUMNS = {"a table": 'client = "who"\ntarget = "label"', "a data set with owners": 'client = "ward"'}


@pytest.mark.parametrize("made", [parquet, tsv, arrays, images, recordings, saved], ids=lambda made: made.__name__)
def test_every_kind_of_source(
    command: Command, tmp_path: Path, patients: pd.DataFrame, made: Callable[[Path, pd.DataFrame], str]
) -> None:
    about = made(tmp_path, patients)
    text = f"rounds = 1\ndata = {{ {about} }}\nmodel = {{ name = 'mlp' }}\nrecipe = {{ name = 'fedavg' }}\n"
    said = command("run", write(tmp_path, text), "--out", "run", "--json")
    assert said.code == 0, said.err


@pytest.mark.parametrize("what", RETURNED)
def test_everything_a_function_may_return(command: Command, tmp_path: Path, what: str) -> None:
    """The file is found beside the experiment, whatever the current folder is."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    code = "import numpy as np, pandas as pd, torch\nfrom piebald import data, partition\n"
    code += f"def load():\n    return {RETURNED[what]}\n"
    (folder / "my_data.py").write_text(code)
    text = f'rounds = 1\n{NEEDS.get(what, "")}\n[data]\nsource = "my_data.py:load"\n{COLUMNS.get(what, "")}\n'
    text += '[model]\nname = "mlp"\n[recipe]\nname = "fedavg"\n'
    said = command("run", write(folder, text), "--out", "run", "--json")
    assert said.code == 0, said.err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('source = "gone.csv", target = "benign"', "there is no file or folder"),
        ('source = "mine.toml"', "an .npz file, a folder, or a function like 'my_data.py:load'"),
        ('source = "patients.csv", client = "hospital"', "a table needs target='...'"),
        ('source = "patients.csv", client = "ward", target = "benign"', "there is no column 'ward'"),
        ('source = "patients.csv", target = "benign", colour = 3', "there is no setting of [data] called 'colour'"),
        ('name = "digits", source = "patients.csv"', "give the name of a data set, or a source of your own"),
        (
            'name = "digits", client = "hospital"',
            "client names columns of a table, which data set 'digits' does not have",
        ),
        ('source = "pickled.npz"', "y.npy holds Python objects, which are never unpickled: save numbers, or text"),
        ('source = "both"', "both holds images and WAV recordings: leave one of them"),
        ('source = "splits", target = "y"', "splits holds the splits train, test: name the folder of one, like"),
        ('source = "my_gone.py:load"', "there is no file my_gone.py: give its path"),
        ('source = "my_data.py:lod"', "there is no data source in my_data.py called 'lod': did you mean 'load'?"),
        ('source = "my_data.py:load"', "my_data.py:load fails: ZeroDivisionError: division by zero"),
        ('source = "my_data.py:leave"', "my_data.py:leave fails: SystemExit: 7"),
        ('source = "my_data.py:three"', "clients must come from"),
        ('source = "my_broken.py:load"', "my_broken cannot be imported: NameError: name 'nothing' is not defined"),
    ],
)
def test_bad_sources_are_one_sentence(
    command: Command,
    tmp_path: Path,
    patients: pd.DataFrame,
    capsys: pytest.CaptureFixture[str],
    line: str,
    message: str,
) -> None:
    (tmp_path / "my_data.py").write_text(
        "def load():\n    return 1 / 0\ndef leave():\n    raise SystemExit(7)\ndef three():\n    return 3\n"
    )
    (tmp_path / "my_broken.py").write_text("nothing")
    np.savez(tmp_path / "pickled.npz", x=np.zeros((2, 2)), y=np.array(["a", "b"], dtype=object))
    for file in ("0.png", "0.wav"):
        (tmp_path / "both" / "cat").mkdir(parents=True, exist_ok=True)
        (tmp_path / "both" / "cat" / file).touch()
    if "splits" in line:
        datasets = pytest.importorskip("datasets")
        rows = datasets.Dataset.from_dict({"x": [1.0], "y": [0]})
        datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(str(tmp_path / "splits"))
        capsys.readouterr()  # its progress
    text = THREE_LINES.replace('source = "patients.csv", client = "hospital", target = "benign"', line)
    said = command("run", write(tmp_path, text + 'partition = { kind = "iid", clients = 2 }\n'), "--out", "run")
    assert said.code == 2, said
    assert message in said.err
    assert said.err.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.full
def test_whole_numbers_are_predicted_if_the_file_says_so(
    command: Command, tmp_path: Path, patients: pd.DataFrame
) -> None:
    patients.assign(benign=[20 + place % 12 for place in range(300)]).to_csv(tmp_path / "patients.csv", index=False)
    text = "rounds = 1\nloss = 'huber'\n" + THREE_LINES
    said = command("run", write(tmp_path, text), "--out", "run")
    assert said.code == 2
    told = "mine.toml:2: loss 'huber' predicts numbers, but the targets are 12 classes: set regression = true"
    assert told in said.err
    said = command("run", write(tmp_path, text), "--set", "data.regression=true", "--out", "run", "--json")
    assert (said.code, "absolute_error" in json.loads(said.out)) == (0, True), said.err
    said = command("adapt", "run", "--data", "patients.csv", "--json")
    assert said.code == 0, said.err


def test_a_source_of_the_command_line_is_found_from_everywhere(
    command: Command, tmp_path: Path, patients: pd.DataFrame, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, the run folder kept it relative to the folder in which the run was started."""
    file = write(tmp_path, THREE_LINES.replace("patients.csv", "gone.csv") + "rounds = 1\n")
    said = command("run", file, "--set", "data.source=patients.csv", "--out", "run", "--json")
    assert said.code == 0, said.err
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    said = command("resume", "../run", "--rounds", "2", "--json")
    assert (said.code, json.loads(said.out)["rounds"]) == (0, 2), said.err
