"""The rows of a site come from what an experiment's [data] can name, and are its own."""

from __future__ import annotations

import itertools
import json
import sys
import wave
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from piebald.cli import main
from piebald.core import references
from piebald.core.errors import SettingError
from piebald.data.clients.data_source import RunRows
from piebald.data.partition.split import SplitSettings
from piebald.data.preparation.agreement import fitted
from piebald.data.preparation.preparation import PrepareSettings
from piebald.experiments.file import ExperimentSettings
from piebald.experiments.run_settings import RunSettings
from piebald.federation.credentials import provisioning
from piebald.federation.hub.run_terms import terms
from piebald.federation.site import site_check
from piebald.federation.site.site_process import SiteSettings, SiteWork, site_work
from piebald.federation.site.site_rows import (
    SPLITS,
    SiteClient,
    SiteRows,
    SiteSource,
    missing_source,
    own_rows,
    rows_before_a_run,
)
from piebald.runs.prepare import prepare

from .conftest import provisioned

COLUMNS = ["a", "b", "c"]
CLASSES = ["yes", "no"]  # not in the order of the alphabet
MY_DATA = """
import numpy as np, pandas as pd, torch
from piebald import data
frame = pd.read_csv("FILE")
x, y, owner = frame[["a", "b", "c"]].to_numpy(np.float32), frame.ill.to_numpy(str), frame.hospital.to_numpy(str)
own = owner == "north"
names = ["yes", "no"]
number = torch.tensor([names.index(one) for one in y])
def pair(): return x[own], y[own]
def objects(): return x[own], y[own].astype(object)
def numbers(): return x[own], number.numpy()[own]
def owned(): return x, y, owner
def parts(): return {"train": pair(), "test": frame[:6]}
def clients(): return {one: (x[owner == one], y[owner == one]) for one in ("north", "south")}
def items(): return torch.utils.data.TensorDataset(torch.from_numpy(x[own]), number[own])
def data_set(): return data.DataSet("d", torch.from_numpy(x), number, names, owners={"ward": list(owner)})
def published(): return data.DataSet("d", torch.from_numpy(x[own]), number[own], names, train=np.arange(15),
                                     test=np.arange(15, 20))
def strangers(): return {"east": pair(), "west": pair()}
def misspelt(): return {"train": pair(), "tset": pair()}
def untrained(): return {"test": pair()}
"""


