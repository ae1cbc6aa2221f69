"""The frozen network against a plain reference and real photographs; the cache."""

from __future__ import annotations

import hashlib
import os
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from piebald import data
from piebald.core.errors import SettingError
from piebald.data.partition import ByEmbedding
from piebald.data.sets.dataset import DataSet
from piebald.models import LogMel, SqueezeNet, embed, squeezenet

prepared = pytest.mark.skipif(
    "PIEBALD_DATA" not in os.environ, reason="PIEBALD_DATA is not set: set it to the folder of prepared data sets"
)


PHOTOGRAPHS = 300  # of each source; with all of them it is 85 %


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PIEBALD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "embeddings"


def test_as_many_parameters_as_squeezenet_without_its_classifier() -> None:
    network = SqueezeNet()
    assert sum(one.numel() for one in network.parameters()) == 722_496
    assert network(torch.zeros(2, 1, 40, 50)).shape == (2, 512)


def test_bytes_and_floats_are_the_same_image() -> None:
    network = SqueezeNet(side=64).eval()
    image = torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8)
    assert torch.allclose(network(image), network(image.float() / 255), rtol=1e-4, atol=1e-3)


@pytest.mark.long
@pytest.mark.full
@prepared
@pytest.mark.full
def test_the_weights_separate_photographs_of_another_source() -> None:
    """A linear probe learns on amazon's shop pictures and is right on 85 % of caltech10's (random weights: 26 %)."""
    from sklearn.linear_model import RidgeClassifier

    office = data.office_caltech10()
    domain = office.owners["domain"].codes
    rng = np.random.default_rng(0)
    amazon = np.sort(rng.permutation(np.flatnonzero(domain == 0))[:PHOTOGRAPHS])
    caltech = np.sort(rng.permutation(np.flatnonzero(domain == 1))[:PHOTOGRAPHS])
    made = embed(squeezenet(), office.x[np.r_[amazon, caltech]], batch=32)
    made /= np.linalg.norm(made, axis=1, keepdims=True)
    probe = RidgeClassifier(alpha=1.0).fit(made[: len(amazon)], office.y[amazon])
    right = probe.score(made[len(amazon) :], office.y[caltech])
    assert 0.80 < right < 0.92


@pytest.mark.full
@prepared
def test_nearly_the_stored_features() -> None:
    """Those were made of the original images, ours of the same shrunk to 128 x 128."""
    office, stored = data.office_caltech10(), data.office_caltech10("squeezenet")
    rows = np.arange(0, 2533, 250)
    made, known = embed(squeezenet(), office.x[rows]), stored.x[rows].numpy()
    alike = (made * known).sum(1) / np.linalg.norm(made, axis=1) / np.linalg.norm(known, axis=1)
    assert alike.min() > 0.8
    assert np.median(alike) > 0.9


@pytest.mark.long
@prepared
def test_regions_of_real_embeddings(cache: Path) -> None:
    office = data.office_caltech10()
    rows = np.flatnonzero(office.owners["domain"].codes == 2)
    dslr = DataSet("dslr", office.x[rows], office.y[rows], office.classes)
    clients = ByEmbedding(clients=2, extractor="squeezenet").split(dslr)
    assert len(list(cache.iterdir())) == 1
    assert (clients.table("train").sum(1) > 10).all()


@prepared
def test_other_weights_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "squeezenet").mkdir()
    path = tmp_path / "squeezenet" / "squeezenet1_1_notop.npz"
    shutil.copy(Path(os.environ["PIEBALD_DATA"]) / "squeezenet" / path.name, path)
    path.chmod(0o644)
    with zipfile.ZipFile(path, "a") as stored:
        stored.writestr("more", "x")
    monkeypatch.setenv("PIEBALD_DATA", str(tmp_path))
    with pytest.raises(SettingError, match="does not hold the known weights"):
        squeezenet()


