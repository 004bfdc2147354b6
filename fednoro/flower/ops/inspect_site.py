"""What a site brings along:
images and labels, room on the disk, memory, a device, and the right packages.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

import torch

from fednoro.core.types import UserError
from fednoro.core.wording import first_names, memory_size
from fednoro.data.cache.preparation import Plan, Preparable, home_folder
from fednoro.data.cache.preparation import prepare as prepare_cache
from fednoro.data.sources import Source
from fednoro.engine.choose import choose_device
from fednoro.experiment.config.configuration import Config
from fednoro.flower.ops.check_result import Check, failed, ok, warning
from fednoro.models import initialise

SAMPLE = 200  # images that are decoded to see whether they can be read
TINY_CLASS = 5  # images: a class with fewer teaches little, and its mean loss says much about each
PROGRAM_BYTES = 900e6  # bytes that Python, torch and Flower take before there is a model
MEMORY_FOLDER_BYTES = 100e6  # bytes that must be free for what methods keep between rounds


@dataclass(frozen=True)
class Holding:
    """What is known of a site's images before any is sent through a model."""

    classes: tuple[str, ...]
    counts: Mapping[str, int]
    shape: tuple[int, int, int]  # H, W, C

    @property
    def images(self) -> int:
        return sum(self.counts.values())


def inspect_data(source: Source, full: bool, seed: int = 0) -> Iterator[Check | Holding]:
    """The images: listed, and some or all of them read. Yields what it found out at the end."""
    if not isinstance(source, Preparable):
        dataset = source.load(seed)
        counts = Counter(dataset.classes[c] for c in dataset.labels.tolist())
        holding = Holding(dataset.classes, counts, tuple(dataset.images.shape[1:]))
        yield ok("data", f"{holding.images} images of {_image_size(holding)}, read and checked")
        yield holding
        return
    plan = source.plan()
    recipe = plan.recipe
    holding = Holding(
        recipe.classes, Counter(record.label for record in recipe.records), recipe.shape
    )
    yield from _inspect_cache(source, recipe.bytes)
    yield from _read_all(source, holding) if full else _read_some(plan, holding)
    yield holding


def _inspect_cache(source: Source, cache_bytes: int) -> Iterator[Check]:
    home = home_folder(getattr(source, "cache", None))
    problem = _write_problem(home)
    if problem:
        advice = "choose another folder with data.cache in site.yaml, or FEDNORO_CACHE"
        yield failed("disk", f"the image cache {home} cannot be written: {problem}", advice)
        return
    free = shutil.disk_usage(_nearest_existing(home)).free
    if free < cache_bytes:
        advice = "free some, or choose another folder with data.cache in site.yaml"
        yield failed(
            "disk",
            f"the image cache needs {memory_size(cache_bytes)} in {home}, "
            f"{memory_size(free)} are free",
            advice,
        )
    elif free < 2 * cache_bytes:
        yield warning(
            "disk",
            f"the image cache takes {memory_size(cache_bytes)} "
            f"of {memory_size(free)} free in {home}",
            "free some",
        )
    else:
        yield ok(
            "disk",
            f"{memory_size(free)} free in {home}, the image cache takes {memory_size(cache_bytes)}",
        )