@pytest.fixture(autouse=True)
def undone(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The file of a module is listed; what a test adds is forgotten after it."""
    monkeypatch.setattr(references, "_files", {"my_rows": place / "my_rows.py"})
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    sys.modules.pop("my_rows", None)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty rows of three hospitals, as files of every kind, and the site's own folders of images and recordings."""
    folder, rng = tmp_path_factory.mktemp("rows"), np.random.default_rng(0)
    frame = pd.DataFrame(rng.normal(size=(60, 3)), columns=COLUMNS)
    frame["hospital"], frame["ill"] = ["north", "south", "east"] * 20, ["yes", "yes", "no", "no"] * 15
    frame.to_csv(folder / "all.csv", index=False)
    frame.to_csv(folder / "all.tsv", index=False, sep="\t")
    frame.drop(columns="hospital").to_csv(folder / "own.csv", index=False)
    arrays = {"x": frame[COLUMNS].to_numpy(np.float32), "y": (frame.ill == "no").to_numpy(int)}
    np.savez(folder / "own.npz", **arrays)
    np.savez(folder / "all.npz", **arrays, owner=frame.hospital.to_numpy(str))
    for name, number in itertools.product(CLASSES, range(6)):
        for kind in ("pictures", "sounds"):
            (folder / kind / name).mkdir(parents=True, exist_ok=True)
        with wave.open(str(folder / "sounds" / name / f"{number}.wav"), "wb") as out:
            out.setnchannels(1)
            out.setsampwidth(2)
            out.setframerate(16_000)
            out.writeframes(rng.integers(-9999, 9999, 100, dtype=np.int16).tobytes())
    for name in ("my_data.py", "my_rows.py"):
        (folder / name).write_text(MY_DATA.replace("FILE", (folder / "all.csv").as_posix()))
    return folder


def read(place: Path, run: RunRows | None = None, **source: Any) -> SiteRows:
    return own_rows(SiteSource(**source), place, "north", run or RunRows(CLASSES), ["north", "south", "east"])


def sizes(rows: SiteRows) -> list[int]:
    return [len(rows.rows(0, split)) for split in SPLITS]


def contents(rows: SiteRows) -> dict[tuple[float, ...], int]:
    """The class of each row, by its inputs."""
    held = [rows.rows(0, split) for split in SPLITS]
    return {tuple(x): int(y) for one in held for x, y in zip(one.x.tolist(), one.y.tolist(), strict=True)}


TABLE = {"target": "ill", "client": "hospital"}
OWN: dict[str, dict[str, str]] = {
    "all.csv": TABLE,
    "all.tsv": TABLE,
    "all.npz": {},
    "my_data.py:pair": {},
    "my_data.py:numbers": {},
    "my_data.py:owned": {},
    "my_data.py:parts": TABLE,
    "my_data.py:clients": {},
    "my_data.py:items": {},
    "my_data.py:data_set": {"client": "ward"},
    "my_data.py:published": {},
    "my_rows:owned": {},
}


@pytest.mark.parametrize("source", OWN)
def test_every_source_gives_a_site_its_own_rows(place: Path, source: str) -> None:
    """The same twenty rows, with the classes in the order of the run; those of a published test part stay there."""
    found = read(place, source=source, **OWN[source])
    frame = pd.read_csv(place / "all.csv")
    frame = frame[frame.hospital == "north"]
    wanted = {
        tuple(np.float32(row[:3]).tolist()): CLASSES.index(row[4]) for row in frame.itertuples(index=False, name=None)
    }
    got = contents(found)
    assert got.items() <= wanted.items()
    assert len(got) == 20
    divided = {"my_data.py:published": (13, 2, 5), "my_data.py:parts": (20, 0, 2)}
    assert tuple(sizes(found)) == divided.get(source, (14, 2, 4))


CHOICES = [  # what a server may choose of the rows of sites
    RunRows(CLASSES),
    RunRows(CLASSES[::-1]),
    RunRows([*CLASSES, "maybe"]),
    RunRows(CLASSES, columns={"client": "a", "features": ["c", "b"]}),
    RunRows(CLASSES, columns={"client": "hospital"}, split=SplitSettings(test=0.5)),
]


@pytest.mark.parametrize("source", [*sorted(OWN.keys() - {"my_data.py:parts"}), "my_data.py:objects"])
def test_nothing_that_a_server_chooses_makes_other_rows_of_them(place: Path, source: str) -> None:
    """Before, other classes were other rows where arrays had objects, and what had been asked counted no more."""
    records = {tuple(read(place, run, source=source, **OWN.get(source, {})).records) for run in CHOICES}
    assert len(records) == 1
    assert len(records.pop()) == 20


UNSTEADY = """
import numpy as np
rng = np.random.default_rng()
drawn = rng.normal(size=(20, 3)), np.arange(20) % 2
def at_each_call(): return rng.normal(size=(20, 3)), np.arange(20) % 2
def at_import(): return drawn
def one_column(): return np.column_stack([np.arange(20), np.arange(20), rng.random(20)]), np.arange(20) % 2
def one_row(): return np.append(np.ones((19, 3)), rng.random((1, 3)), axis=0), np.arange(20) % 2
def of_a_seed(): return np.random.default_rng(1).normal(size=(20, 3)), np.arange(20) % 2
"""


@pytest.mark.parametrize("function", ["at_each_call", "at_import", "one_column", "one_row", "of_a_seed"])
def test_rows_that_a_function_draws_anew_are_known_by_nothing(place: Path, function: str) -> None:
    """Each start of the site would have other rows, about which nothing had been asked."""
    (place / "unsteady.py").write_text(UNSTEADY)
    rows = read(place, source=f"unsteady.py:{function}")
    assert len(rows.records) == (20 if function == "of_a_seed" else 0)
    assert sum(sizes(rows)) == 20


def test_a_stated_key_knows_rows_whose_columns_change(tmp_path: Path) -> None:
    """Without one, a column that the owner adds makes other rows, about which nothing had been asked."""
    draw = np.random.default_rng(0)
    frame = pd.DataFrame({"visit": np.arange(30) + 7, "age": draw.integers(20, 90, 30), "ill": CLASSES * 15})
    changes = {
        "as it was": frame,
        "a column more": frame.assign(dose=draw.random(30)),
        "a value corrected": frame.assign(age=frame.age.where(frame.index != 4, 33)),
        "sorted": frame.sort_values("age"),
    }

    def records(key: str | None) -> list[set[int]]:
        held = []
        for table in changes.values():
            table.to_csv(tmp_path / "rows.csv", index=False)
            rows = own_rows(
                SiteSource(source="rows.csv", target="ill", key=key), tmp_path, "north", RunRows(CLASSES), ["north"]
            )
            assert key is None or rows.rows(0, "train").x.shape[1] == len(table.columns) - 2  # it is no input
            held.append({*rows.records.tolist()})
        return held

    first, *others = records("visit")
    assert len(first) == 30
    assert all(other == first for other in others)
    first, more, corrected, in_order = records(None)
    assert not first & more
    assert len(first & corrected) == 29
    assert first == in_order


@pytest.mark.parametrize("role", ["key", "person"])
def test_a_key_and_a_person_are_columns_of_a_table(role: str, place: Path) -> None:
    for source, columns in (("my_data.py:pair", {}), ("own.npz", {}), ("all.csv", TABLE)):
        with pytest.raises(SettingError, match=rf"{role} names columns of a table|no column .visit."):
            read(place, source=source, **{role: "visit"}, **columns)
    found = read(place, RunRows(CLASSES, columns={"features": ["a", "b"]}), source="all.csv", **{role: "a"}, **TABLE)
    assert found.rows(0, "train").x.shape[1] == 2  # features may name it
    whole, without = (read(place, source="all.csv", **named, **TABLE) for named in ({}, {role: "a"}))
    assert without.rows(0, "train").x.shape[1] == whole.rows(0, "train").x.shape[1] - 1  # else it is no input


def test_a_saved_hugging_face_data_set(place: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_pandas(pd.read_csv(place / "all.csv")).save_to_disk(str(place / "saved"))
    saved, table = (read(place, source=source, **TABLE) for source in ("saved", "all.csv"))
    assert contents(saved) == contents(table)
    assert saved.records.tolist() == table.records.tolist()  # by its rows, since one more changes the whole file


def test_files_in_folders_take_the_size_of_the_runs_inputs(place: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for name, number in itertools.product(CLASSES, range(6)):
        image.new("RGB", (9, 9), (number, 9, 9)).save(place / "pictures" / name / f"{number}.png")
    for inputs, source in (([3, 5, 5], "pictures"), ([1, 5, 5], "pictures"), ([1, 80], "sounds")):
        rows = read(place, RunRows(CLASSES, inputs=inputs), source=source).rows(0, "train")
        assert list(rows.x.shape[1:]) == inputs
        assert rows.x.dtype == torch.float32
    assert read(place, RunRows(CLASSES, inputs=[3, 5, 5]), source="pictures", side=4).rows(0, "train").x.shape[2] == 4


def test_what_a_site_leaves_open_is_as_the_experiment_says(place: Path) -> None:
    columns = {"target": "ill", "client": "hospital", "features": ["c", "a"]}
    rows = read(place, RunRows(CLASSES, columns=columns), source="all.csv")
    assert sum(sizes(rows)) == 60  # the site did not say that the table has rows of others
    assert rows.rows(0, "train").x.shape[1] == 2
    assert (
        read(place, RunRows(CLASSES, columns=columns), source="all.csv", features=["b"]).rows(0, "train").x.shape[1]
        == 1
    )
    numbers = read(place, RunRows(numbers=True, columns={"tokens": False}), source="own.npz").rows(0, "train")
    assert numbers.y.dtype == torch.float32  # whole numbers are classes only where the run has classes
    assert rows_before_a_run(SiteSource(source="all.csv", **TABLE), place, "north").classes == ["no", "yes"]


def test_numbers_are_classes_at_a_site_as_in_a_simulation(tmp_path: Path) -> None:
    """Two numbers are two classes by their names, and many are classes where the run names them."""
    (tmp_path / "two.csv").write_text("x,y\n" + "".join(f"{row},{1 + row % 2}.0\n" for row in range(40)))
    (tmp_path / "many.csv").write_text("x,y\n" + "".join(f"{row},{1 + row % 30}\n" for row in range(60)))
    two, many = (SiteSource(source=f"{name}.csv", target="y", test=0.0) for name in ("two", "many"))
    assert rows_before_a_run(two, tmp_path, "north").classes == ["1", "2"]
    assert rows_before_a_run(many, tmp_path, "north").classes is None
    named = RunRows([str(number) for number in range(1, 31)])
    rows = own_rows(many, tmp_path, "north", named, ["north", "south"]).rows(0, "train")
    assert len(rows) > 30
    assert torch.equal(rows.y, rows.x[:, 0].long() % 30)


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ({"source": "all.csv"}, "all.csv is a table: name the column to predict, target in .data. of site.toml, or"),
        ({"source": "all.csv", "target": "ill"}, "column 'hospital' must hold numbers, got str like 'north'"),
        ({"source": "all.csv", "target": "ill", "client": "ward"}, "there is no column 'ward'"),
        ({"source": "own.npz", "target": "ill"}, "target names columns of a table, which own.npz does not have"),
        ({"source": "my_data.py:pair", "client": "ward"}, "client names columns of a table, which my_data.py:pair"),
        (
            {"source": "my_data.py:strangers"},
            "has no client 'north', which is the name of this site, but 'east'",
        ),
        ({"source": "my_data.py:misspelt"}, "called 'tset': did you mean 'test'"),
        ({"source": "my_data.py:untrained"}, "must return a 'train' part"),
        ({"name": "breast_cancer"}, "target 'malignant' is not one of the 2 classes"),
        ({"source": "no_such_rows:load"}, "there is no module 'no_such_rows'"),
    ],
)
def test_other_rows_are_refused_in_one_sentence(place: Path, about: dict[str, str], message: str) -> None:
    with pytest.raises(SettingError, match=message) as caught:
        read(place, **about)
    assert "\n" not in str(caught.value)


def test_a_table_of_others_alone_is_none_of_the_sites(place: Path) -> None:
    with pytest.raises(
        SettingError, match="no row whose hospital is 'west', which is the name of this site, but 'east'"
    ):
        rows_before_a_run(SiteSource(source="all.csv", **TABLE), place, "west")


def test_a_module_is_imported_only_if_the_policy_names_it(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is connected, and before the module is touched."""
    monkeypatch.chdir(place)
    assert missing_source(SiteSource(source="my_rows:pair"), place, ["my_rows"]) is None
    folder = provisioned(tmp_path / "credentials", ["north"]) / "north"
    assert main(["client", str(folder), "--data", "my_rows:pair"]) == 2
    told = capsys.readouterr().err
    assert told.startswith(
        "rows: this site's policy does not allow the module 'my_rows': name it in plugins of [policy]"
    )
    assert told.count("\n") == 1
    assert "my_rows" not in sys.modules


def test_the_command_line_is_on_top_of_the_sites_settings(place: Path, tmp_path: Path) -> None:
    folder = provisioned(tmp_path / "credentials", ["north"]) / "north"
    with pytest.raises(SettingError, match=r"--target is a column of a table: name the table with --data"):
        site_work(folder, None, "ill")
    (folder / "site.toml").write_text("[data]\nsource = 'gone.csv'\ntarget = 'ill'\nvalidation = 0.0\n")
    data = site_work(folder, str(place / "all.csv"), None, client="hospital").settings.data
    assert data is not None
    assert (data.target, data.client, data.validation) == ("ill", "hospital", 0.0)
    (folder / "site.toml").write_text("[data]\nfeatures = ['age']\n")  # the table comes with the command
    data = site_work(folder, str(place / "all.csv"), "ill").settings.data
    assert data is not None
    assert (data.source, data.target, data.features) == (str(place / "all.csv"), "ill", ["age"])
    (folder / "site.toml").write_text("[data]\nfeatures = ['age']\n")
    with pytest.raises(SettingError, match=r"site.toml:1: \[data\] has neither name nor source"):
        site_work(folder, None, None)
    (folder / "site.toml").write_text("[data]\nsource = 'rows.csv'\nstandardise = 'federated'\n")
    with pytest.raises(SettingError, match=r"site.toml:1: standardise is set in the experiment"):
        site_work(folder, None, None)


def test_a_site_takes_part_with_them(place: Path, tmp_path: Path) -> None:
    """Real terms of a run, of which nobody said what the columns of the site's table are."""
    same: dict[str, Any] = {"model": {"name": "logistic"}, "recipe": {"name": "fedavg", "lr": 0.1}}
    here = {"source": str(place / "all.csv"), **TABLE, "classes": CLASSES}
    plan = ExperimentSettings.of_table(same | {"data": here}, "the test's settings").plan()  # for the work alone
    ready = prepare(next(iter(plan.recipes.values())), plan.clients, plan.model, RunSettings(rounds=1, seed=0))
    sites = ["south", "north"]
    table = same | {"partition": {"kind": "sites", "clients": sites, "inputs": [3], "classes": CLASSES}}
    values = json.loads(terms(ready.work, table, sites, sites, CLASSES))
    credentials = provisioning.read(provisioned(tmp_path / "credentials", ["south", "north"]) / "north")
    settings = SiteSettings.model_validate({"data": {"source": "all.csv", **TABLE}})
    made = SiteWork(credentials, settings, place)(values)
    assert (made.client, [len(made.clients.rows(1, split)) for split in SPLITS]) == (1, [14, 2, 4])


@pytest.mark.parametrize(("times", "shift", "said"), [
    (1.0, 0.0, None), (18.0, 0.0, "mg/dl for mmol/l"), (10.0, 0.0, "in another unit"), (1.8, 32.0, None),
])  # fmt: skip
@pytest.mark.parametrize("shared", [False, True])
def test_a_site_hears_of_columns_that_are_off_from_the_preparation_that_a_run_has(
    times: float, shift: float, said: str | None, shared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(4)
    frame = pd.DataFrame({"glucose": rng.normal(6, 1, 120).round(2), "age": rng.normal(60, 9, 120).round()})
    frame["ill"] = np.where(frame.glucose + rng.normal(size=120) > 6, "yes", "no")
    agreed = fitted(frame, "ill", least_rows=1)
    assert agreed.columns[0].kind == "number"
    if not shared:  # as of sites with a floor, which tell no quantiles
        plain = [column.model_copy(update={"values": column.values.model_copy(update={"range": []})})
                 if column.kind == "number" else column for column in agreed.columns]  # fmt: skip
        agreed = agreed.model_copy(update={"columns": plain})
    own = frame.assign(glucose=(frame.glucose * times + shift).round(2))
    own.to_csv(tmp_path / "north.csv", index=False)
    run = RunRows(["no", "yes"], prepare=PrepareSettings(agreed=agreed))
    rows = own_rows(SiteSource(source="north.csv", target="ill"), tmp_path, "north", run, ["north", "south"])
    heard = "; ".join(rows.unlike)
    if said is not None:
        assert "column 'glucose' has numbers outside" in heard
        assert said in heard
    elif times == 1:
        assert not heard
    assert "age" not in heard
    client = SiteClient(SimpleNamespace(layout=SimpleNamespace(size=5)), rows, 0)  # type: ignore[arg-type]
    settings = SimpleNamespace(policy=SimpleNamespace(reject_reason=lambda work: None))

    class Work:
        credentials = SimpleNamespace(folder=tmp_path)

        def __call__(self, terms: Any) -> SiteClient:
            return client

    work: Any = Work()
    work.settings = settings
    monkeypatch.setattr(site_check, "Consent", lambda *_: SimpleNamespace(reject_reason=lambda *_: None))
    monkeypatch.setattr(site_check, "read_values", lambda body: {})
    checks = site_check._met(work, site_check.Check("rows", True, ""), b"", lambda _: None)
    assert [check.told for check in checks if check.what == "columns"] == ([heard] if heard else [])
