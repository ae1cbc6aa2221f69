"""Cases 13 and 14: clients that do unlike work, and clients without one of the inputs.

`tests/methods/test_client_settings.py` and `tests/runs/test_missing_inputs.py` have the mathematics, engine by engine.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import piebald
from piebald import recipes
from piebald.core.errors import SettingError
from tests.cases.conftest import FromFile
from tests.fakes import seeded, simulate

DIGITS = """
rounds = 1
data = { name = "digits" }
partition = { kind = "iid", clients = 4, limit = 200 }
model = { name = "logistic" }
recipe = { name = "fedavg", batch = 20EPOCHS }
"""
CLIENTS = """
[clients]
0 = { share = 0.4 }
1 = { epochs = 2, share = 0.3 }
2 = { share = 0.2 }
3 = { epochs = 5, share = 0.1 }
"""


def work(run: piebald.Run) -> dict[str, int]:
    return {run.names[row["client"]]: row["steps"] for row in run.results if row["version"] == 1}


def test_each_client_trains_its_own_epochs_and_counts_its_agreed_share(from_file: FromFile) -> None:
    run = from_file(DIGITS.replace("EPOCHS", "") + CLIENTS)
    assert [row["steps"] for row in run.results] == [2, 4, 2, 10]
    assert [row["weight"] for row in run.results] == pytest.approx([0.4, 0.3, 0.2, 0.1])


def test_a_list_of_epochs_is_told_where_those_of_single_clients_stand(from_file: FromFile) -> None:
    with pytest.raises(SettingError, match=r"case.toml:6: .* stand in \[clients.\"NAME\"\] of the file"):
        from_file(DIGITS.replace("EPOCHS", ", epochs = [1, 2, 1, 5]"))


SITES = {
    name: (np.random.default_rng(k).normal(size=(20, 3)).astype(np.float32), np.arange(20) % 2)
    for k, name in enumerate(["ward 1", "ward 2", "Ward 3", "icu", "icu [b]"])
}


@pytest.mark.parametrize(
    ("table", "steps"),
    [
        ({"*": {"epochs": 1}, "ward *": {"epochs": 2}, "ward 1": {"epochs": 3}}, (12, 8, 4, 4, 4)),
        ({"ward *": {"epochs": 3}, "w*": {"epochs": 2}}, (12, 12, 4, 4, 4)),  # the longer pattern, in either order
        ({"icu [b]": {"epochs": 2}}, (4, 4, 4, 4, 8)),  # a name that would be a pattern of letters
        ({"*": {"batch": 4}, "icu*": {"steps": 3}}, (4, 4, 4, 3, 3)),
        ({"icu": {"batch": 1000}}, (4, 4, 4, 1, 4)),
    ],
    ids=["precedence", "longer", "brackets", "fields", "large batch"],
)
def test_patterns_of_names_have_an_order(table: dict[str, Any], steps: tuple[int, ...]) -> None:
    recipe = recipes.fedavg(lr=0.1, batch=5).for_clients(table)
    run = simulate(recipe, SITES, seeded(lambda: nn.Linear(3, 2)), rounds=1, evaluate_every=0)
    assert tuple(work(run)[name] for name in SITES) == steps


class Net(nn.Module):
    """Case 14's network: a scan or none beside a table."""

    def __init__(self) -> None:
        super().__init__()
        self.scan, self.head = nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.BatchNorm1d(4)), nn.Linear(7, 2)

    def forward(self, table: Tensor, scan: Tensor | None = None) -> Tensor:
        seen = torch.zeros(len(table), 4) if scan is None else self.scan(scan)
        outputs: Tensor = self.head(torch.cat([table, seen], 1))
        return outputs


class Either(Net):
    """The network with either input, or both."""

    def forward(self, table: Tensor | None = None, scan: Tensor | None = None) -> Tensor:
        rows = len(scan) if scan is not None else len(table)  # type: ignore[arg-type]
        return super().forward(torch.zeros(rows, 3) if table is None else table, scan)


