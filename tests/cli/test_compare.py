"""The command compare: models of recipes, and what it prints."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from piebald.cli.comparing import print_comparison
from piebald.core import progress
from piebald.report.comparison import Comparison
from piebald.report.tables import History
from piebald.storage.store import RunStore

from .conftest import Command

FILE = """
rounds = 1
data = { name = "digits" }
partition = { kind = "iid", clients = 3, limit = 90 }
model = { name = "logistic" }
[[recipes]]
name = "local"
model = { name = "mlp", hidden = [8] }
[[recipes]]
name = "fedavg"
label = "it's"
"""


def test_a_file_gives_recipes_models_and_names_them_in_errors(command: Command, tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(FILE)
    code, out, err = command("compare", "own.toml", "--out", "out", "--set", "recipes.1.cohort=9")
    assert (code, out) == (2, "")
    assert err.startswith('recipe "it\'s": --set recipes.1.cohort: recipes[1].cohort is 9 but there are 3 clients')
    assert not (tmp_path / "out").exists()
    for value, words in (("3", "must be a table"), ("mlpp", "did you mean 'mlp'")):
        code, _, err = command("compare", "own.toml", "--set", f"recipes.0.model={value}")
        assert code == 2
        assert words in err
    assert command("compare", "own.toml", "--out", "out", "--quiet")[0] == 0
    with History(tmp_path / "out" / "local" / "seed-0") as history:
        assert history.meta["parameters"] == 64 * 8 + 8 + 8 * 10 + 10
    assert command("resume", "out/local/seed-0", "--quiet")[0] == 0  # rebuilds the recipe's own model
    assert command("run", "own.toml", "--set", "recipe.name=fedavg", "--set", "recipe.model=mlp")[0] == 2


@pytest.mark.full
@pytest.mark.parametrize("scores", ["", ', standardise = "federated"'], ids=["as they are", "standard scores"])
def test_a_recipe_may_have_all_rows_in_one_place_and_resumes_with_them(
    scores: str, command: Command, tmp_path: Path
) -> None:
    """Before, a run of a recipe on all rows went on from its folder with its clients' training rows alone."""
    rows = FILE.replace("limit = 90", "limit = 90, validation = 0.2").replace('"digits"', f'"digits"{scores}')
    (tmp_path / "own.toml").write_text(f'{rows}validation = false\n[[recipes]]\nname = "fedavg"\npooled = true\n')
    said = command("compare", "own.toml", "--out", "out")
    assert said.code == 0, said.err
    assert "training rows, which train nothing" not in said.err
    head, *lines = said.out.split("times less sent\n")[1].splitlines()[:2]
    assert head.split() == ["label", "rounds", "lost", "MB", "gain"]
    assert re.fullmatch(r"it's +1 +[-+]\d+\.\d +0\.0156 +0\.\d+ *", lines[0])  # 650 numbers, three clients, both ways
    told = json.loads(command("compare", "own.toml", "--out", "out", "--json").out)
    assert [(row["label"], row["rounds"]) for row in told["against_pooled"]] == [("it's", 1)]
    for label, rows_of_clients in (("it-s", [24, 24, 24]), ("fedavg", [54, 0, 0])):
        folder = tmp_path / "out" / label / "seed-0"
        assert command("resume", folder, "--rounds", "2", "--quiet")[0] == 0
        with History(folder) as history:
            assert [row["examples"] for row in history.results if row["kind"] == "train"] == 2 * rows_of_clients
    np.savez(tmp_path / "new.npz", x=np.zeros((2, 1, 8, 8), "float32"))
    assert command("predict", folder, "new.npz").err == ""


@pytest.mark.full
def test_a_comparison_fits_80_columns_and_wide_has_all(command: Command, tmp_path: Path) -> None:
    file = FILE.replace('label = "it\'s"', f'label = "{"a method with a long name " * 3}"')
    (tmp_path / "own.toml").write_text(f"seeds = [0, 1, 2]\n{file}")
    said = command("compare", "own.toml", "--out", "out")
    assert said.code == 0
    assert max(map(len, said.out.splitlines())) <= 80
    head = said.out.splitlines()[0].split()
    assert head == ["label", "accuracy", "against", "alone", "worst", "tenth", "MB"]
    assert "\N{PLUS-MINUS SIGN} half the 95% interval" in said.out
    assert "piebald report out" in said.out
    for words in (("--wide",), ("--json",)):
        out = command("compare", "own.toml", "--out", "out", *words).out
        assert "parameters" in out
        assert "a method with a long name a method" in out


