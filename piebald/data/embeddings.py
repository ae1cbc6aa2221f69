"""Frozen networks that turn inputs into embeddings, and a cache of embeddings.

Clients with a frozen extractor, which runs once over each client's rows; a small model is trained on its embeddings.

The extractor is the same at all clients and is never trained, so only the classifier is sent.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from piebald.contracts import Clients, HasServerRows, Rows, Split
from piebald.contracts.data import public_rows_of
from piebald.core import pytree
from piebald.core.arguments import Count, checked
from piebald.core.errors import SettingError, import_extra, shown, unknown
from piebald.core.files import check_size, read_bytes, regular
from piebald.core.model_settings import checked_network
from piebald.core.private_files import replaced
from piebald.core.progress import Bar
from piebald.core.references import USERS, Reference
from piebald.data.clients.lists import Lists
from piebald.data.clients.pooled_clients import PooledClients
from piebald.data.partition.leakage import SPLITS
from piebald.data.partition.split import Ints, division_of
from piebald.data.sets.dataset import Decoded
from piebald.data.sets.download import cache, is_prepared, official, prepared, read_npz
from piebald.settings import plugins


@checked_network
class LogMel(nn.Module):
    """Mean and standard deviation over time of each band of the log-mel spectrogram: 2 * bands numbers per recording.

    Bands are triangles on the mel scale, 2595 log10(1 + f / 700), from 0 Hz to half the rate (Davis, Mermelstein 1980).

    Args:
        rate: samples per second.
        bands: number of bands on the mel scale.
        window: samples of the Hann window; successive windows overlap by half.
    """

    def __init__(self, rate: Count = 16_000, bands: Count = 40, window: Annotated[int, Field(ge=16)] = 512) -> None:
        super().__init__()
        self.rate, self.window = rate, window
        if bands > window // 4:
            raise SettingError(f"bands must be at most a quarter of window = {window}, got {bands}")
        self.register_buffer("bank", triangles(rate, bands, window), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Recordings [n, 1, samples] float32, at least one window long, to embeddings [n, 2 * bands]."""
        if x.dim() != 3 or x.shape[1] != 1 or x.shape[2] < self.window:
            raise SettingError(
                f"log_mel reads recordings [1, samples] of {self.window} samples or more, got rows {list(x.shape[1:])}"
            )
        hann = torch.hann_window(self.window, device=x.device)
        hop = self.window // 2
        waves = torch.stft(x[:, 0], self.window, hop, window=hann, center=False, return_complex=True)
        assert isinstance(self.bank, Tensor)
        # silence would be -inf
        levels = (self.bank @ waves.abs().square() + 1e-6).log()
        # a recording of one window has no unbiased deviation (NaN)
        return torch.cat([levels.mean(2), levels.std(2, correction=0)], 1)


