"""From a file's bytes to pixels of the size that was asked for."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from fednoro.core.types import UserError

if TYPE_CHECKING:
    from PIL import Image

Crop = Literal["resize", "center"]


def decode_image(
    data: bytes, size: int, crop: Crop = "resize", mode: Literal["RGB", "L"] = "RGB"
) -> NDArray[np.uint8]:
    """One JPEG or PNG, whatever its name says: upright, 8 bits, size×size×channels."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    if not data:
        raise UserError("the file is empty")
    try:
        with Image.open(io.BytesIO(data), formats=("JPEG", "PNG")) as original:
            # A large JPEG is decoded at a fraction of its size.
            original.draft(None, (2 * size, 2 * size))
            image: Image.Image = ImageOps.exif_transpose(original)
    except UnidentifiedImageError:
        raise UserError("not a JPEG or PNG image") from None
    if image.mode.startswith("I"):
        image = Image.fromarray(
            np.rint(np.clip(np.asarray(image), 0, 65535) / 257).astype(np.uint8)
        )
    elif image.has_transparency_data:
        # Dropping alpha would bring back colours nobody was meant to see.
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "black"), image)
    return fit(image.convert(mode), size, crop)


def fit(image: Image.Image, size: int, crop: Crop) -> NDArray[np.uint8]:
    """Stretched to a square, or the middle of the short side's square."""
    from PIL import Image, ImageOps

    if crop == "center":
        image = ImageOps.fit(image, (size, size), Image.Resampling.BILINEAR)
    else:
        image = image.resize((size, size), Image.Resampling.BILINEAR)
    return np.asarray(image).reshape(size, size, -1)
