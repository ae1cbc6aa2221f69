"""Client state of dense layers, stored as products of rows; and which layers see clients' rows themselves.

The change of a layer that sees a client's rows is a product of these rows with one number for each row and output.  The
rows are stored anyway, so a control variate of SCAFFOLD takes (rows x outputs) numbers instead of one number for each
weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from piebald.core import pytree
from piebald.core.parameters import Layout, Slot
from piebald.engines.factored.factors import ClientRowFactor, Factor
from piebald.engines.factored.vectors import FactoredVectors
from piebald.engines.row_loader import Positions, RowLoader
from piebald.methods.client_work import ClientWork

_WORTH = 0.5  # of a vector's length: vectors that would be packed to more than that stay as they are
_MOST = 24  # layers: a float32 represents integers of this many bits exactly
_CLIENT_ROWS = -1.0  # in place of a number of rows: the client's own rows


class StatePacker:
    """Packs vectors [s] of client state in which training left dense layers as products.

    A packed vector [1, k] begins with which layers those are, and the number of rows of each; then come all other
    numbers, and for each such layer the inputs and outputs' gradients of the rows.  The inputs of a layer that sees the
    client's own rows are left out, if the rows are in one pool and so stay the same.
    """

    def __init__(self, work: ClientWork, row_loader: RowLoader, module: nn.Module) -> None:
        self.work, self.row_loader, self.module = work, row_loader, module

    @cached_property
    def layers(self) -> list[DenseInputs]:
        """Dense layers that are used once a pass."""
        return dense_inputs(self.module, self.work.layout, self.row_loader.sample())

    @cached_property
    def _slots(self) -> list[Slot]:
        """The weights that can be packed, in the order of the vector: a model may use its layers in another one."""
        shared = self.work.layout.shared
        slots = [inputs.slot for inputs in self.layers if inputs.slot.stop <= shared]
        return sorted(slots, key=lambda slot: slot.start)[:_MOST]

    def pack(self, vectors: FactoredVectors, clients: Sequence[int]) -> list[Tensor] | None:
        """Each client's vector packed, or None where that is impossible or saves too little."""
        slots = sorted((factor.slot for factor, _ in vectors.factors), key=lambda slot: slot.start)
        # one list of rows for each layer: a layer that is in two factors has no packed form
        packable = bool(slots) and len({slot.start for slot in slots}) == len(slots) and set(slots) <= set(self._slots)
        whole = vectors.shape[1] == self.work.layout.shared and not vectors.matrices
        if not packable or not whole or list(vectors.spans) != self._rest(slots):
            return None
        sizes = [self.row_loader.size(client) for client in clients]
        bits = float(sum(1 << self._slots.index(slot) for slot in slots))
        # on the host, where it is kept: the device would be waited for at each client
        heads, bodies = [[bits] for _ in clients], [[numbers] for numbers in vectors.own.cpu().unsqueeze(1)]
        for factor, scale in sorted(vectors.factors, key=lambda pair: pair[0].slot.start):
            if factor.positions is not None and self.row_loader.indexed:
                for head, body, size, d in zip(
                    heads, bodies, sizes, _by_row(factor, scale, max(sizes)).cpu(), strict=True
                ):
                    head.append(_CLIENT_ROWS)
                    body.append(d[:size].view(1, -1))
                continue
            inputs, gradients = (part.cpu() for part in factor.by_client(scale))
            for head, body, x, d in zip(heads, bodies, inputs, gradients, strict=True):
                some = d.abs().sum(1) > 0  # rows of padding have no gradient
                head.append(float(some.sum()))
                body += [x[some].view(1, -1), d[some].view(1, -1)]
        rows = [torch.cat([body[0].new_tensor([head]), *body], dim=1) for head, body in zip(heads, bodies, strict=True)]
        return rows if max(row.shape[1] for row in rows) <= _WORTH * vectors.shape[1] else None

    def is_packed(self, row: Tensor, name: str) -> bool:
        """Return whether a tensor of client state with this name was made by `pack`."""
        return self._shapes.get(name) == (self.work.layout.shared,) and row.dim() == 2 and len(row) == 1

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        state = self.work.initial_state()
        return {name: tuple(tensor.shape) for name, tensor in state.items()}

    def unpack(self, rows: Sequence[Tensor], clients: Sequence[int], device: torch.device) -> FactoredVectors | None:
        """Clients' vectors [c, s] from rows of which some are packed.

        None where the others are not zero, or where different layers are products in them.
        """
        packed = [row[0] for row in rows if row.dim() == 2]
        fresh = {row.data_ptr(): row for row in rows if row.dim() == 1}.values()  # most often one for all
        bits = int(packed[0][0])
        slots = [slot for index, slot in enumerate(self._slots) if bits >> index & 1]
        heads = [row[: 1 + len(slots)].tolist() for row in packed]
        kinds = {(int(which), *(rows == _CLIENT_ROWS for rows in counts)) for which, *counts in heads}
        if len(kinds) > 1 or any(bool(row.any()) for row in fresh):
            return None
        _, *by_row = kinds.pop()
        parts = [self._unpack_one(row, client, slots, by_row) for row, client in zip(rows, clients, strict=True)]
        numbers, *vectors = zip(*parts, strict=True)
        whole, factors = torch.stack(numbers).to(device), list[tuple[Factor, Tensor]]()
        for slot, from_client, x, d in zip(slots, by_row, vectors[::2], vectors[1::2], strict=True):
            gradients = pad_sequence([*d], batch_first=True).to(device)
            if from_client:
                factor: Factor = ClientRowFactor(slot, gradients, partial(_client_rows, self.row_loader, clients))
            else:
                inputs = pad_sequence([*x], batch_first=True).to(device)
                factor = Factor(slot, [inputs], [gradients], inputs)
            factors.append((factor, whole.new_ones(len(whole), 1)))
        return FactoredVectors(whole, len(whole), self.work.layout.shared, (), factors, whole, self._rest(slots))

    def _unpack_one(self, row: Tensor, client: int, slots: Sequence[Slot], by_row: Sequence[bool]) -> list[Tensor]:
        """A client's numbers outside of the layers, then inputs and outputs' gradients of each layer.

        Zeros for a client that was never asked.
        """
        rest, lengths, counts = self._rest(slots), list[int](), list[int]()
        for index, (slot, from_client) in enumerate(zip(slots, by_row, strict=True)):
            count = self.row_loader.size(client) if from_client else 0 if row.dim() == 1 else int(row[0, 1 + index])
            counts.append(count)
            lengths += [0 if from_client else count * slot.shape[1], count * slot.shape[0]]
        lengths.insert(0, rest[-1][1].stop if rest else 0)
        # a view of a single zero: a client without state takes no memory
        numbers = row.new_zeros(()).expand(sum(lengths)) if row.dim() == 1 else row[0, 1 + len(slots) :]
        own_numbers, *vectors = torch.split(numbers, lengths)
        parts = [own_numbers]
        for index, (slot, from_client, count) in enumerate(zip(slots, by_row, counts, strict=True)):
            x, d = vectors[2 * index : 2 * index + 2]
            parts += [x.view(0 if from_client else count, slot.shape[1]), d.view(count, slot.shape[0])]
        return parts

    def _rest(self, slots: Sequence[Slot]) -> list[tuple[slice, slice]]:
        """Slices outside of some layers, and where they are when they are concatenated."""
        spans, at, length = list[tuple[slice, slice]](), 0, 0
        for stop, after in [*((slot.start, slot.stop) for slot in slots), (self.work.layout.shared, 0)]:
            if at < stop:
                spans.append((slice(at, stop), slice(length, length + stop - at)))
                length += stop - at
            at = after
        return spans


