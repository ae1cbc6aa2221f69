"""Named recipes: one file for each paper, each a few lines over the components.

A recipe is imported when it is first asked for, with the components it consists of.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from piebald.discovery import NamedLikeModules
from piebald.recipes.named import find
from piebald.recipes.named import listing as listing
from piebald.recipes.named import make as make
from piebald.recipes.named import names as names
from piebald.recipes.named import rebuild as rebuild
from piebald.recipes.named import settings_of as settings_of
from piebald.recipes.named import toml as toml

if TYPE_CHECKING:
    from piebald.recipes.afl import afl as afl
    from piebald.recipes.apfl import apfl as apfl
    from piebald.recipes.async_fedavg import async_fedavg as async_fedavg
    from piebald.recipes.cfl import cfl as cfl
    from piebald.recipes.cgau import cgau as cgau
    from piebald.recipes.distfl import distfl as distfl
    from piebald.recipes.ditto import ditto as ditto
    from piebald.recipes.dp_sgd import dp_sgd as dp_sgd
    from piebald.recipes.dvw import adaptive_dvw as adaptive_dvw
    from piebald.recipes.dvw import async_dvw as async_dvw
    from piebald.recipes.dvw import sync_dvw as sync_dvw
    from piebald.recipes.fedadam import fedadam as fedadam
    from piebald.recipes.fedala import fedala as fedala
    from piebald.recipes.fedamp import fedamp as fedamp
    from piebald.recipes.fedasync import fedasync as fedasync
    from piebald.recipes.fedavg import fedavg as fedavg
    from piebald.recipes.fedavgm import fedavgm as fedavgm
    from piebald.recipes.fedbabu import fedbabu as fedbabu
    from piebald.recipes.fedbn import fedbn as fedbn
    from piebald.recipes.fedbuff import fedbuff as fedbuff
    from piebald.recipes.feddecorr import feddecorr as feddecorr
    from piebald.recipes.feddyn import feddyn as feddyn
    from piebald.recipes.fedlc import fedlc as fedlc
    from piebald.recipes.fedmd import fedmd as fedmd
    from piebald.recipes.fednova import fednova as fednova
    from piebald.recipes.fedphp import fedphp as fedphp
    from piebald.recipes.fedproto import fedproto as fedproto
    from piebald.recipes.fedprox import fedprox as fedprox
    from piebald.recipes.fedrep import fedrep as fedrep
    from piebald.recipes.fedrod import fedrod as fedrod
    from piebald.recipes.fedsam import fedsam as fedsam
    from piebald.recipes.fedyogi import fedyogi as fedyogi
    from piebald.recipes.fine_tuned import fine_tuned as fine_tuned
    from piebald.recipes.flexlora import flexlora as flexlora
    from piebald.recipes.hdafl import hdafl as hdafl
    from piebald.recipes.heterofl import heterofl as heterofl
    from piebald.recipes.hierfavg import hierfavg as hierfavg
    from piebald.recipes.ifca import ifca as ifca
    from piebald.recipes.lg_fedavg import lg_fedavg as lg_fedavg
    from piebald.recipes.local import local as local
    from piebald.recipes.moon import moon as moon
    from piebald.recipes.per_fedavg import per_fedavg as per_fedavg
    from piebald.recipes.pfedme import pfedme as pfedme
    from piebald.recipes.qfedavg import qfedavg as qfedavg
    from piebald.recipes.scaffold import scaffold as scaffold
    from piebald.recipes.silobn import silobn as silobn
    from piebald.recipes.term import term as term


sys.modules[__name__].__class__ = NamedLikeModules


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return __dir__()
    if name.startswith("_") or (found := find(name)) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return found.offered


def __dir__() -> list[str]:
    return sorted(["listing", "make", "names", "rebuild", "settings_of", "toml", *names()])
