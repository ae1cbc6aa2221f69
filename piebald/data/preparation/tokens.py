"""Token ids of a column of text, by a tokenizer of Hugging Face's `tokenizers`: a file of data without code.

All clients cut and fill up texts alike.  What they agree on is the tokenizer by name and by the hash of its file, of
which a run folder keeps a copy.  It runs in a process of its own, which it may end; this one goes on with one sentence.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from piebald.core.errors import SettingError, import_extra, install, shown
from piebald.core.files import read_bytes
from piebald.core.private_files import write_private
from piebald.data.preparation import run_tokenizer
from piebald.data.preparation.column_models import TokenColumn
from piebald.storage.run_folder import TOKENIZER

if TYPE_CHECKING:
    import pandas as pd

_SECONDS = 60.0  # for any message, and one more for so many bytes of it
_BYTES = 20_000
_MOST = 1 << 16  # texts of a message
_LONGEST = 400  # letters of an error of the library


class TokenizerProcess:
    """A tokenizer that cuts and fills up texts to one length.

    Args:
        content: a tokenizer.json.
        name: of the tokenizer, for messages.
        length: token ids of each text.

    Attributes:
        vocabulary: number of different tokens.
        json: the tokenizer as JSON of the library's, which cuts and fills up texts in the same way.

    Raises:
        SettingError: it cannot be used.
    """

    def __init__(self, content: bytes, name: str, length: int) -> None:
        self._first = {"content": content.decode(errors="replace"), "called": shown(name), "length": length}
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        about = self._started()
        self.vocabulary, self.json = int(about["vocabulary"]), str(about["json"])

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text.

        Raises:
            SettingError: the tokenizer fails on one of them.
        """
        with self._lock:
            if self._owner != os.getpid():  # a forked process must not share the pipes of the one before
                self._started()
            ids = list[list[int]]()
            for begin in range(0, len(texts), _MOST):
                ids += self._answer({"texts": list(texts[begin : begin + _MOST])})["ids"]
            return ids

    def _started(self) -> Any:
        variables = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "PYTHONUTF8": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-P", run_tokenizer.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, env=variables, start_new_session=True,
        )  # fmt: skip
        self._owner = os.getpid()
        weakref.finalize(self, _end, self._process, self._owner)
        return self._answer(self._first)

    def _answer(self, message: dict[str, Any]) -> Any:
        """Send a message, and return its answer."""
        process = self._process
        assert process is not None
        size = sum(map(len, message.get("texts", [self._first["content"]])))
        # whoever waits for a pipe is woken by the end of the process
        timer = threading.Timer(_SECONDS + size / _BYTES, process.kill)
        timer.daemon = True
        timer.start()
        try:
            run_tokenizer.write(process.stdin, message)
            answer = run_tokenizer.read(process.stdout)
        except (OSError, ValueError):  # it has ended, or was ended while it wrote
            answer = None
        finally:
            timer.cancel()
        if answer is None or "error" in answer:
            self._owner = 0  # so that it is started again for the next text
            _end(process, os.getpid())
            raise SettingError(_told(answer) or self._ended(process))
        return answer

    def _ended(self, process: subprocess.Popen[bytes]) -> str:
        return (
            f"the tokenizer {self._first['called']} cannot be used: it ends the process that runs it "
            f"({process.returncode}), takes longer than {_SECONDS:.0f} seconds or more than "
            f"{run_tokenizer.MEMORY >> 30} GB of memory: choose another one"
        )


