"""An experiment that a site's policy does not name: the server gets nothing, until somebody at the site approves it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from piebald.cli import main
from piebald.federation.credentials import provisioning
from piebald.federation.credentials.audit import verify
from piebald.federation.hub.run_terms import terms
from piebald.federation.link.wire_format import Hello, Welcome, digest
from piebald.federation.site.client_runtime import FederationClient
from piebald.federation.site.policy import Policy
from piebald.federation.site.site_process import SiteSettings, SiteWork

from .conftest import SITES, provisioned
from .test_policy import prepared
from .test_site_choice import Wire, described


class Offered:
    """A site with a policy, to which a server offers an experiment; its threads do not run."""

    def __init__(self, folder: Path, accept: Any, name: str = "fedavg", training: dict[str, Any] | None = None) -> None:
        self.folder = provisioned(folder) / "site-1"
        plan = prepared({"name": "fedavg"})
        table = described({"name": name}).table()
        values = json.loads(terms(plan.work, table, list(plan.clients.names), SITES, plan.clients.classes))
        self.body = json.dumps(values if training is None else values | {"training": training}).encode()
        self.prepared = 0
        policy = Policy.model_validate({"accept": accept})
        work = SiteWork(provisioning.read(self.folder), SiteSettings(policy=policy), folder, local=True)

        def prepare(offered: Any) -> Any:
            self.prepared += 1
            return work(offered)

        self.site = FederationClient(work.credentials, prepare, policy=policy, make_link=Wire)  # type: ignore[arg-type]
        self.site._fetch_terms = lambda _: bytearray(self.body)  # type: ignore[method-assign]

    def offer(self) -> Hello:
        """Offer the experiment; returns the hello that the server gets from then on."""
        self.site._on_welcome(Welcome(version="0", run="ab", epoch="aa", terms=digest(self.body)))
        self.site._say_hello()
        return self.site._link.left[-1][2]  # type: ignore[attr-defined, no-any-return]


NOTHING = {"ready": "", "rows": -1, "validation_rows": -1, "test_rows": -1, "held": []}


def told(hello: Hello) -> dict[str, Any]:
    return {name: getattr(hello, name) for name in NOTHING}


def test_a_recipe_that_the_policy_does_not_name_gets_nothing_from_the_site(tmp_path: Path) -> None:
    offered = Offered(tmp_path, ["hdafl"])
    hello = offered.offer()
    assert hello.refused == "this site accepts the recipes hdafl, the run has 'fedavg'"
    assert told(hello) == NOTHING
    assert offered.prepared == 0  # no rows were read
    assert verify(offered.folder / "audit.jsonl").lines == 1
    assert Offered(tmp_path / "other", ["hdafl", "fedavg"]).offer().rows > 0


def test_a_recipe_under_a_name_that_the_policy_accepts_is_found_out(tmp_path: Path) -> None:
    """The name is the server's word; what is trained is in the terms."""
    sgd = {"kind": "proximal", "mu": 5.0, "lr": 0.1}
    hello = Offered(tmp_path, ["fedavg"], training=sgd).offer()
    assert hello.refused == "the run calls itself 'fedavg', and its training is not that of this recipe"
    assert told(hello) == NOTHING


@pytest.mark.parametrize("levels", [100, 988, 992, 996, 99_999])
def test_terms_of_any_depth_end_no_site(levels: int, tmp_path: Path) -> None:
    """Before, some were read and could not be written to the audit log, which ended the site."""
    offered = Offered(tmp_path, None)
    deep = '{"a":' * levels + "1" + "}" * levels
    offered.body = offered.body.replace(b'"experiment": {', f'"experiment": {{"deep": {deep}, '.encode(), 1)
    hello = offered.offer()
    assert hello.refused.startswith(
        ("the run's terms must be a table of at most 64 levels", "the run's terms cannot be")
    )
    assert told(hello) == NOTHING


def test_an_experiment_waits_until_it_is_approved_by_its_digest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    offered = Offered(tmp_path, "ask")
    for _ in range(2):
        hello = offered.offer()
        assert (hello.pending, hello.refused) == (True, "")
        assert told(hello) == NOTHING
    assert offered.prepared == 0
    credentials, own = str(offered.folder), digest(offered.body)
    assert len(own) == 64  # before, 2^64 tries would have made other terms of the same digest
    assert main(["approve", credentials]) == 0
    said = capsys.readouterr().out
    assert "fedavg" in said
    assert f"approve it with: piebald approve {credentials} {own}" in said
    assert main(["approve", credentials, "ab" * 16]) == 2
    assert f"{own} waits for approval in {credentials}" in capsys.readouterr().err
    assert offered.offer().pending
    assert main(["approve", credentials, own]) == 0
    hello = offered.offer()
    assert (hello.pending, hello.refused) == (False, "")
    assert hello.ready == own
    assert hello.rows > 0
    capsys.readouterr()
    assert main(["approve", credentials]) == 0
    assert "nothing waits for approval" in capsys.readouterr().out
    offered.body = offered.body.replace(b'"seed": 1', b'"seed": 2')  # other terms are another question
    assert offered.offer().pending
    assert [json.loads(line)["event"] for line in (offered.folder / "audit.jsonl").read_text().splitlines()] == [
        "waits for approval", "accepted", "waits for approval",
    ]  # fmt: skip


@pytest.mark.parametrize("accept", ["all", 3, [1]])
def test_a_policy_that_accepts_something_else_is_refused(accept: Any, tmp_path: Path) -> None:
    (tmp_path / "site.toml").write_text(f"[policy]\naccept = {json.dumps(accept)}\n")
    with pytest.raises(ValueError, match=r"policy\.accept"):
        SiteSettings.load(tmp_path / "site.toml")
