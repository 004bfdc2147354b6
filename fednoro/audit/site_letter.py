"""The letter to a site: its own images, ranked by suspicion, as a page and as CSV files.

It is written where the images are: in the run folder of a simulation, on its own disk
at a real site, from the site's data and from what `Audit.work` left in its memory.
Nothing in it is sent anywhere.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from fednoro.audit.audit_method import LEVELS, PROBABILITIES
from fednoro.audit.confident_learning import site_counts, site_joint
from fednoro.audit.csv_sheet import sheet
from fednoro.audit.estimates import noise, off_diagonal
from fednoro.audit.ranking import Ranking, rank
from fednoro.core.files import disk_errors, write_whole
from fednoro.core.types import IntArray, UserError
from fednoro.report.web.audit_shell import plain, render

THUMBNAIL = 96  # pixels; smaller images are kept as they are
TINY = 48  # images up to this size are shown enlarged with their pixels visible
TOP = 200  # images that the page shows
COLUMNS = (
    "id",
    "label",
    "given",
    "suggested",
    "finding",
    "suspicion",
    "p_given",
    "p_suggested",
    "rank",
)


@dataclass(frozen=True)
class Holding:
    """What a site has, and nobody else."""

    name: str
    images: NDArray[np.uint8]  # N×H×W×C, an array or a memory map
    labels: IntArray
    ids: Sequence[str]
    classes: tuple[str, ...]

    def __post_init__(self) -> None:
        if not len(self.images) == len(self.labels) == len(self.ids):
            sizes = f"{len(self.images)} images, {len(self.labels)} labels and {len(self.ids)} ids"
            raise UserError(f"a site needs one label and one id per image, got {sizes}")


@dataclass(frozen=True)
class Judgement:
    """How the site's labels were judged:
    the model's probabilities, the common thresholds, and where they come from.
    """

    probabilities: NDArray[np.float64]
    thresholds: NDArray[np.float64]
    explanation: str  # where the probabilities come from, in a sentence or two

    @classmethod
    def from_memory(cls, memory: Mapping[str, Tensor], explanation: str) -> Judgement:
        """From what the audit left in a site's memory."""
        if PROBABILITIES not in memory or LEVELS not in memory:
            raise UserError(
                "this site has not taken part in an audit to its end, "
                "so there is nothing to write of"
            )
        return cls(memory[PROBABILITIES].numpy(), memory[LEVELS].numpy(), explanation)


def write_letter(folder: Path, site: Holding, judgement: Judgement, top: int = TOP) -> Ranking:
    """Writes letter.html, images.csv and accepted.csv into `folder`.

    images.csv has every image, ranked, with its label as given. accepted.csv is the same with every
    confident suggestion accepted; `noise: from_file` reads either.
    """
    ranking = rank(judgement.probabilities, site.labels, judgement.thresholds)
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "images.csv", sheet(COLUMNS, rows(site, ranking, accept=False)))
    write_whole(folder / "accepted.csv", sheet(COLUMNS, rows(site, ranking, accept=True)))
    write_whole(folder / "letter.html", letter(site, judgement, ranking, top))
    return ranking


def rows(site: Holding, ranking: Ranking, accept: bool) -> list[tuple[str, ...]]:
    """The cells of `COLUMNS` for every image;
    with `accept`, confident suggestions take the place of labels.
    """
    labels = (
        np.where(ranking.differs, ranking.suggested, ranking.labels) if accept else ranking.labels
    )
    return [
        (
            site.ids[ranking.order[i]],
            site.classes[labels[i]],
            site.classes[ranking.labels[i]],
            site.classes[ranking.suggested[i]],
            _finding(ranking, i),
            f"{ranking.suspicion[i]:.4f}",
            f"{ranking.p_given[i]:.4f}",
            f"{ranking.p_suggested[i]:.4f}",
            str(i + 1),
        )
        for i in range(len(ranking.order))
    ]


def letter(site: Holding, judgement: Judgement, ranking: Ranking, top: int = TOP) -> bytes:
    """The letter as an HTML file."""
    sums, counts = site_counts(judgement.probabilities, site.labels)
    joint = site_joint(judgement.probabilities, site.labels, judgement.thresholds)
    estimate = noise(joint)
    return render(
        "letter.html",
        title=f"Labels to look at: {plain(site.name)}",
        site=plain(site.name),
        images=len(site.labels),
        sure=int(joint.sum()),
        suspected=off_diagonal(joint),
        estimate=estimate,
        classes=list(site.classes),
        labels=[site.classes[c] for c in np.unique(ranking.labels[:top]).tolist()],
        rows=[_image_row(site, ranking, i) for i in range(min(top, len(ranking.order)))],
        pairs=_pairs(site, joint),
        explanation=judgement.explanation,
        numbers=[
            {
                "name": plain(site.classes[c]),
                "sum": f"{sums[c]:.3f}",
                "count": int(counts[c]),
                "row": joint[c].tolist(),
            }
            for c in range(len(site.classes))
        ],
    )


def _image_row(site: Holding, ranking: Ranking, i: int) -> dict[str, Any]:
    label, suggested = int(ranking.labels[i]), int(ranking.suggested[i])
    return {
        "rank": i + 1,
        "id": site.ids[ranking.order[i]],
        "thumbnail": thumbnail(site.images[ranking.order[i]]),
        "tiny": max(site.images.shape[1:3]) <= TINY,
        "given": site.classes[label],
        "suggested": site.classes[suggested],
        "differs": bool(ranking.differs[i]),
        "finding": _finding(ranking, i),
        "suspicion": float(ranking.suspicion[i]),
        "p_given": float(ranking.p_given[i]),
        "p_suggested": float(ranking.p_suggested[i]),
    }


def _finding(ranking: Ranking, i: int) -> str:
    if ranking.differs[i]:
        return "looks different"
    return "looks as labelled" if ranking.sure[i] else "not sure"


def _pairs(site: Holding, joint: IntArray) -> list[tuple[str, str, int]]:
    pairs = [(int(joint[i, j]), i, j) for i, j in np.argwhere(joint > 0).tolist() if i != j]
    pairs.sort(key=lambda item: (-item[0], item[1:]))
    return [(plain(site.classes[i]), plain(site.classes[j]), n) for n, i, j in pairs[:5]]


def thumbnail(image: ArrayLike) -> str:
    """A small copy of one image as a data URI."""
    from PIL import Image

    pixels = np.asarray(image)
    picture = Image.fromarray(
        np.ascontiguousarray(pixels[..., :3] if pixels.shape[-1] >= 3 else pixels[..., 0])
    )
    small, out = max(picture.size) <= THUMBNAIL, io.BytesIO()
    picture.thumbnail((THUMBNAIL, THUMBNAIL))
    if small and picture.mode == "L":
        picture.save(out, "PNG", optimize=True)
        kind = "png"
    else:
        picture.save(out, "JPEG", quality=82)
        kind = "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(out.getvalue()).decode()}"
