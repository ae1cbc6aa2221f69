"""The ensemble of what a race has trained: how members are selected, what it scores, and runs to predict with."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from piebald import models, partition
from piebald.advice import Advice, advise
from piebald.advice.distillation import taught_rows
from piebald.advice.ensemble import EnsembleMember, MemberAnswers, Refit, _shares, _with_all_rows
from piebald.advice.tuning.space import Cost
from piebald.advice.tuning.trial_runs import without_test_rows
from piebald.cli import main
from piebald.contracts import Clients, Rows, Split
from piebald.core.errors import RunFolderError, RuntimeFault, SettingError
from piebald.core.objective import objective_for
from piebald.models.prediction import mean_outputs
from piebald.report.tables import History
from piebald.runs.averaged import _plain_model, ensemble_predictor
from piebald.runs.plain_models import PlainModel
from piebald.runs.run import opened


def test_probabilities_and_numbers_are_averaged_as_what_they_are() -> None:
    drawn = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for kind, link in (("classes", lambda z: z.softmax(-1)), ("labels", torch.sigmoid), ("values", lambda z: z)):
        torch.testing.assert_close(link(mean_outputs(list(drawn), kind)), link(drawn).mean(0))  # type: ignore[arg-type]


CLIENTS, ROWS = 6, 60
SPLITS: tuple[Split, ...] = ("train", "validation", "test")


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> tuple[Advice, Clients, nn.Module, Path]:
    """An answer on clients of which half have another rule, so that several models are better than one."""
    rng, out = np.random.default_rng(0), tmp_path_factory.mktemp("search") / "advice"
    x = rng.normal(size=(CLIENTS, ROWS, 4)).astype("float32")
    y = x[..., 0] + np.where(np.arange(CLIENTS) % 2, 1, -1)[:, None] * x[..., 1] + rng.normal(size=x.shape[:2]) > 0
    clients = partition.clients_from(
        {f"s{n}": (x[n], y[n].astype(int)) for n in range(CLIENTS)}, validation=0.4, test=0.2
    )
    model = models.build_model("mlp", (4,), 2, hidden=(4,))
    found = advise(clients, model, rounds=4, families=["ditto", "hdafl"], seeds=(0,), training={"batch": 8},
                   more_data=False, distil=True, out=out)  # fmt: skip
    return found, clients, model, out


def shares_of(folder: Path, clients: Clients, model: nn.Module, split: Split) -> np.ndarray[Any, Any]:
    """The probabilities [clients, rows, 2] of a run's models."""
    with opened(folder, without_test_rows(clients), model) as run, torch.no_grad():
        return np.stack([
            run.model(client)(clients.rows(client, split).x).softmax(1).numpy() for client in range(CLIENTS)
        ])  # fmt: skip


def accuracy(shares: np.ndarray[Any, Any], clients: Clients, split: Split) -> float:
    truth = np.stack([clients.rows(client, split).y.numpy() for client in range(CLIENTS)])
    return float((shares.argmax(2) == truth).mean())


def of_member(member: EnsembleMember, clients: Clients, model: nn.Module, split: Split) -> np.ndarray[Any, Any]:
    """The probabilities [clients, rows, 2] of a member's models."""
    if member.folder is not None:
        return shares_of(member.folder, clients, model, split)
    name, plain = member.plain or ("", None)
    assert plain is not None
    answers = [plain.judged(name, client, clients.rows(client, split)) for client in range(CLIENTS)]
    return np.stack([answer[1].softmax(1).numpy() for answer in answers if answer is not None])


