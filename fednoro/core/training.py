"""How clients train: the protocol that every method shares."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from fednoro.core.options import Options, option

# ImageNet's mean and deviation, as the paper's protocol has it;
# the average of the three where a network takes no RGB.
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
GREY_MEAN, GREY_DEVIATION = 0.449, 0.226

# A task's setting: how many times as far its images are turned and shifted.
FURTHER = "augment.further"
FARTHEST_TURN, FARTHEST_SHIFT = 180.0, 0.25  # by that, in degrees and in sides


def normalisation(inputs: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of each of a network's input channels."""
    return (MEAN, DEVIATION) if inputs == 3 else ((GREY_MEAN,) * inputs, (GREY_DEVIATION,) * inputs)


@dataclass(frozen=True)
class Augment(Options):
    """Random affine and flip, drawn anew for every image of every batch."""

    section: ClassVar[str] = "train.augment"

    rotate: float = option(0.0, "largest rotation in degrees, either way", ge=0, le=180)
    translate: float = option(
        0.0, "largest shift as a share of the image's side, either way", ge=0, lt=1
    )
    flip: bool = option(False, "mirror left to right with probability 1/2")

    @property
    def active(self) -> bool:
        return bool(self.rotate or self.translate or self.flip)

    def spread(self, times: float) -> tuple[float, float]:
        """By how much angles and shifts grow if images are moved so many times as far,
        within the limits above.
        """

        def growth(own: float, most: float) -> float:
            return max(1.0, min(times, most / own)) if own else 1.0

        return growth(self.rotate, FARTHEST_TURN), growth(self.translate, FARTHEST_SHIFT)


@dataclass(frozen=True)
class Training(Options):
    """Rounds, local epochs and the optimizer;
    the defaults are the paper's where it gives one for all data.
    """

    section: ClassVar[str] = "train"

    rounds: int = option(100, "rounds in all", ge=1)
    epochs: int = option(1, "local epochs in a round", ge=1)
    batch: int = option(16, "images in a batch; the last one of an epoch may be smaller", ge=1)
    lr: float = option(3e-4, "Adam's learning rate, constant", gt=0)
    weight_decay: float = option(5e-4, "Adam's weight decay", ge=0)
    participation: float = option(1.0, "share of clients drawn to train in each round", gt=0, le=1)
    failures: float = option(
        0.0, "chance that a client does not answer, drawn per client and exchange", ge=0, le=0.95
    )
    augment: Augment = field(default_factory=Augment)
