"""The packing of updates, client by client, on the CPU."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from piebald.engines.stack import ClientStack
from piebald.methods.client_work import ClientWork
from piebald.methods.transforms.compression import Compressed, Compressor


def compressed(
    work: ClientWork, compressor: Compressor, stack: ClientStack, vectors: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], list[Tensor], dict[str, Tensor | list[Tensor]]]:
    """Pack the changes of a stack.

    Returns:
        The vectors as the server unpacks them; the bytes of each client's change; and the clients' new state.
    """
    changes, made = vectors["model"].cpu(), list[Compressed]()
    for row, (client, version) in enumerate(zip(stack.clients, stack.rng_versions, strict=True)):
        state = {name: rows[row].cpu() for name, rows in stack.state.items()}
        change = changes[row].contiguous()
        if bool(change.isfinite().all()):
            made.append(compressor.compress(change, state, work.wire_context(client, version)))
        else:  # it cannot count, and the client's state stays as it was
            made.append(Compressed(change.new_zeros(0, dtype=torch.uint8), change, state))
    kept = {name: [one.state[name] for one in made] for name in compressor.initial_state(work)}
    model = torch.stack([one.change for one in made]).to(vectors["model"].device)
    return {**vectors, "model": model}, [one.packed for one in made], dict(kept)
