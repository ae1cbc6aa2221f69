"""Who is averaged with whom."""

from piebald.clustering.cfl import Cfl
from piebald.clustering.distfl import Distfl
from piebald.clustering.ifca import Ifca
from piebald.clustering.single_cluster import SingleCluster

__all__ = ["Cfl", "Distfl", "Ifca", "SingleCluster"]
