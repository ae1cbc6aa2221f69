"""A federation that goes on from a finished one, with the private layers that its sites kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import piebald

from .conftest import SITES, Sites, carry_out, provisioned, settings

pytestmark = pytest.mark.full


def losses(run: piebald.Run, version: int) -> dict[int, float]:
    found = [row for row in run._store.rows("score") if (row["version"], row["metric"]) == (version, "loss")]
    return {row["client"]: row["value"] for row in found if row["client"] is not None and row["split"] == "test"}


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
        lost = settings({"name": "fedavg"}, rounds=1)
        with pytest.raises(piebald.errors.SettingError, match="private layers"):
            carry_out(lost, tmp_path / "third", start_from=tmp_path / "first", **where)
    finally:
        sites.close()
