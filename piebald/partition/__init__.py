"""Partitions: a data set dealt to clients, your own data as clients, and the devices of clients."""

from typing import TYPE_CHECKING

from piebald.discovery import lazy_names

if TYPE_CHECKING:
    from piebald.partition.backdoor import Backdoor as Backdoor
    from piebald.partition.by_embedding import ByEmbedding as ByEmbedding
    from piebald.partition.by_owner import ByOwner as ByOwner
    from piebald.partition.client_statistics import Statistics as Statistics
    from piebald.partition.client_statistics import collect as collect
    from piebald.partition.corruption import Blur as Blur
    from piebald.partition.corruption import Contrast as Contrast
    from piebald.partition.corruption import Noise as Noise
    from piebald.partition.corruption import Sensor as Sensor
    from piebald.partition.data_change import DataChange as DataChange
    from piebald.partition.data_change import FlipPairs as FlipPairs
    from piebald.partition.data_change import FlipRandom as FlipRandom
    from piebald.partition.data_change import FlipTo as FlipTo
    from piebald.partition.devices import Devices as Devices
    from piebald.partition.devices import FastSlow as FastSlow
    from piebald.partition.devices import Homogeneous as Homogeneous
    from piebald.partition.devices import LogNormal as LogNormal
    from piebald.partition.dirichlet import Dirichlet as Dirichlet
    from piebald.partition.disjoint import Disjoint as Disjoint
    from piebald.partition.heterogeneity import Heterogeneity as Heterogeneity
    from piebald.partition.heterogeneity import measure as measure
    from piebald.partition.iid import Iid as Iid
    from piebald.partition.lazy_clients import LazyClients as LazyClients
    from piebald.partition.lists import Lists as Lists
    from piebald.partition.non_iid import NonIid as NonIid
    from piebald.partition.partition import Partition as Partition
    from piebald.partition.pooled_clients import PooledClients as PooledClients
    from piebald.partition.shards import Shards as Shards
    from piebald.partition.sites import RemotePartition as RemotePartition
    from piebald.partition.sites import Sites as Sites
    from piebald.partition.sizes import Explicit as Explicit
    from piebald.partition.sizes import PowerLaw as PowerLaw
    from piebald.partition.sizes import Quantity as Quantity
    from piebald.partition.sizes import Sizes as Sizes
    from piebald.partition.sizes import Skewed as Skewed
    from piebald.partition.sizes import Uniform as Uniform
    from piebald.partition.sources import clients_from as clients_from
    from piebald.partition.standardise import Standardisation as Standardisation
    from piebald.partition.standardise import StandardisedClients as StandardisedClients
    from piebald.partition.standardise import standardised as standardised
    from piebald.partition.survey import survey as survey
    from piebald.partition.torch_clients import TorchClients as TorchClients
    from piebald.partition.trace import Trace as Trace
    from piebald.partition.vertical_split import Parties as Parties
    from piebald.partition.vertical_split import PartyRows as PartyRows
    from piebald.partition.vertical_split import Vertical as Vertical

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "backdoor": ("Backdoor",),
        "by_embedding": ("ByEmbedding",),
        "by_owner": ("ByOwner",),
        "client_statistics": ("Statistics", "collect"),
        "corruption": ("Blur", "Contrast", "Noise", "Sensor"),
        "data_change": ("DataChange", "FlipPairs", "FlipRandom", "FlipTo"),
        "devices": ("Devices", "FastSlow", "Homogeneous", "LogNormal"),
        "dirichlet": ("Dirichlet",),
        "disjoint": ("Disjoint",),
        "heterogeneity": ("Heterogeneity", "measure"),
        "iid": ("Iid",),
        "lazy_clients": ("LazyClients",),
        "lists": ("Lists",),
        "non_iid": ("NonIid",),
        "partition": ("Partition",),
        "pooled_clients": ("PooledClients",),
        "shards": ("Shards",),
        "sites": ("RemotePartition", "Sites"),
        "sizes": ("Explicit", "PowerLaw", "Quantity", "Sizes", "Skewed", "Uniform"),
        "sources": ("clients_from",),
        "standardise": ("Standardisation", "StandardisedClients", "standardised"),
        "survey": ("survey",),
        "torch_clients": ("TorchClients",),
        "trace": ("Trace",),
        "vertical_split": ("Parties", "PartyRows", "Vertical"),
    },
)
