# %% [markdown]
# # Your own table, one client per hospital
#
# This notebook starts from a CSV file with a column that names the hospital of each patient.  It measures how unlike
# the hospitals are, and compares three recipes.
#
# The file is made from scikit-learn's breast-cancer data.  The hospitals are invented and see tumours of different
# sizes.  Put your own file in its place.

# %%
import pandas
import torch
from sklearn.datasets import load_breast_cancer

import piebald
from piebald import partition

table = load_breast_cancer(as_frame=True).frame.rename(columns={"target": "benign"})
table["hospital"] = pandas.qcut(table["mean radius"], 4, labels=["A", "B", "C", "D"])
table.to_csv("patients.csv", index=False)

# %% [markdown]
# ## Clients
#
# Columns with very different scales are standardized first.  In a real federation, the hospitals would use means and
# standard deviations that all have agreed on.  A quarter of each hospital's rows is held out for its test.

# %%
table = pandas.read_csv("patients.csv")
measures = table.columns.drop(["benign", "hospital"])
table[measures] = (table[measures] - table[measures].mean()) / table[measures].std()

hospitals = piebald.clients_from(table, client="hospital", target="benign", test=0.25)
pandas.DataFrame(
    [hospitals.counts(number, "train") for number in range(len(hospitals))],
    index=hospitals.names,
    columns=hospitals.classes,
)

# %% [markdown]
# How unlike are they?  Each measure is computed from statistics of the clients, so that a real federation can compute
# it without moving a row.

# %%
seen = partition.measure(partition.collect(hospitals, embed=lambda x: x))
{name: round(value, 3) for name, value in seen.federation.items()}


# %% [markdown]
# ## A model and three recipes
#
# The model is a torch module.  A function of the seed gives each seed initial weights of its own.


# %%
def small_network(seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(30, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))


comparison = piebald.compare(
    ["local", "fedavg", "ditto"], hospitals, small_network, rounds=15, seeds=(0, 1, 2), out="runs"
)
pandas.DataFrame(comparison.summary())[["label", "seeds", "mean", "low", "high", "worst_decile"]].round(3)

# %% [markdown]
# `mean` is the accuracy over hospitals and `worst_decile` that of the worst hospital.  `low` and `high` are the bounds
# of the 95% confidence interval of the mean, for other hospitals and seeds.  Differences to training alone are compared
# seed by seed:

# %%
pandas.DataFrame(comparison.paired("local")).round(3)

# %% [markdown]
# ## The report
#
# The page `report/report.html` has the same tables, curves over rounds, and each hospital's gain or loss.

# %%
print(piebald.write_report(["runs"], "report")[0])
