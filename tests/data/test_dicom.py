"""DICOM to 8-bit pixels: against a slow re-derivation in float64, for the files
that scanners and archives hold.
"""

from __future__ import annotations

import io
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pydicom
import pytest
from numpy.typing import NDArray
from PIL import Image
from pydicom import uid
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.encaps import encapsulate

from fednoro.core.types import UserError
from fednoro.data.cache.dicom import decode_dicom, is_dicom, patient

Array = NDArray[np.generic]
BRAIN, SUBDURAL, BONE = (40.0, 80.0), (80.0, 200.0), (600.0, 2800.0)


def dataset(pixels: Array, bits: int = 16, **fields: object) -> Dataset:
    """A CT slice (or an RGB capture, for H×W×3) that holds `pixels` as they are."""
    ds = Dataset()
    ds.file_meta = FileMetaDataset()
    ds.file_meta.MediaStorageSOPClassUID = uid.CTImageStorage
    ds.file_meta.MediaStorageSOPInstanceUID = "1.2.3"
    ds.file_meta.TransferSyntaxUID = uid.ExplicitVRLittleEndian
    ds.SOPClassUID, ds.SOPInstanceUID = uid.CTImageStorage, "1.2.3"
    ds.Rows, ds.Columns = pixels.shape[:2]
    ds.SamplesPerPixel = pixels.shape[2] if pixels.ndim == 3 else 1
    ds.PhotometricInterpretation = "RGB" if pixels.ndim == 3 else "MONOCHROME2"
    if pixels.ndim == 3:
        ds.PlanarConfiguration = 0
    ds.BitsAllocated = 8 * pixels.itemsize
    ds.BitsStored = min(bits, ds.BitsAllocated)
    ds.HighBit = ds.BitsStored - 1
    ds.PixelRepresentation = int(pixels.dtype.kind == "i")
    ds.PixelData = pixels.tobytes()
    ds["PixelData"].VR = "OW" if pixels.itemsize > 1 else "OB"
    for name, value in fields.items():
        setattr(ds, name, value)
    return ds


def to_bytes(ds: Dataset, preamble: bool = True) -> bytes:
    file = io.BytesIO()
    if preamble:
        ds.save_as(file, enforce_file_format=True)
    else:
        plain = Dataset({element.tag: element for element in ds})
        plain.save_as(file, implicit_vr=True, little_endian=True)
    return file.getvalue()


def dicom(pixels: Array, bits: int = 16, **fields: object) -> bytes:
    return to_bytes(dataset(pixels, bits, **fields))


def slowly(
    pixels: Array,
    size: int,
    window: tuple[float, float],
    slope: float = 1,
    intercept: float = 0,
    invert: bool = False,
) -> NDArray[np.uint8]:
    """Value by value in float64, then Pillow's bilinear reduction."""
    centre, width = window
    shown = np.empty(pixels.shape, np.uint8)
    for place, x in np.ndenumerate(pixels):
        level = (float(x) * slope + intercept - (centre - width / 2)) / width * 255
        level = round(min(max(level, 0.0), 255.0))
        shown[place] = 255 - level if invert else level
    return np.asarray(Image.fromarray(shown).resize((size, size), Image.Resampling.BILINEAR))


@pytest.fixture
def head() -> NDArray[np.int16]:
    """Hounsfield units from air to bone, not square."""
    rng = np.random.default_rng(0)
    return rng.integers(-1000, 1500, (24, 20)).astype(np.int16)


def close(found: Array, wanted: Array) -> bool:
    """Equal but for a rare tie that float32 rounds the other way."""
    off = np.abs(found.astype(int) - wanted.astype(int))
    return bool(off.max() <= 1 and (off > 0).mean() < 0.02)


# Values and windows


