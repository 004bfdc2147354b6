"""Where a run's time goes, in seconds and shares that add up to its wall time.

python -m benchmarks.stages [PRESET] [key=value …]

The run is a real one (`fednoro.run`) with a clock at the doors of its parts. Each moment belongs to
the innermost part that is open, and a GPU is waited for at every door. On a CPU, clients go on
training in other threads while the server
aggregates: what shows as aggregation is the time that the server itself was busy with it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

PARTS = {
    "start-up": "imports, configuration, network, engine",
    "data": "loading, split, partition, label noise, checks for leakage",
    "annotators": "networks that make label noise depend on the image",
    "warm-up": "local training in stage 1",
    "scoring": "class losses of every client",
    "mixture": "fit and verdicts",
    "stage 2": "local training after the verdicts, or all of it for other methods",
    "aggregation": "checks of the replies, distances, averages",
    "evaluation": "the global model on the test part",
    "files": "logs, model, result, and waiting for checkpoints, which another thread writes",
    "other": "the loop itself",
}
TOLERANCE = 0.02


class Stopwatch:
    """Seconds per part; a part that opens inside another one stops that one's clock."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._open = ["other"]
        self._since = time.perf_counter()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self._strike()
        self._open.append(name)
        try:
            yield
        finally:
            self._strike()
            self._open.pop()

    def stop(self) -> None:
        self._strike()

    def _strike(self) -> None:
        torch: Any = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds[self._open[-1]] += now - self._since
        self._since = now

    def inside(
        self, name: str | Callable[..., str], function: Callable[..., Any]
    ) -> Callable[..., Any]:
        """`function` with its time under `name`, or under what `name` says about its arguments."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.part(name if isinstance(name, str) else name(*args)):
                return function(*args, **kwargs)

        return timed

    def between(self, name: Callable[..., str], function: Callable[..., Any]) -> Callable[..., Any]:
        """The same for a generator: only the time until its next value counts, not
        what is done with that value.
        """

        def timed(*args: Any, **kwargs: Any) -> Any:
            values, part, end = function(*args, **kwargs), name(*args), object()
            while True:
                with self.part(part):
                    value = next(values, end)
                if value is end:
                    return
                yield value

        return timed


def training(method: Any, tasks: Any) -> str:
    """The part that an exchange belongs to."""
    task = next(iter(tasks.values()))
    if task.name == "train":
        return "warm-up" if task.round < getattr(method, "warmup", 0) else "stage 2"
    return "scoring"


def watched_run(preset: str, overrides: Sequence[str]) -> tuple[Stopwatch, float, str]:
    """Plays a run: the time of its parts, its wall time, and the line
    that names engine and machine.
    """
    began = time.perf_counter()
    watch, told = Stopwatch(), list[str]()
    with watch.part("start-up"):
        import fednoro
        from benchmarks.machine import describe
        from fednoro.data.federation import Federation
        from fednoro.engine.choose import Hardware, choose_device
        from fednoro.experiment import drive, simulation
        from fednoro.experiment.checkpoint import Saver
        from fednoro.experiment.config.configuration import resolve
        from fednoro.experiment.rounds import play
        from fednoro.experiment.run_folder.run_files import RunFolder

        config = resolve(preset, overrides)

    class Told(drive.Watcher):
        def started(self, *args: Any) -> None:
            told.append(str(args[-1]))

    def watched_play(
        method: Any, state: Any, exchange: Any, clients: Any, evaluate: Any, *rest: Any
    ) -> Any:
        timed = watch.between(training, exchange)
        return play(method, state, timed, clients, watch.inside("evaluation", evaluate), *rest)

    def folded(_method: Any, _state: Any, replies: Any) -> str:
        return "mixture" if replies.task == "score" else "aggregation"

    def built(_lab: Any, purpose: str = "model", *_keys: int) -> str:
        return "annotators" if purpose == "annotator" else "start-up"

    doors: list[tuple[Any, str, str | Callable[..., str]]] = [
        (type(config.data), "load", "data"),
        (simulation, "assemble", "data"),
        (simulation, "fingerprint", "data"),
        (simulation.Lab, "annotate", "annotators"),
        (simulation.Lab, "network", built),
        (Hardware, "engine", "start-up"),
        (simulation, "_recalibrate", "start-up"),
        (type(config.method), "fold", folded),
        (Federation, "save", "files"),
        (simulation, "write_split", "files"),
        (simulation, "environment", "files"),
        (simulation, "write_json", "files"),
        (simulation, "write_whole", "files"),
        (simulation, "finish", "files"),
        *((RunFolder, name, "files") for name in ("create", "lock", "record")),
        (simulation, "restore", "files"),
        (drive, "take_snapshot", "files"),
        (Saver, "write", "files"),
        (Saver, "wait", "files"),
    ]
    with ExitStack() as stack:
        for owner, name, part in doors:
            stack.enter_context(patch.object(owner, name, watch.inside(part, getattr(owner, name))))
        stack.enter_context(patch.object(drive, "play", watched_play))
        fednoro.run(config, watcher=Told())
    watch.stop()
    wall = time.perf_counter() - began
    return watch, wall, f"Engine: {'; '.join(told)}. {describe(choose_device(config.device))}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a Markdown table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("preset", nargs="?", default="digits")
    parser.add_argument("overrides", nargs="*", help="key=value")
    options = parser.parse_args(arguments)
    preset, overrides = options.preset, options.overrides
    if "=" in preset:
        preset, overrides = "digits", [preset, *overrides]
    with tempfile.TemporaryDirectory(prefix="fednoro-") as out:
        watch, wall, machine = watched_run(preset, [f"out={out}", *overrides])
    from benchmarks.machine import markdown

    total = sum(watch.seconds.values())
    rows = [
        [part, PARTS[part], f"{spent:.2f}", f"{100 * spent / wall:.1f} %"]
        for part, spent in watch.seconds.items()
    ]
    rows.append(["sum", "", f"{total:.2f}", f"{100 * total / wall:.1f} %"])
    print(f"{' '.join([preset, *overrides])}: {wall:.2f} s\n")
    print(markdown(["part", "what", "seconds", "share"], rows))
    print(f"\n{machine}")
    if abs(total - wall) > TOLERANCE * wall:
        raise SystemExit(f"the parts add up to {total:.2f} s, and the run took {wall:.2f} s")


if __name__ == "__main__":
    main()
