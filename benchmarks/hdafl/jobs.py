"""Jobs: one run each, of a recipe on one partition with one seed, in its own run folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import federations
import settings
import torch
from settings import Plan, Scale

import piebald
from piebald.models import build_model
from piebald.report.tables import History


@dataclass(frozen=True)
class Job:
    """One run.

    Attributes:
        part: one of `settings.PARTS`.
        model: the network.
        setting: the partition.
        cohort: clients per round, a number, or 1.0 for all.
        label: the recipe's name in tables.
        seed: seed of the rows, the partition, the first model and the training.
        plan: number of rounds and how often models are evaluated.
        rows: rows of the data set to use, None for all.
        rate: learning rate.
    """

    part: str
    model: str
    setting: str
    cohort: float
    label: str
    seed: int
    plan: Plan
    rows: int | None
    rate: float

    @property
    def folder(self) -> Path:
        """Folder, below the output folder, of all runs that this one is compared with."""
        cohort = "alone" if self.cohort == settings.ALONE and isinstance(self.cohort, float) else f"C{self.cohort}"
        return Path(self.part) / self.model / self.setting / cohort


def digit_jobs(scale: Scale, part: str, model: str, where: Sequence[str], seeds: Sequence[int]) -> Iterator[Job]:
    """Yield the jobs on digits: every setting, cohort and recipe."""
    for seed in seeds:
        for setting in where:
            leaf, few = part == "leaf", setting in settings.FEW
            plans = scale.leaf_plans if leaf else scale.few_plans if few else scale.plans
            alone = scale.leaf_alone if leaf else scale.alone
            for cohort, plan in plans.items():
                for label in settings.LABELS[1:]:
                    yield Job(part, model, setting, cohort, label, seed, plan, scale.rows, settings.LEARNING_RATE)
            yield Job(part, model, setting, settings.ALONE, "Local", seed, alone, scale.rows, settings.LEARNING_RATE)


def paper_jobs(scale: Scale) -> Iterator[Job]:
    """Yield the jobs of tables 3 and 4 and Fig. 3 in the paper's own settings."""
    letters = federations.letters_here()
    many, few = settings.paper_plans(scale.paper_rounds, letters, scale.paper_every)
    rows, rate = None if letters else scale.paper_rows, settings.LEARNING_RATE
    epochs = scale.paper_alone or scale.paper_rounds
    alone = settings.Plan(epochs, epochs, epochs)
    for seed in scale.paper_seeds:
        for setting, plans in {"iid": many, "writer": many, "disjoint": few}.items():
            for cohort, plan in plans.items():
                for label in settings.LABELS[1:]:
                    yield Job("paper", "small_cnn", setting, cohort, label, seed, plan, rows, rate)
            yield Job("paper", "small_cnn", setting, settings.ALONE, "Local", seed, alone, rows, rate)
        for label in settings.LABELS:
            rate_of_apps, plan = settings.TRAFFIC_LEARNING_RATE, settings.APPS_PLAN
            yield Job("paper", settings.APPS_MODEL, settings.APPS, 10, label, seed, plan, None, rate_of_apps)
            setting, limit, plan = settings.MANY_ROWS, settings.MANY_ROWS_LIMIT, settings.MANY_ROWS_PLAN
            yield Job("paper", "small_cnn", setting, 10, label, seed, plan, limit, settings.LEARNING_RATE)


def tuning_jobs(scale: Scale) -> Iterator[Job]:
    """Yield jobs that compare learning rates on digits, with a seed that is used for nothing else."""
    cohort, plan = next(iter(scale.plans.items()))
    for setting in settings.TUNED_SETTINGS:
        for rate in settings.TUNED_RATES:
            for label in ("FedAvg", "HDAFL"):
                seed = settings.TUNING_SEED
                yield Job("tuning", f"lr{rate}", setting, cohort, label, seed, plan, scale.rows, rate)


def why_jobs(scale: Scale) -> Iterator[Job]:
    """Yield jobs at Dirichlet(0.3) with more rounds, and with more rows."""
    for name, (rows, plan) in settings.WHY.items():
        for label in ("FedAvg", "HDAFL", "FedAvg_tuned"):
            seed = scale.seeds[0]
            yield Job("why", name, settings.WHY_SETTING, 10, label, seed, plan, rows, settings.LEARNING_RATE)


