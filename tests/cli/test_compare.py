"""The command compare: models of recipes, and what it prints."""

from __future__ import annotations

from pathlib import Path

from piebald.report.tables import History

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
