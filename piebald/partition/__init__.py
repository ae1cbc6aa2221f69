"""Partitions: a data set dealt to clients, your own data as clients, and the devices of clients."""

from piebald.partition.backdoor import Backdoor
from piebald.partition.by_embedding import ByEmbedding
from piebald.partition.by_owner import ByOwner
from piebald.partition.client_statistics import Statistics, collect
from piebald.partition.corruption import Blur, Contrast, Noise, Sensor
from piebald.partition.data_change import DataChange, FlipPairs, FlipRandom, FlipTo
from piebald.partition.devices import Devices, FastSlow, Homogeneous, LogNormal
from piebald.partition.dirichlet import Dirichlet
from piebald.partition.disjoint import Disjoint
from piebald.partition.heterogeneity import Heterogeneity, measure
from piebald.partition.iid import Iid
from piebald.partition.lazy_clients import LazyClients
from piebald.partition.lists import Lists
from piebald.partition.non_iid import NonIid
from piebald.partition.partition import Partition
from piebald.partition.pooled_clients import PooledClients
from piebald.partition.shards import Shards
from piebald.partition.sites import RemotePartition, Sites
from piebald.partition.sizes import Explicit, PowerLaw, Quantity, Sizes, Skewed, Uniform
from piebald.partition.sources import clients_from
from piebald.partition.standardise import Standardisation, StandardisedClients, standardised
from piebald.partition.survey import survey
from piebald.partition.torch_clients import TorchClients
from piebald.partition.trace import Trace
from piebald.partition.vertical_split import Parties, PartyRows, Vertical

__all__ = [
    "Backdoor",
    "Blur",
    "ByEmbedding",
    "ByOwner",
    "Contrast",
    "DataChange",
    "Devices",
    "Dirichlet",
    "Disjoint",
    "Explicit",
    "FastSlow",
    "FlipPairs",
    "FlipRandom",
    "FlipTo",
    "Heterogeneity",
    "Homogeneous",
    "Iid",
    "LazyClients",
    "Lists",
    "LogNormal",
    "Noise",
    "NonIid",
    "Parties",
    "Partition",
    "PartyRows",
    "PooledClients",
    "PowerLaw",
    "Quantity",
    "RemotePartition",
    "Sensor",
    "Shards",
    "Sites",
    "Sizes",
    "Skewed",
    "Standardisation",
    "StandardisedClients",
    "Statistics",
    "TorchClients",
    "Trace",
    "Uniform",
    "Vertical",
    "clients_from",
    "collect",
    "measure",
    "standardised",
    "survey",
]
