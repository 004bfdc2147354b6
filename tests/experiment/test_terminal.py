"""What a person reads on the terminal about verdicts."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from federations import start
from rich.console import Console
from run_folders import make_run

from fednoro.core.types import State
from fednoro.data.cache.preparation import Prepared
from fednoro.data.federation import Federation
from fednoro.detection.mixture_detector import NoisyClientDetector
from fednoro.experiment.config.configuration import resolve
from fednoro.experiment.drive import Run
from fednoro.experiment.rounds import Turn
from fednoro.experiment.run_folder.recorded_run import read
from fednoro.experiment.watch.terminal import Terminal, prepared_table
from fednoro.report.findings import findings
from fednoro.report.recorded_verdict import read_verdict as judged_by


def judged(after: int, flagged: Sequence[int], clients: Sequence[int] = range(6)) -> State:
    rows = {str(k): {"noisy": k in flagged, "posterior": 0.9} for k in clients}
    memo = {"detection": {"reason": f"the reason of round {after}", "clients": rows}}
    return replace(start(20), round=after, memo=memo)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", clients=6)


def shown(run: Path, *verdicts: State, terminal: Terminal | None = None) -> list[str]:
    """What each verdict of a run adds to the terminal."""
    said: list[str] = []
    terminal = terminal or Terminal(Console(width=100))
    text = terminal.console.file = io.StringIO()
    terminal.started(resolve("digits"), run, Federation.load(run / "split.npz"), start(20), "eager")
    for state in verdicts:
        before = len(text.getvalue())
        terminal.turned(Turn(state, "score", (), 0.1, (), None))
        said.append(text.getvalue()[before:])
    return said


def test_a_verdict_that_stays_is_one_line_and_one_that_changes_is_shown_whole(run: Path) -> None:
    everybody = range(6)
    verdicts = [
        judged(5, everybody),
        judged(10, everybody),
        judged(15, everybody),
        judged(16, [2, 5]),
        judged(17, [2]),
    ]
    first, second, third, fourth, fifth = shown(run, *verdicts)
    assert second == "after round 10: the same 6 clients are flagged as after round 5\n"
    assert third == "after round 15: the same 6 clients are flagged as after round 5\n"
    for number, text, noisy in ((5, first, 6), (16, fourth, 2), (17, fifth, 1)):
        assert text.startswith(f"after round {number}: the reason of round {number}\n")
        lines = [line for line in text.splitlines() if line.startswith("│ client ")]
        assert len(lines) == 6 and sum("noisy" in line for line in lines) == noisy


@pytest.mark.parametrize(
    ("flagged", "said"),
    [
        ([], "nobody is flagged, as after round 5"),
        ([3], "the same client is flagged as after round 5"),
    ],
)
def test_the_line_fits_any_number_of_clients(run: Path, flagged: list[int], said: str) -> None:
    assert shown(run, judged(5, flagged), judged(7, flagged))[1] == f"after round 7: {said}\n"


def test_a_client_that_is_judged_later_is_shown_though_it_is_clean(run: Path) -> None:
    later = shown(run, judged(5, [2], range(5)), judged(6, [2]))[1]
    assert "client 05" in later and "the same" not in later


def test_another_run_begins_with_the_whole_verdict(run: Path) -> None:
    watcher = Terminal(Console(width=100))
    assert shown(run, judged(5, [2]), terminal=watcher) == shown(
        run, judged(5, [2]), terminal=watcher
    )


def first_lines(run: Path, *overrides: str) -> str:
    console = Console(file=io.StringIO(), width=100)
    federation = Federation.load(run / "split.npz")
    Terminal(console).started(resolve("digits", overrides), run, federation, start(20), "eager")
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_clients_that_the_user_names_are_said_at_the_start(run: Path) -> None:
    said = first_lines(run, "method=fednoro-plus", "method.noisy=[3,0]")
    assert "2 of 6 clients named noisy by method.noisy: client 00, client 03\n" in said
    said = first_lines(run, "method=fednoro-plus", "method.noisy=[]")
    assert "0 of 6 clients named noisy by method.noisy: none is looked for\n" in said
    assert "named noisy" not in first_lines(run, "method=fednoro-plus") + first_lines(run)


@pytest.mark.parametrize(("apart", "begins"), [(True, "Firm: "), (False, "Not firm: ")])
def test_the_terminal_says_how_firm_a_verdict_is_as_the_report_does(
    tmp_path: Path, apart: bool, begins: str
) -> None:
    run = make_run(tmp_path / "run", clients=20, classes=8)
    detection = json.loads((run / "detection.json").read_text())
    if not apart:  # one group, which the mixture splits all the same
        losses = np.random.default_rng(1).normal(1, 0.2, (20, 8))
        detector = NoisyClientDetector(seed=0).fit(losses)
        for k, row in detection["clients"].items():
            row |= {"losses": losses[int(k)].tolist(), "counts": [5] * 8}
            row |= {
                "noisy": bool(detector.noisy_[int(k)]),
                "posterior": float(detector.posterior_[int(k)]),
            }
        (run / "detection.json").write_text(json.dumps(detection))
    state = replace(start(20), round=2, memo={"detection": detection})
    last = shown(run, state)[0].splitlines()[-1]
    recorded = read(run)
    assert last.startswith(begins) and last in findings(recorded, judged_by(recorded)).noisy


@pytest.mark.parametrize(
    ("exact", "said"),
    [
        (True, "flagged exactly the noisy clients: recall 50%, precision 100%"),
        (False, "the flagged clients differ from the noisy ones: recall 50%, precision 100%"),
    ],
)
def test_the_end_says_whether_the_noisy_clients_were_found(
    tmp_path: Path, exact: bool, said: str
) -> None:
    found = {"exact": exact, "recall": 0.5, "precision": 1.0, "flagged": [1]}
    console = Console(file=io.StringIO(), width=100)
    Terminal(console).finished(
        Run(tmp_path, resolve("digits"), 0.9, 0.8, 0.8, found, (0.9, 0.8), 1.0)
    )
    assert said in console.file.getvalue()  # type: ignore[attr-defined]


def test_what_could_not_be_read_comes_before_what_was_not_meant_by_reason(tmp_path: Path) -> None:
    def lines(skipped: list[dict[str, str]]) -> list[str]:
        console = Console(width=200)
        with console.capture() as shown:
            console.print(prepared_table(Prepared(tmp_path, {"a": 3}, skipped, False, 10, 1.0)))
        return shown.get().splitlines()[3:]

    unmeant = [{"path": f"extra/{i}.png", "reason": "the CSV does not list it"} for i in range(7)]
    lost = [
        {"path": "gone.png", "reason": "no such file"},
        {"path": "odd.png", "reason": "not a JPEG or PNG image"},
    ]
    assert lines([*unmeant, *lost]) == [
        f"9 left out; all are listed in {tmp_path / 'manifest.json'}:",
        "  not a JPEG or PNG image: odd.png",
        "  no such file: gone.png",
        "  the CSV does not list it: extra/0.png, extra/1.png, extra/2.png, … 7 in all",
    ]
    assert (
        lines([{"path": f"{i}.png", "reason": f"reason {i}"} for i in range(8)])[-1]
        == "  and for 3 more reasons"
    )
    assert lines([]) == []


def test_where_there_is_no_terminal_counts_are_shown_once_there_is_something_to_count() -> None:
    stream = io.StringIO()
    terminal = Terminal(Console(file=stream))
    terminal.progress("training annotators", 0, 8)
    terminal.progress("training annotators", 3, 8)
    terminal.progress("predicting", 5, 0)
    assert stream.getvalue() == "training annotators …\npredicting … 5\n"