@pytest.mark.full
def test_members_are_added_while_the_mean_is_better_on_validation_rows_and_tested_once(
    answer: tuple[Advice, Clients, nn.Module, Path],
) -> None:
    found, clients, model, _ = answer
    assert found.ensemble is not None
    members = found.ensemble.members
    assert np.stack([member.shares for member in members]).sum(0) == pytest.approx(np.ones(CLIENTS))
    raced = [member for member in members if not member.on_all_rows]
    assert len(raced) > 1
    mean = sum(x.shares[:, None, None] * of_member(x, clients, model, "validation") for x in raced)
    best = max(row["score"] for row in found.tried if row["rounds"] == 4)
    assert accuracy(np.asarray(mean), clients, "validation") > best
    tested = sum(x.shares[:, None, None] * of_member(x, clients, model, "test") for x in members)
    assert found.ensemble.rows == "test"
    assert found.ensemble.score == pytest.approx(accuracy(np.asarray(tested), clients, "test"))
    own = next(checked.scores.mean for checked in found.tested if checked.label == found.recommended)
    assert (found.ensemble.gain.mean, found.ensemble.gain.noise) == (pytest.approx(found.ensemble.score - own), "rows")
    assert found.plain()["ensemble"]["members"] == [
        {"name": x.name, "share": pytest.approx(x.shares.mean()), "on_all_rows": x.on_all_rows} for x in members
    ]
    said = " ".join(found.text().split())
    distilled = r"one model distilled from it [\d.]+%"
    assert re.search(
        rf"the mean of \d+ models has [\d.]+% on test rows, one seed, {distilled}; against .* \(95 %: ", said
    )


def examples(folder: Path, version: int = 1) -> int:
    """The rows that the first step of a run has trained on."""
    with History(folder) as history:
        return sum(row["examples"] for row in history.results if row["kind"] == "train" and row["version"] == version)


@pytest.mark.full
def test_members_are_trained_once_more_on_the_rows_that_they_were_chosen_by_and_never_on_test_rows(
    answer: tuple[Advice, Clients, nn.Module, Path],
) -> None:
    found, clients, _, _ = answer
    assert found.ensemble is not None
    runs_of_all = [x for x in found.ensemble.members if x.on_all_rows and x.folder is not None]
    again = [x for x in found.ensemble.members if x.on_all_rows]
    assert again
    rows = {split: sum(clients.size(client, split) or 0 for client in range(CLIENTS)) for split in SPLITS}
    raced = {member.name: member for member in found.ensemble.members if not member.on_all_rows}
    for member in runs_of_all:
        assert member.folder is not None
        assert examples(member.folder) == rows["train"] + rows["validation"]
    for member in again:
        of_plain = member.plain
        if of_plain is not None:
            assert of_plain[1].clients.size(0, "train") == (rows["train"] + rows["validation"]) // CLIENTS
        # each method has the share that it was chosen with, whether the budget was enough to train it again or not
        assert np.array_equal(raced[member.name.removesuffix(" on all rows")].shares, member.shares)


@pytest.mark.full
def test_one_model_is_distilled_from_it_on_all_rows_but_test_rows_and_kept_as_a_run(
    answer: tuple[Advice, Clients, nn.Module, Path],
) -> None:
    found, clients, model, out = answer
    assert found.distilled is not None
    rows = {split: sum(clients.size(client, split) or 0 for client in range(CLIENTS)) for split in SPLITS}
    asked = rows["train"] + rows["validation"]
    # a row is there once or, where both classes are probable, twice
    assert asked < examples(found.distilled.folder) <= 2 * asked
    shares = shares_of(out / "distilled", clients, model, "test")
    assert found.distilled.score == pytest.approx(accuracy(shares, clients, "test"))
    own = next(checked.scores.mean for checked in found.tested if checked.label == found.recommended)
    assert found.distilled.gain.mean == pytest.approx(found.distilled.score - own)
    assert f"one model distilled from it {found.distilled.score:.1%}" in " ".join(found.text().split())
    assert found.spent.rounds <= 23 * 4


def test_what_cannot_be_trained_again_keeps_its_share() -> None:
    members = [EnsembleMember("a", np.array([0.75, 1.0])), EnsembleMember("b", np.array([0.25, 0.0]))]

    def again(member: EnsembleMember) -> EnsembleMember | None:
        return EnsembleMember("b on all rows", member.shares) if member.name == "b" else None

    joined = _with_all_rows(members, again)
    assert [(x.name, x.shares.tolist()) for x in joined] == [
        ("a", [0.75, 1.0]), ("b", [0.125, 0.0]), ("b on all rows", [0.125, 0.0])
    ]  # fmt: skip
    assert _with_all_rows(members, lambda member: None) == members


