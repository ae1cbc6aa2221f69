# %% [markdown]
# # CIFAR-10 with different classes at each client
#
# Photographs are divided among ten clients by a Dirichlet distribution, and three recipes are compared.  The notebook
# takes 2,000 photographs and five rounds, so that it is done in a minute without a GPU.  Its accuracies say nothing
# about the recipes on the whole data set: leave out `limit` and raise `rounds` for that.

# %%
import pandas

import piebald
from piebald import data, models, partition, recipes

photographs = data.cifar10()
photographs

# %% [markdown]
# ## Clients
#
# `alpha` is the concentration of the Dirichlet distribution: the smaller it is, the fewer classes a client has.  With
# `pool`, the published training and test parts are put together, and each client holds out a fifth of its own rows.

# %%
clients = partition.Dirichlet(clients=10, alpha=0.5, limit=2000, pool=True).split(photographs)
pandas.DataFrame(
    [clients.counts(number, "train") for number in range(len(clients))], index=clients.names, columns=clients.classes
)

# %% [markdown]
# ## A network and three recipes
#
# Clients that train alone, one model for all, and that model after one more epoch at each client.  The engine is named
# so that the figures repeat; without `runtime`, the fastest one on this machine is chosen.


# %%
def network(seed):
    return models.build_model("cnn_bn", input_shape=(3, 32, 32), outputs=10, seed=seed)


settings = {"lr": 0.05, "batch": 10}
methods = {
    "alone": recipes.local(**settings),
    "FedAvg": recipes.fedavg(**settings),
    "FedAvg, fine-tuned": recipes.fine_tuned(**settings),
}
comparison = piebald.compare(
    methods, clients, network, rounds=5, out="runs", runtime=piebald.Simulator(engine="batched", workers=0)
)
pandas.DataFrame(comparison.summary())[["label", "mean", "worst_decile", "common", "mb_up"]].round(3)

# %% [markdown]
# `mean` is the accuracy over clients, each on photographs of its own mixture of classes; `common` is that of the global
# model on all test photographs.  A client that knows its own mixture has an easier task than the global model, which
# must tell all ten classes apart.
#
# ## Over the rounds

# %%
loss = {label: comparison.by_label[label][0].frame("rounds").set_index("version")["loss"] for label in methods}
pandas.DataFrame(loss).round(2)
