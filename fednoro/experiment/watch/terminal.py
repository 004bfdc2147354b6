"""What a person sees while a run goes on: a live line in a terminal, plain lines elsewhere."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.markup import escape
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from fednoro.core.types import State
from fednoro.core.wording import megabytes, one_line
from fednoro.data.cache.preparation import Prepared
from fednoro.data.federation import Federation
from fednoro.detection.verdicts import verdicts
from fednoro.experiment.config.configuration import Config, as_tree, section_name
from fednoro.experiment.drive import Run, Watcher
from fednoro.experiment.rounds import Turn
from fednoro.experiment.run_folder.recorded_run import Recorded
from fednoro.experiment.run_folder.run_files import RunFolder
from fednoro.report.findings import stability
from fednoro.report.recorded_verdict import read_verdict

REASONS, EXAMPLES = 5, 3  # why images were left out, and which
PLAIN_INTERVAL = 10.0  # seconds between lines of progress where there is no terminal


class Terminal(Watcher):
    """Shows a run on a console; where that is no terminal, one line per round."""

    def __init__(self, console: Console, quiet: bool = False) -> None:
        self.console, self.quiet = console, quiet
        self.live = console.is_terminal and not quiet
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._activity, self._line_time = "", 0.0
        self._federation: Federation | None = None
        self._config: Config | None = None
        # the last one shown in full, and after which round
        self._verdict: tuple[dict[int, bool], int] | None = None
        self._rounds = self._round = 0
        self._best = 0.0
        self._seconds: list[float] = []
        self._shown_warnings: set[str] = set()

    def progress(self, what: str, done: int, total: int) -> None:
        if not self.live:
            now = time.monotonic()
            if not self.quiet and (
                what != self._activity or now - self._line_time > PLAIN_INTERVAL
            ):
                count_text = f"{done}/{total}" if total else str(done)
                self.console.print(f"{what} …{f' {count_text}' if done else ''}", highlight=False)
                self._line_time = now
            self._activity = what
            return
        if self._bar is None or what != self._activity:
            self.close()
            count_text = (
                "{task.completed:.0f}/{task.total:.0f}" if total else "{task.completed:.0f}"
            )
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn(count_text),
                TimeRemainingColumn(),
                console=self.console,
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task(what, total=total or None)
        assert self._task is not None
        self._activity = what
        self._bar.update(self._task, completed=done)

    def started(
        self, config: Config, folder: Path, federation: Federation, state: State, engine: str
    ) -> None:
        self.close()
        self._config, self._federation = config, federation
        self._rounds, self._round = state.rounds, state.round
        self._verdict = None
        self._best = max((record["bacc"] for record in RunFolder(folder).rounds()), default=0.0)
        if self.quiet:
            return
        names = {
            key: escape(section_name(config, key))
            for key in ("data", "partition", "noise", "model", "method")
        }
        sizes = [len(part) for part in federation.parts]
        training = f"{sum(sizes)} training"
        if len(federation.validation):
            training += f", {len(federation.validation)} validation"
        noise = f"noise {names['noise']}"
        if federation.noisy is not None and federation.noisy.any():
            rates, count = federation.rates[federation.noisy], federation.noisy.sum()
            noise += (
                f": {count} noisy clients, "
                f"{rates.min():.0%} to {rates.max():.0%} of their labels wrong"
            )
        self._say(f"[bold]{escape(str(folder))}[/]")
        self._say(
            f"{names['method']} on {names['data']}: {training} and "
            f"{len(federation.test)} test images, {state.classes} classes, {len(sizes)} "
            f"clients of {min(sizes)} to {max(sizes)} images"
        )
        self._say(
            f"partition {names['partition']}; {noise}; model {names['model']}; seed {config.seed}"
        )
        if isinstance(named_noisy := getattr(config.method, "noisy", None), tuple):
            name_list = (
                ", ".join(federation.names[k] for k in sorted(named_noisy)) or "none is looked for"
            )
            self._say(
                f"{len(named_noisy)} of {len(sizes)} clients named noisy by method.noisy: "
                f"{escape(name_list)}"
            )
        self._say(f"engine: {escape(engine)}")
        if state.round:
            self._say(f"going on after round {state.round}")
        if self.live:
            self._show_training_bar(state)

    def _show_training_bar(self, state: State) -> None:
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            TextColumn("round {task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
        )
        self._bar.start()
        self._task = self._bar.add_task(
            "training", total=state.rounds, completed=state.round, figures=""
        )

    def _say(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True)

    def warned(self, message: str) -> None:
        # The same trouble every round is said once; rounds.jsonl has it for each.
        if message not in self._shown_warnings:
            self._shown_warnings.add(message)
            self._say(f"[yellow]warning:[/] {escape(message)}")

    def turned(self, turn: Turn) -> None:
        if self.quiet:
            return
        if turn.task == "score":
            self._show_verdicts(turn.state)
        self._seconds.append(turn.seconds)
        if turn.evaluation is None:
            return
        self._round = turn.state.round
        self._best = max(self._best, turn.evaluation.bacc)
        figures = f"BACC {turn.evaluation.bacc:6.2%}  best {self._best:6.2%}"
        if self._bar is not None and self._task is not None:
            self._bar.update(
                self._task, completed=self._round, description=turn.state.stage, figures=figures
            )
        else:
            seconds_left = statistics.mean(self._seconds[-10:]) * (self._rounds - self._round)
            self._say(
                f"round {self._round:>3}/{self._rounds}  "
                f"{turn.state.stage:<22}  {figures}  ETA {seconds_left:.0f} s"
            )

    def _show_verdicts(self, state: State) -> None:
        detection = state.memo.get("detection")
        if detection is None or self._federation is None:
            return
        truth, client_verdicts = self._federation.noisy, verdicts(state)
        if self._verdict is not None and self._verdict[0] == client_verdicts:
            self._say(
                f"after round {state.round}: "
                f"{_count_flagged(client_verdicts)} as after round {self._verdict[1]}"
            )
            return
        self._verdict = client_verdicts, state.round
        self._say(f"after round {state.round}: {escape(detection['reason'])}")
        table = Table()
        for heading in ("client", "images", "P(noisy)", "verdict"):
            table.add_column(
                heading, justify="left" if heading in ("client", "verdict") else "right"
            )
        if truth is not None:
            table.add_column("labels wrong", justify="right")
            table.add_column("")
        for key, row in sorted(detection["clients"].items(), key=lambda item: int(item[0])):
            k = int(key)
            posterior = "not scored" if row["posterior"] is None else f"{row['posterior']:.3f}"
            verdict = "[red]noisy[/]" if row["noisy"] else "[green]clean[/]"
            cells = [
                escape(self._federation.names[k]),
                str(len(self._federation.parts[k])),
                posterior,
                verdict,
            ]
            if truth is not None:
                cells += [
                    f"{self._federation.rates[k]:.0%}",
                    "✓" if bool(truth[k]) == row["noisy"] else "[red]✗[/]",
                ]
            table.add_row(*cells)
        self.console.print(table)
        if stability_text := self._firmness(detection):
            self._say(escape(stability_text))

    def _firmness(self, detection: dict[str, Any]) -> str | None:
        """What the report will say on how firm the verdicts are."""
        assert self._config is not None and self._federation is not None
        config, names = as_tree(self._config), {"sites": self._federation.names}
        recorded_run = Recorded(Path(), config=config, detection=detection, sites=names)
        verdict = read_verdict(recorded_run)
        return (
            None
            if verdict is None or verdict.agreement is None
            else stability(recorded_run, verdict)
        )

    def stopped(self, folder: Path) -> None:
        self.close()
        self._say(f"stopped; carry on with: fednoro resume {escape(str(folder))}")

    def finished(self, run: Run) -> None:
        self.close()
        if self.quiet:
            return
        self._say(
            f"[bold]BACC[/]  best [bold]{run.best:.2%}[/]  last {run.last:.2%} (mean of the last "
            f"{min(10, len(run.bacc))} rounds)  final {run.final:.2%}  in {run.seconds:.1f} s"
        )
        if run.best_by_validation is not None:
            self._say(
                f"the round that is best on the validation part: {run.best_by_validation:.2%}"
            )
        if run.detection is not None and "exact" in run.detection:
            detection = run.detection
            exact = (
                "flagged exactly the noisy clients"
                if detection["exact"]
                else "the flagged clients differ from the noisy ones"
            )
            self._say(
                f"{exact}: recall {detection['recall']:.0%}, precision {detection['precision']:.0%}"
            )
        report = run.folder / "report.html"
        if report.exists():
            self._say(f"report: {escape(str(report))}")
        self._say(f"[dim]everything is in {escape(str(run.folder))}[/]")

    def close(self) -> None:
        """Takes the live line off the screen."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = self._task = None