def _read_some(plan: Plan, holding: Holding) -> Iterator[Check]:
    records = plan.recipe.records
    step = max(1, len(records) // SAMPLE)
    broken_images = []
    for record in records[::step]:
        try:
            plan.decode(plan.recipe.tree.read(record.path))
        except Exception as error:  # decoders raise a type of their own for each kind of damage
            broken_images.append(
                f"{record.path} "
                f"({str(error).splitlines()[0] if str(error) else type(error).__name__})"
            )
    attempts = len(records[::step])
    yield _image_check(
        f"{len(records)} images of {_image_size(holding)}, {attempts} of them read",
        broken_images,
        attempts,
    )
    yield from _omission_warning([name for name, _ in plan.omissions])


def _read_all(source: Source, holding: Holding) -> Iterator[Check]:
    cache = prepare_cache(source)
    skipped_files = [f"{entry['path']} ({entry['reason']})" for entry in cache.skipped]
    image_count = sum(cache.counts.values())
    broken_images = skipped_files[len(skipped_files) - (holding.images - image_count) :]
    yield _image_check(
        f"{image_count} images of {_image_size(holding)} in {cache.folder}",
        broken_images,
        holding.images,
    )
    yield from _omission_warning(skipped_files[: len(skipped_files) - len(broken_images)])


def _image_check(message: str, broken_images: Sequence[str], attempts: int) -> Check:
    if not broken_images:
        return ok("data", message)
    finding = f"{message}; {len(broken_images)} could not be: {first_names(broken_images, 3)}"
    if 2 * len(broken_images) > attempts:
        return failed("data", finding, "export the images again as JPEG, PNG or DICOM")
    return warning("data", finding, "export those again; they are left out otherwise")


def _omission_warning(names: Sequence[str]) -> Iterator[Check]:
    if names:
        advice = (
            "nothing to do unless they are images: "
            "then see data.csv and the types of files that are read"
        )
        yield warning("data", f"left out, {len(names)} in all: {first_names(names, 3)}", advice)


def inspect_labels(
    holding: Holding,
    federation_classes: Sequence[str] | None,
    min_count: int,
    epsilon: float | None,
) -> Iterator[Check]:
    """Class names against the federation's,
    missing and tiny classes, and what would be withheld.
    """
    counts = {name: holding.counts.get(name, 0) for name in holding.classes}
    if federation_classes is None:
        advice = "give them with --classes or --run-config to compare"
        yield warning(
            "classes",
            f"the federation's class names are not known; here: {first_names(counts, 12)}",
            advice,
        )
    elif tuple(federation_classes) == holding.classes:
        yield ok("classes", f"the federation's {len(federation_classes)}, in its order")
    else:
        yield _mismatch(holding.classes, federation_classes)
    missing = [name for name, count in counts.items() if not count]
    tiny = [f"{name} ({count})" for name, count in counts.items() if 0 < count < TINY_CLASS]
    class_count = len(counts) - len(missing)
    if class_count < 2:
        yield warning(
            "labels",
            f"images of {class_count} class only",
            "a site with one class learns and shows little",
        )
    elif missing:
        yield warning(
            "labels",
            f"no image of {first_names(missing)}",
            "nothing to do if that is so; else look for lost labels",
        )
    if tiny:
        advice = (
            "min_count in site.yaml keeps their losses at home; check "
            "that they are no slips of the pen"
        )
        yield warning("labels", f"fewer than {TINY_CLASS} images of {first_names(tiny)}", advice)
    if not missing and not tiny:
        yield ok("labels", f"{min(counts.values())} to {max(counts.values())} images in each class")
    yield from _inspect_privacy(counts, min_count, epsilon)


def _mismatch(site_classes: tuple[str, ...], federation_classes: Sequence[str]) -> Check:
    advice = (
        f"set data.classes in site.yaml to [{', '.join(federation_classes)}], "
        "in this order, and rename labels to match"
    )
    if unknown_classes := [name for name in site_classes if name not in federation_classes]:
        return failed(
            "classes",
            f"the federation has no class {first_names(unknown_classes)}; "
            f"it has {first_names(federation_classes, 12)}",
            advice,
        )
    if lost_classes := [name for name in federation_classes if name not in site_classes]:
        return failed("classes", f"{first_names(lost_classes)} not among the classes here", advice)
    return failed("classes", f"the order differs: here {first_names(site_classes, 12)}", advice)


def _inspect_privacy(
    counts: Mapping[str, int], min_count: int, epsilon: float | None
) -> Iterator[Check]:
    withheld_classes = [name for name, count in counts.items() if 0 < count < min_count]
    sent_classes = [name for name, count in counts.items() if count and count >= min_count]
    if not sent_classes:
        message = f"no class has min_count = {min_count} images: this site could never be judged"
        yield failed(
            "privacy",
            message,
            "it would be treated as noisy throughout; lower min_count in site.yaml",
        )
    elif withheld_classes:
        yield warning(
            "privacy",
            f"losses of {first_names(withheld_classes)} are withheld",
            "wanted, if you set min_count; gaps make the verdict on this site less sure",
        )
    elif min_count or epsilon is not None:
        yield ok("privacy", f"losses of all {len(sent_classes)} classes are sent")
    if epsilon is not None and sent_classes:
        smallest_count = min(counts[name] for name in sent_classes)
        share = 1 / (smallest_count * epsilon)
        if share > 0.25:
            message = (
                f"ε = {epsilon:g} and {smallest_count} images blur the smallest class "
                f"by {share:.0%} of the range of losses"
            )
            yield warning(
                "privacy",
                message,
                "raise score_epsilon or min_count, or expect verdicts to be guesses",
            )


def inspect_memory_folder(folder: Path) -> Iterator[Check]:
    """Where methods keep what they remember between rounds."""
    if problem := _write_problem(folder):
        yield failed(
            "disk",
            f"the memory folder {folder} cannot be written: {problem}",
            "set memory in site.yaml",
        )
        return
    free = shutil.disk_usage(_nearest_existing(folder)).free
    if free < MEMORY_FOLDER_BYTES:
        yield failed(
            "disk",
            f"{memory_size(free)} free in the memory folder {folder}",
            f"free {memory_size(MEMORY_FOLDER_BYTES)}",
        )
    else:
        yield ok("disk", f"the memory folder {folder} can be written, {memory_size(free)} free")


def inspect_device(name: str) -> Iterator[Check]:
    """What trains: a GPU that works, or the processor."""
    try:
        device = choose_device(name)
    except UserError as error:
        yield failed("device", str(error), "device: auto in site.yaml takes what is there")
        return
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        torch.ones(8, device=device).sum().item()
        yield ok("device", f"{properties.name}, {memory_size(properties.total_memory)}")
    elif name == "auto":
        advice = (
            "for a GPU install its driver and a CUDA build of torch; "
            "device: cpu says that none is wanted"
        )
        yield warning("device", f"no GPU found, {os.cpu_count()} processor cores", advice)
    else:
        yield ok("device", f"{device}, {os.cpu_count()} processor cores")


def inspect_memory(config: Config, holding: Holding, device: str) -> Iterator[Check]:
    """Whether the run's model and batch fit, by an estimate that is rather too large."""
    needed_bytes, parameters = _memory_estimate(config, holding)
    what = f"a model of {parameters / 1e6:.1f} million weights in batches of {config.train.batch}"
    advice = "ask the coordinator for a smaller model or train.batch, or add memory"
    on_gpu = torch.cuda.is_available() and device != "cpu"
    images = holding.images * math.prod(holding.shape)
    if on_gpu:
        free, _ = torch.cuda.mem_get_info()
        yield _memory_check("GPU memory", needed_bytes + images, free, what, advice)
        needed_bytes = 4 * 4 * parameters
    yield _memory_check("memory", PROGRAM_BYTES + needed_bytes, _available_memory(), what, advice)


def _memory_estimate(config: Config, holding: Holding) -> tuple[float, int]:
    height, width, channels = holding.shape
    inputs = config.model.inputs(channels)
    net = initialise(config.model, inputs, len(holding.classes), seed=0).eval()
    outputs = 0

    def count(_: Any, __: Any, output: Any) -> None:
        nonlocal outputs
        outputs += output.numel() if isinstance(output, torch.Tensor) else 0

    hooks = [
        module.register_forward_hook(count)
        for module in net.modules()
        if not list(module.children())
    ]
    with torch.inference_mode():
        net(torch.zeros(1, inputs, height, width))
    for hook in hooks:
        hook.remove()
    parameters = sum(p.numel() for p in net.parameters())
    # Weights, anchor, gradients, Adam's two moments,
    # and three copies on their way in and out; activations twice.
    return 4.0 * (8 * parameters + 2 * outputs * config.train.batch), parameters


def _memory_check(
    name: str, needed_bytes: float, free_bytes: float, what: str, advice: str
) -> Check:
    message = f"{what} takes about {memory_size(needed_bytes)}, {memory_size(free_bytes)} are free"
    if needed_bytes > free_bytes:
        return failed(name, message, advice)
    return (
        warning(name, message, "close other programs")
        if 2 * needed_bytes > free_bytes
        else ok(name, message)
    )


def _available_memory() -> float:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return 1024.0 * next(
            int(line.split()[1]) for line in lines if line.startswith("MemAvailable")
        )
    except (OSError, StopIteration):  # not Linux
        return (
            float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
            if hasattr(os, "sysconf")
            else math.inf
        )


def inspect_packages() -> Iterator[Check]:
    """Python and the packages that every site of a federation must have alike."""
    from packaging.requirements import Requirement

    requirements = {}
    for line in requires("fednoro") or []:
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": "flower"}):
            requirements[requirement.name] = requirement
    problems = []
    for name in ("flwr", "torch", "numpy", "scikit-learn", "safetensors"):
        try:
            package_version = version(name)
        except PackageNotFoundError:
            problems.append(f"{name} is missing")
            continue
        if name in requirements and not requirements[name].specifier.contains(
            package_version.partition("+")[0], prereleases=True
        ):
            problems.append(f"{name} {package_version} is not {requirements[name].specifier}")
    if problems:
        yield failed(
            "packages", "; ".join(problems), "pip install 'fednoro[flower]' in a fresh environment"
        )
        return
    versions = ", ".join(f"{name} {version(name)}" for name in ("fednoro", "flwr", "torch"))
    yield ok(
        "packages",
        f"Python {sys.version.split()[0]}, {versions}; "
        "fednoro and flwr must be the coordinator's too",
    )


def _write_problem(folder: Path) -> str:
    """Why nothing can be written there; empty where it can. Nothing is left behind."""
    existing_folder = _nearest_existing(folder)
    if not existing_folder.is_dir():
        return f"{existing_folder} is not a folder"
    try:
        with tempfile.TemporaryFile(dir=existing_folder):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def _nearest_existing(folder: Path) -> Path:
    """The folder itself or, where it is yet to be made, the nearest one above it."""
    folder = folder.expanduser().absolute()
    return next(path for path in (folder, *folder.parents) if path.exists())


def _image_size(holding: Holding) -> str:
    height, width, channels = holding.shape
    return f"{height}×{width}×{channels}"
