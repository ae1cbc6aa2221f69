"""Runs that go on from others: a budget that one of them states does not hide what another one has told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("dp_accounting", reason="needs the extra: pip install '.[privacy]'")

import piebald
from piebald import recipes
from piebald.engines.stack import PRIVATE
from piebald.federation.credentials import provisioning
from piebald.federation.site.client_runtime import FederationClient
from piebald.federation.site.client_store import ClientStore
from piebald.federation.site.policy import Policy
from piebald.federation.site.site_rows import SiteClient
from piebald.federation.site.task_runner import TaskRunner
from piebald.methods.recipe import Recipe
from piebald.testing.components import plain_network, uneven_clients

from ..federation.conftest import provisioned
from ..federation.test_policy import prepared
from ..federation.test_site_choice import Wire

HIDDEN = {"kind": "dp_sgd", "noise": 1.0, "lr": 0.1, "batch": 10}
SPARSE = {"kind": "top_k", "share": 0.1}
NOISE = {"kind": "gaussian", "clip": 1.0, "noise": 1.0, "where": "client"}


def carried_out(recipe: Recipe, out: Path, **more: Any) -> piebald.Run:
    return piebald.run(
        recipe, uneven_clients(), plain_network, rounds=1, seed=1, out=out,
        runtime={"kind": "simulator", "engine": "sequential", "workers": 0}, evaluate_every=0, **more,
    )  # fmt: skip


def head(**training: Any) -> Recipe:
    """A method with a private head, trained in this way."""
    return recipes.make("hdafl").with_(training={**HIDDEN, **training})


def sparse(*transforms: dict[str, Any]) -> Recipe:
    """A method whose clients remember what they did not send."""
    return recipes.make("fedavg", lr=0.1, batch=10).with_(transforms=(*transforms, SPARSE))


def common(*transforms: str) -> Recipe:
    """The same, with numbers that can be summed."""
    numbers = {"kind": "random_k", "share": 0.1, "positions": "common"}
    return recipes.make("fedavg", lr=0.1, batch=10).with_(transforms=(numbers, *transforms))


@pytest.mark.full
@pytest.mark.parametrize(
    ("before", "after", "taken"),
    [
        (head(noise=0.0), head(), False),  # heads that were trained without noise are in the gradients of other layers
        (head(), head(), True),
        (sparse(), sparse(NOISE), False),  # what was not sent then, without noise, would be sent now
        (sparse(NOISE), sparse(NOISE), True),
        (common(), common("secure_aggregation"), False),  # members of a sum begin alike
        (common("secure_aggregation"), common("secure_aggregation"), False),
    ],
    ids=[
        "rows, without noise before",
        "rows",
        "updates, without noise before",
        "updates",
        "sums, without masks before",
        "sums, under masks before",
    ],
)
def test_state_is_taken_over_only_where_it_was_protected_alike(
    before: Recipe, after: Recipe, taken: bool, tmp_path: Path
) -> None:
    """Before, all of it was, so that what left in the second run told of rows what its budget said is hidden."""
    carried_out(before, tmp_path / "first").close()
    run = carried_out(after, tmp_path / "second", start_from=tmp_path / "first")
    assert any(what.startswith("the state of") for what in run.meta["lineage"]["taken"]) == taken


@pytest.mark.full
def test_a_budget_says_what_is_known_of_all_runs_together(tmp_path: Path) -> None:
    """Before, it spoke of all that a client ever sends, and of this run alone."""
    plain, hidden = recipes.make("fedavg", lr=0.1, batch=10), recipes.make("dp_sgd", noise=1.0, lr=0.1, batch=10)
    first = carried_out(hidden, tmp_path / "first")
    second = carried_out(hidden, tmp_path / "second", start_from=tmp_path / "first")
    one, two = (run.meta["privacy"][0] for run in (first, second))
    assert "Said of this run alone" not in one["meaning"]
    both, delta = one["epsilon_pld"] + two["epsilon_pld"], one["delta"] + two["delta"]
    assert f"epsilon is at most {both:.4g} at delta {delta:.2g}, the sums." in two["meaning"]
    resumed = piebald.resume(tmp_path / "second", uneven_clients(), plain_network, rounds=2)
    assert f"epsilon is at most {one['epsilon_pld'] + resumed.meta['privacy'][0]['epsilon_pld']:.4g}" in str(
        resumed.meta
    )
    carried_out(plain, tmp_path / "open", start_from=tmp_path / "first").close()
    third = carried_out(hidden, tmp_path / "third", start_from=tmp_path / "open")
    assert "goes on from 2 others, one after another: of all that was told in all of them no budget is known" in str(
        third.meta["privacy"]
    )


@pytest.mark.parametrize("hidden", [pytest.param("rows", marks=pytest.mark.full), "sums", None])
def test_a_site_begins_anew_where_a_server_names_an_earlier_run(hidden: str | None, tmp_path: Path) -> None:
    """The server says which run this one goes on from, and the site does not know how that one was protected.

    Beside masks, it could have shown all sites but one a model in that run that spoils what they keep.
    """
    folder = provisioned(tmp_path) / "site-1"
    more = {"rows": {"training": HIDDEN}, "sums": {"transforms": ["secure_aggregation"]}}
    plan = prepared({"name": "hdafl", **more.get(str(hidden), {})})
    runner = TaskRunner(SiteClient(plan.work, plan.clients, 0), Policy(), "cpu")
    state = {name: torch.ones(shape) for name, shape in runner.state_form.items()}
    assert PRIVATE in state
    ClientStore(folder / "state" / "aa").begin_with(state, "99")
    site = FederationClient(
        provisioning.read(folder), lambda _: pytest.fail("not asked"), policy=Policy(), make_link=Wire
    )  # type: ignore[arg-type]
    site.session.begin_run("bb")
    site._carry_over("aa", runner)
    assert site.session.store is not None
    kept = site.session.store.state(before=1)
    assert (kept is None) if hidden else (kept is not None and torch.equal(kept[PRIVATE], state[PRIVATE]))
