"""Preparing images against a plain loop with Pillow or pydicom over the same
files: what docs/data.md shows.

python -m benchmarks.prepare [--images 1000] [--size 224] [--repeats 3]

Photographs are 1024×768 JPEGs and slices 512×512 DICOM files, both generated; HAM10000 is
measured where its zip is found by FEDNORO_DATA or in ../shared/data. Each figure comes from a
process of its own. Linux only.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from io import BytesIO
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fednoro.data.cache.archive import open_tree
from fednoro.data.cache.dicom import decode_dicom
from fednoro.data.cache.image_file import decode_image
from fednoro.data.cache.preparation import Plan, Recipe, Record, prepare

Decode = Callable[..., NDArray[np.uint8]]
# images per second, MB on top of those at the start, MB of all workers
Figures = tuple[float, float, float]


def photographs(folder: Path, count: int) -> None:
    """JPEGs with the detail and the size of a photograph of the skin."""
    rng = np.random.default_rng(0)
    for i in range(count):
        coarse = Image.fromarray(rng.integers(0, 255, (24, 32, 3), dtype=np.uint8))
        fine = rng.normal(0, 6, (768, 1024, 1))
        pixels = np.asarray(coarse.resize((1024, 768), Image.Resampling.BICUBIC)) + fine
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(
            folder / f"{i:06}.jpg", quality=85
        )


def slices(folder: Path, count: int) -> None:
    """Uncompressed CT slices as RSNA's."""
    from pydicom import Dataset
    from pydicom.dataset import FileMetaDataset
    from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, generate_uid

    rng = np.random.default_rng(0)
    for i in range(count):
        header = Dataset()
        header.file_meta = FileMetaDataset()
        header.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
        header.SOPClassUID, header.SOPInstanceUID = CTImageStorage, generate_uid()
        header.Rows = header.Columns = 512
        header.BitsAllocated, header.BitsStored, header.HighBit, header.PixelRepresentation = (
            16,
            16,
            15,
            1,
        )
        header.SamplesPerPixel, header.PhotometricInterpretation = 1, "MONOCHROME2"
        header.RescaleIntercept, header.RescaleSlope, header.WindowCenter, header.WindowWidth = (
            -1024,
            1,
            40,
            80,
        )
        header.PixelData = rng.integers(900, 1200, (512, 512), dtype=np.int16).tobytes()
        header.save_as(folder / f"{i:06}.dcm", enforce_file_format=True)


def plain_pillow(data: bytes, size: int) -> NDArray[np.uint8]:
    """What a script does with a photograph."""
    return np.asarray(
        Image.open(BytesIO(data)).convert("RGB").resize((size, size), Image.Resampling.BILINEAR)
    )


def plain_pydicom(data: bytes, size: int) -> NDArray[np.uint8]:
    """What a script does with a slice."""
    from pydicom import dcmread

    header = dcmread(BytesIO(data))
    values = header.pixel_array.astype(np.float32) * float(header.RescaleSlope) + float(
        header.RescaleIntercept
    )
    low, width = (
        float(header.WindowCenter) - float(header.WindowWidth) / 2,
        float(header.WindowWidth),
    )
    grey = np.clip((values - low) / width * 255, 0, 255).astype(np.uint8)
    return np.asarray(Image.fromarray(grey).resize((size, size), Image.Resampling.BILINEAR))


def loop(path: Path, count: int, decode: Decode) -> Figures:
    """One after another into a list, then saved."""
    tree = open_tree(path)
    names = tree.names[:count]
    before, begin = _start(), time.perf_counter()
    images = [decode(tree.read(name)) for name in names]
    with tempfile.TemporaryFile() as file:
        np.save(file, np.stack(images))
    return len(names) / (time.perf_counter() - begin), _memory("VmHWM") - before, 0.0


class _Source:
    def __init__(self, plan: Plan) -> None:
        self.plan = lambda progress=None: plan


def prepared(
    path: Path, count: int, decode: Decode, shape: tuple[int, int, int], processes: bool
) -> Figures:
    """By the cache, checksums and manifest included."""
    tree = open_tree(path)
    records = tuple(Record(name, str(i % 2), name) for i, name in enumerate(tree.names[:count]))
    recipe = Recipe(tree, "benchmark", records, ("0", "1"), shape, {}, processes)
    before = _start()
    with tempfile.TemporaryDirectory() as home:
        made = prepare(_Source(Plan(recipe, decode)), home=home)
    # 0 where threads were enough
    largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    return (
        len(records) / made.seconds,
        _memory("VmHWM") - before,
        len(os.sched_getaffinity(0)) * largest,
    )


def _start() -> float:
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak that imports have reached
    return _memory("VmRSS")


def _memory(what: str) -> float:
    line = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what)
    )
    return int(line.split()[1]) / 1024


def apart(function: Callable[..., Figures], *arguments: object) -> Figures:
    """In a fresh process, so that its peak is its own."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def main() -> None:
    """Prints a Markdown table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    size, count = options.size, options.images
    ham = Path(os.environ.get("FEDNORO_DATA", "../shared/data")) / "ham10000_112.zip"
    with tempfile.TemporaryDirectory() as scratch:
        jpeg, dicom = Path(scratch, "jpeg"), Path(scratch, "dicom")
        jpeg.mkdir()
        photographs(jpeg, count)
        dicom.mkdir()
        slices(dicom, count)
        cases: list[tuple[str, Path, Decode, Decode, int, bool]] = [
            ("1024×768 JPEG", jpeg, plain_pillow, decode_image, 3, False),
            ("512×512 DICOM", dicom, plain_pydicom, decode_dicom, 1, True),
        ]
        if ham.is_file():
            cases.insert(
                1, ("HAM10000, 112×112 JPEG in a zip", ham, plain_pillow, decode_image, 3, False)
            )
        print(
            f"{count} images to {size} px, {len(os.sched_getaffinity(0))} cores; "
            "images/s (peak memory in MB)\n"
        )
        print("| files | plain loop | prepare | ratio |\n|---|---|---|---|")
        for name, path, plain, ours, channels, processes in cases:
            work = partial(ours, size=size), (size, size, channels), processes
            # The best of several, taken in turns: whatever else a machine
            # does can only slow them down.
            pairs = [
                (
                    apart(loop, path, count, partial(plain, size=size)),
                    apart(prepared, path, count, *work),
                )
                for _ in range(options.repeats)
            ]
            (slow, slow_memory, _), (fast, memory, workers) = (
                max(figures) for figures in zip(*pairs, strict=True)
            )
            kind = f"{memory:.0f} + {workers:.0f} in processes" if workers else f"{memory:.0f}"
            print(
                f"| {name} | {slow:.0f} ({slow_memory:.0f}) | {fast:.0f} "
                f"({kind}) | {fast / slow:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
