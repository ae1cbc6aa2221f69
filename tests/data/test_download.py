"""Downloads from a local server with tiny files in the official formats: good, cut off, wrong, slow, not there."""

from __future__ import annotations

import gzip
import hashlib
import importlib
import io
import json
import os
import shutil
import struct
import sys
import tarfile
import threading
import time
import wave
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest

from piebald import data
from piebald.core.errors import SettingError
from piebald.data.sets import download
from piebald.data.sets.encoded_tables import encode
from piebald.data.sets.formats import read_idx, read_leaf, read_xls
from piebald.data.sets.har import SIGNALS as HAR_SIGNALS


class Server(ThreadingHTTPServer):
    """Files by path; `cut` bytes are sent at most an answer, `pause` seconds come between pieces."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.cut: int | None = None
        self.pause = 0.0
        self.ranges: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        body = self.server.files.get(self.path)
        if body is None:
            self.send_error(404)
            return
        asked = self.headers.get("Range")
        self.server.ranges.append(asked)
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        rest = body[start:][: self.server.cut]
        try:
            for at in range(0, len(rest), 500):
                self.wfile.write(rest[at : at + 500])
                self.wfile.flush()
                time.sleep(self.server.pause)
        except OSError:  # the client has had enough
            pass

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("PIEBALD_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("PIEBALD_DATA", raising=False)
    opened = Server()
    thread = threading.Thread(target=opened.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield opened
    opened.shutdown()
    thread.join()
    opened.server_close()


def md5(body: bytes) -> str:
    return "md5:" + hashlib.md5(body).hexdigest()


def idx(values: np.ndarray) -> bytes:
    return (
        struct.pack(">BBBB", 0, 0, 8, values.ndim) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()
    )


def tarred(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, body in files.items():
            entry = tarfile.TarInfo(f"folder/{name}")
            entry.size = len(body)
            archive.addfile(entry, io.BytesIO(body))
    return buffer.getvalue()


BODY = np.random.default_rng(0).bytes(5000)


def test_downloaded_once_checked_and_kept(server: Server) -> None:
    server.files["/file.bin"] = BODY
    for _ in range(2):
        path = download.official("some", f"{server.url}/file.bin", "sha256:" + hashlib.sha256(BODY).hexdigest())
        assert path.read_bytes() == BODY
    assert len(server.ranges) == 1
    assert [file.name for file in path.parent.iterdir()] == ["file.bin"]


def test_a_download_that_breaks_off_goes_on(server: Server) -> None:
    server.files["/file.bin"], server.cut = BODY, 2000
    path = download.official("some", f"{server.url}/file.bin", md5(BODY))
    assert path.read_bytes() == BODY
    assert server.ranges == [None, "bytes=2000-", "bytes=4000-"]


def test_a_truncated_file_says_so_and_is_gone_on_with_the_next_time(server: Server) -> None:
    server.files["/file.bin"], server.cut = BODY, 1000
    with pytest.raises(
        SettingError, match=r"broke off after 3,000 bytes, which are kept.*put it in some/file.bin there"
    ):
        download.official("some", f"{server.url}/file.bin", md5(BODY))
    server.cut = None
    assert download.official("some", f"{server.url}/file.bin", md5(BODY)).read_bytes() == BODY
    assert server.ranges[-1] == "bytes=3000-"


def test_a_wrong_checksum_leaves_nothing_behind(server: Server, tmp_path: Path) -> None:
    server.files["/file.bin"] = b"a page that asks you to log in"
    with pytest.raises(SettingError, match=r"is not the published file \(another checksum\): try again later"):
        download.official("some", f"{server.url}/file.bin", md5(BODY))
    assert not list((tmp_path / "cache").rglob("*.bin*"))


def test_a_slow_server_is_waited_for_and_a_silent_one_is_not(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.files["/file.bin"], server.pause = BODY, 0.05
    monkeypatch.setattr(download, "TIMEOUT", 0.4)  # the whole takes longer than this
    assert download.official("slow", f"{server.url}/file.bin", md5(BODY)).read_bytes() == BODY
    server.pause = 1.0
    monkeypatch.setattr(download, "TIMEOUT", 0.1)
    with pytest.raises(SettingError, match=r"cannot be downloaded from .*timed out"):
        download.official("silent", f"{server.url}/file.bin", md5(BODY))


def test_offline_and_not_found_say_what_to_put_where(server: Server) -> None:
    with pytest.raises(SettingError, match=r"Not Found.*set PIEBALD_DATA to a folder and put it in some/no.bin there"):
        download.official("some", f"{server.url}/no.bin", md5(BODY))
    with pytest.raises(SettingError, match=r"file.bin is not here and cannot be downloaded from .*refused") as caught:
        download.official("some", "http://127.0.0.1:9/file.bin", md5(BODY))
    assert "\n" not in str(caught.value)


def test_a_file_put_there_by_hand_comes_first_and_is_checked(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIEBALD_DATA", str(tmp_path))
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "file.bin").write_bytes(BODY)
    assert download.official("some", f"{server.url}/file.bin", md5(BODY)) == tmp_path / "some" / "file.bin"
    assert server.ranges == []
    with pytest.raises(SettingError, match=r"delete or replace it"):
        download.official("some", f"{server.url}/file.bin", md5(b"other"))


def test_a_listing_downloads_nothing(server: Server) -> None:
    server.files["/file.bin"] = BODY
    with download.forbidden(), pytest.raises(SettingError, match=r"file.bin is not here: loading it downloads it from"):
        download.official("some", f"{server.url}/file.bin", md5(BODY))
    assert server.ranges == []


def test_fashion_mnist(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("piebald.data.sets.fashion_mnist")
    images = np.arange(3 * 784, dtype=np.uint64).astype(np.uint8).reshape(3, 28, 28)
    bodies = [images, np.array([3, 9, 0], np.uint8), images[:2], np.array([1, 2], np.uint8)]
    sent = [gzip.compress(idx(body)) for body in bodies]
    monkeypatch.setattr(module, "URL", server.url)
    monkeypatch.setattr(module, "CHECKSUMS", {f: md5(b) for f, b in zip(module.CHECKSUMS, sent, strict=True)})
    server.files = {f"/{file}": body for file, body in zip(module.CHECKSUMS, sent, strict=True)}
    fashion = data.fashion_mnist()
    assert fashion.x.shape == (5, 1, 28, 28)
    assert (fashion.x[:3, 0].numpy() == images).all()
    assert fashion.y.tolist() == [3, 9, 0, 1, 2]
    assert fashion.test.tolist() == [3, 4]


def test_cifar10_and_cifar100(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    image = rng.integers(0, 256, (12, 3072)).astype(np.uint8)
    ten = {f"data_batch_{n}.bin": bytes([n]) + image[n].tobytes() for n in range(1, 6)}
    ten |= {
        "test_batch.bin": b"\x09" + image[0].tobytes(),
        "batches.meta.txt": b"\n".join(b"c%d" % n for n in range(10)),
    }
    hundred = {
        "train.bin": b"".join(bytes([n % 20, n]) + image[n].tobytes() for n in range(3)),
        "test.bin": bytes([19, 99]) + image[5].tobytes(),
        "fine_label_names.txt": b"\n".join(b"f%d" % n for n in range(100)),
        "coarse_label_names.txt": b"\n".join(b"g%d" % n for n in range(20)),
    }
    for name, files in (("cifar10", ten), ("cifar100", hundred)):
        body, module = tarred(files), importlib.import_module(f"piebald.data.sets.{name}")
        server.files[f"/{name}.tar.gz"] = body
        monkeypatch.setattr(module, "URL", f"{server.url}/{name}.tar.gz")
        monkeypatch.setattr(module, "CHECKSUM", md5(body))
    first = data.cifar10()
    assert first.y.tolist() == [1, 2, 3, 4, 5, 9]
    assert (first.x[0].numpy().ravel() == image[1]).all()
    assert "all 1 images, exact pixels" in first.source
    second = data.cifar100()
    assert second.y.tolist() == [0, 1, 2, 99]
    assert [second.owners["group"].names[code] for code in second.owners["group"].codes] == ["g0", "g1", "g2", "g19"]
    assert second.classes[99] == "f99"


def test_femnist_from_the_json_of_leaf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIEBALD_DATA", str(tmp_path))
    for part, rows in (("train", 2), ("test", 1)):
        (tmp_path / "femnist" / part).mkdir(parents=True)
        own = {"x": [[0.5] * 784] * rows, "y": [61] * rows}
        body = {"users": ["f1", "f2"], "num_samples": [rows] * 2, "user_data": {"f1": own, "f2": own}}
        (tmp_path / "femnist" / part / "all.json").write_text(json.dumps(body))
    femnist = data.femnist()
    assert femnist.x.shape == (6, 1, 28, 28)
    assert femnist.owners["writer"].names == ["f1", "f2"]
    assert femnist.test.tolist() == [4, 5]
    assert femnist.classes[61] == "z"


def test_damaged_formats_are_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = idx(np.zeros((2, 3), np.uint8))
    for body, message in (
        (whole[:-1], "must hold 6 bytes of numbers"),
        (b"nothing", "not of the IDX format"),
        (gzip.compress(whole)[:-9], "may be damaged"),
    ):
        (tmp_path / "file").write_bytes(body)
        with pytest.raises(SettingError, match=message):
            read_idx(tmp_path / "file")
    (tmp_path / "a.json").write_text('{"users": ["f1"], "user_data": {"f1": {"x": [[1]], "y": []}}}')
    with pytest.raises(SettingError, match=r"not of LEAF's format.*1 inputs and 0 labels"):
        read_leaf(tmp_path)
    (tmp_path / "a.json").write_text('{"users": ["f1"')
    with pytest.raises(SettingError, match=r"not of LEAF's format"):
        read_leaf(tmp_path)
    monkeypatch.delenv("PIEBALD_DATA", raising=False)
    with pytest.raises(SettingError, match=r"preprocess.sh.*set PIEBALD_DATA"):
        data.femnist()


def zipped(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, body in files.items():
            archive.writestr(name, body)
    return buffer.getvalue()


def serve(server: Server, monkeypatch: pytest.MonkeyPatch, module: str, body: bytes) -> Any:
    """Let a data set's archive come from the local server; the module, for other names to be put in."""
    found = importlib.import_module(module)
    server.files["/archive"] = body
    monkeypatch.setattr(found, "URL", f"{server.url}/archive")
    name = "URL_CHECKSUM" if hasattr(found, "URL_CHECKSUM") else "CHECKSUM"
    monkeypatch.setattr(found, name, md5(body))
    return found