def _count_flagged(client_verdicts: Mapping[int, bool]) -> str:
    count = sum(client_verdicts.values())
    if not count:
        return "nobody is flagged,"
    return "the same client is flagged" if count == 1 else f"the same {count} clients are flagged"


def prepared_table(preparation: Prepared) -> Group:
    """What a preparation holds, how long it took and what it left out."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("class")
    table.add_column("images", justify="right")
    for name, count in preparation.counts.items():
        table.add_row(_printable(name), f"{count:,}")
    total = sum(preparation.counts.values())
    duration_text = (
        "was there already"
        if preparation.existed
        else f"{preparation.seconds:.1f} s, {total / max(preparation.seconds, 1e-9):,.0f} images/s"
    )
    lines = [
        f"{total:,} images, "
        f"{megabytes(preparation.bytes)} in {preparation.folder} ({duration_text})"
    ]
    if preparation.skipped:
        lines.append(
            f"{len(preparation.skipped):,} left out; "
            f"all are listed in {preparation.folder / 'manifest.json'}:"
        )
        reasons: dict[str, list[str]] = {}
        for item in preparation.skipped:
            reasons.setdefault(item["reason"], []).append(item["path"])
        for reason, paths in [*reversed(reasons.items())][:REASONS]:
            # Unreadable images come before those left out.
            count_text = f", … {len(paths):,} in all" if len(paths) > EXAMPLES else ""
            lines.append(f"  {reason}: {', '.join(paths[:EXAMPLES])}{count_text}")
        if len(reasons) > REASONS:
            lines.append(f"  and for {len(reasons) - REASONS} more reasons")
    return Group(table, *map(_printable, lines))


def _printable(line: str) -> Text:
    # Names of files and classes may hold line ends and what steers a terminal.
    return Text(one_line(line))


def seeds_table(runs: Sequence[Run]) -> Table:
    """Several seeds of one configuration, with mean and standard deviation."""
    table = Table(title=f"{len(runs)} seeds", title_justify="left")
    for heading in ("seed", "best", "last", "final", "flagged exactly"):
        table.add_column(heading, justify="right")
    for run in runs:
        exact = (
            "–"
            if run.detection is None or "exact" not in run.detection
            else "yes"
            if run.detection["exact"]
            else "no"
        )
        table.add_row(
            str(run.config.seed),
            *(f"{value:.2%}" for value in (run.best, run.last, run.final)),
            exact,
        )
    columns = [[getattr(run, name) for run in runs] for name in ("best", "last", "final")]
    exact_detections = [
        run.detection["exact"]
        for run in runs
        if run.detection is not None and "exact" in run.detection
    ]
    table.add_section()
    table.add_row(
        "mean ± std",
        *(
            f"{100 * statistics.mean(values):.2f} ± {100 * statistics.stdev(values):.2f}"
            for values in columns
        ),
        f"{sum(exact_detections)} of {len(exact_detections)}" if exact_detections else "–",
    )
    return table
