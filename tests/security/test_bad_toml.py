"""Bad experiment files: exit code 2 and one line, however deep, long or broken they are.

Before, 1,000 nested lists ended in a RecursionError and a number of 5,000 digits in a ValueError.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import piebald
from piebald.core.errors import SettingError
from piebald.experiments.file import ExperimentSettings
from piebald.settings.toml_document import Document
from tests.security.fuzzers import fuzzer

BAD = {
    "lists": ("a = " + "[" * 1000 + "]" * 1000, "nested at most 50 deep"),
    "tables": ("a = " + "{ a = " * 300 + "1" + " }" * 300, "nested at most 50 deep"),
    "digits": ("a = " + "9" * 5000, "64 bits"),
    "a large number": (f"a = {10**30}", "64 bits"),
    "a float beyond float32": ("a = 1e300", "32 bits"),
    "twice": ("a = 1\na = 2", "cannot overwrite"),
    "control characters": ('a = "\x1b[31m"', "not TOML"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_document_is_refused_in_one_line(case: str) -> None:
    text, message = BAD[case]
    with pytest.raises(SettingError) as caught:
        Document(text, "f.toml")
    assert str(caught.value).startswith("f.toml")
    assert message in str(caught.value)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("flag", ["rounds=" + "9" * 5000, "rounds=" + "[" * 1000, "recipe.lr=1e300"])
def test_a_flag_is_refused_in_one_line(flag: str) -> None:
    with pytest.raises(SettingError, match=r"^--set") as caught:
        Document("", "f.toml").set(flag)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"\x00\x01", b"a = '\xe9'"])
def test_a_file_that_is_no_utf8_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "f.toml"
    file.write_bytes(content)
    with pytest.raises(SettingError, match=r"f\.toml"):
        ExperimentSettings.load(file)
    with pytest.raises(SettingError, match="directory"):
        ExperimentSettings.load(tmp_path)


def test_dates_and_labels_that_no_folder_can_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by the fuzzer: a date reached the run folder's JSON, a long label the file system."""
    monkeypatch.chdir(tmp_path)
    text = """
    rounds = 1
    data = { name = "digits" }
    partition = { kind = "iid", clients = 2, limit = 100 }
    model = { name = "logistic" }
    recipes = [{ name = "fedavg", label = LABEL }, { name = "local" }]
    """
    file = tmp_path / "f.toml"
    file.write_text(text.replace("LABEL", "07:32:00"))
    with pytest.raises(SettingError, match="got the date or time 07:32:00"):
        ExperimentSettings.load(file)
    file.write_text(text.replace("LABEL", f"'{'x' * 300}'"))
    plan = ExperimentSettings.load(file).plan()
    with pytest.raises(SettingError, match="at most 200 characters"):
        piebald.compare(plan.recipes, plan.clients, plan.model, rounds=1, out=tmp_path / "out")


@pytest.mark.full
def test_no_bad_file_ends_raw(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for row in fuzzer("toml_fuzzer").run(25, seed=3, processes=1):
        assert row.good, row.examples


@pytest.mark.long
@pytest.mark.full
def test_no_bad_file_of_many_ends_raw(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for row in fuzzer("toml_fuzzer").run(300, seed=4, processes=3):
        assert row.good, row.examples