def triangles(rate: int, bands: int, window: int) -> Tensor:
    """Weights of frequencies in each band [bands, window // 2 + 1]."""
    top = 2595 * torch.log10(torch.tensor(1 + rate / 2 / 700))
    edges = 700 * (10 ** (torch.linspace(0, float(top), bands + 2) / 2595) - 1)
    hertz = torch.linspace(0, rate / 2, window // 2 + 1)
    low, middle, high = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    return torch.minimum((hertz - low) / (middle - low), (high - hertz) / (high - middle)).clamp(min=0)


PREPARED = "squeezenet1_1_notop.npz"
CHECKSUM = "bada1ac20b1f9b2f1208a00bab0e32585c5c838379afcffa7d06ccb7c3edf49a"  # of the weights, SHA-256
WEIGHTS_CHECKSUM = "d1c29ebc6bf05f690027ba77024c9e7c079d2f2c04731b8270bf8e445a56472e"  # of the arrays in order
URL = (
    "https://raw.githubusercontent.com/DeepCognition/keras-squeezenet/a73d4339aa4d37c51a0b3ba044bed55477abec73/"
    "squeezenet_weights_tf_dim_ordering_tf_kernels_notop.h5"
)
URL_CHECKSUM = "md5:80b66c92d79d4310e07fb60a297bf0d1"  # the authors publish MD5 only
MEAN = (123.68, 116.779, 103.939)  # of ImageNet's red, green and blue, out of 255
FIRES = {3: (64, 16, 64), 4: (128, 16, 64), 6: (128, 32, 128), 7: (256, 32, 128)}
FIRES |= {9: (256, 48, 192), 10: (384, 48, 192), 11: (384, 64, 256), 12: (512, 64, 256)}
LAYERS = {"features.0": "conv1"} | {  # names of the layers in the Keras file, which does not count pooling layers
    f"features.{place}.{part}": f"fire{number}/{part if part[0] == 'e' else 'squeeze1x1'}"
    for number, place in enumerate(FIRES, 2)
    for part in ("squeeze", "expand1x1", "expand3x3")
}


class Fire(nn.Module):
    """A 1x1 convolution to few channels, then 1x1 and 3x3 convolutions side by side.

    Args:
        inputs: number of input channels.
        few: number of channels after the first convolution.
        each: number of output channels of each of the two other convolutions.
    """

    def __init__(self, inputs: int, few: int, each: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(inputs, few, 1)
        self.expand1x1 = nn.Conv2d(few, each, 1)
        self.expand3x3 = nn.Conv2d(few, each, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """[n, inputs, height, width] to [n, 2 * each, height, width]."""
        x = functional.relu(self.squeeze(x))
        return torch.cat([functional.relu(self.expand1x1(x)), functional.relu(self.expand3x3(x))], 1)


@checked_network
class SqueezeNet(nn.Module):
    """SqueezeNet 1.1 without its classifier (Iandola et al. 2016): 722,496 parameters, 512 numbers per image.

    Images are resized to `side` x `side` (bilinear) and centered on ImageNet's mean color; gray images get three equal
    channels.

    Args:
        side: height and width in pixels: 224 as in training; less is faster and coarser.
    """

    def __init__(self, side: Annotated[int, Field(ge=32)] = 224) -> None:
        super().__init__()
        self.side = side
        layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, stride=2), nn.ReLU()]
        for index in range(2, 13):
            pool = nn.MaxPool2d(3, stride=2, ceil_mode=True)
            layers.append(Fire(*FIRES[index]) if index in FIRES else pool)
        self.features = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """Images [n, 1 or 3, height, width], uint8 or float in [0, 1], to embeddings [n, 512]."""
        if x.dim() != 4 or x.shape[1] not in (1, 3):
            raise SettingError(f"squeezenet reads images [1 or 3, height, width], got rows {list(x.shape[1:])}")
        x = x.float() if x.dtype == torch.uint8 else x * 255
        if x.shape[2:] != (self.side, self.side):
            # without low-pass filtering a smaller image would have aliases of fine patterns
            shrinks = min(x.shape[2:]) > self.side
            size = (self.side, self.side)
            x = functional.interpolate(x, size, mode="bilinear", align_corners=False, antialias=shrinks)
        centered = x.expand(-1, 3, -1, -1) - x.new_tensor(MEAN).reshape(1, 3, 1, 1)
        embedded: Tensor = self.features(centered).mean((2, 3))
        return embedded


@checked
def squeezenet(side: int = 224) -> SqueezeNet:
    """SqueezeNet 1.1 with weights trained on ImageNet, frozen.

    Without the prepared file, the original file is downloaded, which needs `pip install '.[weights]'`.

    Args:
        side: height and width in pixels to which images are resized.

    Raises:
        SettingError: squeezenet/squeezenet1_1_notop.npz is missing and cannot be made, or is not the known file.
    """
    with torch.device("meta"):  # no random numbers are drawn for weights that are replaced
        network = SqueezeNet(side)
    names = list(network.state_dict())
    if is_prepared("squeezenet", PREPARED):
        path = prepared("squeezenet", PREPARED)
        if hashlib.sha256(read_bytes(path, most=None)).hexdigest() != CHECKSUM:
            raise SettingError(f"{path} does not hold the known weights (another checksum): replace it")
        weights = read_npz("squeezenet", PREPARED, names)
    else:
        weights = _published(names)
    network.load_state_dict({name: torch.from_numpy(weights[name]) for name in names}, assign=True)
    return network.requires_grad_(False).eval()


def _published(names: Sequence[str]) -> dict[str, NDArray[np.float32]]:
    """The weights from the Keras file, by their names in the network."""
    path = official("squeezenet", URL, URL_CHECKSUM)
    h5py = import_extra("h5py", "weights", f"{path} is an HDF5 file, which needs h5py")
    stored: dict[tuple[str, int], NDArray[np.float32]] = {}
    try:
        regular(path)
        with h5py.File(path, "r") as file:
            file.visititems(lambda path, node: _take(stored, path, node))
        weights = {name: _as_torch(stored, name) for name in names}
    except (OSError, KeyError, ValueError, RuntimeError) as error:
        raise SettingError(f"{path} does not hold the known weights: delete or replace it ({error})") from None
    digest = hashlib.sha256()
    for array in weights.values():
        # one byte order, so that the checksum is the same on every machine
        digest.update(array.astype("<f4").tobytes())
    if digest.hexdigest() != WEIGHTS_CHECKSUM:
        raise SettingError(f"{path} does not hold the known weights (another checksum): delete or replace it")
    return weights


def _take(stored: dict[tuple[str, int], NDArray[np.float32]], path: str, node: Any) -> None:
    """Store an array of the file by its layer and number of axes: 4 for a kernel, 1 for a bias."""
    layer = next((layer for layer in LAYERS.values() if layer in path), None)
    if layer is not None and hasattr(node, "shape"):
        # an HDF5 file may refer to any other file of this machine
        if node.is_virtual or node.external:
            raise ValueError(f"{path} lies in another file, which is not opened")
        check_size(path, node.nbytes, node.id.get_storage_size())
        stored[layer, len(node.shape)] = np.asarray(node, dtype=np.float32)


def _as_torch(stored: dict[tuple[str, int], NDArray[np.float32]], name: str) -> NDArray[np.float32]:
    """One array in the network's format: kernels [out, in, h, w], with red as the first channel of the first layer."""
    layer, kind = name.rsplit(".", 1)
    weight = stored[LAYERS[layer], 4 if kind == "weight" else 1]
    if kind == "bias":
        return weight
    kernel = weight.transpose(3, 2, 0, 1)
    # the Keras file has these kernels for blue, green and red
    return np.ascontiguousarray(kernel[:, ::-1] if layer == "features.0" else kernel)


EXTRACTORS: dict[str, Callable[[], nn.Module]] = {"log_mel": LogMel, "squeezenet": squeezenet}


def names() -> list[str]:
    """Names of all extractors, sorted."""
    return sorted(EXTRACTORS)


@checked
def embed(network: nn.Module, x: Tensor | Decoded, *, batch: Count = 64, key: str | None = None) -> NDArray[np.float32]:
    """Compute the embeddings [n, d] of inputs [n, ...], in batches, without gradients.

    Args:
        network: any module that maps inputs [batch, ...] to [batch, d]; its mode is not changed.
        x: inputs, uint8 or float32; of `Decoded` inputs, one batch at a time is in memory.
        batch: inputs per batch.
        key: name under which the embeddings are cached on disk, or None for no cache.  They are reused only for the
            same inputs and the same weights and settings of the module.

    Raises:
        SettingError: the output of the network is not a row of finite numbers for each input.
    """
    if isinstance(x, Tensor) and not x.dim():
        raise SettingError("x must have one entry for each input, got a single number")
    if key is not None and not re.fullmatch(r"[\w.-]{1,100}", key):
        raise SettingError(
            f"key must be letters, digits, '.', '_' and '-', as a part of a file's name, got {shown(key)}"
        )
    path = None if key is None else cache() / "embeddings" / f"{key}-{_fingerprint(network, x)}.npy"
    if path is not None and path.is_file():
        try:
            return np.asarray(np.load(path, allow_pickle=False), dtype=np.float32)
        except (OSError, ValueError, EOFError):
            path.unlink()  # damaged, so computed again
    # batch norm would else learn from these inputs, and dropout draw random numbers
    training = network.training
    network.eval()
    try:
        with torch.inference_mode():
            parts = _in_batches(network, x, batch)
    finally:
        network.train(training)
    embeddings = torch.cat(parts).numpy() if parts else np.zeros((0, 0), dtype=np.float32)
    if embeddings.ndim != 2 or len(embeddings) != len(x) or not np.isfinite(embeddings).all():
        raise SettingError(
            f"an extractor must return a row of finite numbers for each input, got {list(embeddings.shape)}"
        )
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced(path) as part, part.open("wb") as file:
            np.save(file, embeddings, allow_pickle=False)
    return np.asarray(embeddings, dtype=np.float32)


def _fingerprint(network: nn.Module, x: Tensor | Decoded) -> str:
    parameters = inspect.signature(type(network)).parameters
    settings = {
        name: value for name in parameters if isinstance(value := getattr(network, name, None), int | float | str)
    }
    digest = hashlib.sha256(repr((str(network), settings, x.shape, x.dtype)).encode())
    # buffers besides the state, since those that are not persistent are missing there
    values = [*network.state_dict().values(), *network.buffers()]
    for value in itertools.chain(values, (x[at : at + 1024] for at in range(0, len(x), 1024))):
        digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:24]


