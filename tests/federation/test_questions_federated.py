"""Statistics and trees over real connections: the sites are threads of this process, each with its certificate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("xgboost", reason="needs the extra: pip install '.[trees]'")

from piebald.federation.site.policy import Policy
from piebald.inference.columns import statistics_request
from piebald.inference.statistics_at_sites import statistics_at_sites
from piebald.inference.trees.site_clients import trees_at_sites
from tests.inference.test_at_sites import InProcess
from tests.inference.test_trees_at_sites import PLAN, SETTINGS

from .site_threads import connected


def told_by(folder: Path) -> set[str]:
    """The names of what has left a site, as its own audit log says."""
    lines = map(json.loads, (folder / "audit.jsonl").read_text().splitlines())
    return {name for line in lines if line["event"] == "sent" for name in line["tensors"]}


@pytest.mark.full
def test_statistics_and_trees_over_mutual_tls(tmp_path: Path) -> None:
    """They are to the bit those of sites in this process; a site whose policy does not name trees grows none."""
    policies = [Policy(queries=["statistics", "trees"], least_rows=1)] * 2 + [
        Policy(queries=["statistics"], least_rows=1)
    ]
    wanted = statistics_request((0.1, 0.5), None, {}, True)
    with connected(PLAN, policies, tmp_path / "credentials") as server:
        told = statistics_at_sites(server, PLAN.work, PLAN.clients, wanted)
        grown = trees_at_sites(server, PLAN.work, PLAN.clients, SETTINGS, out=tmp_path / "trees")
    here = InProcess(PLAN, policies)
    assert told.plain() == statistics_at_sites(here, PLAN.work, PLAN.clients, wanted).plain()
    other = trees_at_sites(here, PLAN.work, PLAN.clients, SETTINGS)
    assert grown.xgboost_model() == other.xgboost_model() == (tmp_path / "trees" / "trees.json").read_bytes()
    assert (grown.clients, grown.together, grown.alone) == (["a", "b"], other.together, other.alone)
    named = [told_by(tmp_path / "credentials" / name) for name in "abc"]
    assert named == [{"moments", "counts", "sums", "forest"}] * 2 + [{"moments", "counts"}]
