"""A tokenizer in a process of its own, which it may end, and this one goes on with one sentence."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from typing import Any

from piebald.core.errors import SettingError, shown
from piebald.data.preparation import run_tokenizer

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
