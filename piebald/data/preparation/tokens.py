"""Token ids of a column of text, by a tokenizer of Hugging Face's `tokenizers`: a file of data without code.

All clients cut and fill up texts alike.  What they agree on is the tokenizer by name and by the hash of its file.
"""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from piebald.core.errors import SettingError, install, shown
from piebald.core.reading.files import read_bytes
from piebald.data.preparation.column_models import TokenColumn

if TYPE_CHECKING:
    import pandas as pd

FILE = "tokenizer.json"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_PADDING = ("[PAD]", "<pad>", "<|pad|>")  # as tokenizers call what fills up texts
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
    size = _tokenizer(tokenizer, sha256, length).get_vocab_size()
    return TokenColumn(name=name, tokenizer=tokenizer, sha256=sha256, length=length, vocabulary=size)


def token_ids(column: TokenColumn, texts: pd.Series) -> NDArray[np.int64]:
    """Return the token ids [n, length] of texts.

    Raises:
        SettingError: the tokenizer is not there any more, or is another one.
    """
    tokenizer = _tokenizer(column.tokenizer, column.sha256, column.length)
    codes, different = texts.factorize()
    # one by one: the library's threads do not survive the fork of a worker process
    ids = [tokenizer.encode(text).ids for text in different]
    return np.asarray(np.array(ids, dtype=np.int64).reshape(len(ids), column.length)[codes])


def tokenizer_json(column: TokenColumn) -> str:
    """Return the tokenizer as JSON of the library's, which cuts and fills up texts as `token_ids` does."""
    return str(_tokenizer(column.tokenizer, column.sha256, column.length).to_str())


def cached_file(name: str) -> Path | None:
    """Return the file of a tokenizer of the Hub that is in this machine's cache already, None without one."""
    try:
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(name, FILE, local_files_only=True)) if _HUB_NAME.fullmatch(name) else None
    except (ImportError, OSError, ValueError):  # not there, or no name that the Hub gives
        return None


@lru_cache(maxsize=8)
def _tokenizer(name: str, sha256: str, length: int) -> Any:
    """Return the tokenizer with this hash, which cuts and fills up texts to a length."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise SettingError(f"tokenizers is missing: {install('hf')}") from None
    content = _content(name)
    if hashlib.sha256(content).hexdigest() != sha256:
        raise SettingError(
            f"the tokenizer {shown(name)} is not the agreed one, whose {FILE} has the SHA-256 {sha256}: put that "
            "one there"
        )
    try:
        tokenizer = Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises no narrower one
        raise SettingError(f"the tokenizer {shown(name)} cannot be read: {shown(str(error))}") from None
    padding = tokenizer.padding or {}
    token = padding.get("pad_token") or next(
        (word for word in _PADDING if tokenizer.token_to_id(word) is not None), None
    )
    if token is None:
        raise SettingError(
            f"the tokenizer {shown(name)} has no token that fills up texts: add one of {', '.join(_PADDING)}"
        )
    if (special := tokenizer.num_special_tokens_to_add(is_pair=False)) >= length:
        raise SettingError(
            f"length in [prepare] must be more than the {special} tokens that the tokenizer {shown(name)} adds to each "
            f"text, got {length}"
        )
    tokenizer.enable_truncation(length)
    number = padding["pad_id"] if padding else tokenizer.token_to_id(token)
    tokenizer.enable_padding(length=length, pad_token=token, pad_id=number, direction=padding.get("direction", "right"))
    return tokenizer


def _content(name: str) -> bytes:
    """Return the bytes of a tokenizer.json; that of a model on the Hub is downloaded unless it is in its cache."""
    path = Path(name)
    path = path / FILE if path.is_dir() else path
    if not path.is_file():
        if path.suffix == ".json" or not _HUB_NAME.fullmatch(name):
            raise SettingError(
                f"tokenizer in [prepare] must be a {FILE}, or the name of a model on the Hugging Face Hub, and there "
                f"is no file {shown(str(path))}"
            )
        path = cached_file(name) or _fetched(name)
    return read_bytes(path, _LARGEST)


def _fetched(name: str) -> Path:
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        raise SettingError(f"huggingface-hub is missing: {install('hf')}") from None
    try:
        return Path(hf_hub_download(name, FILE))
    except Exception as error:  # of the network, the Hub or the disk: each library below raises its own
        message = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        raise SettingError(
            f"there is no file {name!r}, and the tokenizer {name!r} cannot be fetched from the Hugging Face Hub "
            f"({message[:200]}): give a {FILE}"
        ) from None
