"""FedLSR: each client regularises itself by two views of its images.

Jiang et al., Towards Federated Learning against Noisy Labels via Local Self-Regularization, CIKM
2022. Logits f_1 of x and f_2 of a stronger augmentation of x, p_i = softmax(f_i),
q_i = softmax(3 f_i) kept ≥ 1e-6, λ ~ Beta(1, 1) for each batch:

    P = λ p_1 + (1 − λ) p_2,   P_sharp = P² / Σ P²
    client    CE(P_sharp, y) + γ_t JS(q_1, q_2) + λ_e H,   H = (H(q_1) + H(q_2)) / 2
              γ_t = γ min(t / t_w, 1),  t = 0, 1, …
    server    as FedAvg

The published code (`reference`) differs in three places: its CE takes P_sharp for logits, so that
a softmax is taken twice; H has the entropy of softmax(q_1) in both places; JS is averaged over
batch and classes, C times less.

Colour images are mirrored with probability 1/2, jittered with probability 0.8 (brightness,
contrast and saturation by up to 0.8, then hue by up to 0.2) and made grey with probability 0.2.
Grey images are rotated by up to 30°.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fednoro.core.losses import at_least_float32, entropy, js_divergence, sharpen
from fednoro.core.options import option
from fednoro.core.training import normalisation
from fednoro.core.types import Site, Step, Task
from fednoro.methods.method import Method

FLOOR = 1e-6  # of q
TURN = 30.0  # degrees


@dataclass(frozen=True)
class FedLSR(Method):
    """FedAvg whose clients agree with themselves on two views of each image, confidently."""

    draws: ClassVar[int] = 8  # λ, then at most seven for the second view

    gamma: float = option(0.4, "weight of the agreement of the two views", ge=0)
    warmup: int = option(20, "rounds over which that weight rises from 0 (t_w)", ge=0)
    lam_e: float = option(0.6, "weight of the entropy", ge=0)
    view: Literal["auto", "colour", "rotation"] = option(
        "auto",
        "the second view; auto: colour for three channels, else rotation; "
        "grey images as RGB want rotation",
    )
    behaviour: Literal["paper", "reference"] = option(
        "paper", "as the paper says, or as its published code does"
    )

    def aux(self, task: Task, site: Site) -> dict[str, Tensor]:
        gamma = self.gamma * min(task.round / self.warmup, 1.0) if self.warmup else self.gamma
        return {"gamma": site.counts.new_full((), gamma, dtype=torch.float32)}

    def loss(self, step: Step) -> Tensor:
        stronger = self.second_view(step.x, step.u[:, 1:])
        f_1, f_2 = (at_least_float32(step.net(x)) for x in (step.x, stronger))
        lam = step.u[:1, :1].to(f_1.dtype)
        # By logarithms: P² of an unlikely class leaves float32.
        log_p_1, log_p_2 = F.log_softmax(f_1, dim=1), F.log_softmax(f_2, dim=1)
        log_p = sharpen(torch.logaddexp(torch.log(lam) + log_p_1, torch.log1p(-lam) + log_p_2))
        q_1, q_2 = (torch.softmax(3 * f, dim=1).clamp(min=FLOOR) for f in (f_1, f_2))
        js = js_divergence(q_1, q_2)
        if self.behaviour == "reference":
            ce, js = F.cross_entropy(log_p.exp(), step.y), js / q_1.shape[1]
            h = entropy(torch.softmax(q_1, dim=1))
        else:
            ce, h = F.nll_loss(log_p, step.y), (entropy(q_1) + entropy(q_2)) / 2
        return ce + step.aux["gamma"] * js + self.lam_e * h

    def second_view(self, x: Tensor, u: Tensor) -> Tensor:
        """A stronger augmentation of normalised images by their uniforms (B×7),
        laid out as they are.
        """
        mean, deviation = normalisation(x.shape[1])
        colour = self.view == "colour" or (self.view == "auto" and x.shape[1] == 3)
        with torch.no_grad():
            u = u.to(x.dtype)
            image = _per_channel(x, deviation, mean)  # to [0, 1]
            image = recolour(image, u) if colour else rotate(image, u[:, 0])
            normalised = _per_channel(
                image,
                [1 / d for d in deviation],
                [-m / d for m, d in zip(mean, deviation, strict=True)],
            )
            return torch.empty_like(x).copy_(normalised)


def recolour(x: Tensor, u: Tensor) -> Tensor:
    """Images in [0, 1] (B×C×H×W) mirrored, jittered and made grey,
    each as its own uniforms (B×7) say.
    """
    mirror, jitter, brightness, contrast, saturation, hue, grey = (
        v.view(-1, 1, 1, 1) for v in u.unbind(1)
    )
    x = torch.where(mirror < 0.5, x.flip(3), x)
    y = (x * _factor(brightness)).clamp(0, 1)
    y = _blend(y, _luminance(y).mean(dim=(2, 3), keepdim=True), _factor(contrast))
    y = _blend(y, _luminance(y), _factor(saturation))
    y = shift_hue(y, (2 * hue - 1) * 0.2) if x.shape[1] == 3 else y
    x = torch.where(jitter < 0.8, y, x)
    return torch.where(grey < 0.2, _luminance(x).expand_as(x), x)


def shift_hue(x: Tensor, shift: Tensor) -> Tensor:
    """RGB images in [0, 1] with hues turned by a share of the circle;
    value and saturation (HSV) stay.
    """
    r, g, b = torch.split(x, 1, dim=1)
    value, low = x.amax(dim=1, keepdim=True), x.amin(dim=1, keepdim=True)
    chroma = value - low
    # Grey has no hue, and keeps its colour whatever hue it is given.
    d = chroma.masked_fill(chroma == 0, 1.0)
    sixths = torch.where(
        value == r, (g - b) / d, torch.where(value == g, 2 + (b - r) / d, 4 + (r - g) / d)
    )
    sixths = sixths + 6 * shift
    channels = []
    for start in (5, 3, 1):
        # Red, green, blue: how far along the circle from where the channel begins to fall.
        k = torch.remainder(sixths + start, 6)
        channels.append(value - chroma * torch.minimum(k, 4 - k).clamp(0, 1))
    return torch.cat(channels, dim=1)


def rotate(x: Tensor, u: Tensor) -> Tensor:
    """Images (B×C×H×W) turned about their middle by up to 30° either way;
    what comes in from outside is black.
    """
    height, width = x.shape[2:]
    angle = ((2 * u - 1) * math.radians(TURN)).view(-1, 1, 1)
    cos, sin = torch.cos(angle), torch.sin(angle)
    rows, columns = (
        torch.arange(n, device=x.device, dtype=x.dtype) - (n - 1) / 2 for n in (height, width)
    )
    rows = rows[:, None]
    # Without a product of matrices, which autocast would round to bfloat16.
    grid = torch.stack(
        [(cos * columns - sin * rows) * (2 / width), (sin * columns + cos * rows) * (2 / height)],
        dim=-1,
    )
    return F.grid_sample(x, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


def _per_channel(x: Tensor, factors: Sequence[float], offsets: Sequence[float]) -> Tensor:
    """x·factor + offset by channel;
    the numbers stay in the code, so that a captured step copies nothing.
    """
    if len({*zip(factors, offsets, strict=True)}) == 1:
        return x * factors[0] + offsets[0]
    return torch.stack(
        [x[:, c] * f + o for c, (f, o) in enumerate(zip(factors, offsets, strict=True))], dim=1
    )


def _factor(u: Tensor) -> Tensor:
    return 1 + (2 * u - 1) * 0.8


def _blend(x: Tensor, other: Tensor, share: Tensor) -> Tensor:
    return (share * x + (1 - share) * other).clamp(0, 1)


def _luminance(x: Tensor) -> Tensor:
    """B×1×H×W, by ITU-R 601 for RGB."""
    if x.shape[1] != 3:
        return x.mean(dim=1, keepdim=True)
    r, g, b = torch.split(x, 1, dim=1)
    return 0.299 * r + 0.587 * g + 0.114 * b
