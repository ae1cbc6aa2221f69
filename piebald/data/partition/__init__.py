"""Partitions: a data set dealt to clients, changes of their rows, and their devices; one method a file.

`piebald.partition` also offers what users call beside them: clients from their own data and measures of heterogeneity,
which lie in `data.clients` and `data.measures`.  Nothing here reads a file of a data set or trains.
"""

from typing import TYPE_CHECKING

from piebald.core.discovery import lazy_names

if TYPE_CHECKING:
    from piebald.data.clients.lists import Lists as Lists
    from piebald.data.clients.pooled_clients import LazyClients as LazyClients
    from piebald.data.clients.pooled_clients import PooledClients as PooledClients
    from piebald.data.clients.prepared import Standardisation as Standardisation
    from piebald.data.clients.prepared import StandardisedClients as StandardisedClients
    from piebald.data.clients.prepared import standardised as standardised
    from piebald.data.clients.sites import RemotePartition as RemotePartition
    from piebald.data.clients.sites import Sites as Sites
    from piebald.data.clients.sources import TorchClients as TorchClients
    from piebald.data.clients.sources import clients_from as clients_from
    from piebald.data.measures.heterogeneity import Heterogeneity as Heterogeneity
    from piebald.data.measures.heterogeneity import Statistics as Statistics
    from piebald.data.measures.heterogeneity import collect as collect
    from piebald.data.measures.heterogeneity import measure as measure
    from piebald.data.measures.heterogeneity import survey as survey
    from piebald.data.partition.by_class import Dirichlet as Dirichlet
    from piebald.data.partition.by_class import Disjoint as Disjoint
    from piebald.data.partition.by_class import Shards as Shards
    from piebald.data.partition.by_embedding import ByEmbedding as ByEmbedding
    from piebald.data.partition.by_owner import ByOwner as ByOwner
    from piebald.data.partition.data_change import Backdoor as Backdoor
    from piebald.data.partition.data_change import Blur as Blur
    from piebald.data.partition.data_change import Contrast as Contrast
    from piebald.data.partition.data_change import DataChange as DataChange
    from piebald.data.partition.data_change import FlipPairs as FlipPairs
    from piebald.data.partition.data_change import FlipRandom as FlipRandom
    from piebald.data.partition.data_change import FlipTo as FlipTo
    from piebald.data.partition.data_change import Noise as Noise
    from piebald.data.partition.data_change import Sensor as Sensor
    from piebald.data.partition.devices import Devices as Devices
    from piebald.data.partition.devices import FastSlow as FastSlow
    from piebald.data.partition.devices import Homogeneous as Homogeneous
    from piebald.data.partition.devices import LogNormal as LogNormal
    from piebald.data.partition.devices import Trace as Trace
    from piebald.data.partition.non_iid import NonIid as NonIid
    from piebald.data.partition.partition import Explicit as Explicit
    from piebald.data.partition.partition import Iid as Iid
    from piebald.data.partition.partition import Partition as Partition
    from piebald.data.partition.partition import PowerLaw as PowerLaw
    from piebald.data.partition.partition import Quantity as Quantity
    from piebald.data.partition.partition import Sizes as Sizes
    from piebald.data.partition.partition import Skewed as Skewed
    from piebald.data.partition.partition import Uniform as Uniform
    from piebald.data.partition.vertical_split import Parties as Parties
    from piebald.data.partition.vertical_split import PartyRows as PartyRows
    from piebald.data.partition.vertical_split import Vertical as Vertical

__getattr__, __dir__ = lazy_names(__name__)