def har_archive(walk: np.ndarray, **changed: bytes) -> bytes:
    """Two windows of one walk that overlap by half, one of another person, and one in the test part."""
    parts = {"train": [walk[:, :128], walk[:, 64:192], walk[:, 200:328]], "test": [walk[:, 300:428]]}
    labels = {"train": ("5\n5\n1\n", "7\n7\n9\n"), "test": ("6\n", "2\n")}
    files = {"UCI HAR Dataset/activity_labels.txt": b"1 WALKING\n2 UP\n3 DOWN\n4 SITTING\n5 STANDING\n6 LAYING\n"}
    for part, windows in parts.items():
        for place, signal in enumerate(HAR_SIGNALS):
            lines = "\n".join(" ".join(f"{value: .7e}" for value in window[place]) for window in windows)
            files[f"UCI HAR Dataset/{part}/Inertial Signals/{signal}_{part}.txt"] = lines.encode()
        files[f"UCI HAR Dataset/{part}/y_{part}.txt"] = labels[part][0].encode()
        files[f"UCI HAR Dataset/{part}/subject_{part}.txt"] = labels[part][1].encode()
    files["__MACOSX/UCI HAR Dataset/train/._y_train.txt"] = b"\0"
    files |= {name: body for name, body in changed.items()}
    return zipped({"UCI HAR Dataset.zip": zipped(files), "UCI HAR Dataset.names": b"text"})


