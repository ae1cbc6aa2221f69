"""Sites agree on a preparation under their policies, and what they train on is what the simulator makes, to the bit."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch

from piebald.contracts import SUM, Task, Update
from piebald.core.errors import PiebaldError, SettingError
from piebald.data.partition import clients_from
from piebald.data.preparation import Preparation, PrepareSettings, tokens
from piebald.experiments.file import ExperimentSettings
from piebald.experiments.run_settings import RunSettings
from piebald.federation.hub.run_terms import terms
from piebald.federation.link.wire_format import pack_update
from piebald.federation.site.site_process import SiteSettings, SiteWork
from piebald.federation.site.site_rows import SiteClient
from piebald.federation.site.task_runner import TaskRunner
from piebald.inference.experiment import _values_at_sites, asked_sites
from piebald.inference.queries.columns import from_limbs
from piebald.inference.queries.prepare import MaskedPrepareQuery, PrepareQuery, packed, unpacked
from piebald.inference.simulated import AskedSites
from piebald.methods.recipes.fedavg import fedavg
from piebald.privacy import SecureAggregation
from piebald.runs.prepare import PreparedRun, prepare

from .sites import Change, InProcess, Policy

NAMES = ["north", "south", "east"]
ALLOWED = Policy(queries=["prepare"], least_rows=1)
KINDS = {"kind": "prepare", "question": {"about": "kinds"}}


def table(rows: int, wards: str, seed: int) -> pandas.DataFrame:
    rng = np.random.default_rng(seed)
    frame = pandas.DataFrame(
        {"age": rng.normal(60, 10, rows).round(1), "ward": rng.choice(list(wards), rows),
         "smoker": rng.choice(["yes", "no"], rows), "ill": rng.choice(["no", "yes"], rows)}
    )  # fmt: skip
    frame.loc[rng.random(rows) < 0.1, "age"] = None
    return frame


TABLES = {"north": table(80, "ab", 1), "south": table(60, "ab", 2), "east": table(40, "bc", 3)}


class Party:
    """The part of a site's credentials that matters here."""

    def __init__(self, party: str, folder: Path) -> None:
        self.party, self.folder = party, folder


class Sites:
    """Three sites with tables of their own, and the server's experiment."""

    def __init__(
        self,
        folder: Path,
        tables: dict[str, pandas.DataFrame],
        extra: str = "",
        model: str = "logistic",
        site: str = "",
        target: str = "'ill'",
    ) -> None:
        self.folder = folder
        for name, frame in tables.items():
            (folder / name).mkdir()
            frame.to_csv(folder / name / "rows.csv", index=False)
            (folder / name / "site.toml").write_text(
                f"[data]\nsource = 'rows.csv'\ntarget = {target}\ntest = 0.0\nvalidation = 0.0\n{site}"
            )
        (folder / "file.toml").write_text(
            f"model = {{ name = {model!r} }}\nrecipe = {{ name = 'fedavg' }}\nmeasure = 'none'\n{extra}"
            f"data = {{ target = {target} }}\n"  # the server has no rows
            f"partition = {{ kind = 'sites', clients = {json.dumps(NAMES)} }}\n"
        )
        self.settings = ExperimentSettings.load(folder / "file.toml", ["runtime.kind='federation'"])

    def ready(self, settings: ExperimentSettings, masks: tuple[SecureAggregation, ...] = ()) -> PreparedRun:
        plan = settings.plan()
        recipe = fedavg().with_(transforms=masks)
        options = RunSettings(seed=0, runtime=plan.runtime, loss=settings.chosen_loss)
        return prepare(recipe, plan.clients, plan.model, options)

    def at(self, ready: PreparedRun, asks: bool = False) -> list[SiteClient]:
        """What each site makes of the terms."""
        work = dataclasses.replace(ready.work, questions=(KINDS,), trains=False) if asks else ready.work
        classes = ready.clients.classes
        body = terms(work, ready.runtime.experiment, NAMES, NAMES, classes)  # type: ignore[attr-defined]
        sites = []
        for name in NAMES:
            site = SiteSettings.load(self.folder / name / "site.toml")
            party: Any = Party(name, self.folder / name)
            sites.append(SiteWork(party, site, self.folder / name)(json.loads(body)))
        return sites

    def agree(self, policies: list[Policy], change: Change | None = None, masked: bool = False) -> Preparation:
        masks = (SecureAggregation(bits=64),) if masked else ()
        ready = self.ready(self.settings.with_agreed(None), masks)
        runtime = InProcess(ready, policies, change, self.folder / "kept" if masked else None)
        runtime._sites = [
            TaskRunner(site, policies[k], "cpu", runtime._signers[k]) for k, site in enumerate(self.at(ready, True))
        ]
        said: list[str] = []
        self.said, self.runtime, self.bodies = said, runtime, runtime.bodies
        settings, target = self.settings.wanted, self.settings.target_at_sites
        return asked_sites(runtime, ready.work, ready.clients, settings, target, None, said.append)  # type: ignore[arg-type]