def test_window_is_the_file_s_own(head: NDArray[np.int16]) -> None:
    for window in (BRAIN, (600.0, 2800.0), (-20.5, 33.25)):
        data = dicom(head, WindowCenter=str(window[0]), WindowWidth=str(window[1]))
        found = decode_dicom(data, 16)
        assert found.shape == (16, 16, 1)
        assert found.dtype == np.uint8
        assert close(found[..., 0], slowly(head, 16, window))


def test_the_first_of_several_windows_counts(head: NDArray[np.int16]) -> None:
    data = dicom(head, WindowCenter=["300", "40"], WindowWidth=["1500", "80"])
    assert close(decode_dicom(data, 16)[..., 0], slowly(head, 16, (300, 1500)))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"WindowCenter": "40"},
        {"WindowCenter": "", "WindowWidth": ""},
        {"WindowCenter": 40, "WindowWidth": 0},
    ],
)
def test_without_a_window_the_whole_range_is_shown(
    head: NDArray[np.int16], fields: dict[str, object]
) -> None:
    low, high = float(head.min()), float(head.max())
    found = decode_dicom(dicom(head, **fields), 16)[..., 0]
    assert close(found, slowly(head, 16, ((low + high) / 2, high - low)))


def test_an_image_of_one_value_is_black_without_a_window() -> None:
    assert not decode_dicom(dicom(np.full((8, 8), 700, np.uint16)), 8).any()


def test_rescaling_comes_before_the_window(head: NDArray[np.int16]) -> None:
    stored = ((head + 1024) / 0.5).astype(np.uint16)
    data = dicom(
        stored, RescaleSlope="0.5", RescaleIntercept="-1024", WindowCenter="40", WindowWidth="80"
    )
    assert close(decode_dicom(data, 16)[..., 0], slowly(stored, 16, BRAIN, 0.5, -1024))


def test_brain_window_is_fixed_whatever_the_file_says(head: NDArray[np.int16]) -> None:
    data = dicom(head, WindowCenter="600", WindowWidth="2800")
    assert close(decode_dicom(data, 16, "brain")[..., 0], slowly(head, 16, BRAIN))


def test_triple_is_brain_subdural_and_bone(head: NDArray[np.int16]) -> None:
    found = decode_dicom(dicom(head, WindowCenter="1", WindowWidth="2"), 16, "triple")
    assert found.shape == (16, 16, 3)
    for channel, window in enumerate((BRAIN, SUBDURAL, BONE)):
        assert close(found[..., channel], slowly(head, 16, window))


@pytest.mark.parametrize("window", ["file", "triple"])
def test_monochrome1_is_inverted(head: NDArray[np.int16], window: str) -> None:
    data = dicom(head, PhotometricInterpretation="MONOCHROME1", WindowCenter="40", WindowWidth="80")
    found = decode_dicom(data, 16, window)  # type: ignore[arg-type]
    assert close(found[..., 0], slowly(head, 16, BRAIN, invert=True))


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint16, np.int16, np.int32])
def test_signed_and_unsigned_of_any_width(dtype: type) -> None:
    limits = np.iinfo(dtype)
    low, high = max(limits.min, -3000), min(limits.max, 3000)
    pixels = np.linspace(low, high, 64).reshape(8, 8).astype(dtype)
    data = dicom(pixels, bits=32, WindowCenter="20", WindowWidth="150")
    assert close(decode_dicom(data, 8)[..., 0], slowly(pixels, 8, (20, 150)))


def test_twelve_bits_of_sixteen_ignore_what_is_in_the_other_four(head: NDArray[np.int16]) -> None:
    values = np.clip(head, -1000, 1500)
    zero_filled = (values.astype(np.uint16) & 0x0FFF).view(np.int16)  # two's complement in 12 bits
    for stored in (values, zero_filled):
        data = dicom(stored, bits=12, WindowCenter="40", WindowWidth="80")
        assert close(decode_dicom(data, 16)[..., 0], slowly(values, 16, BRAIN))
    unsigned = (values + 1000).astype(np.uint16)
    data = dicom(
        unsigned | 0xA000, bits=12, RescaleIntercept="-1000", WindowCenter="40", WindowWidth="80"
    )
    assert close(decode_dicom(data, 16)[..., 0], slowly(values, 16, BRAIN))


