"""Downloads from a local server with tiny files in the official formats: good, cut off, wrong, slow, not there."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import struct
import tarfile
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from piebald import data
from piebald.data import download
from piebald.data.formats import read_idx, read_leaf
from piebald.errors import SettingError


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
    import importlib

    module = importlib.import_module("piebald.data.fashion_mnist")
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
    import importlib

    dice = np.random.default_rng(1)
    image = dice.integers(0, 256, (12, 3072)).astype(np.uint8)
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
        body, module = tarred(files), importlib.import_module(f"piebald.data.{name}")
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
