"""A run from its first round to its last: played, recorded, saved, summed up.

Whoever has clients and a way to ask them drives them here:
`simulation` in this process, the package `flower` at real sites.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from fednoro.core.files import write_json, write_whole
from fednoro.core.metrics import best_last, detection
from fednoro.core.types import BoolArray, FedNoRoWarning, State, UserError, Weights
from fednoro.data.client import Client
from fednoro.data.federation import Federation
from fednoro.detection.verdicts import verdicts
from fednoro.experiment.checkpoint import Saver, take_snapshot
from fednoro.experiment.config.configuration import Config, resolve, section_name
from fednoro.experiment.rounds import Evaluation, Exchange, Turn, play
from fednoro.experiment.run_folder.run_files import RunFolder
from fednoro.models import Packed


class Watcher:
    """Told what happens during a run; this one passes warnings on and keeps quiet otherwise."""

    def started(
        self, config: Config, folder: Path, federation: Federation, state: State, engine: str
    ) -> None:
        """The federation stands and training begins, or goes on from `state`."""

    def joined(
        self,
        config: Config,
        folder: Path,
        classes: tuple[str, ...],
        sites: Sequence[str],
        state: State,
    ) -> None:
        """The same with sites that keep their data to themselves; more `sites` may come later."""

    def progress(self, what: str, done: int, total: int) -> None:
        """Preparation has come this far."""

    def warned(self, message: str) -> None:
        """Something degenerate was met and handled."""
        warnings.warn(message, FedNoRoWarning, stacklevel=2)

    def turned(self, turn: Turn) -> None:
        """An exchange was finished."""

    def stopped(self, folder: Path) -> None:
        """The run was interrupted and can be resumed."""

    def finished(self, run: Run) -> None:
        """All rounds are done."""


@dataclass(frozen=True)
class Run:
    """A finished run."""

    folder: Path
    config: Config
    best: float
    last: float
    final: float
    # verdicts per client; recall, precision and exact match where the truth is known
    detection: dict[str, Any] | None
    bacc: tuple[float, ...]  # per round
    seconds: float
    # of the round that is best on the validation part, where there is one
    best_by_validation: float | None = None

    def __repr__(self) -> str:
        figures = ", ".join(
            f"{name}={getattr(self, name):.4f}" for name in ("best", "last", "final")
        )
        flagged = "" if self.detection is None else f", flagged={self.detection['flagged']}"
        return f"Run({str(self.folder)!r}, {figures}{flagged})"

    @cached_property
    def federation(self) -> Federation:
        return Federation.load(self.folder / "split.npz")


def load(path: str | Path) -> Run:
    """A finished run from its folder."""
    folder = Path(path).expanduser()
    try:
        result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        facts = {key: result[key] for key in ("best", "last", "final", "detection", "seconds")}
        bacc = tuple(result["bacc"])
    except OSError as error:
        raise UserError(f"{folder} holds no finished run: result.json: {error.strerror}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{folder / 'result.json'} is damaged: delete it and resume the run ({error})"
        ) from error
    facts["best_by_validation"] = result.get("best_by_validation")
    return Run(folder, resolve(folder / "config.yaml"), bacc=bacc, **facts)


@contextmanager
def lock_run(folder: RunFolder, watcher: Watcher) -> Iterator[None]:
    """Keeps other processes out of the folder,
    and says how to go on where the user stops the run.
    """
    folder.lock()
    try:
        yield
    except KeyboardInterrupt:
        watcher.stopped(folder.path)
        raise
    finally:
        folder.unlock()


@dataclass(frozen=True)
class Setting:
    """What a run's result needs to know about its clients."""

    classes: tuple[str, ...]
    clients: int
    noisy: BoolArray | None = None  # K; None where the truth is not known
    leakage: Mapping[str, Any] = field(default_factory=dict)
    # H, W, C of what the model was trained on, where this process has seen it
    image: tuple[int, ...] | None = None


