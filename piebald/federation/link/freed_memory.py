"""Memory that a server has freed, and files that it may open: a process of months with few models and many sites."""

from __future__ import annotations

import ctypes
import resource
import sys
from contextlib import suppress
from typing import Any

_TOP_PAD, _MMAP_THRESHOLD = -2, -3  # of mallopt(3)
_LARGE = 1 << 15  # bytes, less than the shortest of the pieces of which many arrive at a time
_SPARE = 1 << 14  # bytes that the heap grows by beyond what is asked for: what fits there is not returned


def return_freed_memory() -> None:
    """Have vectors returned to the system as soon as they are freed.

    GNU's C library keeps freed pieces of up to 32 MB once it has seen one, and gaps between them never close: a server
    with a model of 25 MB kept a dozen of them.  Pieces of results leave such gaps, too: a hundred sites with a model of
    1 MB left more than a hundred MB of them.  With other libraries nothing happens.
    """
    library: Any = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(library, "mallopt"):
        library.mallopt(_MMAP_THRESHOLD, _LARGE)
        library.mallopt(_TOP_PAD, _SPARE)
        library.malloc_trim(0)  # what was freed while the run was prepared


def open_many_files() -> None:
    """Allow as many open files as the system lets this process have: each site has a connection, each result a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):  # some systems have a limit of their own
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