def _in_batches(network: nn.Module, x: Tensor | Decoded, batch: int) -> list[Tensor]:
    starts, parts = range(0, len(x), batch), list[Tensor]()
    with Bar("embedding", len(starts), len(starts) > 1, "batch", lines=False) as bar:
        for start in starts:
            parts.append(network(x[start : start + batch]).cpu())
            bar.show(len(parts))
    return parts


@checked
def embedded(
    clients: Clients, extractor: str | nn.Module, *, key: str | None = None, batch: Count = 64
) -> PooledClients:
    """Clients whose inputs are the embeddings of a frozen extractor.

    Args:
        clients: the clients with the rows.
        extractor: "squeezenet" (images), "log_mel" (recordings), any module that maps inputs [batch, ...] to
            [batch, d], or "module:name" for one of a plugin, or for a class or function that makes it.
        key: name under which a module's embeddings are cached on disk; those of named extractors always are.
        batch: rows per batch.

    Raises:
        SettingError: there is no extractor with this name, it cannot read these rows, or its output is not a row of
            finite numbers for each.
    """
    if isinstance(extractor, nn.Module):
        return _pooled(clients, extractor, key, batch)
    return embedded_by(clients, USERS.mark(extractor), key, batch)


def embedded_by(clients: Clients, extractor: str, key: str | None = None, batch: int = 64) -> PooledClients:
    """`embedded`, where an extractor is one of those with names or a reference, and other text names nothing."""
    name = key if isinstance(extractor, Reference) else key or extractor
    return _pooled(clients, _network(extractor), name, batch)