def test_center_keeps_the_middle_and_resize_stretches() -> None:
    pixels = np.zeros((8, 16), np.uint16)
    pixels[:, 4:12] = 255
    data = dicom(pixels, WindowCenter="127.5", WindowWidth="255")
    assert (decode_dicom(data, 8, crop="center") == 255).all()
    stretched = decode_dicom(data, 8, crop="resize")[..., 0]
    assert not stretched[:, 0].any()
    assert (stretched[:, 4] == 255).all()


# Kinds of files


def rle(ds: Dataset) -> Dataset:
    ds.compress(uid.RLELossless, generate_instance_uid=False)
    return ds


def test_rle_is_read(head: NDArray[np.int16]) -> None:
    plain = dataset(head, WindowCenter="40", WindowWidth="80")
    assert np.array_equal(
        decode_dicom(to_bytes(rle(plain)), 16), decode_dicom(dicom(head), 16, "brain")
    )


@pytest.mark.parametrize(
    ("syntax", "name"), [(uid.JPEGBaseline8Bit, "JPEG"), (uid.JPEG2000Lossless, "JPEG2000")]
)
def test_jpeg_and_jpeg_2000_are_read_by_pillow(syntax: uid.UID, name: str) -> None:
    pixels = np.add.outer(np.arange(32), np.arange(32)).astype(np.uint8) * 3
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, name)
    ds = dataset(pixels, bits=8, WindowCenter="127.5", WindowWidth="255")
    ds.PixelData = encapsulate([file.getvalue()])
    ds["PixelData"].VR = "OB"
    ds.file_meta.TransferSyntaxUID = syntax
    assert np.abs(decode_dicom(to_bytes(ds), 32)[..., 0].astype(int) - pixels).max() <= 4


def test_colour_becomes_grey_and_has_no_hounsfield_units() -> None:
    pixels = np.zeros((8, 8, 3), np.uint8)
    pixels[...] = (200, 100, 50)
    grey = decode_dicom(dicom(pixels, bits=8), 8)
    assert grey.shape == (8, 8, 1)
    assert (grey == Image.new("RGB", (1, 1), (200, 100, 50)).convert("L").getpixel((0, 0))).all()
    assert np.array_equal(decode_dicom(dicom(pixels.astype(np.uint16) * 256), 8), grey)
    with pytest.raises(
        UserError, match="a colour image has no Hounsfield units for the window 'brain'"
    ):
        decode_dicom(dicom(pixels, bits=8), 8, "brain")


def test_files_without_preamble_are_read(head: NDArray[np.int16]) -> None:
    ds = dataset(head, WindowCenter="40", WindowWidth="80")
    data = to_bytes(ds, preamble=False)
    assert data[128:132] != b"DICM"
    assert is_dicom(data)
    assert np.array_equal(decode_dicom(data, 16), decode_dicom(dicom(head), 16, "brain"))


def test_dicom_is_told_from_other_files() -> None:
    jpeg, png = io.BytesIO(), io.BytesIO()
    Image.new("L", (200, 200)).save(jpeg, "JPEG")
    Image.new("L", (200, 200)).save(png, "PNG")
    assert is_dicom(dicom(np.zeros((2, 2), np.uint16)))
    for other in (b"", b"\x08", bytes(400), jpeg.getvalue(), png.getvalue(), b"ID,Label\n" * 40):
        assert not is_dicom(other)


def test_patient_is_read_from_the_header_alone() -> None:
    pixels = np.zeros((64, 64), np.uint16)
    assert patient(dicom(pixels, PatientID="p 1", StudyInstanceUID="1.2.9")[:1000]) == "p 1"
    assert patient(dicom(pixels, PatientID="", StudyInstanceUID="1.2.9")) == "1.2.9"
    assert patient(dicom(pixels)) is None


# Damage