def test_har_from_the_published_text(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    walk = np.random.default_rng(2).normal(size=(9, 500)).round(5)
    serve(server, monkeypatch, "piebald.data.sets.har", har_archive(walk))
    har = data.har()
    assert har.x.shape == (4, 9, 128)
    np.testing.assert_allclose(har.x[1], walk[:, 64:192], rtol=1e-6)
    assert har.y.tolist() == [4, 4, 0, 5]
    assert har.classes[5] == "laying"
    assert [har.owners["subject"].names[code] for code in har.owners["subject"].codes] == ["7", "7", "9", "2"]
    assert har.test.tolist() == [3]
    assert har.groups.tolist() == [0, 0, 1, 2]  # the first two windows share half their samples


@pytest.mark.parametrize(
    ("name", "body", "message"),
    [
        ("UCI HAR Dataset/train/y_train.txt", b"5\n5\n", "must have a line for each window"),
        ("UCI HAR Dataset/train/y_train.txt", b"5\nsix\n1\n", "is not a table of numbers"),
        ("UCI HAR Dataset/train/y_train.txt", b"5 1\n5 1\n1 1\n", "must have 1 numbers in each line, got 2"),
    ],
)
def test_damaged_har_is_one_sentence(
    server: Server, monkeypatch: pytest.MonkeyPatch, name: str, body: bytes, message: str
) -> None:
    walk = np.random.default_rng(2).normal(size=(9, 500)).round(5)
    serve(server, monkeypatch, "piebald.data.sets.har", har_archive(walk, **{name: body}))
    with pytest.raises(SettingError, match=message) as caught:
        data.har()
    assert "\n" not in str(caught.value)


def test_credit_from_the_published_sheet(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    sheet = (Path(__file__).parent / "credit_three_rows.xls").read_bytes()  # BIFF8, as Excel 97 to 2003 wrote it
    name = "default of credit card clients.xls"
    serve(server, monkeypatch, "piebald.data.sets.credit", zipped({name: sheet}))
    credit = data.credit()
    assert credit.x.shape == (3, 23)
    assert credit.y.tolist() == [1, 1, 0]
    assert credit.owners["sex"].names == ["male", "female"]
    assert credit.owners["age"].names == ["20s", "30s"]
    limits = credit.x[:, credit.features.index("LIMIT_BAL")].numpy()
    expected = np.array([20000, 120000, 90000])
    np.testing.assert_allclose(limits, (expected - expected.mean()) / expected.std(), rtol=1e-6)
    for damaged, message in ((sheet[:2000], "cannot be read as Excel"), (b"<html>", "cannot be read as Excel")):
        with pytest.raises(SettingError, match=message) as caught:
            read_xls(damaged, 1, "sheet")
        assert "\n" not in str(caught.value)


def test_an_old_sheet_without_xlrd_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xlrd", None)
    with pytest.raises(SettingError, match=r"needs xlrd: pip install '\.\[xls\]'"):
        read_xls(b"", 0, "sheet")


PERSON = "39, State-gov, 77516, Bachelors, 13, Never-married, Adm-clerical, Not-in-family, White, Male, 2174, 0, 40, "


def test_census_from_the_published_text(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    train = PERSON + "United-States, <=50K\n" + PERSON.replace("39", "55").replace("State-gov", "?") + "Cuba, >50K\n\n"
    test = "|1x3 Cross validator\n" + PERSON.replace("39", "25") + "?, >50K.\n\n"
    files = {"adult.data": train.encode(), "adult.test": test.encode(), "Index": b"x"}
    serve(server, monkeypatch, "piebald.data.sets.census", zipped(files))
    census = data.census()
    assert census.y.tolist() == [0, 1, 1]
    assert (census.train.tolist(), census.test.tolist()) == ([0, 1], [2])
    assert census.owners["age"].names == ["20s", "30s", "50s"]
    assert set(census.owners["native-country"].names) == {"?", "Cuba", "United-States"}
    assert census.x[:, census.features.index("age")].tolist() == pytest.approx([-1, 1, -22 / 8])
    files["adult.data"] = train.replace(" <=50K", " maybe").encode()
    serve(server, monkeypatch, "piebald.data.sets.census", zipped(files))
    shutil.rmtree(os.environ["PIEBALD_CACHE"])
    with pytest.raises(SettingError, match=r"must have <=50K or >50K at each line's end"):
        data.census()


def test_mnist_with_its_writers(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("piebald.data.sets.mnist_writers")
    images = np.arange(3 * 784, dtype=np.uint64).astype(np.uint8).reshape(3, 28, 28)

    def table(*rows: tuple[int, int, int]) -> bytes:
        values = np.zeros((len(rows), 8), ">i4")
        values[:, :3] = rows
        return struct.pack(">BBBBII", 0, 0, 12, 2, *values.shape) + values.tobytes()

    bodies = [idx(images), idx(np.array([5, 0, 4], np.uint8)), idx(images[:1]), idx(np.array([7], np.uint8))]
    labels = [table((5, 0, 11), (0, 4, 12), (4, 0, 11)), table((7, 4, 20), (2, 4, 21))]
    for place, made in (("CHECKSUMS", bodies), ("WRITERS", labels)):
        sent = [gzip.compress(body) for body in made]
        names = list(getattr(module, place))
        monkeypatch.setattr(module, place, {name: md5(body) for name, body in zip(names, sent, strict=True)})
        server.files |= {f"/{name}": body for name, body in zip(names, sent, strict=True)}
    monkeypatch.setattr(module, "MNIST", server.url)
    monkeypatch.setattr(module, "QMNIST", server.url)
    mnist = data.mnist_writers()
    assert (mnist.x[:3, 0].numpy() == images).all()
    assert mnist.y.tolist() == [5, 0, 4, 7]
    assert [mnist.owners["writer"].names[code] for code in mnist.owners["writer"].codes] == ["11", "12", "11", "20"]
    assert mnist.owners["population"].names == ["census employees", "high-school students"]
    assert mnist.test.tolist() == [3]
    shutil.rmtree(os.environ["PIEBALD_CACHE"])
    name = "qmnist-test-labels-idx2-int.gz"
    server.files[f"/{name}"] = gzip.compress(table((3, 4, 20)))
    monkeypatch.setitem(module.WRITERS, name, md5(server.files[f"/{name}"]))
    with pytest.raises(SettingError, match="the test files in mnist_writers/ do not fit together"):
        data.mnist_writers()


def wav(values: list[int], rate: int = 16_000) -> bytes:
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((1, 2, rate, 0, "NONE", ""))
        file.writeframes(np.array(values, "<i2").tobytes())
    return buffer.getvalue()


def test_speech_commands_unpacked_once_and_decoded_when_asked(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    files = {
        "./yes/aa_nohash_0.wav": wav([16384] * 16_000),
        "./yes/bb_nohash_0.wav": wav([-16384] * 8000),
        "./no/aa_nohash_1.wav": wav([0, 32767]),
        "./_background_noise_/pink.wav": wav([1]),
        "./testing_list.txt": b"yes/bb_nohash_0.wav\n",
        "./validation_list.txt": b"",
    }
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, body in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(body)
            archive.addfile(entry, io.BytesIO(body))
    serve(server, monkeypatch, "piebald.data.sets.speech_commands", buffer.getvalue())
    for _ in range(2):
        speech = data.speech_commands()
        assert speech.classes == ["no", "yes"]
        assert speech.y.tolist() == [0, 1, 1]
        assert speech.owners["speaker"].names == ["aa", "bb"]
        assert speech.test.tolist() == [2]
        assert speech.x.shape == (3, 1, 16_000)
        assert speech.x[1].unique().tolist() == [0.5]
        assert speech.x[2][0, [0, 8000]].tolist() == [-0.5, 0.0]
    assert len(server.ranges) == 1
    (tmp_path / "cache" / "speech_commands" / "unpacked" / "no" / "aa_nohash_1.wav").write_bytes(b"RIFF")
    spoilt = data.speech_commands()
    with pytest.raises(SettingError, match=r"aa_nohash_1.wav cannot be read as WAV"):
        spoilt.x[0]


def test_speech_commands_cut_off_and_with_a_path_that_leads_out(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = tarred({"testing_list.txt": b"\n"})
    for body in (whole[: len(whole) // 2], tarred({"../../../out.txt": b"x"})):
        serve(server, monkeypatch, "piebald.data.sets.speech_commands", body)
        with pytest.raises(SettingError, match="cannot be unpacked"):
            data.speech_commands()
        assert not list(tmp_path.rglob("out.txt"))
        assert [path.name for path in (tmp_path / "cache" / "speech_commands").iterdir()] == ["archive"]
        shutil.rmtree(tmp_path / "cache")


@pytest.mark.parametrize("name", ["har", "credit", "census", "mnist_writers", "speech_commands"])
@pytest.mark.parametrize("wrong", ["cut", "other", "silent", "gone"])
def test_every_download_says_in_one_sentence_what_went_wrong(
    server: Server, monkeypatch: pytest.MonkeyPatch, name: str, wrong: str
) -> None:
    module = importlib.import_module(f"piebald.data.sets.{name}")
    for place in ("URL", "MNIST", "QMNIST"):
        if hasattr(module, place):
            address = server.url if place != "URL" else f"{server.url}/{getattr(module, place).rsplit('/', 1)[-1]}"
            monkeypatch.setattr(module, place, address)
    file = next(iter(module.CHECKSUMS)) if name == "mnist_writers" else module.URL.rsplit("/", 1)[-1]
    if wrong != "gone":
        server.files[f"/{file}"] = BODY
    server.cut, server.pause = (100 if wrong == "cut" else None), (0.6 if wrong == "silent" else 0.0)
    monkeypatch.setattr(download, "TIMEOUT", 0.1 if wrong == "silent" else 10.0)
    said = {"cut": "broke off after", "other": "another checksum", "silent": "timed out", "gone": "Not Found"}[wrong]
    with pytest.raises(SettingError, match=said) as caught:
        data.load(name)
    assert "\n" not in str(caught.value)
    assert "set PIEBALD_DATA to a folder and put it in" in str(caught.value)


def test_rows_of_a_table_whose_index_repeats_are_encoded_once_each() -> None:
    frame = pandas.DataFrame({"age": [1.0, 3.0, 5.0], "ward": ["b", "a", "b"]}, index=[0, 0, 1])
    x, names = encode(frame, ("age",), ("ward",), np.array([True, True, False]))
    assert names == ["age", "ward=a", "ward=b"]
    assert x.tolist() == [[-1.0, 0.0, 1.0], [1.0, 1.0, 0.0], [3.0, 0.0, 1.0]]
