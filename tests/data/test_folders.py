from __future__ import annotations

import wave
from pathlib import Path

import numpy as np
import pytest
import torch

from piebald import data
from piebald.core.errors import SettingError
from piebald.data.clients.data_source import DataSource
from piebald.data.partition import ByOwner, Iid


def image(path: Path, grey: int, size: tuple[int, int] = (12, 9)) -> None:
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (grey, 0, 0)).save(path)


def sound(path: Path, values: list[int], rate: int = 8000, width: int = 2, channels: int = 1) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setparams((channels, width, rate, 0, "NONE", ""))
        file.writeframes(np.array(values, {1: "u1", 2: "<i2", 4: "<i4"}[width]).tobytes())


def test_images_by_class(tmp_path: Path) -> None:
    image(tmp_path / "dog" / "1.png", 200)
    image(tmp_path / "cat" / "2.JPG", 100, (5, 5))
    (tmp_path / "cat" / "notes.txt").write_text("not an image")
    found = data.image_folder(tmp_path, side=8)
    assert found.x.shape == (2, 3, 8, 8)
    assert found.x.dtype == torch.uint8
    assert [found.classes[label] for label in found.y] == ["cat", "dog"]
    assert found.x[1, 0].unique().tolist() == [200]


@pytest.mark.parametrize("lazy", [False, True])
def test_images_with_one_channel_are_the_mean_of_three(tmp_path: Path, lazy: bool) -> None:
    image(tmp_path / "dog" / "1.png", 200)
    found = data.image_folder(tmp_path, side=2, channels=1, lazy=lazy)
    assert found.x.shape == (1, 1, 2, 2)
    assert found.x[:].unique().tolist() == [67]  # 200 / 3
    source = DataSource(source=str(tmp_path), side=3, channels=1).load()
    assert isinstance(source, data.DataSet)
    assert tuple(source.input_shape) == (1, 3, 3)


def test_images_by_owner_and_class(tmp_path: Path) -> None:
    for owner in ("north", "south"):
        for number in range(4):
            image(tmp_path / owner / "cat" / f"{number}.png", number)
    found = data.image_folder(tmp_path, side=4, owner="hospital")
    assert ByOwner(owner="hospital").split(found).names == ["north", "south"]


def test_recordings_by_class_and_speaker(tmp_path: Path) -> None:
    sound(tmp_path / "yes" / "a1_nohash_0.wav", [16384, -32768])
    sound(tmp_path / "no" / "b2_nohash_0.wav", [64, 192] * 20, width=1)
    sound(tmp_path / "no" / "a1_nohash_1.wav", [1 << 30, 7, 1 << 29, 7], width=4, channels=2)
    found = data.audio_folder(tmp_path, seconds=0.001, rate=8000)
    assert found.x.shape == (3, 1, 8)
    assert found.x[2, 0].tolist() == [0.5, -1.0, 0, 0, 0, 0, 0, 0]
    assert found.x[1, 0, :3].tolist() == [-0.5, 0.5, -0.5]
    assert found.x[0, 0, :3].tolist() == [0.5, 0.25, 0]
    assert found.owners["speaker"].names == ["a1", "b2"]
    assert found.owners["speaker"].codes.tolist() == [0, 1, 0]


def test_what_cannot_be_read_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="there is no file class/file"):
        data.image_folder(tmp_path)
    with pytest.raises(SettingError, match="there is no file room/class/file"):
        data.audio_folder(tmp_path, owner="room")
    with pytest.raises(SettingError, match="side must be a whole number"):
        data.image_folder(tmp_path, side=0)
    with pytest.raises(SettingError, match="seconds must be a finite number above 0"):
        data.audio_folder(tmp_path, seconds=0)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.png").write_bytes(b"no image")
    with pytest.raises(SettingError, match=r"x.png cannot be read as an image"):
        data.image_folder(tmp_path)
    (tmp_path / "a" / "x.wav").write_bytes(b"no sound")
    with pytest.raises(SettingError, match=r"x.wav cannot be read as WAV"):
        data.audio_folder(tmp_path)
    sound(tmp_path / "a" / "x.wav", [1, 2], rate=4000)
    with pytest.raises(SettingError, match="has 4000 samples per second, not 16000"):
        data.audio_folder(tmp_path)


def test_lazy_images_are_decoded_when_rows_are_asked_for_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from piebald.data.sets import folders

    for number in range(12):
        image(tmp_path / f"c{number % 2}" / f"{number:02}.png", 10 * number)
    opened: list[str] = []
    decode = folders._image
    monkeypatch.setattr(folders, "_image", lambda path, *form: opened.append(path.name) or decode(path, *form))
    lazy = data.image_folder(tmp_path, side=4, lazy=True)
    clients = Iid(clients=3, seed=1).split(lazy)
    assert len(opened) == 1  # the first, for the shape
    rows = clients.rows(0, "train")
    assert len(opened) == 1 + len(rows)
    eager = Iid(clients=3, seed=1).split(data.image_folder(tmp_path, side=4))
    for client in range(3):
        for split in ("train", "test"):
            assert torch.equal(clients.rows(client, split).x, eager.rows(client, split).x)
    assert torch.equal(clients.x, eager.x)
    assert lazy.x.dim() == 4
    with pytest.raises(IndexError):
        lazy.x[12]


def test_a_run_on_lazy_images_is_the_run_on_decoded_ones(tmp_path: Path) -> None:
    import piebald

    for number in range(24):
        image(tmp_path / f"c{number % 2}" / f"{number:02}.png", 10 * number)
    runs = []
    for lazy in (False, True):
        clients = Iid(clients=3).split(data.image_folder(tmp_path, side=4, lazy=lazy))
        model = piebald.models.build_model("logistic", (3, 4, 4), 2)
        runs.append(piebald.run("fedavg", clients, model, rounds=2))
    assert [row["loss"] for row in runs[0].rounds] == [row["loss"] for row in runs[1].rounds]
