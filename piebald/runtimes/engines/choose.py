"""Build the engine that was asked for, or measure which is fastest here."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from piebald.contracts import Clients, Descent, Work
from piebald.runtimes.engines.algebra import Walk
from piebald.runtimes.engines.feed import Feed
from piebald.runtimes.engines.lean import Lean
from piebald.runtimes.engines.reference import Reference
from piebald.runtimes.engines.stacked import Stacked
from piebald.runtimes.engines.traits import probe

ENGINES: dict[str, type[Lean]] = {engine.name: engine for engine in (Lean, Stacked, Reference)}
STACKS = (4, 16)
_STACK_NUMBERS = 32_000_000  # a measured stack holds at most this many numbers, so that trying never costs much memory
_STEPS = 4
_MARGIN = 0.85  # a stack must be this much faster than one client after another: measuring is noisy, lean is smaller


def make_engine(name: str, work: Work, clients: Clients, device: torch.device, bfloat16: bool) -> Lean:
    """An engine by name ("lean", "stacked" or "reference"), ready for these clients."""
    feed = Feed(clients, device)
    first = next((c for c in range(len(clients)) if clients.size(c, "train") != 0), 0)
    rows = clients.rows(first, "train")
    return ENGINES[name](work, feed, probe(work, rows), device, bfloat16)


def stack_limit(work: Work) -> int:
    """The largest stack that keeps one stack's vectors within a modest piece of memory."""
    return max(1, _STACK_NUMBERS // max(work.layout.size, 1))


def fastest(
    work: Work, clients: Clients, device: torch.device, bfloat16: bool, sample: Sequence[int]
) -> tuple[str, int, float]:
    """Try the engines on some clients' own rows.

    Returns:
        The name and the stack size of the fastest, and its seconds for one client and step.
    """
    sample = [client for client in sample if clients.size(client, "train") != 0] or list(sample)
    lean = make_engine("lean", work, clients, device, bfloat16)
    best = ("lean", 1, _measure(lean, sample[:2], 1))
    stacked = Stacked(work, lean.feed, lean.traits, device, bfloat16)
    for stack in STACKS:
        if stack > min(len(sample), stack_limit(work)) or lean.traits.random:
            break
        try:
            seconds = _measure(stacked, sample[:stack], stack)
        except (RuntimeError, ValueError, TypeError):  # a model that vmap cannot take: the lean engine runs everything
            break
        if seconds < (_MARGIN * best[2] if best[0] == "lean" else best[2]):
            best = ("stacked", stack, seconds)
    return best


def _measure(engine: Lean, clients: Sequence[int], stack: int) -> float:
    """Seconds for one client and step, the best of three goes after a first one."""
    batch = getattr(engine.work.rule, "batch", 20)
    descent = Descent(lr=0.01, batch=batch, steps=_STEPS)
    times = []
    for _ in range(4):
        began = time.perf_counter()
        for lo in range(0, len(clients), stack):
            chosen = clients[lo : lo + stack]
            engine.walk(
                Walk(
                    chosen, [0] * len(chosen), 0, engine.work.initial.to(engine.device).expand(len(chosen), -1), descent
                )
            )
        if engine.device.type == "cuda":
            torch.cuda.synchronize(engine.device)
        times.append(time.perf_counter() - began)
        if times[0] > 2.0:  # a large model: one go tells enough
            break
    return min(times[1:] or times) / (len(clients) * _STEPS)
