"""A federation that goes on from a finished one, with the private layers that its sites kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import piebald
from piebald.federation.credentials import provisioning
from piebald.federation.credentials.audit import FILE, missing

from .conftest import SITES, Sites, carry_out, provisioned, settings

pytestmark = pytest.mark.full


def losses(run: piebald.Run, version: int) -> dict[int, float]:
    found = [row for row in run._store.rows("score") if (row["version"], row["metric"]) == (version, "loss")]
    return {row["client"]: row["value"] for row in found if row["client"] is not None and row["split"] == "test"}


@pytest.mark.long
def test_private_layers_follow_where_the_sites_policy_lets_them(tmp_path: Path) -> None:
    sites = Sites(provisioned(tmp_path / "credentials"))
    (sites.folder / "site-3" / "site.toml").write_text("[policy]\ncarry = false\n")
    where: dict[str, Any] = {"credentials": str(sites.folder / "server")}
    try:
        for name in SITES:
            sites.start(name)
        made = settings({"name": "hdafl"}, rounds=2)
        first = carry_out(made, tmp_path / "first", **where)
        second = carry_out(made, tmp_path / "second", start_from=tmp_path / "first", **where)
        ended, begun = losses(first, 2), losses(second, 0)
        assert (begun[0], begun[1]) == (
            ended[0],
            ended[1],
        )  # their private layers, to the bit
        assert begun[2] != ended[2]  # a private layer of its own choice
        assert second.meta["lineage"]["federation"] in sites.log("site-1")
        assert "carry = false" in sites.log("site-3")
        port = provisioning.read(sites.folder / "server").port
        table = {"name": "test", "host": "127.0.0.1", "port": port, "days": 2, "sites": SITES}
        provisioning.revoke(provisioning.Description.model_validate(table), sites.folder, ["site-2"])
        third = carry_out(made, tmp_path / "third", start_from=tmp_path / "second", wait_for=2, **where)
        assert {row["client"] for row in third.results if row["status"] == "ok"} == {0, 2}
    finally:
        sites.close()
    logs = {name: sites.folder / name / FILE for name in ("server", *SITES)}
    for name in SITES:  # nothing has left a site that is not in both logs
        assert missing(logs[name], logs["server"]) == missing(logs["server"], logs[name]) == []
    told = [json.loads(line) for line in logs["server"].read_text().splitlines()]
    runs = [entry["run"] for entry in told if entry["event"] == "ended"]
    received = [(entry["run"], entry["site"]) for entry in told if entry["event"] == "received"]
    assert {site for run, site in received if run == runs[1]} == {*SITES}
    assert {site for run, site in received if run == runs[2]} == {"site-1", "site-3"}
    (shared,) = {tuple(entry["tensors"]) for entry in told if entry["event"] == "received" and entry["trains"]}
    assert shared == ("model",)