def test_without_a_terminal_progress_is_a_line_a_minute(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(progress, "monotonic", lambda: now[0])
    monkeypatch.setattr(progress, "line_clock", progress.LineClock())
    with progress.Bar("hdafl (seed 3)", 10, wanted=True) as bar:
        for version, now[0] in ((1, 30.0), (2, 61.0), (3, 90.0), (4, 130.0)):
            bar.show(version, f"accuracy {version / 10:.3f}")
    assert capsys.readouterr() == (
        "",
        "hdafl (seed 3): server step 2 of 10, accuracy 0.200\nhdafl (seed 3): server step 4 of 10, accuracy 0.400\n",
    )
    for seed in range(4):  # 130 to 210 seconds: short runs in a row are told of, too
        with progress.Bar(f"local (seed {seed})", 2, wanted=True) as bar:
            now[0] += 20
            bar.show(1)
    assert capsys.readouterr() == ("", "local (seed 2): server step 1 of 2\n")
    now[0] += 600
    with progress.Bar("hdafl (seed 3)", 10, wanted=True) as bar:
        bar.show(1)
    with progress.Bar("hdafl (seed 3)", 10, wanted=False) as bar:
        bar.show(1)
    assert capsys.readouterr() == ("", "")


def test_in_a_notebook_progress_is_a_bar_of_html(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown, now = list[str](), [0.0]

    class Handle:
        def update(self, drawn: Any) -> None:
            shown.append(drawn.data)

    def display(drawn: Any, display_id: bool) -> Handle:
        shown.append(drawn.data)
        return Handle()

    ipython = pytest.importorskip("IPython")
    monkeypatch.setattr("IPython.display.display", display)
    monkeypatch.setattr(progress, "monotonic", lambda: now[0])
    for config, lines in (({"IPKernelApp": {}}, 4), ({}, 0)):  # a notebook's kernel, and IPython on a terminal
        monkeypatch.setattr(ipython, "get_ipython", lambda config=config: SimpleNamespace(config=config))
        shown.clear()
        with progress.Bar("<hdafl> (seed 3)", 10, wanted=True) as bar:
            for version, now[0] in ((1, 1.0), (2, 1.01), (3, 2.0), (4, 3.0)):  # the second one comes too soon
                bar.show(version, f"accuracy {version / 10:.3f}")
        assert len(shown) == lines
        if shown:
            assert shown[-1] == (
                "&lt;hdafl&gt; (seed 3) <progress value='4' max='10'></progress> 4 of 10 accuracy 0.400"
            )
        now[0] = 0.0
    with progress.Bar("a", 10, wanted=False) as bar:
        bar.show(1)
    assert not shown
    assert capsys.readouterr().err == ""


def test_a_comparison_names_clients_and_unequal_work(capsys: pytest.CaptureFixture[str]) -> None:
    def run(label: str, seed: int, values: list[float], clients: int) -> History:
        store = RunStore.create(None, {"recipe": {"name": label}, "label": label, "seed": seed, "metric": "accuracy"})
        store.clients([{"client": c, "name": name} for c, name in enumerate(("george", "lucas", "nicolas"))])
        row = {"version": 1, "kind": "train", "status": "ok", "steps": 5, "examples": 40}
        store.commit({"version": 1}, [row | {"id": c, "client": c} for c in range(clients)])
        head = {"version": 1, "model": "global", "split": "test", "metric": "accuracy"}
        store.scores([head | {"client": c, "value": value} for c, value in enumerate(values)])
        return History(store)

    print_comparison(
        Comparison([run("local", s, [0.9, 0.8, 0.7], 3) for s in range(3)]
                   + [run("ditto", s, [0.7, 0.9, 0.2], 2) for s in range(3)]), wide=False
    )  # fmt: skip
    out = " ".join(capsys.readouterr().out.split())
    assert "Worse with ditto than with local, in the mean over seeds: george (-20.0)." in out
    assert "unequal work: 2 used updates with ditto, 3 with local" in out
    assert "Clients that never trained are left out; with them: ditto 60.0%." in out
    assert "clients are too few to say who is behind it" in out


def test_on_a_terminal_progress_is_a_bar_that_takes_no_markup_from_names(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for unit, count in (("server step", "2/4"), ("bytes", "2/4 bytes")):
        monkeypatch.setattr(sys, "stderr", terminal := Terminal())
        with progress.Bar("[red]site[/red]", 4, wanted=True, unit=unit, lines=False) as bar:
            bar.show(2, "[bold]loss 0.5")
            bar.show()  # leaves what was shown
        for text in ("[red]site[/red]", count, "[bold]loss 0.5"):
            assert text in re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", terminal.getvalue())
    monkeypatch.setattr(sys, "stderr", file := io.StringIO())
    monkeypatch.setattr(progress, "line_clock", progress.LineClock())
    with progress.Bar("download", 4, wanted=True, unit="bytes", lines=False) as bar:
        bar.show(2)
    assert file.getvalue() == ""
