"""Who holds what: a data set dealt to clients, your own data as clients, and the devices they have."""

from piebald.partition.base import Partition
from piebald.partition.by_owner import ByOwner
from piebald.partition.clients import PooledClients
from piebald.partition.devices import Devices, FastSlow, Homogeneous, LogNormal
from piebald.partition.dirichlet import Dirichlet
from piebald.partition.disjoint import Disjoint
from piebald.partition.heterogeneity import Heterogeneity, measure
from piebald.partition.iid import Iid
from piebald.partition.lazy import LazyClients
from piebald.partition.lists import Lists
from piebald.partition.non_iid import NonIid
from piebald.partition.sources import clients_from
from piebald.partition.statistics import Statistics, collect

__all__ = [
    "ByOwner",
    "Devices",
    "Dirichlet",
    "Disjoint",
    "FastSlow",
    "Heterogeneity",
    "Homogeneous",
    "Iid",
    "LazyClients",
    "Lists",
    "LogNormal",
    "NonIid",
    "Partition",
    "PooledClients",
    "Statistics",
    "clients_from",
    "collect",
    "measure",
]
