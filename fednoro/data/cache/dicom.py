"""DICOM images as 8-bit pixels.

A stored value x is x · slope + intercept in the modality's units, Hounsfield units for CT. A window
with centre c and width w shows c − w/2 as black and c + w/2 as white, linearly between. That is
LINEAR_EXACT in DICOM's words; its LINEAR ends one unit earlier, which is at most one grey level for
windows wider than 255 units. MONOCHROME1 is inverted.

An image of several frames is refused, because a label seldom belongs to its first. Colour
becomes grey. Some scanners wrote 12-bit negative values as unsigned ones (in RSNA 2019: an
intercept near 0 and values up to 4095). The file does not tell which values are meant, so these
are shown as they are stored.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from fednoro.core.types import UserError
from fednoro.data.cache.image_file import Crop, fit

if TYPE_CHECKING:
    from pydicom import Dataset as Header

Window = Literal["file", "brain", "triple"]
_BRAIN, _SUBDURAL, _BONE = (40, 80), (80, 200), (600, 2800)  # centre and width in Hounsfield units
_WINDOWS = {"brain": (_BRAIN,), "triple": (_BRAIN, _SUBDURAL, _BONE)}
_MAX_PIXELS = 2**27
_FILTERS_LOCK = threading.Lock()


def check_pydicom() -> None:
    """A `UserError` that names the extra where pydicom is not installed."""
    try:
        import pydicom  # noqa: F401
    except ImportError:
        raise UserError("reading DICOM needs pydicom: pip install 'fednoro[dicom]'") from None


def is_dicom(data: bytes) -> bool:
    """Whether `data` begins as a DICOM file does,
    with its preamble or, as older ones, with a first element.
    """
    if data[128:132] == b"DICM":
        return True
    group, representation = data[:2], data[4:6]
    explicit = representation.isalpha() and representation.isupper()
    first = group in (b"\x02\x00", b"\x08\x00") and data[3:4] == b"\x00" and len(data) > 8
    return first and (explicit or int.from_bytes(data[4:8], "little") < len(data))


def decode_dicom(
    data: bytes, size: int, window: Window = "file", crop: Crop = "resize"
) -> NDArray[np.uint8]:
    """One image, 8 bits, size×size×channels:
    one channel, or brain, subdural and bone windows as three for `triple`.

    `file` is the window that the file itself names first, or the whole range of
    its values where it names none.
    """
    from PIL import Image

    with _quiet_pydicom():
        header = _header(data)
        pixels = _pixels(header)
        own_window = _own_window(header)
        slope, intercept = (
            _number(header, "RescaleSlope", 1.0),
            _number(header, "RescaleIntercept", 0.0),
        )
        inverted = header.get("PhotometricInterpretation") == "MONOCHROME1"
        unused_bits = _unused_bits(header, pixels)

    if pixels.ndim == 3:
        if window != "file":
            raise UserError(f"a colour image has no Hounsfield units for the window {window!r}")
        shift = max(8 * pixels.itemsize - unused_bits - 8, 0)
        image = Image.fromarray((pixels >> shift).astype(np.uint8)).convert("L")
    else:
        if unused_bits:  # older files keep overlays there, and not all extend the sign
            pixels = (pixels << unused_bits) >> unused_bits
        with np.errstate(all="ignore"):
            values = pixels.astype(np.float32) * np.float32(slope) + np.float32(intercept)
        if not np.isfinite(values).all():
            raise UserError("it has values that are not finite")
        windows = _WINDOWS.get(window) or (own_window or _whole_range(values),)
        grey = np.dstack([_show(values, *each) for each in windows])
        grey = 255 - grey if inverted else grey
        image = Image.fromarray(grey if len(windows) > 1 else grey[:, :, 0])
    return fit(image, size, crop)


def patient(data: bytes) -> str | None:
    """Whose image it is: the patient's id, else the study's; None where the header has neither."""
    with _quiet_pydicom():
        header = _header(data, only=("PatientID", "StudyInstanceUID"))
        return str(header.get("PatientID") or header.get("StudyInstanceUID") or "").strip() or None


@contextmanager
def _quiet_pydicom() -> Iterator[None]:
    """No warnings about odd headers, and one line for whatever pydicom raises on damaged ones."""
    check_pydicom()
    # Filters belong to the process, so threads must take turns.
    with _FILTERS_LOCK, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        except UserError:
            raise
        except Exception as error:  # damaged files make pydicom raise anything
            raise UserError(" ".join(str(error).split()) or type(error).__name__) from error


def _header(data: bytes, only: tuple[str, ...] = ()) -> Header:
    from pydicom import dcmread, uid

    if not is_dicom(data):
        raise UserError("not a DICOM file")
    header = dcmread(
        BytesIO(data), force=True, stop_before_pixels=bool(only), specific_tags=list(only) or None
    )
    if "TransferSyntaxUID" not in header.file_meta:
        implicit, little = header.original_encoding
        plain = uid.ExplicitVRLittleEndian if little else uid.ExplicitVRBigEndian
        header.file_meta.TransferSyntaxUID = uid.ImplicitVRLittleEndian if implicit else plain
    return header


def _pixels(header: Header) -> NDArray[Any]:
    """The stored values, H×W, or H×W×3 as RGB."""
    from pydicom.pixels.decoders.base import get_decoder

    if not any(name in header for name in ("PixelData", "FloatPixelData", "DoubleFloatPixelData")):
        raise UserError("the file has no pixels")
    frames, colour = header.get("NumberOfFrames") or 1, header.get("PhotometricInterpretation", "")
    if frames != 1:
        raise UserError(f"{frames} frames in one file; export each as a file of its own")
    if header.get("Rows", 0) * header.get("Columns", 0) > _MAX_PIXELS:
        raise UserError(f"{header.Rows}×{header.Columns} pixels are too many")
    if colour == "PALETTE COLOR":
        raise UserError("PALETTE COLOR images are not supported")
    syntax = header.file_meta.TransferSyntaxUID
    try:
        available = not syntax.is_compressed or get_decoder(syntax).is_available
    except (NotImplementedError, ValueError):
        available = False
    if not available:
        raise UserError(
            f"no decoder for transfer syntax {syntax.name}; pip install 'pylibjpeg[all]' adds most"
        )
    try:
        pixels: NDArray[Any] = header.pixel_array
    except Exception as error:
        raise UserError(
            f"{' '.join(str(error).split())} (transfer syntax {syntax.name})"
        ) from error
    if pixels.ndim not in (2, 3) or (
        pixels.ndim == 3 and (pixels.shape[2] != 3 or pixels.dtype.kind != "u")
    ):
        raise UserError(f"pixels of shape {pixels.shape} and type {pixels.dtype} are not an image")
    return pixels


def _unused_bits(header: Header, pixels: NDArray[Any]) -> int:
    if pixels.dtype.kind not in "iu":
        return 0
    bits_stored, bits_allocated = int(header.BitsStored), 8 * pixels.itemsize
    if not 1 <= bits_stored <= bits_allocated:
        raise UserError(f"BitsStored is {bits_stored}, but {bits_allocated} bits are allocated")
    return bits_allocated - bits_stored


def _own_window(header: Header) -> tuple[float, float] | None:
    centre, width = (
        _number(header, "WindowCenter", math.nan),
        _number(header, "WindowWidth", math.nan),
    )
    return (centre, width) if math.isfinite(centre) and 0 < width < math.inf else None


def _number(header: Header, name: str, default: float) -> float:
    """A number from the header, the first where it has several."""
    value = header.get(name)
    if isinstance(value, str | float | int) or value is None:
        return default if value in (None, "") else float(value)
    return float(value[0]) if len(value) else default


def _whole_range(values: NDArray[np.float32]) -> tuple[float, float]:
    low, high = float(values.min()), float(values.max())
    return (low + high) / 2, high - low


def _show(values: NDArray[np.float32], centre: float, width: float) -> NDArray[np.uint8]:
    black = np.float32(centre - width / 2)
    scale = np.float32(255 / width if width > 0 else 0)
    grey: NDArray[np.uint8] = np.rint(np.clip((values - black) * scale, 0, 255)).astype(np.uint8)
    return grey
