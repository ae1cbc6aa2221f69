"""All recipes by name, Piebald's own and those of plugins: `piebald.recipes`.

A recipe is imported when it is first asked for, with the components it consists of.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from piebald.methods.catalog.registry import find, unknown_recipe
from piebald.methods.catalog.registry import listing as listing
from piebald.methods.catalog.registry import make as make
from piebald.methods.catalog.registry import names as names
from piebald.methods.catalog.registry import rebuild as rebuild
from piebald.methods.catalog.registry import settings_of as settings_of
from piebald.methods.catalog.registry import toml as toml

if TYPE_CHECKING:
    from piebald.methods.recipes.afl import afl as afl
    from piebald.methods.recipes.apfl import apfl as apfl
    from piebald.methods.recipes.async_fedavg import async_fedavg as async_fedavg
    from piebald.methods.recipes.cfl import cfl as cfl
    from piebald.methods.recipes.cgau import cgau as cgau
    from piebald.methods.recipes.distfl import distfl as distfl
    from piebald.methods.recipes.ditto import ditto as ditto
    from piebald.methods.recipes.dp_sgd import dp_sgd as dp_sgd
    from piebald.methods.recipes.dvw import adaptive_dvw as adaptive_dvw
    from piebald.methods.recipes.dvw import async_dvw as async_dvw
    from piebald.methods.recipes.dvw import sync_dvw as sync_dvw
    from piebald.methods.recipes.fedadam import fedadam as fedadam
    from piebald.methods.recipes.fedala import fedala as fedala
    from piebald.methods.recipes.fedamp import fedamp as fedamp
    from piebald.methods.recipes.fedasync import fedasync as fedasync
    from piebald.methods.recipes.fedavg import fedavg as fedavg
    from piebald.methods.recipes.fedavgm import fedavgm as fedavgm
    from piebald.methods.recipes.fedbabu import fedbabu as fedbabu
    from piebald.methods.recipes.fedbn import fedbn as fedbn
    from piebald.methods.recipes.fedbuff import fedbuff as fedbuff
    from piebald.methods.recipes.feddecorr import feddecorr as feddecorr
    from piebald.methods.recipes.feddyn import feddyn as feddyn
    from piebald.methods.recipes.fedlc import fedlc as fedlc
    from piebald.methods.recipes.fedmd import fedmd as fedmd
    from piebald.methods.recipes.fednova import fednova as fednova
    from piebald.methods.recipes.fedphp import fedphp as fedphp
    from piebald.methods.recipes.fedproto import fedproto as fedproto
    from piebald.methods.recipes.fedprox import fedprox as fedprox
    from piebald.methods.recipes.fedrep import fedrep as fedrep
    from piebald.methods.recipes.fedrod import fedrod as fedrod
    from piebald.methods.recipes.fedsam import fedsam as fedsam
    from piebald.methods.recipes.fedyogi import fedyogi as fedyogi
    from piebald.methods.recipes.fine_tuned import fine_tuned as fine_tuned
    from piebald.methods.recipes.flexlora import flexlora as flexlora
    from piebald.methods.recipes.hdafl import hdafl as hdafl
    from piebald.methods.recipes.heterofl import heterofl as heterofl
    from piebald.methods.recipes.hierfavg import hierfavg as hierfavg
    from piebald.methods.recipes.ifca import ifca as ifca
    from piebald.methods.recipes.lg_fedavg import lg_fedavg as lg_fedavg
    from piebald.methods.recipes.local import local as local
    from piebald.methods.recipes.moon import moon as moon
    from piebald.methods.recipes.per_fedavg import per_fedavg as per_fedavg
    from piebald.methods.recipes.pfedme import pfedme as pfedme
    from piebald.methods.recipes.qfedavg import qfedavg as qfedavg
    from piebald.methods.recipes.scaffold import scaffold as scaffold
    from piebald.methods.recipes.silobn import silobn as silobn
    from piebald.methods.recipes.term import term as term


def __getattr__(name: str) -> Any:
    # computed only when asked for, since it imports all recipes
    if name == "__all__":
        return __dir__()
    # Python itself asks modules for such names, and looking them up would import every recipe
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if (named := find(name)) is None:
        raise AttributeError(str(unknown_recipe(name)))
    return named.offered


def __dir__() -> list[str]:
    return sorted(["listing", "make", "names", "rebuild", "settings_of", "toml", *names()])