def test_a_tone_is_in_its_band_and_twice_as_loud_is_log_4_more() -> None:
    time = torch.arange(16_000) / 16_000
    network = LogMel()
    made = network(torch.stack([torch.sin(2 * np.pi * hertz * time) for hertz in (300, 1000, 4000)])[:, None])
    assert made.shape == (3, 80)
    centres = 700 * (10 ** (np.arange(1, 41) / 41 * np.log10(1 + 8000 / 700)) - 1)
    heard = [float(centres[row[:40].argmax()]) for row in made]
    assert heard == pytest.approx([300, 1000, 4000], rel=0.12)
    loudest = made[:, :40].argmax(1)
    assert float(made[range(3), 40 + loudest].max()) < 0.1  # a steady tone hardly changes over time
    louder = network(2 * torch.sin(2 * np.pi * 1000 * time)[None, None])
    band = int(louder[0, :40].argmax())
    assert float(louder[0, band] - made[1, band]) == pytest.approx(np.log(4), abs=1e-3)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 2), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        assert not self.training
        return self.linear(x)


def test_any_module_embeds_in_batches_and_only_once(cache: Path) -> None:
    network, x = Counting(), torch.rand(10, 4)
    first = embed(network, x, batch=4, key="mine")
    assert network.calls == 3
    assert network.training
    np.testing.assert_array_equal(embed(network, x, batch=4, key="mine"), first)
    assert network.calls == 3
    (file,) = cache.iterdir()
    file.write_bytes(b"damaged")
    np.testing.assert_array_equal(embed(network, x, batch=4, key="mine"), first)
    assert network.calls == 6
    with torch.no_grad():
        network.linear.bias += 1
    np.testing.assert_allclose(embed(network, x, key="mine"), first + 1, rtol=1e-5)
    embed(network, x + 1, key="mine")
    assert len(list(cache.iterdir())) == 3


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: SqueezeNet(side=8), "side must be a whole number of at least 32, got 8"),
        (lambda: SqueezeNet()(torch.zeros(2, 4, 64, 64)), "squeezenet reads images"),
        (lambda: LogMel(bands=200), "bands must be at most a quarter of window = 512, got 200"),
        (lambda: LogMel()(torch.zeros(2, 1, 100)), "log_mel reads recordings"),
        (lambda: embed(nn.Identity(), torch.zeros(2, 3, 3)), "must return a row of finite numbers"),
        (lambda: embed(nn.Identity(), torch.full((2, 3), torch.nan)), "must return a row of finite numbers"),
    ],
)
def test_what_cannot_be_is_one_sentence(wrong, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        wrong()


@prepared
def test_weights_from_the_published_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Keras file holds the same numbers in another order, as [h, w, in, out] and with blue first."""
    import h5py

    from piebald.data import embeddings

    known = squeezenet()
    path = tmp_path / "cache" / "squeezenet" / "weights.h5"
    path.parent.mkdir(parents=True)
    with h5py.File(path, "w") as file:
        for name, value in known.state_dict().items():
            layer, kind = name.rsplit(".", 1)
            array = value.numpy()
            if kind == "weight":
                array = (array[:, ::-1] if layer == "features.0" else array).transpose(2, 3, 1, 0)
            group = embeddings.LAYERS[layer]
            file[f"{group}/{group}_{'W' if kind == 'weight' else 'b'}:0"] = array
        file.create_group("pool1")

    def pin() -> None:
        monkeypatch.setattr(embeddings, "URL_CHECKSUM", "md5:" + hashlib.md5(path.read_bytes()).hexdigest())

    monkeypatch.setattr(embeddings, "URL", "http://127.0.0.1:9/weights.h5")
    monkeypatch.delenv("PIEBALD_DATA")
    pin()
    made = squeezenet().state_dict()
    assert all(torch.equal(made[name], value) for name, value in known.state_dict().items())
    with h5py.File(path, "a") as file:
        file["conv1/conv1_b:0"][0] += 1
    with pytest.raises(SettingError, match="is not the published file"):
        squeezenet()
    pin()
    with pytest.raises(SettingError, match=r"does not hold the known weights \(another checksum\)"):
        squeezenet()
    path.write_bytes(path.read_bytes()[:3000])
    pin()
    with pytest.raises(SettingError, match="does not hold the known weights"):
        squeezenet()
    path.unlink()
    with pytest.raises(SettingError, match=r"cannot be downloaded.*put it in squeezenet/weights.h5 there"):
        squeezenet()
