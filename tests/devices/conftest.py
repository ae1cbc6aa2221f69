"""A device that is lost ends these tests: every other one on it would fail in the same way."""

from __future__ import annotations

from collections.abc import Generator

import pytest
import torch

from piebald.core.errors import DeviceLost
from piebald.core.machine import raise_if_lost
from tests.devices.there import NAME


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Look whether the device still computes after a test that has failed."""
    report = yield
    if NAME != "pretended" and call.excinfo is not None and not call.excinfo.errisinstance(pytest.skip.Exception):
        try:
            raise_if_lost(RuntimeError(str(call.excinfo.value)), torch.device(NAME))
        except DeviceLost as error:
            item.session.shouldstop = str(error)
    return report
