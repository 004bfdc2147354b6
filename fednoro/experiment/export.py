"""A run's model as one file for other programs,
checked against the network before it is put in place.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fednoro.core.files import write_whole
from fednoro.core.seeds import generator
from fednoro.core.types import FedNoRoWarning, UserError
from fednoro.data.federation import Federation, fingerprint
from fednoro.experiment.drive import Run
from fednoro.experiment.trained_model import Trained, new_network, open_trained_model

COMPARED_IMAGES = 64  # that a model is compared on
# |a − b| ≤ TOLERANCE · (1 + |b|) for every logit: another program adds in another order.
TOLERANCE = 1e-4

Forward = Callable[[NDArray[np.uint8]], Tensor]


@dataclass(frozen=True)
class Exported:
    """What was written, and how it compares."""

    path: Path
    bytes: int
    images: int  # compared
    real: bool  # test images of the run; otherwise made up
    difference: float  # largest, of any logit
    agreement: float  # share of images with the same most probable class


def export(run: Run | str | Path, path: str | Path, kind: str) -> Exported:
    """Writes a run's model as "onnx" or "safetensors";
    a file that gives other outputs is not written.

    The file's metadata has one entry, `fednoro`: JSON with the class names and the preprocessing.
    """
    if kind not in ("onnx", "safetensors"):
        raise UserError(f"a model is exported as onnx or safetensors, got {kind!r}")
    model, target = open_trained_model(run), Path(path).expanduser()
    content, forward = (_onnx if kind == "onnx" else _safetensors)(model)
    images, real = _comparison_images(model)
    difference, agreement = _compare_outputs(model, forward, images, exact=kind == "safetensors")
    target.parent.mkdir(parents=True, exist_ok=True)
    write_whole(target, content)
    return Exported(target, len(content), len(images), real, difference, agreement)


def _onnx(model: Trained) -> tuple[bytes, Forward]:
    try:
        import onnx
        import onnxruntime
    except ImportError as error:
        raise UserError(f"--onnx needs {error.name}: pip install 'fednoro[export]'") from error
    height, width, _ = model.image
    example = torch.zeros(2, model.inputs, height, width)
    buffer: Any = io.BytesIO()  # it takes a file too, whatever its annotation says
    batch = {0: "batch"}
    # The exporter that needs no further package warns that there is a newer one, and
    # the tracer of every comparison of sizes; the comparison of outputs below is what
    # tells whether all went well.
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model.net,
            (example,),
            buffer,
            dynamo=False,
            input_names=["images"],
            output_names=["logits"],
            dynamic_axes={"images": batch, "logits": batch},
        )
    proto = onnx.load_from_string(buffer.getvalue())
    for key, value in model.metadata.items():
        proto.metadata_props.add(key=key, value=value)
    onnx.checker.check_model(proto)
    content = proto.SerializeToString(deterministic=True)
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])

    def forward(images: NDArray[np.uint8]) -> Tensor:
        (logits,) = session.run(["logits"], {"images": model.batch(images).contiguous().numpy()})
        return torch.from_numpy(np.asarray(logits))

    return content, forward


def _safetensors(model: Trained) -> tuple[bytes, Forward]:
    from safetensors.torch import load, save

    tensors = {name: tensor.contiguous().clone() for name, tensor in model.net.state_dict().items()}
    content = save(tensors, model.metadata)
    fresh = new_network(model.config, model.image[2], len(model.classes))
    fresh.load_state_dict(load(content))
    fresh.eval()

    def forward(images: NDArray[np.uint8]) -> Tensor:
        with torch.inference_mode():
            logits: Tensor = fresh(model.batch(images))
        return logits

    return content, forward


def _comparison_images(model: Trained) -> tuple[NDArray[np.uint8], bool]:
    """Test images of the run; where its data is not here or is another by now, made-up ones."""
    try:
        federation = Federation.load(model.folder / "split.npz")
        dataset = model.config.data.load(model.config.seed)
        if fingerprint(dataset) != federation.fingerprint:
            raise UserError("the data has changed since")
        return np.asarray(dataset.images[federation.test[:COMPARED_IMAGES]]), True
    except (OSError, UserError) as error:
        message = (
            f"the run's test images are not at hand ({error}): "
            "the export is compared on made-up images"
        )
        warnings.warn(message, FedNoRoWarning, stacklevel=3)
        noise = generator(0, "export").integers(0, 256, (COMPARED_IMAGES, *model.image))
        return noise.astype(np.uint8), False


def _compare_outputs(
    model: Trained, forward: Forward, images: NDArray[np.uint8], exact: bool
) -> tuple[float, float]:
    """The largest difference of a logit, over all images at once and over the first alone."""
    worst = 0.0
    for part in (images, images[:1]):
        expected, actual = model.logits(part).double(), forward(part).double()
        if actual.shape != expected.shape:
            raise UserError(
                f"the exported model gives {tuple(actual.shape)} numbers, "
                f"the network {tuple(expected.shape)}"
            )
        bound = torch.zeros_like(expected) if exact else TOLERANCE * (1 + expected.abs())
        difference = (actual - expected).abs()
        if not bool((difference <= bound).all()):
            raise UserError(
                "the exported model's outputs differ by up to "
                f"{float(difference.max()):.3g}, more than rounding explains: nothing was "
                "written. Does the network branch on the values of its input?"
            )
        worst = max(worst, float(difference.max()))
    same = forward(images).argmax(1) == model.logits(images).argmax(1)
    return worst, float(same.double().mean())