def test_a_member_whose_steps_have_no_bounds_on_all_rows_is_not_trained_again(tmp_path: Path) -> None:
    def diverge(*_: Any) -> Any:
        raise RuntimeFault("training failed on 2 of 3 clients in round 7")

    runs: Any = SimpleNamespace(train=diverge, rungs=(1,), shared_rounds=lambda recipe, label: None)
    runs.on_all_rows = lambda: runs
    runner = SimpleNamespace(name="fedavg", label="fedavg", recipe=None, last=SimpleNamespace(seeds=[0]))
    said, budget = list[str](), SimpleNamespace(has_room=lambda *_: True)
    refit = Refit(runs, tmp_path, budget, Cost(), said.append)  # type: ignore[arg-type]
    assert refit(SimpleNamespace(runner=runner, name="fedavg")) is None  # type: ignore[arg-type]
    assert said == ["fedavg on all rows: training failed on 2 of 3 clients in round 7"]


def test_a_row_of_classes_is_taught_as_a_row_for_each_class_that_is_probable_and_the_own_counts_a_quarter() -> None:
    rows = Rows(torch.arange(3.0)[:, None], torch.tensor([0, 2, -100]), torch.tensor([1.0, 2.0, 1.0]))
    answer = torch.tensor([[0.58, 0.4, 0.02], [0.01, 0.01, 0.98], [0.5, 0.5, 0.0]]).log()
    taught = taught_rows(rows, answer, "classes", objective_for(torch.tensor([0, 1])))
    assert taught is not None
    assert taught.x[:, 0].tolist() == [0, 0, 1, 2, 2]
    assert taught.y.tolist() == [0, 1, 2, 0, 1]
    own = 0.75 * 0.58 + 0.25
    shares = [own / (own + 0.3), 0.3 / (own + 0.3), 2, 0.5, 0.5]  # together, each row counts as much as before
    assert taught.weight is not None
    assert taught.weight.tolist() == pytest.approx(shares)


def test_numbers_are_taught_as_numbers_and_what_is_no_target_is_not_taught() -> None:
    rows, objective = Rows(torch.zeros(2, 1), torch.tensor([1.0, torch.nan])), objective_for(torch.tensor([0.5, 1.5]))
    taught = taught_rows(rows, torch.tensor([[5.0], [7.0]]), "values", objective)
    assert taught is not None
    assert taught.y.tolist() == [4.0, 7.0]
    assert taught_rows(rows, torch.zeros(2, 1), "risk", objective) is None


def judged(values: list[list[int]], truth: list[list[int]]) -> MemberAnswers:
    """A member that says these classes for the rows of each client, and is sure of it."""
    objective = objective_for(torch.tensor([0, 1]))
    outputs = [(10.0 * torch.nn.functional.one_hot(torch.tensor(x), 2), torch.tensor(y))
               for x, y in zip(values, truth, strict=True)]  # fmt: skip
    return MemberAnswers(EnsembleMember("", np.zeros(len(truth))), "classes", [objective] * len(truth), outputs)


def test_a_client_selects_for_itself_the_more_the_more_rows_it_has() -> None:
    """One member is right at a client of two hundred rows and at one of two, where another one is right elsewhere."""
    sizes = [2, 200, 50, 50, 50]
    truth = [[1] * size for size in sizes]
    here = judged([[1] * size if place < 2 else [0] * size for place, size in enumerate(sizes)], truth)
    there = judged([[0] * size if place < 2 else [1] * size for place, size in enumerate(sizes)], truth)
    shares = _shares([here, there], 1)
    assert shares.sum(0) == pytest.approx(np.ones(5))
    assert shares[:, 2].tolist() == [0.0, 1.0]  # what is best for most is best for it as well
    assert shares[0, 1] == pytest.approx(200 / 300)
    assert shares[0, 0] == pytest.approx(2 / 102)


