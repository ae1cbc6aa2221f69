"""The table of a paper's page that says where our runs differ from it."""

from __future__ import annotations

from pathlib import Path

from tests.scripts import loaded

deviations = loaded(Path(__file__).parents[2] / "benchmarks" / "papers" / "deviations.py")
PAPER = {"rounds": "50", "lr": "not printed", "seeds": "3"}
TABLE = """<!-- deviations -->
| table | the paper → here |
| --- | --- |
| Table 1 | {} |
| Table 3 | network LeNet → Mlp |
<!-- end of deviations -->
"""


def test_a_row_has_what_the_paper_prints_and_we_do_otherwise() -> None:
    ours = {"rounds": "6", "lr": "0.1", "seeds": "3", "batch": "10"}
    assert deviations.row("Table 1", PAPER, ours) == ["Table 1", "rounds 50 → 6"]


def test_methods_stand_beside_those_of_the_paper() -> None:
    ours = ["DistFL", "FedAvg", "FedAvg, equal weights", "K-Cluster (K = 5)"]
    assert deviations.beside("DistFL / FedAvg / K-Cluster", [*ours[:2], ours[3]]) == "DistFL / FedAvg / K-Cluster"
    assert deviations.beside("DistFL / K-Cluster / Credit", ours) == (
        "without Credit, also FedAvg / FedAvg, equal weights"
    )


def test_a_page_has_one_row_for_each_table_that_differs() -> None:
    """Table 2 does not differ, and the data of Table 3 are not here."""
    before = "# A paper\n\n## Where the runs differ from the paper\n\n" + TABLE.format("rounds 50 → 9") + "\nThe end.\n"
    after = before.replace("50 → 9", "50 → 6")
    assert deviations.page(before, [["Table 1", "rounds 50 → 6"], ["Table 2", ""], ["Table 3"]]) == after


def test_a_page_without_the_table_gets_one() -> None:
    text = deviations.page("# A paper\n", [["Table 1", "rounds 50 → 6"], ["Table 3", "network LeNet → Mlp"]])
    assert text == f"# A paper\n\n{deviations.HEADING}\n\n" + TABLE.format("rounds 50 → 6")
