"""A finished run's network, and how it wants its images."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from fednoro.core.training import Augment, normalisation
from fednoro.core.types import UserError
from fednoro.data.sources.folder import decode_file
from fednoro.engine.images import Images
from fednoro.experiment.config.configuration import Config, resolve_network, section_name
from fednoro.experiment.drive import Run
from fednoro.models import Resnet18, initialise


@dataclass(frozen=True)
class Trained:
    """A network in eval mode on the CPU, with its classes and the shape of its images."""

    folder: Path
    config: Config
    classes: tuple[str, ...]
    image: tuple[int, int, int]  # H, W, C of the run's data
    net: nn.Module

    @property
    def inputs(self) -> int:
        """Channels that the network takes; a grey image is repeated where it takes three."""
        return self.config.model.inputs(self.image[2])

    @property
    def preprocessing(self) -> dict[str, Any]:
        """From a decoded image to the network's input, in words and numbers."""
        mean, deviation = normalisation(self.inputs)
        return {
            "size": list(self.image[:2]),
            "channels": self.image[2],
            "inputs": self.inputs,
            "layout": "NCHW",
            "colour": "RGB" if self.image[2] == 3 else "grey",
            "resize": "bilinear",
            **self._decoding,
            "scale": 1 / 255,
            "mean": list(mean),
            "std": list(deviation),
        }

    @property
    def _decoding(self) -> dict[str, Any]:
        """How the run's data source fits images into their size, and windows DICOM files."""
        options: dict[str, Any] = {
            key: getattr(self.config.data, key, None) for key in ("crop", "window")
        }
        if section_name(self.config, "data") == "prepared":
            options = _settings(
                Path(getattr(self.config.data, "path", "")).expanduser() / "manifest.json"
            )
        return {"crop": options.get("crop") or "resize", "window": options.get("window") or "file"}

    @property
    def metadata(self) -> dict[str, str]:
        """What goes with an exported model: one entry, so that equal models give equal files."""
        facts = {
            "model": section_name(self.config, "model"),
            "classes": self.classes,
            "preprocessing": self.preprocessing,
        }
        return {"fednoro": json.dumps(facts, ensure_ascii=False)}

    @property
    def decode(self) -> Callable[[bytes], NDArray[np.uint8]]:
        """From a file's bytes to H×W×C, as the run's data source does it."""
        height, width, channels = self.image
        if height != width:
            raise UserError(
                f"{self.folder} was trained on images of {height}×{width}: only squares can be made"
            )
        return partial(decode_file, size=height, grey=channels == 1, **self._decoding)

    def batch(self, images: NDArray[np.uint8]) -> Tensor:
        """The network's input for N×H×W×C images, by what the training used."""
        prepared_images = Images(images, self.inputs, Augment(), torch.device("cpu"))
        return prepared_images.batch(torch.arange(len(images)))

    def logits(self, images: NDArray[np.uint8]) -> Tensor:
        with torch.inference_mode():
            logits: Tensor = self.net(self.batch(images))
        return logits


def load_model(run: Run | str | Path) -> nn.Module:
    """The network of a finished run with its final weights, in eval mode on the CPU."""
    return open_trained_model(run).net


def open_trained_model(run: Run | str | Path) -> Trained:
    """A finished run's network;
    its data is not needed where the run folder tells the shape of its images.
    """
    folder = run.folder if isinstance(run, Run) else Path(run).expanduser()
    if not (folder / "config.yaml").is_file():
        raise UserError(f"{folder} is not a run folder: it has no config.yaml")
    config, file = resolve_network(folder / "config.yaml"), folder / "model.safetensors"
    if not file.is_file():
        raise UserError(
            f"{folder} has no model.safetensors yet: finish it with `fednoro resume {folder}`"
        )
    try:
        with safe_open(file, framework="pt") as reader:
            classes = tuple(json.loads((reader.metadata() or {})["fednoro"])["classes"])
            tensors = {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118
    except (OSError, KeyError, ValueError, SafetensorError) as error:
        raise UserError(
            f"{file} is damaged: delete result.json and resume the run ({error})"
        ) from error
    image = _image_shape(folder, config)
    net = new_network(config, image[2], len(classes))
    try:
        net.load_state_dict(tensors)
    except RuntimeError as error:
        why = " ".join(str(error).split())[:200]
        raise UserError(
            f"{file} does not fit the network of {folder / 'config.yaml'}: {why}"
        ) from error
    return Trained(folder, config, classes, image, net.eval())


def new_network(config: Config, channels: int, classes: int) -> nn.Module:
    """The run's network without weights that it began with, which may not be here."""
    model = config.model
    if isinstance(model, Resnet18):
        model = dataclasses.replace(model, weights=None)
    return initialise(model, model.inputs(channels), classes, config.seed)


def _image_shape(folder: Path, config: Config) -> tuple[int, int, int]:
    for name, key in (("result.json", "image"), ("sites.json", "shape")):
        try:
            height, width, channels = json.loads((folder / name).read_text(encoding="utf-8"))[key]
            return int(height), int(width), int(channels)
        except (OSError, KeyError, TypeError, ValueError):
            continue  # an older version's folder, or a run without sites
    height, width, channels = config.data.load(config.seed).images.shape[1:]
    return height, width, channels


def _settings(manifest: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(manifest.read_text(encoding="utf-8"))["settings"])
    except (OSError, KeyError, TypeError, ValueError):
        return {}