def simulated(**options: Any) -> Any:
    frame = pandas.concat([frame.assign(site=name) for name, frame in TABLES.items()], ignore_index=True)
    order = {name: place for place, name in enumerate(sorted(NAMES))}
    clients = clients_from(frame, client="site", target="ill", test=0.0, prepare=PrepareSettings(**options))
    return clients, order


@pytest.mark.full
def test_sites_and_the_simulator_make_the_same_of_the_same_rows(tmp_path: Path) -> None:
    sites = Sites(tmp_path, TABLES)
    assert sites.settings.asks_sites
    agreed = sites.agree([ALLOWED] * 3)
    here, order = simulated()
    assert here.preparation.model_copy(update={"target": agreed.target}) == agreed
    assert agreed.target == here.preparation.target
    settings = sites.settings.with_agreed(agreed)
    assert not settings.asks_sites
    ready = sites.ready(settings)
    assert (ready.work.shape, ready.clients.classes) == ((len(agreed.feature_names_out),), ["no", "yes"])
    for name, site in zip(NAMES, sites.at(ready), strict=True):
        rows, ours = site.clients.rows(site.client, "train"), here.rows(order[name], "train")
        assert torch.equal(rows.x, ours.x)  # type: ignore[arg-type]
        assert torch.equal(rows.y, ours.y)  # type: ignore[arg-type]


TOGETHER: list[tuple[str, Any, str]] = [
    ("numbers", ["load", "stay"], ""),
    ("labels", ["ill", "smoker"], "loss = 'multilabel'\n"),
    ("survival", {"time": "stay", "event": "ill"}, ""),
    ("rates", {"count": "falls", "exposure": "stay"}, ""),
]


