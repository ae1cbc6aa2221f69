"""Named recipes: one paper a file, each a few lines over the parts."""

import piebald.attacks
import piebald.privacy
import piebald.transforms  # noqa: F401 - so that all transforms can be named in recipes
from piebald.recipes.async_fedavg import async_fedavg
from piebald.recipes.cfl import cfl
from piebald.recipes.cgau import cgau
from piebald.recipes.distfl import distfl
from piebald.recipes.ditto import ditto
from piebald.recipes.dp_sgd import dp_sgd
from piebald.recipes.dvw import adaptive_dvw, async_dvw, sync_dvw
from piebald.recipes.fedadam import fedadam
from piebald.recipes.fedasync import fedasync
from piebald.recipes.fedavg import fedavg
from piebald.recipes.fedavgm import fedavgm
from piebald.recipes.fedbn import fedbn
from piebald.recipes.fedbuff import fedbuff
from piebald.recipes.fedprox import fedprox
from piebald.recipes.fedyogi import fedyogi
from piebald.recipes.fine_tuned import fine_tuned
from piebald.recipes.hdafl import hdafl
from piebald.recipes.ifca import ifca
from piebald.recipes.lg_fedavg import lg_fedavg
from piebald.recipes.local import local
from piebald.recipes.named import listing, make, names, rebuild, toml
from piebald.recipes.scaffold import scaffold

__all__ = [
    "adaptive_dvw",
    "async_dvw",
    "async_fedavg",
    "cfl",
    "cgau",
    "distfl",
    "ditto",
    "dp_sgd",
    "fedadam",
    "fedasync",
    "fedavg",
    "fedavgm",
    "fedbn",
    "fedbuff",
    "fedprox",
    "fedyogi",
    "fine_tuned",
    "hdafl",
    "ifca",
    "lg_fedavg",
    "listing",
    "local",
    "make",
    "names",
    "rebuild",
    "scaffold",
    "sync_dvw",
    "toml",
]