def embedding(extractor: str, x: pytree.Tree) -> Tensor:
    """Return what the extractor of a run, by its name or reference, makes of inputs [n, ...]: embeddings [n, d].

    Raises:
        SettingError: there is no such extractor, or it cannot read these rows.
    """
    return _embedded(_network(extractor), x, None, 64)


def _pooled(clients: Clients, network: nn.Module, name: str | None, batch: int) -> PooledClients:
    """Return clients with the embeddings; all rows of a client are one file of the cache, whatever their splits."""
    x, y, weights = list[Tensor](), list[Tensor](), list[Tensor]()
    places: dict[Split, list[Ints]] = {split: [] for split in SPLITS}
    at = 0
    for client in range(len(clients)):
        parts = {split: clients.rows(client, split) for split in SPLITS}
        if held := [part for part in parts.values() if len(part)]:
            x.append(_embedded(network, pytree.joined([part.x for part in held]), name, batch))
            y += [pytree.single(part.y, "an extractor") for part in held]
            weights += [part.weight for part in held if part.weight is not None]
        for split, part in parts.items():
            places[split].append(np.arange(at, at + len(part)))
            at += len(part)

    def extra(rows: Rows | None) -> Rows | None:
        return None if rows is None else replace(rows, x=_embedded(network, rows.x, name, batch))

    # rows were appended client by client and split by split, so places only grow
    lists = {split: Lists(np.concatenate(own), np.cumsum([0, *map(len, own)])) for split, own in places.items()}
    return PooledClients(
        torch.cat(x), torch.cat(y), lists, names=clients.names,
        weights=torch.cat(weights) if weights else None, classes=clients.classes, division=division_of(clients),
        common=extra(clients.common), public_rows=extra(public_rows_of(clients)),
        server_rows=extra(clients.server_rows if isinstance(clients, HasServerRows) else None),
    )  # fmt: skip


def _network(extractor: str) -> nn.Module:
    if isinstance(extractor, Reference):
        return _of_plugin(extractor)
    if extractor not in EXTRACTORS:
        raise unknown("extractor", extractor, EXTRACTORS)
    return EXTRACTORS[extractor]()


def _of_plugin(reference: Reference) -> nn.Module:
    named = plugins.find(reference, "extractor")
    network = named if isinstance(named, nn.Module) else plugins.call(reference, "extractor")
    if not isinstance(network, nn.Module):
        raise SettingError(f"extractor {reference!r} must be or make a torch.nn.Module, got {type(network).__name__}")
    return network


def _embedded(network: nn.Module, x: pytree.Tree, name: str | None, batch: int) -> Tensor:
    return torch.from_numpy(embed(network, pytree.single(x, "an extractor"), batch=batch, key=name))