@pytest.mark.parametrize("masked", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize(("kind", "target", "loss"), TOGETHER)
def test_sites_agree_on_columns_that_are_predicted_together(
    tmp_path: Path, kind: str, target: Any, loss: str, masked: bool
) -> None:
    rng = np.random.default_rng(5)
    tables = {
        name: frame.assign(load=rng.normal(1e4, 30, len(frame)), stay=rng.integers(1, 30, len(frame)),
                           falls=rng.poisson(2, len(frame))) for name, frame in TABLES.items()
    }  # fmt: skip
    columns = [*(target.values() if isinstance(target, dict) else target)]
    tables = {name: frame[["age", "ward", *columns]] for name, frame in tables.items()}
    written = json.dumps(target).replace(":", " =") if isinstance(target, dict) else json.dumps(target)
    sites = Sites(tmp_path, tables, loss, target=written.replace('"time"', "time").replace('"event"', "event"))
    agreed = sites.agree([MASKED if masked else ALLOWED] * 3, masked=masked)
    frame = pandas.concat([frame.assign(site=name) for name, frame in tables.items()], ignore_index=True)
    own = None if kind == "numbers" else "none"
    scale = {name: own for name in columns} if own else {}
    here = clients_from(frame, client="site", target=target, test=0.0, prepare=PrepareSettings(scale=scale))
    assert agreed.target_columns == columns
    assert agreed.target is not None
    for side, other in zip(agreed.target.constants, here.preparation.target.constants, strict=True):  # type: ignore[union-attr]
        assert side == pytest.approx(other, rel=1e-9)
    asked = b"".join(sites.bodies)
    assert own is None or b'"targets": [{' not in asked
    ready = sites.ready(sites.settings.with_agreed(agreed))
    outputs = 1 if isinstance(target, dict) else 2
    assert [*ready.work.model(torch.zeros(4, *ready.work.shape)).shape] == [4, outputs]
    for name, site in zip(NAMES, sites.at(ready), strict=True):
        rows, ours = site.clients.rows(site.client, "train"), here.rows(sorted(NAMES).index(name), "train")
        assert torch.equal(rows.y, ours.y) or masked  # type: ignore[arg-type]
        torch.testing.assert_close(rows.y, ours.y, atol=1e-5, rtol=1e-5)


def test_a_site_that_codes_one_of_several_labels_otherwise_is_refused(tmp_path: Path) -> None:
    tables = {
        name: frame.assign(a=(frame.ill == "yes").astype(int) + (name == "east"), ill=frame.ill)
        for name, frame in TABLES.items()
    }
    sites = Sites(tmp_path, tables, "loss = 'multilabel'\n", target='["ill", "a"]')
    ready = sites.ready(sites.settings.with_agreed(sites.agree([ALLOWED] * 3)))
    with pytest.raises(SettingError, match=r"its column .*'a'.* must be .*0.* 1"):
        sites.at(ready)


@pytest.mark.full
def test_sites_that_write_the_same_in_other_ways_make_the_same_as_the_simulator(tmp_path: Path) -> None:
    forms = {"north": ("%d/%m/%Y", ("yes", "no"), "{}%"), "south": ("%Y-%m-%d", ("J", "N"), "{}e-2"),
             "east": ("%d/%m/%Y", ("1", "0"), "{} %")}  # fmt: skip
    written = {}
    for name, (form, (true, false), share) in forms.items():
        frame, rows = TABLES[name], range(len(TABLES[name]))
        days = pandas.to_datetime([f"2024-{1 + row % 12}-{1 + row % (12 if name == 'east' else 28)}" for row in rows])
        written[name] = frame.assign(
            smoker=frame.smoker.map({"yes": true, "no": false}), seen=days.strftime(form),
            load=[share.format(row / 4) for row in rows],
        )  # fmt: skip
    sites = Sites(tmp_path, written)
    agreed = sites.agree([ALLOWED] * 3)
    here = clients_from(
        {name: tmp_path / name / "rows.csv" for name in sorted(NAMES)}, target="ill", test=0.0, prepare="federated"
    )
    assert here.preparation == agreed
    kinds = {column.name: column.kind for column in agreed.columns}
    assert kinds == {"age": "number", "ward": "category", "smoker": "boolean", "seen": "date", "load": "number"}
    for name, site in zip(NAMES, sites.at(sites.ready(sites.settings.with_agreed(agreed))), strict=True):
        rows, ours = site.clients.rows(site.client, "train"), here.rows(sorted(NAMES).index(name), "train")
        assert torch.equal(rows.x, ours.x)  # type: ignore[arg-type]
        assert torch.equal(rows.y, ours.y)  # type: ignore[arg-type]


@pytest.mark.parametrize("masked", [False, True])
def test_sites_with_other_units_are_refused(tmp_path: Path, masked: bool) -> None:
    weight = {name: [f"{age:.0f} {'lb' if name == 'south' else 'kg'}" for age in frame.age.fillna(50)]
              for name, frame in TABLES.items()}  # fmt: skip
    sites = Sites(tmp_path, {name: frame.assign(weight=weight[name]) for name, frame in TABLES.items()})
    with pytest.raises(SettingError, match="column 'weight' has the unit 'kg' at east and 'lb' at south"):
        sites.agree([MASKED if masked else ALLOWED] * 3, masked=masked)


@pytest.mark.full
def test_per_cent_at_one_site_are_shares_at_all(tmp_path: Path) -> None:
    whole = {name: frame.assign(load=[row / 4 for row in range(len(frame))]) for name, frame in TABLES.items()}
    signed = whole | {"south": whole["south"].assign(load=[f"{load}%" for load in whole["south"].load])}
    (tmp_path / "bare").mkdir()
    with pytest.raises(SettingError, match="'load' has numbers in % at south, which are read as shares of 1, and"):
        Sites(tmp_path / "bare", signed).agree([ALLOWED] * 3)
    shares = {name: frame.assign(load=frame.load / 100) for name, frame in whole.items()}
    (tmp_path / "shares").mkdir()
    agreed = Sites(tmp_path / "shares", shares | {"south": signed["south"]}).agree([ALLOWED] * 3)
    (tmp_path / "plain").mkdir()
    expected = Sites(tmp_path / "plain", shares).agree([ALLOWED] * 3)
    assert next(column for column in agreed.columns if column.name == "load").unit == "%"
    assert agreed.transform(whole["east"]).tolist() == expected.transform(whole["east"]).tolist()


def varied(rows: int, wards: str, seed: int) -> pandas.DataFrame:
    """A table with a column for each question: moments far from 0, powers, ranks, dates and large numbers."""
    rng, frame = np.random.default_rng(seed + 10), table(rows, wards, seed)
    seen = pandas.Timestamp("2024-01-01") + pandas.to_timedelta(rng.integers(0, 700, rows), "D")
    return frame.assign(far=1e7 + rng.normal(size=rows), price=rng.lognormal(size=rows), income=1e12 * rng.random(rows),
                        rank=rng.integers(0, 50, rows), seen=seen.strftime("%Y-%m-%d"))  # fmt: skip


VARIED = {
    name: varied(len(frame), "ab" if name != "east" else "bc", k) for k, (name, frame) in enumerate(TABLES.items())
}
MASKED = Policy(queries=["prepare_names", "masked_prepare"], secure_aggregation=3, least_rows=1)
SCALES = "prepare = { scale = { price = 'power', income = 'log', rank = 'rank' } }\n"


@pytest.mark.full
def test_sums_under_masks_agree_on_what_answers_in_the_open_do(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    expected = Sites(tmp_path / "open", VARIED, SCALES).agree([ALLOWED] * 3)
    (tmp_path / "masked").mkdir()
    sites = Sites(tmp_path / "masked", VARIED, SCALES)
    agreed = sites.agree([MASKED] * 3, masked=True)
    assert agreed.feature_names_out == expected.feature_names_out
    assert [column.kind for column in agreed.columns] == [column.kind for column in expected.columns]
    frame = pandas.concat(VARIED.values())
    np.testing.assert_allclose(agreed.transform(frame), expected.transform(frame), atol=1e-6)
    for column, other in zip(agreed.columns, expected.columns, strict=True):
        for part, numbers in getattr(column, "parts", {}).items():
            plain = other.parts[part]  # type: ignore[union-attr]
            assert (numbers.mean, numbers.deviation) == pytest.approx((plain.mean, plain.deviation), rel=1e-9), part


@pytest.mark.full
def test_the_server_sees_no_sum_of_a_single_site(tmp_path: Path) -> None:
    """The same bytes are searched for in what sites answer without masks, where they are."""
    sites = Sites(tmp_path, TABLES)
    sites.agree([MASKED] * 3, masked=True)
    names = {"kinds": {"age": "number", "smoker": "boolean"}}
    question = {"about": "counts", "thresholds": {"age": [50.0, 60.0], "smoker": [0.0]}, **names}
    query, runtime = MaskedPrepareQuery(question=question), sites.runtime
    del runtime.bodies[:]
    work = runtime._plan.work
    total = AskedSites(runtime, work).sums(query, work.masking)[1]  # type: ignore[arg-type]
    own = [runtime._sites[k].serve(Task(0, k, 0, {"model": work.initial}, query), None)[0] for k in range(3)]
    single = [update.vectors[SUM].numpy() for update in own if update is not None]
    assert from_limbs(total).tolist() == [
        sum((frame.age <= limit).sum() for frame in TABLES.values()) for limit in (50, 60)
    ] + [sum((frame.smoker == "no").sum() for frame in TABLES.values())]
    left = b"".join(runtime.bodies)
    assert not any(vector.tobytes() in left for vector in single)
    assert all(vector.tobytes() in pack_update(update, None) for vector, update in zip(single, own, strict=True))


@pytest.mark.parametrize(
    ("policies", "extra", "why"),
    [
        ([MASKED, Policy(queries=["prepare_names"], least_rows=1), MASKED], "", "no secure aggregation|south"),
        ([MASKED] * 3, "prepare = { harmonise = 'combat' }\n", "harmonise in .prepare. needs the means of each site"),
        (
            [Policy(queries=["prepare_names", "masked_prepare"], least_rows=3)] * 3,
            "",
            "cannot know that a sum is about",
        ),
    ],
)
def test_where_sums_under_masks_are_not_to_be_had(tmp_path: Path, policies: list[Policy], extra: str, why: str) -> None:
    with pytest.raises(PiebaldError, match=why):
        Sites(tmp_path, TABLES, extra).agree(policies, masked=True)


def test_no_row_and_no_rare_word_leaves_a_site(tmp_path: Path) -> None:
    rare = TABLES["north"].assign(ward=["isolation 7", *TABLES["north"].ward[1:]])
    sites = Sites(tmp_path, {**TABLES, "north": rare})
    agreed = sites.agree([ALLOWED] * 3)
    assert "isolation 7" not in agreed.to_json()
    assert agreed.columns[1].rare  # type: ignore[union-attr]
    answers = [body for body in sites.bodies if b"isolation" in body]
    assert answers == []


def test_a_site_answers_where_its_policy_names_the_question(tmp_path: Path) -> None:
    sites = Sites(tmp_path, TABLES)
    agreed = sites.agree([ALLOWED, Policy(), ALLOWED])
    assert any(line.startswith("south is left out") for line in sites.said)
    assert [column.name for column in agreed.columns] == ["age", "ward", "smoker"]


def test_nobody_answers(tmp_path: Path) -> None:
    with pytest.raises(PiebaldError, match="no site answers questions about its columns"):
        Sites(tmp_path, TABLES).agree([Policy()] * 3)


def told(change: dict[str, Any]) -> Change:
    def changed(update: Update) -> Update:
        values = unpacked(update.vectors["told"])
        if not {*change} <= {*type(values).model_fields}:
            return update
        return dataclasses.replace(update, vectors={"told": packed(values.model_copy(update=change))})

    return changed


@pytest.mark.parametrize(
    "change",
    [
        told({"rows": 10**9}),
        lambda update: dataclasses.replace(update, vectors={"told": torch.zeros(1 << 15, dtype=torch.int64)}),
        lambda update: dataclasses.replace(update, vectors={"told": torch.ones(1 << 15, dtype=torch.int64)}),
        lambda update: dataclasses.replace(update, vectors={"told": torch.zeros(3, dtype=torch.int64)}),
        lambda update: dataclasses.replace(update, vectors={}),
    ],
)
def test_hostile_answers_do_not_count(tmp_path: Path, change: Change) -> None:
    sites = Sites(tmp_path, TABLES)
    sites.agree([ALLOWED] * 3, change)
    assert any(line.startswith("north is left out") for line in sites.said)


def test_later_hostile_answers_end_the_question(tmp_path: Path) -> None:
    with pytest.raises(PiebaldError, match="north tells no more of its columns"):
        Sites(tmp_path, TABLES).agree([ALLOWED] * 3, told({"numbers": {}}))


def test_a_question_that_is_none_is_refused() -> None:
    for question in ({"about": "rows"}, {"about": "kinds", "path": "/etc"}, {"about": "counts"}):
        with pytest.raises(SettingError, match="question must be one about columns"):
            PrepareQuery(question=question)


def test_a_careful_site_tells_no_counts_of_few_rows(tmp_path: Path) -> None:
    """Medians need counts about few rows: the mean stands for them, within one deviation."""
    careful = Policy(queries=["prepare"], least_rows=3)
    full = {name: frame.assign(age=frame.age.fillna(60.0)) for name, frame in TABLES.items()}
    agreed = Sites(tmp_path, full).agree([careful] * 3)
    age = agreed.columns[0].values  # type: ignore[union-attr]
    pooled = np.concatenate([frame.age for frame in full.values()])
    assert age.median == pytest.approx(pooled.mean())  # type: ignore[union-attr]
    assert abs(np.median(pooled) - age.median) <= age.error  # type: ignore[union-attr]


@pytest.mark.full
def test_sites_grow_trees_on_the_rows_that_they_prepare(tmp_path: Path) -> None:
    """Tables with words and gaps, and a model that reads such a table."""
    pytest.importorskip("xgboost", reason="needs the extra: pip install '.[trees]'")
    from piebald.inference.trees.encoding import Encoding
    from piebald.inference.trees.forest import TreeSettings
    from piebald.inference.trees.site_clients import trees_at_sites

    sites = Sites(tmp_path, TABLES)
    agreed = sites.agree([ALLOWED] * 3)
    ready = sites.ready(sites.settings.with_agreed(agreed))
    policies = [Policy(queries=["trees"], least_rows=1)] * 3
    runtime = InProcess(ready, policies)
    runtime._sites = [
        TaskRunner(site, policies[k], "cpu", runtime._signers[k]) for k, site in enumerate(sites.at(ready))
    ]
    settings = TreeSettings(rounds=2, max_depth=2)
    grown = trees_at_sites(runtime, ready.work, ready.clients, settings, compare=False, split="train")  # type: ignore[arg-type]
    assert grown.encoding.columns == agreed.feature_names_out
    here, order = simulated()
    rows = np.concatenate([here.rows(order[name], "train").x.numpy() for name in NAMES])
    frame = pandas.concat([TABLES[name] for name in NAMES], ignore_index=True)
    told = grown.predict(frame)
    assert np.array_equal(told, grown.predict(rows))
    assert len(np.unique(told)) > 2
    again = Encoding.of_table(json.loads(json.dumps(grown.encoding.table())))
    assert np.array_equal(again.inputs(frame), rows)


@pytest.mark.full
def test_sites_make_the_same_token_ids_each_with_its_own_file(tmp_path: Path) -> None:
    """A site opens no path of the server's, and takes no other tokenizer than the agreed one."""
    pytest.importorskip("tokenizers", reason="needs the extra: pip install '.[hf]'")
    from tests.data.test_tokens import WORDS, notes, write_tokenizer

    path, bag = write_tokenizer(tmp_path / "tokenizer.json"), "tests.data.test_tokens:Bag"
    tables = {name: notes(rows).drop(columns="site") for name, rows in zip(NAMES, (12, 18, 24), strict=True)}
    policy = "[policy]\nplugins = ['tests.data.test_tokens']\n"
    extra = f"prepare = {{ tokenizer = {str(path)!r}, length = 5 }}\n"
    sites = Sites(tmp_path, tables, extra, bag, policy)
    with pytest.raises(SettingError, match="statistics of sites read no text"):
        _values_at_sites(sites.settings, ())
    agreed = sites.agree([ALLOWED] * 3)
    (tmp_path / "masked").mkdir()
    masked = Sites(tmp_path / "masked", tables, extra, bag, policy)
    assert masked.agree([MASKED] * 3, masked=True) == agreed
    ready = sites.ready(sites.settings.with_agreed(agreed))
    assert ready.work.shape == (5,)
    with pytest.raises(SettingError, match="this site does not have the tokenizer"):
        sites.at(ready)
    for name in NAMES:
        write_tokenizer(tmp_path / name / "own.json")
        with (tmp_path / name / "site.toml").open("a") as file:
            file.write(f"[weights]\n{json.dumps(str(path))} = 'own.json'\n")
    path.unlink()
    for name, site in zip(NAMES, sites.at(ready), strict=True):
        ids = site.clients.rows(site.client, "train").x
        assert isinstance(ids, torch.Tensor)
        assert ids.dtype == torch.int64
        assert sorted(ids.tolist()) == sorted(agreed.transform(tables[name]).tolist())
        assert site.clients.rows(site.client, "train").x is ids  # no task prepares them again
    write_tokenizer(tmp_path / "east" / "own.json", [*WORDS[:3], *reversed(WORDS[3:])])
    tokens._tokenizer.cache_clear()
    with pytest.raises(SettingError, match="its rows cannot be used for this run"):
        sites.at(ready)
