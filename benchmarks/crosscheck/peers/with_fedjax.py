"""FedJAX: FedAvg on the same rows from the same model, and the weighted mean of the same updates."""

import sys

import jax
import numpy as np

for lost in ("tree_map", "tree_leaves", "tree_structure", "tree_unflatten", "tree_flatten"):
    if not hasattr(jax, lost):  # names that FedJAX 0.0.17 uses and JAX has dropped since
        setattr(jax, lost, getattr(jax.tree_util, lost))

import fedjax
import jax.numpy as jnp
from fedjax.algorithms import fed_avg
from inputs import ROWS, TRAINING, folder_of

given, out = folder_of(sys.argv)
params = {"weight": jnp.asarray(given["weight"]), "bias": jnp.asarray(given["bias"])}


def loss(model, batch, rng):
    """Mean cross-entropy of a batch."""
    logits = batch["x"] @ model["weight"].T + model["bias"]
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), batch["y"][:, None], axis=1))


algorithm = fed_avg.federated_averaging(
    jax.grad(loss),
    client_optimizer=fedjax.optimizers.sgd(TRAINING["lr"]),
    server_optimizer=fedjax.optimizers.sgd(1.0),
    client_batch_hparams=fedjax.ShuffleRepeatBatchHParams(batch_size=ROWS, num_epochs=TRAINING["epochs"], seed=0),
)
state = algorithm.init(params)
for number in range(TRAINING["rounds"]):
    clients = [
        (str(client).encode(), fedjax.ClientDataset({"x": x, "y": y}), jax.random.PRNGKey(number))
        for client, (x, y) in enumerate(zip(given["x"], given["y"], strict=True))
    ]
    state, _ = algorithm.apply(state, clients)
mean = fedjax.tree_util.tree_mean(
    ({"w": jnp.asarray(row)}, float(count)) for row, count in zip(given["updates"], given["examples"], strict=True)
)
np.savez(
    out,
    **{
        "FedAvg": np.concatenate([np.asarray(state.params[name]).ravel() for name in ("weight", "bias")]),
        "weighted mean": np.asarray(mean["w"]),
    },
)