@pytest.fixture(scope="module")
def from_table(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A search that was started from a table, and new rows of it."""
    out, rng = tmp_path_factory.mktemp("table"), np.random.default_rng(0)
    x = rng.normal(size=(320, 3))
    site = np.repeat([f"s{number}" for number in range(4)], 80)
    turned = np.where(np.isin(site, ["s1", "s3"]), -1, 1)
    sick = np.where(x[:, 0] + turned * x[:, 1] ** 2 + 0.5 * rng.normal(size=320) > 0.2, "yes", "no")
    table = pd.DataFrame(x, columns=["a", "b", "c"]).assign(site=site, sick=sick)
    table.to_csv(out / "rows.csv", index=False)
    table.drop(columns=["sick", "site"]).head(12).to_csv(out / "new.csv", index=False)
    command = ["advise", str(out / "rows.csv"), "--client", "site", "--target", "sick", "--out", str(out / "advice")]
    assert main([*command, "--budget", "60 rounds", "--distil", "--quiet"]) == 0
    return out / "advice" / "ensemble", out / "new.csv"


def predicted(folder: Path, rows: Path, client: str, out: Path) -> np.ndarray[Any, Any]:
    """The probabilities [n, 2] that the command writes."""
    assert main(["predict", str(folder), str(rows), "--client", client, "--out", str(out), "--quiet"]) == 0
    return np.asarray(pd.read_csv(out)[["no", "yes"]].to_numpy())


@pytest.mark.full
def test_its_folder_predicts_the_mean_of_its_members_by_their_shares(
    from_table: tuple[Path, Path], tmp_path: Path
) -> None:
    folder, rows = from_table
    stated = json.loads((folder / "ensemble.json").read_text("utf-8"))
    assert any("plain" in member for member in stated["members"])
    for place, (client, *shares) in enumerate(stated["clients"]):
        x, mean = ensemble_predictor(folder, client).inputs.read(rows), np.zeros((12, 2))
        for member, share in zip(stated["members"], shares, strict=True):
            if share and "run" in member:
                mean += share * predicted(folder / member["run"], rows, client, tmp_path / "of-run.csv")
            elif share:
                mean += share * _plain_model(folder, member["plain"], place)(x).softmax(1).numpy()
        assert predicted(folder, rows, client, tmp_path / f"{client}.csv") == pytest.approx(mean, abs=1e-5)


@pytest.mark.full
def test_its_members_are_trained_anew_from_their_files_and_joined_as_they_count(
    from_table: tuple[Path, Path], tmp_path: Path
) -> None:
    folder, rows = from_table
    stated, runs = json.loads((folder / "ensemble.json").read_text("utf-8")), list[Path]()
    for file in sorted(folder.glob("*.toml")):
        runs.append(tmp_path / file.stem)
        # fewer rounds make other models, whose mean is taken all the same
        assert main(["run", str(file), "--out", str(runs[-1]), "--set", "rounds=2", "--quiet"]) == 0
    joined = tmp_path / "joined"
    assert main(["ensemble", *map(str, runs[::-1]), "--like", str(folder), "--out", str(joined), "--quiet"]) == 0
    counts = dict[str, float]()
    client, *shares = stated["clients"][1]
    for member, share in zip(stated["members"], shares, strict=True):
        if "run" in member:  # one that was trained on all rows counts for the run of its recipe
            name = re.sub("^[0-9]+-|-on-all-rows", "", member["run"])
            counts[name] = counts.get(name, 0.0) + share
    mean = np.zeros((12, 2))
    for run in runs:
        share = counts[re.sub("^[0-9]+-", "", run.name)]
        mean += share * predicted(run, rows, client, tmp_path / "of-run.csv")
    assert predicted(joined, rows, client, tmp_path / "joined.csv") == pytest.approx(mean / mean.sum(1)[0], abs=1e-5)


@pytest.mark.full
def test_an_ensemble_is_exported_to_onnx_with_the_same_answers(from_table: tuple[Path, Path], tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    folder, rows = from_table
    assert main(["export", str(folder), "--client", "s1", "--out", str(tmp_path / "s1.onnx"), "--quiet"]) == 0
    session, table = runtime.InferenceSession(str(tmp_path / "s1.onnx")), pd.read_csv(rows)
    kinds = {"tensor(float)": "float32", "tensor(double)": "float64"}
    given = {x.name: table[[x.name]].to_numpy().astype(kinds[x.type]) for x in session.get_inputs()}
    answers = [np.asarray(value) for value in session.run(None, given)]
    own = predicted(folder, rows, "s1", tmp_path / "s1.csv")
    shown = next((x for x in answers if x.shape == (12, 2)), None)
    shown = np.stack([x.ravel() for x in answers[:2]], 1) if shown is None else shown
    assert shown == pytest.approx(own, abs=1e-4)


@pytest.mark.full
def test_what_it_was_distilled_into_predicts_and_is_exported_as_any_run(
    from_table: tuple[Path, Path], tmp_path: Path
) -> None:
    folder, rows = from_table[0].parent / "distilled", from_table[1]
    answers = predicted(folder, rows, "s1", tmp_path / "s1.csv")
    assert answers.sum(1) == pytest.approx(np.ones(12))
    assert main(["export", str(folder), "--client", "s1", "--out", str(tmp_path / "s1.pt"), "--quiet"]) == 0


@pytest.mark.full
def test_what_is_no_ensemble_is_refused_in_a_sentence(from_table: tuple[Path, Path], tmp_path: Path) -> None:
    folder, _ = from_table
    with pytest.raises(SettingError, match="name one of s0, s1, s2 and s3"):
        ensemble_predictor(folder, None)
    with pytest.raises(SettingError, match="client"):
        ensemble_predictor(folder, "s9")
    for text in ("{", "[]", '{"members": [{"run": "../x"}], "clients": [["s0", 1.0]]}',
                 '{"members": [{"run": ".."}], "clients": [["s0", 1.0]]}',
                 '{"members": [], "clients": [["s0"]]}', '{"members": [{"run": "x"}], "clients": []}',
                 '{"members": [{"run": "x", "plain": 0}], "clients": [["s0", 1.0]]}',
                 '{"members": [{"plain": true}], "clients": [["s0", 1.0]]}',
                 '{"members": [{"plain": -1}], "clients": [["s0", 1.0]]}',
                 '{"members": [{"run": "x"}], "clients": [["s0", 1.0], ["s0", 1.0]]}',
                 '{"members": [{"run": "x"}], "clients": [["s0", 1' + 400 * "0" + "]]}",
                 '{"members": [{"run": "x"}], "clients": [["s0", 1e999]]}',
                 '{"members": [{"run": "x"}], "clients": [["s0", -1.0]]}'):  # fmt: skip
        (tmp_path / "ensemble.json").write_text(text)
        with pytest.raises(RunFolderError, match="holds no ensemble that can be read"):
            ensemble_predictor(tmp_path, "s0")


def trees(**changed: torch.Tensor) -> dict[str, torch.Tensor]:
    """Two trees of three nodes for two classes."""
    index, number = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.float64)
    state = {"feature": index, "left": index, "right": index, "threshold": number, "value": number}
    state |= {"base": torch.zeros(1, dtype=torch.float64), "depth": torch.tensor(2), "columns": torch.tensor([0, 1])}
    return state | changed


@pytest.mark.parametrize(
    "changed",
    [
        {"depth": torch.tensor(1 << 60)}, {"depth": torch.tensor(-1)}, {"depth": torch.tensor([2, 2])},
        {"feature": torch.full((2, 3), -1)}, {"feature": torch.full((2, 3), 1 << 40)}, {"left": torch.full((2, 3), 3)},
        {"right": torch.full((2, 3), -1)}, {"right": torch.zeros(2, 3)}, {"columns": torch.tensor([0, 3])},
        {"columns": torch.tensor([0, -1])}, {"columns": torch.zeros(2)}, {"value": torch.zeros(2, 4).double()},
        {"base": torch.zeros(0).double()}, {"base": torch.zeros(3).double()}, {"code": torch.zeros(1)},
        {"threshold": torch.zeros(2, 3, dtype=torch.complex64)},
    ],
)  # fmt: skip
def test_stored_trees_name_no_size_and_no_index_that_is_not_theirs(changed: dict[str, torch.Tensor]) -> None:
    """A depth of a file was as many steps as it said, and an index beyond a table ended the prediction."""
    assert PlainModel.of(trees())(torch.zeros(4, 1)).shape == (4, 2)
    with pytest.raises(ValueError, match="no plain model"):
        PlainModel.of(trees(**changed))
    for weight, bias in ((torch.zeros(2, 3), torch.zeros(2)), (torch.zeros(2, 3).double(), torch.zeros(3).double())):
        with pytest.raises(ValueError, match="no plain model"):
            PlainModel.of({"weight": weight, "bias": bias})