def hospital(rows: int, *inputs: str) -> dict[str, Any]:
    draw, y = np.random.default_rng(rows), np.arange(rows) % 2
    x = {
        "table": draw.normal(size=(rows, 3)) + y[:, None],
        "scan": draw.normal(size=(rows, 1, 4, 4)) + y[:, None, None, None],
    }
    held = {name: x[name].astype(np.float32) for name in inputs}, y
    return {"train": held, "test": held}


def buffers(run: piebald.Run) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in run.model().state_dict().items() if name.startswith("scan")}


@pytest.mark.parametrize("name", ["fedavg", "fedadam", "feddyn", "ditto"])
def test_a_hospital_without_scans_moves_nothing_of_theirs(name: str) -> None:
    """Layers and running statistics of scans are those of a run without this hospital, the head is not."""
    recipe = recipes.make(name, lr=0.1, batch=50)
    held = {"a": hospital(40, "table", "scan"), "b": hospital(24, "table")}
    both = simulate(recipe, held, seeded(Net), rounds=1, evaluate_every=0)
    alone = simulate(recipe, {"a": held["a"]}, seeded(Net), rounds=1, evaluate_every=0)
    if name != "fedadam":  # whose step is as long whoever takes part
        assert not torch.allclose(both.model().head.weight, alone.model().head.weight, atol=1e-3)
    for (buffer, tensor), expected in zip(buffers(both).items(), buffers(alone).values(), strict=True):
        torch.testing.assert_close(tensor, expected, rtol=1e-4, atol=1e-5, msg=buffer)


def test_each_may_have_what_the_other_lacks() -> None:
    held = {"pictures": hospital(40, "scan"), "tables": hospital(24, "table")}
    run = simulate("fedavg", held, seeded(Either), rounds=2)
    assert sorted(run.per_client) == [0, 1]
    assert run.failures == []


def test_what_the_model_cannot_do_without_is_told_before_training() -> None:
    with pytest.raises(SettingError, match="client 'b' lacks table, and the model cannot do without"):
        simulate("fedavg", {"a": hospital(8, "table", "scan"), "b": hospital(8, "scan")}, seeded(Net), rounds=1)


@pytest.mark.parametrize("engine", ["sequential", "reference", "batched"])
def test_a_lone_last_row_joins_its_batch_only_where_the_clients_own_part_has_batch_norm(engine: str) -> None:
    """Whoever comes first: 11 rows are 2 batches of at most 6 where scans are normalised, and else 3 of at most 5."""
    held = {"pictures": hospital(11, "scan"), "tables": hospital(11, "table"), "single": hospital(1, "table")}
    for names in (["pictures", "tables", "single"], ["single", "tables", "pictures"]):
        rows = {name: held[name] for name in names}
        options: Any = {"rounds": 1, "simulator": {"engine": engine}}
        run = simulate(recipes.fedavg(lr=0.1, batch=5, batches="exact"), rows, seeded(Either), **options)
        assert run.failures == []
        assert work(run) == {"pictures": 2, "tables": 3, "single": 1}


@pytest.mark.parametrize("names", [["norm", "plain"], ["plain", "norm"]])
def test_who_cannot_train_on_one_row_is_told_by_its_own_model(names: list[str], caplog: Any) -> None:
    """With FedBN-like private layers, and before training."""
    norms = {"norm": [nn.BatchNorm1d(4)], "plain": []}
    models = {
        name: seeded(lambda own=own: nn.Sequential(nn.Sequential(nn.Linear(3, 4), *own), nn.Linear(4, 2)))
        for name, own in norms.items()
    }
    held = {name: {"train": (np.ones((1, 3), np.float32), np.zeros(1, int)), "test": SITES["icu"]} for name in names}
    recipe = recipes.fedavg().with_(sharing={"kind": "all_except", "private_layers": ["0"]})
    run = simulate(recipe, held, {name: models[name] for name in names}, rounds=1)
    assert "batch norm cannot train on a single one: norm\n" in caplog.text + "\n"
    assert [row["name"] for row in run.failures if row["kind"] == "train"] == ["norm"]
