"""What all tests share."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """One thread: small tensors gain nothing from more, and a forked child may not use its parent's thread pool."""
    torch.set_num_threads(1)
