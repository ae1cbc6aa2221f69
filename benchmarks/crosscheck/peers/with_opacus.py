"""opacus: steps of DP-SGD without noise on one batch, and epsilons of its accountants."""

import sys

import numpy as np
import torch
from inputs import BUDGETS, DELTA, PRIVATE, folder_of, linear
from opacus import GradSampleModule
from opacus.accountants import PRVAccountant, RDPAccountant
from opacus.optimizers import DPOptimizer
from personal import flat
from torch.nn.functional import cross_entropy

given, out = folder_of(sys.argv)
x, y = torch.from_numpy(given["x"][0]), torch.from_numpy(given["y"][0])
model = linear(given)
wrapped = GradSampleModule(model)
optimizer = DPOptimizer(
    torch.optim.SGD(wrapped.parameters(), lr=PRIVATE["lr"]), noise_multiplier=0.0, max_grad_norm=PRIVATE["clip"],
    expected_batch_size=len(x),
)  # fmt: skip
for _ in range(PRIVATE["steps"]):
    optimizer.zero_grad()
    cross_entropy(wrapped(x), y).backward()
    optimizer.step()

found = {"DP-SGD": flat(model)}
for name, accountant in (("RDP", RDPAccountant), ("PLD", PRVAccountant)):
    spent = []
    for noise, share, steps in BUDGETS:
        one = accountant()
        one.history = [(noise, share, steps)]
        spent.append(one.get_epsilon(DELTA))
    found[f"epsilon, {name}"] = np.array(spent)
np.savez(out, **found)
