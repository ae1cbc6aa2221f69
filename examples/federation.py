# %% [markdown]
# # A federation on one machine
#
# A simulation and a real federation run the same experiment file.  This notebook writes one, runs it both ways, and
# compares the models.  The federation has a server and three sites, each a process with a certificate of its own; they
# talk over mutual TLS.

# %%
import subprocess
import sys
from pathlib import Path

import torch

import piebald

experiment = """
rounds = 3

[data]
name = "digits"

[partition]
kind = "dirichlet"
clients = 3
alpha = 0.5

[model]
name = "mlp"

[recipe]
name = "fedavg"
lr = 0.1
"""
with Path("experiment.toml").open("w") as file:
    file.write(experiment)


# %% [markdown]
# In a terminal, the two commands are `piebald run experiment.toml --out simulated` and
# `piebald up experiment.toml --local 3 --out real`.


# %%
def command(*words):
    done = subprocess.run([sys.executable, "-m", "piebald.cli", *words], check=True, capture_output=True, text=True)
    print(done.stdout)


command("run", "experiment.toml", "--out", "simulated", "--set", "runtime.engine=sequential")

# %%
command("up", "experiment.toml", "--local", "3", "--out", "real")

# %% [markdown]
# ## The same model
#
# `piebald.resume` reads a finished run.  The global models are the same up to rounding:

# %%
simulated, real = piebald.resume("simulated"), piebald.resume("real")
pairs = zip(simulated.model().parameters(), real.model().parameters(), strict=True)
print(all(torch.allclose(one, other, atol=1e-4) for one, other in pairs))

# %% [markdown]
# ## What the sites have sent
#
# One row for each update: how many rows it was trained on, and the bytes of its message.

# %%
real.frame("results")[["version", "client", "status", "examples", "bytes_up"]].head(6)

# %% [markdown]
# Between organisations, each site starts `piebald client` with credentials of its own and with its own rows: see
# [run a federation of organisations](../howto/federation.md).
