"""Real models beside published figures: python benchmarks/real_models/run.py

Heart disease, survival with breast cancer, Shakespeare by role with an LSTM and a transformer, and CIFAR-10 with
ResNet-18: Local, FedAvg and FedAvg with fine-tuning, three seeds.  A line is added to OUT/SCALE.jsonl when a run has
ended, so that the same command goes on after an interruption; RESULTS.md is written from these lines.  All need the
prepared data sets (PIEBALD_DATA).  `--scale full` is a day's work for a GPU.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # for `shared`

import results
import torch
from results import NETWORKS, SEEDS, Job, jobs
from shared.options import reader
from shared.stored import Lines
from studies import study

import piebald

HERE = Path(__file__).parent


def measure(job: Job, scale: str, device: str) -> dict[str, Any]:
    """Carry out a run, as the line that is kept: the score of each client on its own test rows, in per cent."""
    chosen = study(job.study, scale)
    recipe, rounds = chosen.plans[job.method]
    began = time.perf_counter()
    run = piebald.run(
        recipe, chosen.clients, chosen.networks[job.network], rounds=rounds, seed=job.seed, evaluate_every=rounds,
        measure="none", runtime=piebald.Simulator(workers=0, device=device), **chosen.options,
    )  # fmt: skip
    names, last = chosen.clients.names, max(row["version"] for row in run.scores)
    scored = [row for row in run.scores if row["version"] == last and row["metric"] == chosen.metric]
    own = [row for row in scored if row["client"] is not None and row["split"] == "test"]
    model = "personal" if any(row["model"] == "personal" for row in own) else "global"
    values = {names[row["client"]]: round(100 * row["value"], 2) for row in own if row["model"] == model}
    rows = {names[client]: len(chosen.clients.indices(client, "test")) for client in range(len(names))}
    common = [100 * row["value"] for row in scored if row["split"] == "common" and row["model"] == "global"]
    return {
        **job._asdict(), "title": chosen.title, "metric": chosen.metric, "rounds": rounds, "values": values,
        "rows": {name: rows[name] for name in values}, "common": round(common[-1], 2) if common else None,
        "seconds": round(time.perf_counter() - began, 1),
    }  # fmt: skip


def main() -> int:
    """Run what has not been run, and write the page."""
    options = reader(
        __doc__, scale=("small", "full"), only=tuple(NETWORKS), seeds=list(SEEDS), minutes=float("inf"), device="cpu",
        out=HERE, dry_run=False,
    ).parse_args()  # fmt: skip
    kept, began = Lines(options.out / f"{options.scale}.jsonl", *Job._fields), time.monotonic()
    done = kept.done()
    missing = [job for job in jobs(options.only, options.seeds) if job not in done]
    if options.dry_run:
        print("\n".join(" ".join(map(str, job)) for job in missing))
        return 0
    torch.set_num_threads(1)
    for job in missing:
        if time.monotonic() - began > 60 * options.minutes:
            break
        line = measure(job, options.scale, options.device)
        kept.add(line)
        mean = sum(line["values"].values()) / len(line["values"])
        print(f"[{time.monotonic() - began:.0f} s] {' '.join(map(str, job))}: {mean:.1f}", flush=True)
    print(results.write(options.out, options.scale))
    return 0


if __name__ == "__main__":
    sys.exit(main())
