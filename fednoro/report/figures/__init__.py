"""The figures of a report, in the order in which they are shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fednoro.experiment.run_folder.recorded_run import Recorded
from fednoro.report.drawing.figure import Figure
from fednoro.report.figures import (
    classes,
    clients,
    detection,
    doubts,
    marks,
    partition,
    training,
)
from fednoro.report.recorded_verdict import RecordedVerdict

Maker = Callable[[Recorded, RecordedVerdict | None], Figure | None]

SECTIONS: dict[str, tuple[Maker, ...]] = {
    "Data": (partition.partition,),
    "Detection": (
        detection.losses,
        detection.posterior,
        detection.mixture,
        marks.level,
        marks.explained,
        doubts.doubt,
    ),
    "Performance": (training.bacc, classes.recall, classes.confusion),
    "Training": (clients.weights, clients.distances, training.ramp, training.time),
}


def figures(run: Recorded, verdict: RecordedVerdict | None) -> Iterator[tuple[str, Figure]]:
    """Every figure that the run has the parts for, with its section;
    one that fails is a line in `run.missing`.
    """
    for section, makers in SECTIONS.items():
        for make in makers:
            try:
                figure = make(run, verdict)
            except Exception as error:
                # Parts that contradict each other must not take the other figures with them.
                why = (str(error).splitlines() or [""])[0][:200]
                run.missing.append(
                    (
                        f"figure “{make.__name__}”",
                        f"could not be drawn: {type(error).__name__}: {why}",
                    )
                )
                continue
            if figure is not None:
                yield section, figure
