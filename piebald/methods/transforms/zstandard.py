"""Updates packed without loss, by zstandard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from piebald.contracts.data import ModelSpec
from piebald.core.errors import import_extra
from piebald.methods.transforms.bit_fields import Bytes
from piebald.methods.transforms.compression import Compressed, Compressor, Numbers, WireContext, as_floats


class Zstandard(Compressor):
    """Pack an update with zstandard (RFC 8878), without loss.

    What is packed is the change since the model that the server sent, and so holds: the difference that a delta
    encoding would take.  The bytes of its float32 numbers are sorted by significance first, since signs and exponents
    repeat and the lowest bits do not.

    Attributes:
        level: of the compression, from 1 to 19; higher ones take longer and rarely gain for such numbers.
    """

    level: int = Field(default=3, ge=1, le=19)

    @property
    def keeps_clip(self) -> bool:
        return True

    def compress(self, change: Tensor, state: Mapping[str, Tensor], context: WireContext) -> Compressed:
        planes = np.ascontiguousarray(change.numpy().view(np.uint8).reshape(-1, 4).T)
        packed = _module().ZstdCompressor(level=self.level).compress(planes.tobytes())
        # a bytearray, since torch warns of tensors in memory that cannot be written to
        return Compressed(torch.frombuffer(bytearray(packed), dtype=torch.uint8), change)

    def unpack(self, packed: Bytes, context: WireContext) -> Numbers:
        zstandard, size = _module(), 4 * context.layout.shared
        data = packed.tobytes()
        try:
            claimed = zstandard.get_frame_parameters(data).content_size
            if claimed != size:  # before any memory is taken for it
                raise ValueError(f"a frame of {claimed:,} bytes, where {size:,} are due")
            # no bytes behind the frame, so that an update has one form only
            content = zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
        except zstandard.ZstdError:
            raise ValueError("bytes that zstandard cannot unpack") from None
        planes = np.frombuffer(content, dtype=np.uint8).reshape(4, -1)
        return as_floats(np.ascontiguousarray(planes.T).ravel())

    def unsupported_model(self, spec: ModelSpec) -> str | None:
        _module()
        return super().unsupported_model(spec)


def _module() -> Any:
    """The package that packs.

    Raises:
        SettingError: it is not installed.
    """
    return import_extra("zstandard", "compression", "transform 'zstandard' needs the package zstandard")