def _client_rows(row_loader: RowLoader, clients: Sequence[int]) -> Tensor:
    """Clients' rows as inputs of a layer, [c, n, in]."""
    gathered = row_loader.gather(clients, "train")
    x = pytree.single(gathered.x, "a layer that sees the rows")
    chosen = torch.from_numpy(np.concatenate(gathered.positions)).to(x.device)
    sizes = [len(positions) for positions in gathered.positions]
    return pad_sequence([*torch.split(x[chosen].flatten(1), sizes)], batch_first=True)


def _by_row(factor: Factor, scale: Tensor, rows: int) -> Tensor:
    """The outputs' gradients of a factor [c, rows, out], summed for each of a client's rows."""
    assert factor.positions is not None
    _, d = factor.rows(scale)
    gradients = d.new_zeros(len(d), rows, d.shape[2])
    gradients.scatter_add_(1, factor.positions.unsqueeze(2).expand_as(d), d)
    return gradients if factor.order is None else gradients[factor.order.argsort()]


def client_row_positions(
    index: Positions, ends: Sequence[int], plans: Sequence[Sequence[Positions]], positions: Sequence[Positions]
) -> tuple[Tensor, Tensor]:
    """Match the rows of all steps with the client's own rows.

    Args:
        index, ends: what `lay_out_rows` returned for `plans`.
        plans: each client's mini-batches.
        positions: of each client's rows in the pool.

    Returns:
        Which of a client's own rows each row of the steps is [c, r], and in which row of the steps each of them occurs
        first [c, n], -1 for rows that are in no step.
    """
    which = np.zeros(index.shape, dtype=np.int64)
    first = np.full((len(index), max(map(len, positions))), -1)
    for row, (plan, client_positions) in enumerate(zip(plans, positions, strict=True)):
        order = client_positions.argsort()
        which[row] = order[np.searchsorted(client_positions, index[row], sorter=order)]
        # backwards, so that the first occurrence of a row is what is written last
        for batch, start in zip(reversed(plan), reversed(ends[: len(plan)]), strict=True):
            first[row, which[row, start : start + len(batch)]] = np.arange(start, start + len(batch))
    return torch.from_numpy(which), torch.from_numpy(first)