def broken(change: Callable[[Dataset], object]) -> bytes:
    ds = dataset(np.zeros((8, 8), np.uint16))
    change(ds)
    return to_bytes(ds)


def without(*names: str) -> Callable[[Dataset], object]:
    return lambda ds: [delattr(ds, name) for name in names]


def with_(name: str, value: object) -> Callable[[Dataset], object]:
    return lambda ds: setattr(ds, name, value)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not a DICOM file"),
        (b"\xff\xd8\xff\xe0" + bytes(300), "not a DICOM file"),
        (
            dicom(np.zeros((8, 8), np.uint16))[:-40],
            "number of bytes of pixel data is less than expected",
        ),
        (dicom(np.zeros((8, 8), np.uint16))[:200], "no pixels"),
        (broken(without("PixelData")), "no pixels"),
        (broken(without("Rows")), "Rows"),
        (broken(without("BitsStored")), "Bits Stored"),
        (broken(with_("NumberOfFrames", 12)), "12 frames in one file"),
        (
            broken(with_("PhotometricInterpretation", "PALETTE COLOR")),
            "PALETTE COLOR images are not supported",
        ),
        (broken(with_("RescaleSlope", "1e39")), "not finite"),
        (
            broken(lambda ds: (with_("Rows", 60000)(ds), with_("Columns", 60000)(ds))),
            "60000×60000 pixels are too many",
        ),
    ],
)
def test_damage_is_named_in_one_line(data: bytes, reason: str) -> None:
    with pytest.raises(UserError, match=reason) as caught:
        decode_dicom(data, 8)
    assert "\n" not in str(caught.value)


def test_a_transfer_syntax_without_decoder_is_named() -> None:
    ds = dataset(np.zeros((8, 8), np.uint16))
    ds.PixelData = encapsulate([b"\xff\xd8\xff\xd9"])
    ds.file_meta.TransferSyntaxUID = uid.JPEGLosslessSV1
    with pytest.raises(UserError, match="no decoder for transfer syntax JPEG Lossless"):
        decode_dicom(to_bytes(ds), 8)


@pytest.mark.parametrize("cut", range(0, 700, 37))
def test_a_file_cut_anywhere_is_an_error_or_an_image(cut: int) -> None:
    data = to_bytes(rle(dataset(np.arange(256, dtype=np.uint16).reshape(16, 16))))
    try:
        assert decode_dicom(data[:-cut] if cut else data, 8).shape == (8, 8, 1)
    except UserError as error:
        assert "\n" not in str(error)


def test_no_warnings_leak_and_no_filters_stay(head: NDArray[np.int16]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # as RSNA's, not what DICOM allows
        odd = dicom(head, StudyInstanceUID="ID_0a1b", PatientBirthDate="never")
    with pytest.warns(UserWarning, match="Invalid value for VR UI"):
        assert pydicom.dcmread(io.BytesIO(odd)).StudyInstanceUID == "ID_0a1b"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        before = list(warnings.filters)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _: decode_dicom(odd, 8), range(40)))
            assert set(pool.map(lambda _: patient(odd), range(40))) == {"ID_0a1b"}
        assert warnings.filters == before
    assert not caught


def test_real_files_that_pydicom_carries_are_read_or_refused() -> None:
    read = 0
    for name in (
        "CT_small.dcm",
        "MR_small.dcm",
        "MR_small_RLE.dcm",
        "MR_small_bigendian.dcm",
        "JPEG2000.dcm",
    ):
        file = pydicom.data.get_testdata_file(name, download=False)
        if file is not None:
            with open(str(file), "rb") as stream:  # noqa: PTH123
                image = decode_dicom(stream.read(), 32)
            assert image.std() > 5
            read += 1
    assert read


def test_without_pydicom_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydicom", None)
    with pytest.raises(
        UserError, match=r"reading DICOM needs pydicom: pip install 'fednoro\[dicom\]'"
    ):
        decode_dicom(b"", 8)
