"""The attacks on the commit before: python benchmarks/robustness/before.py

Unpacks the commit that the audit read into a temporary folder and runs short programs there, each an attack of a line
of `tests/security/README.md`.  They print what they got; the tests of that line show that it is not to be had any more.
Other lines are shown in the tests themselves, which run the same attack with the defence taken out, and succeed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

COMMIT = "afd58e4"
ROOT = Path(__file__).parents[2]
SITE = """
import torch
from torch import nn
from piebald import recipes
from piebald.contracts import Task
from piebald.prepare import Options, prepare
from piebald.runtimes.federation.policy import Policy
from piebald.runtimes.federation.task_runner import SiteClient, TaskRunner
from tests.core.fakes import classified, seeded
noise = {"kind": "gaussian", "clip": 0.5, "noise": 1.0, "where": "client"}
recipe = recipes.fedavg(lr=0.1).with_(transforms=[noise])
plan = prepare(recipe, classified(24, 24), seeded(lambda: nn.Linear(4, 2)), Options(rounds=1))
shared = plan.work.initial[: plan.work.layout.shared]
def site(secret, policy=Policy()):
    return TaskRunner(SiteClient(plan.work, plan.clients, 0), policy, "cpu", secret)
def upload(runner, start=shared):
    return runner.serve(Task(1, 0, 3, {"model": start}), None)[0].vectors["model"]
"""
PROGRAMS = {
    "1: two uploads of one version, in two runs, minus one another": SITE
    + """
own = Policy(noise=0.5)
print("largest difference", float((upload(site(12345, own)) - upload(site(12345, own))).abs().max()))
""",
    "2: 32 bits of a seed of 63 give the same noise": """
import torch
from piebald.randomness import key, torch_generator
whole, cut = torch_generator("a", 1), torch.Generator().manual_seed((key("a", 1) >> 1) & 0xFFFFFFFF)
print("equal", torch.equal(torch.randn(9, generator=whole), torch.randn(9, generator=cut)))
""",
    "3: the server's noise, made by a site from the run's seed": """
import torch
from piebald.contracts import StepContext
from piebald.randomness import key
from piebald.transforms.gaussian import Gaussian
import inspect
from piebald.server import cluster_models
used = [line.strip() for line in inspect.getsource(cluster_models).splitlines() if "rng_key = key(" in line]
print("the key of the noise is", used[0])
""",
    "4: the noise of a site whose policy names none, made by the server": SITE
    + """
clear = recipes.fedavg(lr=0.1)
again = upload(site(1)) - upload(site(2))
print("two sites' secrets make a difference of", float(again.abs().max()))
""",
    "5: noise 1, 10 of 100 clients by number, weights of those who arrive, 100 rounds": """
from piebald import recipes
from piebald.privacy import accounting
noise = {"kind": "gaussian", "clip": 1.0, "noise": 1.0, "where": "server"}
made = recipes.fedavg(cohort=10).with_(transforms=(noise,))
print("epsilon is said to be", round(accounting.of_recipe(made, known=100, rounds=100, delta=1e-5)[0].epsilon_pld, 2))
""",
    "6: scores on training rows beside noise": SITE
    + """
from piebald.queries.evaluate import Evaluate
query = Evaluate(split="train")
print("answered", site(1, Policy(noise=0.5)).serve(Task(1, 0, 3, {"model": shared}, query=query), None)[0].metrics)
""",
    "12: 10^400 examples": """
import json, struct, torch
from safetensors.torch import save
from piebald.runtimes.federation.wire_format import unpack_update
values = {"examples": 10**400, "steps": 1, "metrics": {}, "norm": 0.0, "nbytes": 4}
text = json.dumps(values).encode()
made = unpack_update(struct.pack("<I", len(text)) + text + save({"model": torch.zeros(3)}))[0]
try:
    torch.tensor([float(made.examples)])
except OverflowError as error:
    print("accepted, and the mean ends with", repr(error))
""",
    "13: a billion examples, and a norm of 0 for a vector that has another": """
import json, struct, torch
from safetensors.torch import save
from piebald.runtimes.federation.wire_format import unpack_update
values = {"examples": 10**9, "steps": 1, "metrics": {}, "norm": 0.0, "nbytes": 4}
text = json.dumps(values).encode()
made = unpack_update(struct.pack("<I", len(text)) + text + save({"model": torch.ones(3)}))[0]
print("believed: examples", made.examples, "and norm", made.norm, "of", made.vectors["model"].tolist())
""",
    "17: run.lock as a link": """
import tempfile
from pathlib import Path
from piebald.report.lock import RunLock
folder = Path(tempfile.mkdtemp())
victim = folder / "victim"
victim.write_text("precious")
(folder / "run.lock").symlink_to(victim)
RunLock(folder).release()
print("the target holds", victim.read_text() != "precious" and "a process number")
""",
    "18: a rate beside a trainer": """
from piebald import recipes
from piebald.experiment_file import ExperimentSettings
import tomllib
text = 'partition = { kind = "iid", clients = 2 }\\nmodel = { name = "logistic" }\\n'
text += 'recipe = { name = "fedavg", lr = 5.0, training = { kind = "proximal" } }'
settings = ExperimentSettings.of_table(tomllib.loads(text), "a file")
made = next(iter(settings.plan().recipes.values()))
print("given 5.0, trained with", made.training.lr)
""",
    "19: bad calls, and nested TOML": """
import piebald
from piebald import data, models, partition
clients, model = partition.Iid(clients=3, limit=60).split(data.digits()), models.build_model("logistic", (1, 8, 8), 10)
for bad in ({"evaluate_every": "x"}, {"metrics": 5}, {"seed": True}):
    try:
        piebald.run("fedavg", clients, model, rounds=1, **bad)
        print(bad, "was allowed")
    except piebald.PiebaldError as error:
        print(bad, "was refused")
    except Exception as error:
        print(bad, "raised", type(error).__name__)
import tomllib
try:
    tomllib.loads("a = " + "[" * 1000 + "]" * 1000)
except RecursionError:
    print("1,000 lists in one another: RecursionError")
""",
    "21: a cache whose weights have all become 0": """
import torch
from piebald.server.cluster_state import ModelCache
from piebald.tensor_store import TensorStore
made, out = ModelCache(3, TensorStore()), torch.full((3,), 7.0)
for client, weight in enumerate((0.1, 0.2, 0.7)):
    made.swap(client, weight, torch.tensor([1 / 3, 1e8, -0.1]) * (client + 1), out)
before = out.clone()
for client in (1, 0, 2):
    made.swap(client, 0.0, torch.full((3,), 5.0), out if client == 2 else None)
print("the model was", before.tolist(), "and is", out.tolist(), "from weights of sum", made.whole)
""",
}


def main() -> None:
    """Run all programs on the old commit."""
    with tempfile.TemporaryDirectory() as folder:
        packed = subprocess.run(["git", "archive", COMMIT], cwd=ROOT, capture_output=True, check=True)
        subprocess.run(["tar", "-x", "-C", folder], input=packed.stdout, check=True)
        environment = os.environ | {"PYTHONPATH": folder, "PYTHONWARNINGS": "ignore"}
        for name, program in PROGRAMS.items():
            command = [sys.executable, "-c", program]
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
            said = done.stdout.strip().splitlines() or done.stderr.strip().splitlines()[-1:]
            print(name, *(f"    {line}" for line in said), sep="\n", flush=True)


if __name__ == "__main__":
    main()
