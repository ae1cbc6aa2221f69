"""Pictures, each opened by the decoder that its name calls for."""

from __future__ import annotations

import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

from piebald.core.errors import SettingError
from piebald.core.reading.files import opened

if TYPE_CHECKING:
    from PIL.Image import Image


FORMATS = {  # others would be chosen by content, and some of them start programs, as Ghostscript for PostScript
    ".bmp": "BMP",
    ".gif": "GIF",
    ".jpeg": "JPEG",
    ".jpg": "JPEG",
    ".png": "PNG",
    ".ppm": "PPM",
    ".tif": "TIFF",
    ".tiff": "TIFF",
    ".webp": "WEBP",
}


MOST_PIXELS = 1 << 26  # of one image


_DAMAGE = (OSError, ValueError, SyntaxError, MemoryError, OverflowError, struct.error)  # what decoders raise


@contextmanager
def picture(source: Path | IO[bytes], kind: str, where: str) -> Iterator[Image]:
    """An image whose size has been checked; the first one where there are several.

    Args:
        source: the file, or its content.
        kind: the format that it must have, one of the values of `FORMATS`.
        where: name of the file, for the error message.

    Raises:
        SettingError: it is none of this format, is damaged or too large; also while the block decodes it.
    """
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise SettingError(f"{where}: images need Pillow: pip install pillow") from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of large images, which are refused here
            file = opened(source) if isinstance(source, Path) else source
            with file, Image.open(file, formats=(kind,)) as image:
                if image.width * image.height > MOST_PIXELS:
                    raise ValueError(f"its {image.width} x {image.height} pixels are more than {MOST_PIXELS:,}")
                yield image
    except UnidentifiedImageError:
        raise SettingError(
            f"{where} cannot be read as an image: its name says {kind}, and its content is something else: rename it, "
            "or leave it out"
        ) from None
    except (*_DAMAGE, Image.DecompressionBombError) as error:
        raise SettingError(f"{where} cannot be read as an image: replace it or leave it out ({error})") from None