def in_step_rows(
    factor: ClientRowFactor, x: Tensor, positions: Tensor, first: Tensor, order: Tensor | None
) -> Factor | None:
    """A factor of client rows expressed by rows of the steps, x [c, r, in] in `order`; None if a row is in no step."""
    d = factor.d[0] if order is None else factor.d[0][order]
    first = first[:, : d.shape[1]]
    unseen = first < 0
    if bool(unseen.any()) and bool((d.abs().sum(2) * unseen).any()):
        return None
    # one row more than there are, for what is in no step: all zeros, and cut off below
    gradients = d.new_zeros(len(d), x.shape[1] + 1, d.shape[2])
    gradients.scatter_(1, torch.where(unseen, x.shape[1], first).unsqueeze(2).expand_as(d), d)
    return Factor(factor.slot, [x], [gradients[:, :-1]], x, order, positions, factor.key)


class DenseInputs(NamedTuple):
    """The inputs of a dense layer.

    Attributes:
        slot: the layer's weights.
        rows: rows of the layer for each row of the model, more than one in sequences.
        is_model_input: whether these are the model's inputs themselves, perhaps in another shape.
    """

    slot: Slot
    rows: int
    is_model_input: bool


def dense_inputs(model: nn.Module, layout: Layout, x: pytree.Tree) -> list[DenseInputs]:
    """Return the inputs of the dense layers that are used once in a forward pass over the inputs x."""
    slots, uses = {slot.name: slot for slot in layout.slots}, list[DenseInputs]()
    hooks = []
    for path, layer in model.named_modules():
        slot = slots.get(f"{path}.weight")
        # by exact type: a subclass may compute something other than W x + b
        if type(layer) is nn.Linear and slot is not None:

            def note(_: nn.Module, inputs: tuple[Tensor, ...], slot: Slot = slot) -> None:
                is_model_input = isinstance(x, Tensor) and _is_same(inputs[0], x)
                uses.append(DenseInputs(slot, inputs[0].shape[:-1].numel() // pytree.count(x), is_model_input))

            hooks.append(layer.register_forward_pre_hook(note))
    was = model.training
    try:
        with torch.no_grad():
            # in training mode this pass would move batch norm's statistics
            pytree.run(model.eval(), x)
    finally:
        model.train(was)
        for hook in hooks:
            hook.remove()
    names = [use.slot.name for use in uses]
    return [use for use in uses if names.count(use.slot.name) == 1]


def _is_same(inputs: Tensor, x: Tensor) -> bool:
    """Return whether a layer sees the model's inputs themselves, perhaps in another shape."""
    alike = inputs.data_ptr() == x.data_ptr() and inputs.dtype == x.dtype and inputs.numel() == x.numel()
    return alike and inputs.is_contiguous() and x.is_contiguous()
