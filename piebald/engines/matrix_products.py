"""Matrix products by whichever of torch's libraries is faster on this processor.

torch computes float32 products with MKL, which does not use all vector units of processors that Intel did not make;
oneDNN, which is part of torch as well, does.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

_use_onednn = False


def set_onednn(wanted: bool) -> None:
    """Choose the library that `product` uses from now on, in this process and processes forked from it."""
    global _use_onednn
    _use_onednn = wanted and has_onednn()


def has_onednn() -> bool:
    """Return whether this build of torch has oneDNN's product; it is an internal operator that may be removed."""
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return available and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def product(x: Tensor, w: Tensor) -> Tensor:
    """The product of x [m, k] and the transpose of w [n, k], [m, n], without gradient."""
    if _use_onednn and x.device.type == "cpu" and x.dtype == torch.float32:
        return _onednn(x, w)
    return x @ w.t()


def each_product(x: Tensor, w: Tensor) -> Tensor:
    """Rows x [c, b, k] times the transpose of w, [n, k] for all clients or [c, n, k]; [c, b, n], without gradient."""
    if w.dim() == 2:
        return product(x.flatten(0, 1), w).view(*x.shape[:2], -1)
    if _use_onednn and x.device.type == "cpu" and x.dtype == torch.float32:
        return torch.stack([_onednn(rows, weights) for rows, weights in zip(x, w, strict=True)])
    return torch.bmm(x, w.transpose(1, 2))


def inner_products(x: Tensor, rows: Tensor) -> Tensor:
    """Inner products of each client's x [c, b, n] with its rows [c, r, n], [c, b, r], without gradient."""
    if _use_onednn and x.device.type == "cpu" and x.dtype == torch.float32:
        return torch.stack([_onednn(left_rows, right_rows) for left_rows, right_rows in zip(x, rows, strict=True)])
    return torch.bmm(x, rows.transpose(1, 2))


def onednn_is_faster() -> bool:
    """Measure both libraries on a product of medium size."""
    if not has_onednn():
        return False
    x, w = torch.randn(128, 512), torch.randn(512, 512)
    return _seconds(lambda: _onednn(x, w)) < 0.9 * _seconds(lambda: x @ w.t())


def _onednn(x: Tensor, w: Tensor) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], "")
    return result


def _seconds(run: Callable[[], object]) -> float:
    best, clock = float("inf"), time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    for _ in range(5):
        began = clock()
        run()
        best = min(best, clock() - began)
    return best
