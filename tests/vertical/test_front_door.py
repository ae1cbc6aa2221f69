"""`piebald transfer`, `piebald.vertical.run`, `piebald resume` and `piebald report`, as somebody would use them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import piebald
from piebald.cli import main
from piebald.core.errors import RunFolderError, SettingError
from piebald.vertical.party_store import is_transfer, read_settings

from .conftest import small


@pytest.fixture
def file(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "transfer.toml"
    path.write_text(small().text())
    return path


def test_a_file_becomes_a_run_a_page_and_numbers(file, capsys):
    assert main(["transfer", str(file), "--out", "run", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert 0 <= said["score"]["auc"] <= 1
    assert said["steps"] == 3
    assert said["seconds"] > 0
    assert said["bytes_to_target"] > 0
    assert set(said["last"]) == {"loss", "mmd2"}
    page = Path("run/report.html").read_text()
    for words in (
        "The target predicts alone",
        "MMD",
        "nothing is claimed about differential privacy",
    ):
        assert words in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert page.count("<svg") >= 2
    assert is_transfer(Path("run"))


@pytest.mark.full
def test_a_finished_run_is_shown_again_and_reported_elsewhere(file, capsys):
    assert main(["transfer", str(file), "--out", "run", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert main(["resume", "run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["score"] == first["score"]
    assert main(["report", "run", "--out", "shown", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["page"] == str(Path("shown/report.html"))


def test_from_python_with_rows_of_ones_own():
    from piebald import vertical as transfer
    from piebald.vertical.party_data import load

    settings = small(steps=2)
    watched = []
    made = transfer.run(settings, load(settings.data, 5), watch=watched.append)
    assert made.folder is None
    assert [line["step"] for line in watched] == [0, 1]
    assert piebald.vertical is transfer


def test_the_folder_of_a_party_is_no_run_of_its_own(file, capsys):
    assert main(["transfer", str(file), "--set", "steps=1", "--out", "run", "-q"]) == 0
    for words in (["resume"], ["report"], ["predict"]):
        assert main([*words, "run/target", *(["rows.csv"] if words == ["predict"] else [])]) == 2
        assert "run/target is one party's part of a transfer" in capsys.readouterr().err


def test_it_prints_a_table_without_a_terminal(file, capsys):
    assert main(["transfer", str(file), "--set", "steps=1"]) == 0
    said = capsys.readouterr()
    assert "AUC" in said.out
    assert "seconds per step" in said.out
    assert "kB per step to the target" in said.out
    assert said.err == ""
    assert Path("runs/transfer/transfer.toml").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["missing.toml"], "missing.toml cannot be read: no such file"),
        (["transfer.toml", "--set", "batch=3"], "--set batch: batch must be at least 16"),
        (["transfer.toml", "--set", "method.kernel.kind=gausian"], "did you mean 'gaussian'"),
        (["transfer.toml", "--set", "backend.kind=ckks"], "there is no backend 'ckks'"),
        (["transfer.toml", "--set", "bach=3"], "did you mean 'batch'"),
        (["transfer.toml", "--set", "data.overlapp=3"], "did you mean 'overlap'"),
        (["transfer.toml", "--set", "data.name=digits"], "must be a table with two classes"),
        (["transfer.toml", "--set", "data.overlap=5000"], "data.overlap must be at most the 455 training rows"),
        (["transfer.toml", "--set", "batch=400"], "batch must be at most"),
        (["transfer.toml", "--set", 'batch="64"'], "batch must be a whole number, got '64'"),
        (
            ["transfer.toml", "--set", "data.overlap=true"],
            "data.overlap must be a whole number, got True",
        ),
        (["transfer.toml", "--set", 'data.source=["mean aera"]'], "did you mean 'mean area'"),
        (["transfer.toml", "--party", "middle"], "--party must be source or target, got 'middle'"),
        (["transfer.toml", "--party", "source"], "a party alone needs credentials: --set runtime.credentials=FOLDER"),
        (["transfer.toml", "--party", "source", "--set", "runtime.credentials=x"], "holds no credentials"),
        (["transfer.toml", "--set", "lr=-1"], "lr"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(file, capsys, words, said):
    assert main(["transfer", *words]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.strip().splitlines()) == 1


def test_ctrl_c_says_how_to_go_on(file, capsys, monkeypatch):
    from piebald.vertical.party import Party

    def interrupted(self, view, results):
        raise KeyboardInterrupt

    monkeypatch.setattr(Party, "_update", interrupted)
    assert main(["transfer", str(file), "--out", "run"]) == 130
    assert capsys.readouterr().err.strip() == (
        "interrupted; completed server steps are saved, continue with: piebald resume run"
    )


def test_a_folder_of_other_settings_is_not_overwritten(file, capsys):
    assert main(["transfer", str(file), "--out", "run", "-q"]) == 0
    assert main(["transfer", str(file), "--out", "run", "--set", "seed=9"]) == 2
    assert "holds a transfer with other settings" in capsys.readouterr().err


def test_damaged_folders_are_one_sentence(file, tmp_path, capsys):
    assert main(["transfer", str(file), "--out", "run", "-q"]) == 0
    Path("run/source/vectors-3.safetensors").write_bytes(b"nonsense")
    assert main(["resume", "run"]) == 2
    assert "vectors-3.safetensors is damaged" in capsys.readouterr().err
    Path("run/transfer.toml").unlink()
    with pytest.raises(RunFolderError, match="not the folder of a transfer"):
        read_settings(tmp_path / "run")


@pytest.mark.parametrize(("backend", "library"), [("bfv", "tenseal")])
def test_a_missing_library_is_named_with_its_install_command(backend, library, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(SettingError, match=rf"{library}, which is not installed: pip install '\.\[he\]'"):
        small(backend=backend)
