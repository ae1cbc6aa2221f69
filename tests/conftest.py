"""What all tests share: everything that could differ from one run to the next is pinned down here."""

from __future__ import annotations

import gc
import os
import random
import shutil
import signal
import sys
import tempfile
import zlib

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when PyTorch is loaded, here and in processes that tests start

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

# The same examples everywhere and at any time, and no example fails because the machine was busy.
settings.register_profile(
    "piebald",
    deadline=None,
    derandomize=True,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("piebald")

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"


# of so many cases that the quick tier leaves out the full tier has one, by folder; of eight where it is not named
_ONE_CASE_OF = {"contract": 16, "devices": 16, "docs": 1, "cases": 2}


def pytest_configure(config: pytest.Config) -> None:
    """Tests come in random order (pytest-randomly) but draw the same numbers every time, and end at Ctrl-C."""
    if hasattr(config.option, "randomly_reset_seed"):
        config.option.randomly_reset_seed = False
    # Engines are measured once for each model and kind of training, and nothing is left in the user's folders.
    os.environ["PIEBALD_CACHE"] = tempfile.mkdtemp(prefix="piebald-tests-")
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # where tests run in the background of a shell
        signal.signal(signal.SIGINT, signal.default_int_handler)  # so that processes they start can be interrupted


def pytest_unconfigure() -> None:
    """Delete what was measured."""
    shutil.rmtree(os.environ.pop("PIEBALD_CACHE"), ignore_errors=True)


def pytest_collection() -> None:
    """Collect no garbage while tests are imported: hardly any of what they make is."""
    gc.disable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever starts a cluster is of the full tier, which has a part of the cases of large tables; the long one all.

    Which cases these are follows from their names, so that they are the same on every machine, and each test has one.
    """
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if "cluster" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.full)
        if hasattr(item, "callspec") and item.get_closest_marker("full") and not item.get_closest_marker("long"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for of_test in cases.values():
        every = _ONE_CASE_OF.get(of_test[0].path.parent.name, 8)
        kept = [item for item in of_test if zlib.crc32(item.name.encode()) % every == 0] or of_test[:1]
        for item in of_test:
            if item not in kept:
                item.add_marker(pytest.mark.long)


def pytest_collection_finish() -> None:
    """A million objects of packages and tests stay to the end, so collections of garbage need not look at them.

    Nor need each run count them, which takes a tenth of a second.
    """
    gc.collect()
    gc.freeze()
    gc.enable()
    if machine := sys.modules.get("piebald.core.machine"):
        machine.objects_are_frozen = True


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Write down how the run ended: `.ci/run` runs failed tests again only if all tests have been run."""
    cache = getattr(session.config, "cache", None)  # absent with `-p no:cacheprovider`
    if not hasattr(session.config, "workerinput") and cache is not None:
        cache.set("piebald/exit_status", int(exitstatus))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """No test sees what another one has drawn from the global generators."""
    random.seed(0)
    np.random.seed(0)
    torch.default_generator.manual_seed(0)  # torch.manual_seed formats the stack for each absent accelerator
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """One thread: small tensors gain nothing from more, and a forked child may not use its parent's thread pool."""
    torch.set_num_threads(1)
