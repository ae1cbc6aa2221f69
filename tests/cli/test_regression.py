"""`piebald glm`, `cox` and `survival`: tables within 80 columns, one JSON object, one sentence for what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas
import pytest

import piebald


@pytest.fixture
def table(tmp_path: Path) -> str:
    """Patients of three clinics with a treatment, a number of visits, and a time to death or the end of the study."""
    rng, rows = np.random.default_rng(3), 90
    frame = pandas.DataFrame({"clinic": list("abc") * 30, "age": rng.normal(60, 9, rows).round(1)})
    frame["arm"], frame["dose"] = rng.choice(["new", "old"], rows), rng.integers(0, 2, rows)
    frame["months"], frame["died"] = rng.integers(1, 40, rows), rng.integers(0, 2, rows)
    frame["exposure"], frame["visits"] = rng.normal(size=rows), rng.poisson(4, rows)
    frame.to_csv(tmp_path / "rows.csv", index=False)
    return str(tmp_path / "rows.csv")


TIMES = ("--client", "clinic", "--time", "months", "--event", "died")


def test_tables_and_sentences_fit_the_screen(command, table) -> None:
    visits = ("glm", table, "--client", "clinic", "--target", "visits", "--column", "age", "--family")
    for words, sentence in (
        ((*visits, "poisson", "--offset", "exposure", "--cluster", "clinic"), "Standard errors by 3 clusters,"),
        ((*visits, "gaussian", "--robust"), "Robust standard errors (HC1)."),
        ((*visits, "gaussian", "--random-intercept", "one_stage"), "Restricted log-likelihood"),
        ((*visits, "gaussian", "--random-intercept", "one_stage", "--ml"), "\nLog-likelihood"),
        ((*visits, "poisson", "--random-intercept", "two_stage"), "Pooled from models of 3 clients"),
        (("cox", table, *TIMES, "--column", "age", "--column", "arm"), "Stratified by client, 3 of 3 with events"),
        (("cox", table, *TIMES, "--column", "age", "--pooled", "--cluster", "client"), "One baseline of all clients"),
        (("survival", table, *TIMES, "--group", "arm"), "Log-rank test of the pooled rows: chi-square"),
        (("survival", table, *TIMES, "--stratified", "--group", "dose", "--categories", "dose=0,1"), "stratified by"),
    ):
        said = command(*words)
        assert (said.code, said.err) == (0, "")
        assert max(map(len, said.out.splitlines())) <= 80, said.out
        assert sentence in said.out


def test_json_is_what_python_returns(command, table) -> None:
    rows = pandas.read_csv(table)
    said = json.loads(command("cox", table, *TIMES, "--column", "age", "--ties", "breslow", "--json").out)
    found = piebald.cox(rows, client="clinic", time="months", event="died", columns=["age"], ties="breslow")
    assert said == json.loads(json.dumps(found.plain()))
    assert (said["events"], said["ties"], said["stratified"]) == (int(rows.died.sum()), "breslow", True)
    times = [float(month) for month in range(6, 37, 6)]
    said = json.loads(command("survival", table, *TIMES, "--times", "6:36:6", "--json").out)
    curves = piebald.survival(rows, client="clinic", time="months", event="died", times=times)
    assert said == json.loads(json.dumps(curves.plain()))
    words = ("--client", "clinic", "--target", "visits", "--column", "age", "--weights", "months", "--json")
    said = json.loads(command("glm", table, *words).out)
    weighted = piebald.glm(rows, client="clinic", target="visits", columns=["age"], weights="months")
    assert said == json.loads(json.dumps(weighted.plain()))
    assert said["log_likelihood"] is None


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("glm", "--target", "visits", "--secure"), "--secure is for sites"),
        (("glm", "--target", "visits", "--cluster", "ward"), "there is no column 'ward'"),
        (("cox", *TIMES[2:], "--column", "clinic"), "needs at least one column that hazards depend on"),
        (("survival", *TIMES[2:], "--times", "1:2"), "--times must be FIRST:LAST:STEP"),
        (("survival", *TIMES[2:], "--times", "1:1e9:1"), "with at most 10,000 times"),
        (("survival", *TIMES[2:], "--group", "age"), "group 'age' holds numbers"),
        (("survival", *TIMES[2:], "--categories", "dose"), "--categories must be COLUMN=A,B"),
    ],
)
def test_bad_input_is_one_sentence(command, table, words, sentence: str) -> None:
    said = command(words[0], table, "--client", "clinic", *words[1:])
    assert (said.code, said.out, said.err.count("\n")) == (2, "", 1)
    assert sentence in said.err


def test_sites_are_asked_for_what_they_can_answer(command, good) -> None:
    times = ("--time", "x0", "--event", "x1", "--runtime", "federation")
    for words, sentence in (
        (("cox", good, *times, "--pooled"), "--pooled compares rows of different clients"),
        (("cox", good, *times, "--client", "clinic"), "--client is for rows on this machine"),
        (("survival", good, *times), "sites count rows at times that they are asked about"),
        (("survival", good, *times, "--times", "2:1:1"), "--times must be"),
        (("cox", good, *times, "--column", "nothing"), "there is no column 'nothing'"),
    ):
        said = command(*words)
        assert (said.code, said.out) == (2, "")
        assert said.err.splitlines()[-1].find(sentence) >= 0


def test_an_experiment_says_the_weights_of_its_rows(command, table, tmp_path: Path) -> None:
    file = tmp_path / "experiment.toml"
    data = f'{{ source = "{table}", client = "clinic", target = "visits", weights = "months" }}'
    file.write_text(f'rounds = 1\ndata = {data}\nmodel = {{ name = "mlp" }}\n')
    words = ("--family", "poisson", "--column", "age", "--column", "arm", "--json")
    said = json.loads(command("glm", file, *words).out)
    named = ("--client", "clinic", "--target", "visits", "--weights", "months")
    assert said["coefficients"] == json.loads(command("glm", table, *named, *words).out)["coefficients"]
    everything = json.loads(command("glm", file, "--family", "poisson", "--json").out)
    assert "months" not in json.dumps(everything["coefficients"])