def drive(
    folder: RunFolder,
    config: Config,
    state: State,
    exchange: Exchange,
    clients: Sequence[int] | Callable[[], Sequence[int]],
    evaluate: Callable[[Weights], Evaluation],
    watcher: Watcher,
    memories: Mapping[int, Client],
) -> State:
    """Plays the remaining rounds; records and shows each exchange, and saves every few of them.

    Args:
        folder: where the run is kept.
        config: the run's configuration.
        state: where to begin.
        exchange: carries tasks to clients.
        clients: who can be asked; a function is called before every exchange.
        evaluate: what a round's model is worth.
        watcher: told what happens.
        memories: clients whose memory this process keeps, and so has to save.
    """
    options = config.train
    unsaved_exchanges, snapshot, saver = 0, take_snapshot(folder, state, memories), Saver(folder)
    try:
        for turn in play(
            config.method,
            state,
            exchange,
            clients,
            evaluate,
            options.participation,
            options.failures,
        ):
            folder.record(turn)
            state = turn.state
            snapshot = take_snapshot(folder, state, memories)
            watcher.turned(turn)
            for message in turn.warnings:
                watcher.warned(message)
            unsaved_exchanges += 1  # a method may have many before its first round ends
            if (
                unsaved_exchanges >= config.checkpoint_every
                or turn.task == "score"
                or state.round == state.rounds
            ):
                saver.write(snapshot)
                unsaved_exchanges = 0
        saver.wait()
    except KeyboardInterrupt:
        # The last snapshot, because the logs and the clients' memories may now hold half a round.
        saver.write(snapshot)
        saver.wait()
        raise
    return state


def final_verdict(state: State, clients: int, truth: BoolArray | None) -> dict[str, Any] | None:
    """What was found about the clients, and how right that is where the truth is known;
    None without a verdict.
    """
    last_scoring = state.memo.get("detection")
    if last_scoring is None:
        return None
    client_verdicts = verdicts(state)
    flagged = [client_verdicts.get(k, True) for k in range(clients)]  # as they were trained
    verdict = {**last_scoring, "flagged": [k for k, noisy in enumerate(flagged) if noisy]}
    if truth is not None:
        recall, precision, exact = detection(flagged, truth)
        noisy = [int(k) for k in truth.nonzero()[0]]
        verdict |= {"noisy": noisy, "recall": recall, "precision": precision, "exact": exact}
    return verdict


def finish(
    folder: RunFolder, config: Config, setting: Setting, state: State, packed: Packed
) -> Run:
    """Writes what the run came to: detection.json, model.safetensors, result.json."""
    from safetensors.torch import save

    records = folder.rounds()
    bacc = [record["bacc"] for record in records]
    best, last, final = best_last(bacc)
    verdict = final_verdict(state, setting.clients, setting.noisy)
    if verdict is not None:
        write_json(folder.path / "detection.json", verdict)
    # One entry: safetensors writes several in any order,
    # and equal runs would end in different files.
    metadata = {
        "fednoro": json.dumps({"model": section_name(config, "model"), "classes": setting.classes})
    }
    write_whole(folder.path / "model.safetensors", save(packed.state_dict(state.model), metadata))
    result = {
        "best": best,
        "last": last,
        "final": final,
        "best_round": 1 + bacc.index(best),
        "rounds": len(bacc),
        "seconds": round(sum(record["seconds"] for record in records), 3),
        "bacc": bacc,
        "detection": verdict,
        "leakage": setting.leakage,
    }
    if setting.image is not None:
        result["image"] = setting.image
    if all("validation_bacc" in record for record in records):
        best_row = max(records, key=lambda record: record["validation_bacc"])  # the first of equals
        result |= {
            "best_by_validation": best_row["bacc"],
            "best_round_by_validation": best_row["round"],
        }
    write_json(folder.path / "result.json", result)
    return load(folder.path)


@contextmanager
def warnings_to(watcher: Watcher) -> Iterator[None]:
    with warnings.catch_warnings(record=True) as caught_warnings:
        warnings.simplefilter("always")
        yield
    for warning in caught_warnings:
        if issubclass(warning.category, FedNoRoWarning):
            watcher.warned(str(warning.message))
        else:
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )
