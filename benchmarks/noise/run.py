"""What differential privacy costs: regressions, survival curves and scores with noise beside those without.

    PIEBALD_DATA=FOLDER python benchmarks/noise/run.py

Needs lifelines, for two of its data sets.  RESULTS.md is what it prints.
"""

from __future__ import annotations

import importlib.util
import math
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas

import piebald
from piebald import recipes
from piebald.contracts import Task
from piebald.data.partition import clients_from
from piebald.experiments.run_settings import RunSettings
from piebald.federation.site.policy import Policy
from piebald.federation.site.task_runner import SiteClient, TaskRunner
from piebald.methods.queries import Evaluate
from piebald.models import Logistic
from piebald.runs.prepare import prepare

EPSILONS, DELTA, REPEATS = (1.0, 3.0, 8.0), 1e-6, 12
DATA = Path(os.environ.get("PIEBALD_DATA", "data"))


def dealt(rows: pandas.DataFrame, clients: int) -> pandas.DataFrame:
    """Rows that are dealt to so many clients at random."""
    return rows.assign(client=np.random.default_rng(0).integers(0, clients, len(rows)).astype(str))


def regressions() -> Iterator[tuple[str, pandas.DataFrame, str, dict[str, tuple[float, float]]]]:
    """Tables of classes: their names, rows, target, and the bounds of columns, from what is known of them."""
    heart = pandas.read_csv(DATA / "heart" / "heart.csv.gz").rename(columns={"site": "client"})
    heart["target"] = (heart["num"] > 0).astype(int)
    yield "heart, 4 hospitals", heart, "target", {
        "age": (20, 90), "sex": (0, 1), "thalach": (60, 210), "exang": (0, 1), "oldpeak": (-3, 7)
    }  # fmt: skip
    adult = pandas.read_csv(DATA / "adult" / "adult.csv.gz")
    adult["target"] = adult["income"].str.contains(">50K").astype(int)
    adult["male"] = (adult["sex"].str.strip() == "Male").astype(int)
    bounds: dict[str, tuple[float, float]] = {
        "age": (17, 90), "education-num": (1, 16), "hours-per-week": (1, 99), "male": (0, 1)
    }  # fmt: skip
    yield "adult, 4 clients", dealt(adult, 4), "target", bounds
    credit = pandas.read_csv(DATA / "credit" / "credit_default.csv.gz")
    bounds = {"LIMIT_BAL": (0, 1_000_000), "AGE": (20, 80), "PAY_0": (-2, 8), "PAY_2": (-2, 8)}
    yield "credit, 4 clients", dealt(credit, 4), "default", bounds


def lives() -> Iterator[tuple[str, pandas.DataFrame, str, str, dict[str, tuple[float, float]], list[float], str]]:
    """Tables of times: their names, rows, time, event, bounds, ends of intervals, and a column of groups."""
    cancer = pandas.read_csv(DATA / "tcga_brca" / "tcga_brca.csv.gz").rename(columns={"site": "client"})
    cancer["treated"] = cancer["treatment_or_therapy_yes"].map({0: "no", 1: "yes"})
    years = [365.25 * year for year in (1, 2, 3, 5, 8, 12, 24)]
    yield "breast cancer, 6 regions", cancer, "time", "event", {
        "age_at_index": (20, 100), "race_white": (0, 1), "treatment_or_therapy_yes": (0, 1)
    }, years, "treated"  # fmt: skip
    # found and not imported, since only its tables are needed
    package = importlib.util.find_spec("lifelines")
    if package is None or package.origin is None:
        raise SystemExit("lifelines has two of the data sets: pip install lifelines")
    folder = Path(package.origin).parent / "datasets"
    trial = dealt(pandas.read_csv(folder / "ACTG175.csv"), 3)
    power = pandas.read_csv(folder / "dd.csv").rename(columns={"un_continent_name": "client"})
    trial["alone"] = (trial["arms"] == 0).map({True: "yes", False: "no"})
    trial["zidovudine"] = (trial["arms"] == 0).astype(int)
    yield "AIDS trial, 3 clients", trial, "days", "cens", {
        "age": (10, 80), "cd40": (0, 1000), "zidovudine": (0, 1)
    }, [200.0, 400, 600, 800, 1000, 1240], "alone"  # fmt: skip
    power["democracy"] = (power["democracy"] == "Democracy").astype(int)
    power["kind"] = power["democracy"].map({0: "other", 1: "democracy"})
    yield "governments, 5 continents", power, "duration", "observed", {
        "democracy": (0, 1), "start_year": (1946, 2008)
    }, [1.0, 2, 4, 8, 16, 50], "kind"  # fmt: skip


def compared(exact: Any, noisy: Callable[[float], Any], name: str, rows: int, epsilons: Sequence[float]) -> None:
    """Print how far estimates with noise are from those without."""
    for epsilon in epsilons:
        found = [noisy(epsilon) for _ in range(REPEATS)]
        apart = np.array([(fit.coefficients - exact.coefficients) / exact.errors for fit in found])
        wider = np.median([fit.errors / exact.errors for fit in found])
        inside = np.mean([
            (fit.interval()[:, 0] <= exact.coefficients) & (exact.coefficients <= fit.interval()[:, 1]) for fit in found
        ])  # fmt: skip
        print(f"| {name} | {rows:,} | {epsilon:g} | {math.sqrt(np.square(apart).mean()):.2f} | {wider:.2f} | "
              f"{100 * inside:.0f} % |")  # fmt: skip


def main() -> None:
    """Print the tables of RESULTS.md."""
    heading = "| data | rows | epsilon | distance | errors | intervals |\n|---|---|---|---|---|---|"
    print(f"## Logistic regression\n\n{heading}")
    for name, rows, target, bounds in regressions():
        common: dict[str, Any] = {
            "client": "client", "target": target, "columns": list(bounds), "family": "binomial"
        }  # fmt: skip
        rows = rows.dropna(subset=[*bounds, target])
        compared(
            piebald.glm(rows, **common),
            lambda epsilon, rows=rows, common=common, bounds=bounds: piebald.glm(
                rows, **common, epsilon=epsilon, delta=DELTA, bounds=bounds
            ),
            name, len(rows), EPSILONS,
        )  # fmt: skip
    print(f"\n## Cox regression\n\n{heading}")
    for name, rows, time, event, bounds, times, _ in lives():
        common = {"client": "client", "time": time, "event": event, "columns": list(bounds)}
        rows = rows.dropna(subset=[*bounds, time, event])
        compared(
            piebald.cox(rows, **common, stratified=False),
            lambda epsilon, rows=rows, common=common, bounds=bounds, times=times: piebald.cox(
                rows, **common, epsilon=epsilon, delta=DELTA, bounds=bounds, times=times
            ),
            name, len(rows), (*EPSILONS, 50.0),  # hardly any noise: what is left is another model
        )  # fmt: skip
    print("\n## Kaplan-Meier curves and log-rank tests\n\n| data | rows | epsilon | distance | errors | chi-square |")
    print("|---|---|---|---|---|---|")
    for name, rows, time, event, _, times, group in lives():
        rows = rows.dropna(subset=[time, event, group])
        common = {"client": "client", "time": time, "event": event, "group": group, "times": times}
        exact = piebald.survival(rows, **common)
        for epsilon in EPSILONS:
            found = [piebald.survival(rows, **common, epsilon=epsilon, delta=DELTA) for _ in range(REPEATS)]
            apart = [_farthest(exact.curves[curve], each.curves[curve]) for each in found for curve in exact.curves]
            wider = [each.curves[curve].errors.max() / exact.curves[curve].errors.max()
                     for each in found for curve in exact.curves if len(each.curves[curve].errors)]  # fmt: skip
            tests = statistics.median(each.test.statistic for each in found if each.test is not None)
            print(f"| {name} | {len(rows):,} | {epsilon:g} | {statistics.mean(apart):.3f} | "
                  f"{statistics.median(wider):.2f} | {tests:.1f} of {exact.test.statistic:.1f} |")  # fmt: skip
    print("\n## Accuracy at a site (`evaluate`)\n\n| data | test rows of a site | epsilon | accuracy | deviation |")
    print("|---|---|---|---|---|")
    for name, rows, target, bounds in regressions():
        low, high = np.array(list(bounds.values())).T
        rows = rows.dropna(subset=[*bounds, target])
        scaled = ((rows[list(bounds)] - low) / (high - low)).assign(client=rows["client"], target=rows[target])
        measured(name, scaled)


def measured(name: str, rows: pandas.DataFrame) -> None:
    """Print by how much answers of sites about a trained model are off, whose noise is that of 200 questions."""
    clients = clients_from(rows, client="client", target="target")
    recipe, model, options = recipes.fedavg(lr=0.1), Logistic([rows.shape[1] - 2], 2), RunSettings(rounds=5, seed=1)
    plan = prepare(recipe, clients, model, options)
    trained = piebald.run(recipe, clients, model, rounds=5, seed=1).cluster_models[0]
    task = Task(1, 0, 5, {"model": trained[: plan.work.layout.shared]}, Evaluate())
    numbers = range(len(plan.clients))

    def accuracy(number: int, policy: Policy) -> float:
        answer, failure, _ = TaskRunner(SiteClient(plan.work, plan.clients, number), policy, "cpu").serve(task, None)
        if answer is None:
            raise SystemExit(failure)
        return float(answer.metrics["global/accuracy"])

    exact = [accuracy(number, Policy(queries=["evaluate"], least_rows=1)) for number in numbers]
    test_rows = statistics.median(len(plan.clients.rows(number, "test")) for number in numbers)
    for epsilon in EPSILONS:
        policy = Policy.model_validate({"preset": "noise", "budget": {"epsilon": epsilon, "delta": DELTA}})
        off = [accuracy(number, policy) - exact[number] for number in numbers for _ in range(25)]
        print(f"| {name} | {test_rows:,.0f} | {epsilon:g} | {100 * statistics.mean(exact):.1f} % | "
              f"{100 * math.sqrt(np.square(off).mean()):.2f} points |")  # fmt: skip


def _farthest(exact: Any, noisy: Any) -> float:
    """The largest distance of two curves at the times of the exact one."""
    if not len(noisy.times):
        return 1.0
    place = np.searchsorted(noisy.times, exact.times, side="right") - 1
    values = np.where(place >= 0, noisy.survival[np.maximum(place, 0)], 1.0)
    return float(np.abs(values - exact.survival).max())


if __name__ == "__main__":
    main()
