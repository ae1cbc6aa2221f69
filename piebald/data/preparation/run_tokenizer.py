"""A program that runs one tokenizer of Hugging Face's `tokenizers` for another process, and needs nothing of Piebald.

A tokenizer's file may be a stranger's, and the library ends the process on some of them: by a recursion that is too
deep, by memory, or by a panic.  So it runs here, with a limit of memory, and is stopped when it takes too long.

Messages are a length of 8 bytes and JSON.  The first has the tokenizer; each other one has texts.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from typing import Any

LENGTH = struct.Struct("<Q")
MEMORY = 6 << 30  # bytes; the largest vocabularies take less than one gigabyte
PADDING = ("[PAD]", "<pad>", "<|pad|>")  # as tokenizers call what fills up texts


def made(content: str, called: str, length: int) -> Any:
    """Return a tokenizer that cuts and fills up texts.

    Args:
        content: a tokenizer.json.
        called: its name, for messages.
        length: token ids of each text.

    Raises:
        ValueError: it cannot be used.
    """
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(content)
    except BaseException as error:  # a panic of the library is none of Python's exceptions
        raise ValueError(f"the tokenizer {called} cannot be read: {error}") from None
    padding = tokenizer.padding or {}
    known = (word for word in PADDING if tokenizer.token_to_id(word) is not None)
    token = padding.get("pad_token") or next(known, None)
    if token is None:
        raise ValueError(f"the tokenizer {called} has no token that fills up texts: add one of {', '.join(PADDING)}")
    if (special := tokenizer.num_special_tokens_to_add(is_pair=False)) >= length:
        raise ValueError(
            f"length in [prepare] must be more than the {special} tokens that the tokenizer {called} adds to each "
            f"text, got {length}"
        )
    tokenizer.enable_truncation(length)
    number = padding["pad_id"] if padding else tokenizer.token_to_id(token)
    tokenizer.enable_padding(length=length, pad_token=token, pad_id=number, direction=padding.get("direction", "right"))
    return tokenizer


def answers() -> Iterator[dict[str, Any]]:
    """Yield what the tokenizer is, and then the token ids of the texts of each message."""
    first = read(sys.stdin.buffer)
    tokenizer = made(**first)
    yield {"vocabulary": tokenizer.get_vocab_size(), "json": tokenizer.to_str()}
    while (message := read(sys.stdin.buffer)) is not None:
        try:
            yield {"ids": [tokenizer.encode(text).ids for text in message["texts"]]}
        except BaseException as error:
            raise ValueError(f"the tokenizer {first['called']} fails on a text: {error}") from None


def read(stream: Any) -> Any:
    """Return the next message of a stream, None where it has ended."""
    head = stream.read(LENGTH.size)
    return json.loads(stream.read(LENGTH.unpack(head)[0])) if len(head) == LENGTH.size else None


def write(stream: Any, message: Any) -> None:
    """Write a message to a stream."""
    text = json.dumps(message).encode()
    stream.write(LENGTH.pack(len(text)) + text)
    stream.flush()


def main() -> None:
    """Answer until there are no more messages, or until one cannot be answered."""
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    except (ImportError, ValueError, OSError):  # Windows has no limits, and a lower one may be set
        pass
    try:
        for answer in answers():
            write(sys.stdout.buffer, answer)
    except (ValueError, MemoryError) as error:
        write(sys.stdout.buffer, {"error": str(error) or "the tokenizer takes too much memory"})


if __name__ == "__main__":
    main()
