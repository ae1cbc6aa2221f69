"""FedJAX 0.0.17: python with_fedjax.py W1"""

import sys
import time

import haiku as hk
import jax

for lost in ("tree_map", "tree_leaves", "tree_structure", "tree_unflatten", "tree_flatten"):
    if not hasattr(jax, lost):  # names that FedJAX 0.0.17 uses and JAX has dropped since
        setattr(jax, lost, getattr(jax.tree_util, lost))

import fedjax
import jax.numpy as jnp
import numpy as np
from fedjax.algorithms import fed_avg
from shapes import BATCH, CLASSES, RATE, SHAPES, arrays, seconds_a_round

name = sys.argv[1]
shape = SHAPES[name]
x, y = arrays(shape)
x = np.moveaxis(x, 2, -1)  # channels last, as JAX likes it


def forward(rows):
    """The network in Haiku."""
    if name == "W1":
        layers = [hk.Flatten(), hk.Linear(128), jax.nn.relu, hk.Linear(CLASSES)]
    else:
        layers = [
            hk.Conv2D(32, 5), jax.nn.relu, hk.MaxPool(2, 2, "VALID"), hk.Conv2D(64, 5), jax.nn.relu,
            hk.MaxPool(2, 2, "VALID"), hk.Flatten(), hk.Linear(2048), jax.nn.relu, hk.Linear(CLASSES),
        ]  # fmt: skip
    return hk.Sequential(layers)(rows)


network = hk.transform(forward)
params = network.init(jax.random.PRNGKey(0), jnp.asarray(x[0, :1]))


def loss(params, batch, rng):
    """Mean cross-entropy of a batch."""
    logits = network.apply(params, rng, batch["x"])
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), batch["y"][:, None], axis=1))


algorithm = fed_avg.federated_averaging(
    jax.grad(loss),
    fedjax.optimizers.sgd(RATE),
    fedjax.optimizers.sgd(1.0),
    fedjax.ShuffleRepeatBatchHParams(batch_size=BATCH, num_epochs=1),
)
state, times, draw = algorithm.init(params), [], np.random.default_rng(0)
for turn in range(shape.rounds + 1):
    cohort = draw.choice(shape.clients, shape.cohort, replace=False)
    keys = jax.random.split(jax.random.PRNGKey(turn), shape.cohort)
    clients = [
        (b"%d" % client, fedjax.ClientDataset({"x": x[client], "y": y[client].astype(np.int32)}), key)
        for client, key in zip(cohort, keys, strict=True)
    ]
    state, _ = algorithm.apply(state, clients)
    jax.block_until_ready(state.params)
    times.append(time.perf_counter())
print(seconds_a_round(times))