def traffic_jobs(scale: Scale) -> Iterator[Job]:
    """Yield the jobs on traffic: every recipe and the centralised model."""
    plan = Plan(scale.traffic_rounds, 1, min(4, max(1, scale.traffic_rounds // 4)))  # meets rounds 4, 8 and 20
    for seed in scale.traffic_seeds:
        for model in scale.traffic_models:
            for case in settings.TRAFFIC_CASES:
                for label in (*settings.LABELS, federations.CENTRAL):
                    rate = settings.TRAFFIC_LEARNING_RATE
                    yield Job("traffic", model, case, 2, label, seed, plan, scale.traffic_rows, rate)


def all_jobs(scale: Scale, parts: Sequence[str], seeds: Sequence[int] | None) -> list[Job]:
    """Return the jobs of some parts, in an order such that a run that is stopped early is still useful."""
    jobs: list[Job] = []
    if "tuning" in parts:
        jobs += tuning_jobs(scale)
    if "paper" in parts:
        jobs += paper_jobs(scale)
    if "digits" in parts:
        jobs += digit_jobs(scale, "digits", "small_cnn", (*settings.MANY, *settings.FEW), scale.seeds)
    if "traffic" in parts:
        jobs += traffic_jobs(scale)
    if "why" in parts:
        jobs += why_jobs(scale)
    if "leaf" in parts:
        jobs += digit_jobs(scale, "leaf", "leaf_cnn", scale.leaf_settings, scale.leaf_seeds)
    if seeds is not None:
        jobs = [job for job in jobs if job.part == "tuning" or job.seed in seeds]
    return sorted(jobs, key=lambda job: _priority(scale, job))


def _priority(scale: Scale, job: Job) -> float:
    """Return a job's place in the order; jobs with low numbers run first."""
    if job.part == "tuning":
        return -1.0
    own = {"traffic": 0.65, "leaf": 0.7, "why": 1.0, "paper": 0.6}.get(job.part)
    if job.part == "paper":  # the smallest cohorts of all seeds first, and what the paper compares before the rest
        cohorts = [10, 2, settings.ALONE, 20, 3, 50, 31, 5]
        rest = job.label not in ("FedAvg", "HDAFL")
        return own + cohorts.index(job.cohort) + 0.5 * rest + 0.1 * job.seed
    if job.part == "traffic":
        own += 0.5 * list(scale.traffic_models).index(job.model)
    elif own is None:
        cohorts = list(scale.few_plans if job.setting in settings.FEW else scale.plans)
        own = 0.55 if job.label == "Local" else (0.0, 0.5, 0.75)[cohorts.index(job.cohort)]
    if job.label == "LG-FedAvg" and job.part == "digits" and job.seed > 1:
        own += 0.5  # far behind in every setting
    return own + 0.3 * job.seed


def run_job(job: Job, out: Path) -> str:
    """Run or resume one job in its folder; do nothing if it has finished."""
    if _finished(out / job.folder / job.label / f"seed-{job.seed}"):
        return f"{job.folder} {job.label} seed {job.seed}: already finished"
    torch.set_num_threads(1)  # jobs run beside one another
    if job.part == "traffic" or job.setting == settings.APPS:
        training = {"lr": job.rate, "batch": settings.TRAFFIC_BATCH, "momentum": settings.TRAFFIC_MOMENTUM}
        clients = (
            settings.partition(settings.APPS, job.rows, job.seed).split(federations.everything())
            if job.setting == settings.APPS
            else federations.federation(job.setting, job.rows, job.seed)
        )
        shape, outputs = (1, federations.LENGTH), len(clients.classes)
        network, own = "cnn_1d", settings.TRAFFIC_MODELS[job.model]
    else:
        training = {"lr": job.rate, "batch": settings.BATCH}
        letters = job.part == "paper" and job.setting != settings.MANY_ROWS
        clients = federations.clients(job.setting, job.rows, job.seed, letters)
        shape, outputs = (1, 28, 28), len(clients.classes)
        network, own = ("leaf_cnn" if job.part == "leaf" else "small_cnn"), {}
    recipe = settings.compared(job.cohort, batches="exact", **training)[
        "FedAvg" if job.label == federations.CENTRAL else job.label
    ]
    comparison = piebald.compare(
        {job.label: recipe},
        clients,
        lambda seed: build_model(network, shape, outputs, seed=seed, **own),
        pooled=[federations.CENTRAL] if job.label == federations.CENTRAL else (),
        seeds=(job.seed,),
        out=out / job.folder,
        rounds=job.plan.rounds,
        evaluate_every=job.plan.fine if job.label in settings.FINE else job.plan.coarse,
        checkpoint_every=job.plan.rounds if job.part == "leaf" else 10,
        runtime=piebald.Simulator(engine="batched" if job.part == "paper" else "sequential", workers=0),
    )
    final = comparison.runs[0].final
    comparison.runs[0].close()
    return f"{job.folder} {job.label} seed {job.seed}: {final['mean']:.4f} ({final['wall']:.0f} s)"


def _finished(folder: Path) -> bool:
    """Return whether a run has finished, without building its clients."""
    if not (folder / "run.db").exists():
        return False
    with History(folder) as history:
        return history.meta.get("status") == "finished"