def _told(answer: Any) -> str:
    """Return the error of an answer in one line, "" where there is no answer."""
    text = "" if answer is None else " ".join(str(answer["error"]).split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() == owner:
        process.kill()
        process.communicate()


_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_LARGEST = 1 << 27  # bytes of a file; those of the largest vocabularies have a quarter


def text_column(name: str, tokenizer: str, length: int) -> TokenColumn:
    """Return what clients agree on of a column of text.

    Args:
        name: the column.
        tokenizer: a tokenizer.json, the folder of one, or the name of a model on the Hugging Face Hub.
        length: token ids of each text.

    Raises:
        SettingError: there is no such tokenizer, or it cannot be used.
    """
    content = _content(tokenizer)
    sha256 = hashlib.sha256(content).hexdigest()
    size = _tokenizer(tokenizer, sha256, length).vocabulary
    return TokenColumn(name=name, tokenizer=tokenizer, sha256=sha256, length=length, vocabulary=size)


def token_ids(column: TokenColumn, texts: pd.Series) -> NDArray[np.int64]:
    """Return the token ids [n, length] of texts.

    Raises:
        SettingError: the tokenizer is not there any more, or is another one.
    """
    tokenizer = _tokenizer(column.tokenizer, column.sha256, column.length)
    codes, different = texts.factorize()
    ids = tokenizer.ids(list(different))
    return np.asarray(np.array(ids, dtype=np.int64).reshape(len(ids), column.length)[codes])


def tokenizer_json(column: TokenColumn) -> str:
    """Return the tokenizer as JSON of the library's, which cuts and fills up texts as `token_ids` does."""
    return _tokenizer(column.tokenizer, column.sha256, column.length).json


def keep_tokenizer(column: TokenColumn, folder: Path) -> None:
    """Copy the tokenizer's file into a run folder, unless it is there already.

    Raises:
        SettingError: the tokenizer is not there any more, or is another one.
    """
    if not (folder / TOKENIZER).exists():
        write_private(folder / TOKENIZER, _agreed_content(column.tokenizer, column.sha256))


def with_tokenizer(settings: Mapping[str, Any], place: Callable[[Any], Path]) -> dict[str, Any]:
    """Return the settings of an experiment with files of this machine in place of the names of tokenizers.

    Args:
        settings: with an agreed preparation, as they arrived.
        place: returns the file for a name.
    """
    prepare = settings.get("prepare")
    if not isinstance(prepare, Mapping) or "agreed" not in prepare:
        return {**settings}
    return {**settings, "prepare": {**prepare, "agreed": _with_tokenizer(prepare["agreed"], place)}}


def with_kept_tokenizer(meta: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the description of a run with the tokenizer in its folder: a name in there may be another machine's.

    Sites on other machines find their own by its name.
    """

    def kept(_: Any) -> Path:
        return folder / TOKENIZER

    changed = {"preparation": _with_tokenizer(meta.get("preparation"), kept)}
    settings, runtime = meta.get("settings"), meta.get("runtime")
    if isinstance(settings, Mapping):
        changed["settings"] = with_tokenizer(settings, kept)
    if isinstance(runtime, Mapping) and runtime.get("experiment") and not runtime.get("credentials"):
        changed["runtime"] = {**runtime, "experiment": with_tokenizer(runtime["experiment"], kept)}
    return {**meta, **changed}


def _with_tokenizer(agreed: Any, place: Callable[[Any], Path]) -> Any:
    """Return the table of a preparation with other tokenizers, and what is no such table as it is."""
    if not isinstance(agreed, Mapping) or not isinstance(agreed.get("columns"), list):
        return agreed
    columns = [
        {**column, "tokenizer": str(place(column.get("tokenizer")))}
        if isinstance(column, Mapping) and column.get("kind") == "text" else column
        for column in agreed["columns"]
    ]  # fmt: skip
    return {**agreed, "columns": columns}


def cached_file(name: str) -> Path | None:
    """Return the file of a tokenizer of the Hub that is in this machine's cache already, None without one."""
    try:
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(name, TOKENIZER, local_files_only=True)) if _HUB_NAME.fullmatch(name) else None
    except (ImportError, OSError, ValueError):  # not there, or no name that the Hub gives
        return None


# keyed by the agreed hash: a file that is exchanged later has no effect on this process
@lru_cache(maxsize=8)
def _tokenizer(name: str, sha256: str, length: int) -> TokenizerProcess:
    """Return the tokenizer with this hash, which cuts and fills up texts to a length."""
    if find_spec("tokenizers") is None:
        raise SettingError(f"tokenizers is missing: {install('hf')}")
    return TokenizerProcess(_agreed_content(name, sha256), name, length)


def _agreed_content(name: str, sha256: str) -> bytes:
    """Return the bytes of the tokenizer that clients have agreed on."""
    gone = name.endswith(".json") and not Path(name).exists()
    content = b"" if gone else _content(name)
    # a name may stand for another file on each machine, and later for another one on the Hub
    if hashlib.sha256(content).hexdigest() != sha256:
        raise SettingError(
            f"the tokenizer {shown(name, 200)} is not {'there' if gone else 'the agreed one'}, whose {TOKENIZER} has "
            f"the SHA-256 {sha256}: put that one there"
        )
    return content


def _content(name: str) -> bytes:
    """Return the bytes of a tokenizer.json; that of a model on the Hub is downloaded unless it is in its cache."""
    path = Path(name)
    path = path / TOKENIZER if path.is_dir() else path
    if not path.is_file():
        if path.suffix == ".json" or not _HUB_NAME.fullmatch(name):
            raise SettingError(
                f"tokenizer in [prepare] must be a {TOKENIZER}, or the name of a model on the Hugging Face Hub, and "
                f"there is no file {shown(str(path))}"
            )
        # no request to the Hub where the file is here already
        path = cached_file(name) or _fetched(name)
    return read_bytes(path, _LARGEST)


def _fetched(name: str) -> Path:
    hub = import_extra("huggingface_hub", "hf", "huggingface-hub is missing")
    try:
        return Path(hub.hf_hub_download(name, TOKENIZER))
    except Exception as error:  # of the network, the Hub or the disk: each library below raises its own
        message = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        raise SettingError(
            f"there is no file {name!r}, and the tokenizer {name!r} cannot be fetched from the Hugging Face Hub "
            f"({message[:200]}): give a {TOKENIZER}"
        ) from None
