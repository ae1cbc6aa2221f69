"""Feature shift on any data: clients are regions of an embedding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from piebald.core.errors import unknown
from piebald.core.randomness import key
from piebald.data.clients.lists import Numbered
from piebald.data.partition.partition import NOBODY, Partition, labels
from piebald.data.partition.split import Ints

if TYPE_CHECKING:
    from piebald.data.sets.dataset import DataSet

Floats = NDArray[np.float64]


class ByEmbedding(Partition):
    """Each class is cut into regions of an embedding, and each client takes one region of each class.

    The simulated non-IID clients of CGAU (Rieger, Høegh, Hansen 2020, section 3.3): embeddings are projected on their
    first principal components, k-means finds as many centroids in each class as there are clients, clients take
    centroids without replacement, and training and test rows go to the client of the nearest centroid of their class.
    All clients have all classes (that have a row for each), but different regions of them.

    Components and centroids are fitted on the rows that are dealt.  In the paper these are training rows only, as here
    where a test part is published.  Where none is, clients hold out test rows of their own regions, which have then
    been seen: set `test_first` to hold them out before anything is fitted.

    Attributes:
        clients: number of clients.
        shuffle: share of the rows, drawn at random, that are shuffled between clients; 0 for pure regions, 1 for IID.
        components: number of principal components.
        extractor: "pixels" for the inputs as they are, flattened, or a frozen extractor, "squeezenet" (images) or
            "log_mel" (recordings of 16 kHz); its embeddings are cached on disk.
        test_first: without a published test part, hold out a share `test` of all rows before components and centroids
            are fitted; it is dealt like a published one.
    """

    clients: int = Field(ge=1)
    shuffle: float = Field(default=0.0, ge=0, le=1)
    components: int = Field(default=2, ge=1)
    extractor: str = "pixels"
    test_first: bool = False

    def holds_out_first(self, data: DataSet) -> bool:
        """Return whether test rows are held out before the others are dealt."""
        return self.test_first or super().holds_out_first(data)

    def deal(self, data: DataSet, rows: Ints) -> tuple[Ints, Sequence[str]]:
        """The client of each row [n], and names."""
        self.check_room(self.clients, rows)
        client = self._nearest(data, rows, rows)
        return self._shuffled(client, "train"), Numbered(self.clients)

    def follow(self, data: DataSet, train: Ints, client: Ints, test: Ints) -> Ints | None:
        """The client of each test row [m], that of the nearest centroid of its class."""
        return self._shuffled(self._nearest(data, train, test), "test")

    def _nearest(self, data: DataSet, train: Ints, rows: Ints) -> Ints:
        from sklearn.decomposition import PCA

        places = self._embed(data, train)
        if self.components > min(places.shape[1], len(train)):
            raise self.refuse(
                f"components must be at most {min(places.shape[1], len(train))}, the numbers in an embedding or the "
                f"rows, got {self.components}"
            )
        pca = PCA(self.components, svd_solver="full").fit(places)  # "auto" may choose a randomised solver
        train_places = np.asarray(pca.transform(places), dtype=np.float64)
        row_places = (
            # `deal` passes one array twice: its rows are embedded once
            train_places if rows is train else np.asarray(pca.transform(self._embed(data, rows)), dtype=np.float64)
        )
        label, row_label = labels(data, train), labels(data, rows)
        # test rows of a class without training rows have no centroid, and stay with nobody
        client = np.full(len(rows), NOBODY)
        for number in np.unique(label):
            centroids = self._centroids(train_places[label == number], int(number))
            # keyed by the class alone, so that `deal` and `follow` give a centroid to the same client
            holder = self.generator(f"take {number}").permutation(self.clients)[: len(centroids)]
            of_class = row_label == number
            # [rows of the class, centroids, components] float64 in memory at a time
            client[of_class] = holder[((row_places[of_class][:, None] - centroids[None]) ** 2).sum(2).argmin(1)]
        return client

    def _centroids(self, places: Floats, number: int) -> Floats:
        """A centroid for each client [clients, components], fewer where there are fewer different rows."""
        from sklearn.cluster import KMeans

        count = min(self.clients, len(np.unique(places, axis=0)))  # k-means warns of equal centroids otherwise
        # scikit-learn accepts seeds below 2 ** 32 only
        seed = key(self.seed, "k-means", number) % (1 << 32)
        centroids = KMeans(count, n_init=3, random_state=seed).fit(places).cluster_centers_
        return np.asarray(centroids, dtype=np.float64)

    def _shuffled(self, client: Ints, part: str) -> Ints:
        rng = self.generator(f"shuffle {part}")
        chosen = np.flatnonzero(rng.random(len(client)) < self.shuffle)
        # chosen rows change places among themselves, so each client keeps its number of rows
        client[chosen] = client[rng.permutation(chosen)]
        return client

    def _embed(self, data: DataSet, rows: Ints) -> Floats:
        if self.extractor == "pixels":
            return np.asarray(data.inputs[torch.from_numpy(rows)].reshape(len(rows), -1), dtype=np.float64)
        from piebald.data.embeddings import EXTRACTORS, embed

        if self.extractor not in EXTRACTORS:
            raise unknown("extractor", self.extractor, [*EXTRACTORS, "pixels"])
        x = data.inputs[torch.from_numpy(rows)]
        embeddings = embed(EXTRACTORS[self.extractor](), x, key=f"{data.name}-{self.extractor}")
        return np.asarray(embeddings, dtype=np.float64)
