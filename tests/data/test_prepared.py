"""The prepared real data sets against published numbers."""

from __future__ import annotations

import io
import os

import numpy as np
import pytest
import torch

from piebald import data
from piebald.core.errors import SettingError
from piebald.data.partition import ByOwner, Vertical
from piebald.data.sets.cifar10 import pixels
from piebald.data.sets.dataset import decode

prepared = pytest.mark.skipif(
    "PIEBALD_DATA" not in os.environ, reason="PIEBALD_DATA is not set: set it to the folder of prepared data sets"
)


def jpegs(*sizes: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    from PIL import Image

    files = []
    for number, (height, width) in enumerate(sizes):
        buffer = io.BytesIO()
        Image.fromarray(np.full((height, width, 3), 40 * number, np.uint8)).save(buffer, "JPEG")
        files.append(np.frombuffer(buffer.getvalue(), np.uint8))
    return np.concatenate(files), np.r_[0, np.cumsum([len(file) for file in files])]


@pytest.mark.full
@prepared
def test_cifar10_as_published() -> None:
    cifar = data.cifar10()
    assert cifar.x.shape == (51_000, 3, 32, 32)
    assert cifar.x.dtype == torch.uint8
    assert cifar.y[:10].tolist() == [6, 9, 9, 4, 1, 1, 2, 7, 8, 3]
    assert np.bincount(cifar.y[:10_000]).tolist() == [1005, 974, 1032, 1016, 999, 937, 1030, 1001, 1025, 981]
    means = [float(cifar.x[:50_000, channel].numpy().mean() / 255) for channel in range(3)]
    assert means == pytest.approx([0.49139968, 0.48215841, 0.44653091], abs=1e-6)
    assert len(cifar.test) == 1000


@pytest.mark.long
@prepared
def test_the_two_test_parts_of_cifar10_differ_in_their_pixels() -> None:
    exact, compressed = data.cifar10().x[50_000:], data.cifar10(test="jpeg")
    assert len(compressed.test) == 10_000
    assert np.bincount(compressed.y[compressed.test]).tolist() == [1000] * 10
    assert "JPEG" in compressed.source
    images = compressed.x[50_000:].flatten(1).float()
    # The counterpart of the first exact image is among the others, but for compression noise of about 8 grey levels.
    nearest = (images - exact[0].flatten().float()).square().mean(1).sqrt().min()
    assert 1 < float(nearest) < 16


def test_residuals_become_the_pixels_they_were_made_of() -> None:
    image = np.random.default_rng(0).integers(0, 256, (5, 3, 32, 32)).astype(np.uint8)
    p = image.copy()
    p[:, 0] -= p[:, 1]
    p[:, 2] -= p[:, 1]
    p = np.diff(np.diff(p, axis=2, prepend=np.uint8(0)), axis=3, prepend=np.uint8(0))
    assert (pixels(p) == image).all()


@prepared
def test_credit_as_published() -> None:
    credit = data.credit()
    assert credit.x.shape == (30_000, 23)
    assert np.bincount(credit.y).tolist() == [23_364, 6_636]
    assert np.bincount(credit.owners["sex"].codes).tolist() == [11_888, 18_112]
    assert credit.owners["sex"].names == ["male", "female"]
    assert "graduate school" in credit.owners["education"].names
    assert float(credit.x.mean()) == pytest.approx(0, abs=1e-4)
    from piebald.data.sets.credit import PERSONAL

    parties = Vertical(features=PERSONAL, overlap=5000).split(credit)
    assert parties.active.features == PERSONAL
    assert parties.passive.x.shape == (17_500, 18)


@prepared
def test_census_as_published() -> None:
    census = data.census()
    assert census.x.shape == (48_842, 108)
    assert np.bincount(census.y[census.train]).tolist() == [24_720, 7_841]
    assert np.bincount(census.y[census.test]).tolist() == [12_435, 3_846]
    assert torch.isfinite(census.x).all()
    assert len(census.owners["native-country"].names) == 42
    assert len(ByOwner(owner="workclass").split(census)) == 9
    one_hot = [place for place, name in enumerate(census.features) if name.startswith("race=")]
    assert (census.x[:, one_hot].sum(1) == 1).all()


@pytest.mark.full
@prepared
def test_office_caltech10_as_published() -> None:
    office = data.office_caltech10()
    assert office.x.shape == (2533, 3, 128, 128)
    assert office.owners["domain"].names == ["amazon", "caltech10", "dslr", "webcam"]
    assert np.bincount(office.owners["domain"].codes).tolist() == [958, 1123, 157, 295]
    features = data.office_caltech10("squeezenet")
    assert features.x.shape == (2533, 512)
    assert torch.equal(features.y, office.y)
    assert data.office_caltech10("surf").x.shape == (2533, 800)


def test_images_are_decoded_or_refused() -> None:
    stored, offset = jpegs((4, 6), (4, 6))
    assert decode(stored, offset, "file").shape == (2, 3, 4, 6)
    with pytest.raises(SettingError, match="file: image 1 cannot be decoded"):
        decode(stored, np.array([0, offset[1], offset[1] + 9]), "file")
    with pytest.raises(SettingError, match="must be of one size"):
        decode(*jpegs((4, 6), (5, 6)), "file")


def test_wrong_forms_and_files_are_one_sentence(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingError, match="got 'image': did you mean 'images'"):
        data.office_caltech10("image")
    with pytest.raises(SettingError, match="got 'jpg': did you mean 'jpeg'"):
        data.cifar10("jpg")
    monkeypatch.setenv("PIEBALD_DATA", str(tmp_path))
    (tmp_path / "credit").mkdir()
    (tmp_path / "credit" / "credit_default.csv.gz").write_bytes(b"no gzip")
    with pytest.raises(SettingError, match="cannot be read as CSV"):
        data.credit()
    (tmp_path / "adult").mkdir()
    import pandas

    pandas.DataFrame({"split": ["train"], "age": [3]}).to_csv(tmp_path / "adult" / "adult.csv.gz")
    with pytest.raises(SettingError, match="must have a column 'fnlwgt'"):
        data.census()
