"""The answer in words: which clients look noisy and how sure that is, what
was gained, what to distrust.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fednoro.core.metrics import best_last, per_class_recall
from fednoro.core.types import FloatArray, IntArray
from fednoro.experiment.run_folder.recorded_run import Recorded
from fednoro.report.drawing.figure import counted, is_are, listed, quoted
from fednoro.report.drawing.scene import shortened
from fednoro.report.recorded_verdict import OTHER_STARTS, Judged

POOR_RECALL, FALL, FEW_TESTED, FEW_IMAGES = 0.5, 0.03, 30, 5
JUDGE_NOBODY = ("fedavg", "fedprox", "fedla", "rofl", "rhfl", "fedlsr")
FIRM = 0.8  # of the verdicts must stay when the mixture starts elsewhere


@dataclass(frozen=True)
class Findings:
    """What the page opens with."""

    headline: str
    flagged: tuple[str, ...]  # names of the clients that look noisy
    noisy: tuple[str, ...]  # sentences on who looks noisy and how sure that is
    gained: tuple[str, ...]
    distrust: tuple[str, ...]
    figures: tuple[tuple[str, str, str], ...]  # value, what it is, and a remark


def findings(run: Recorded, found: Judged | None) -> Findings:
    """Reads the run as a careful colleague would."""
    flagged = () if found is None else tuple(run.names[int(k)] for k in found.clients[found.noisy])
    return Findings(
        headline=_headline(run, found),
        flagged=flagged,
        noisy=tuple(_who(run, found)),
        gained=tuple(_gained(run)),
        distrust=(
            *_about_the_run(run),
            *_about_the_detection(run, found),
            *_about_the_figures(run),
        ),
        figures=tuple(_key_figures(run, found)),
    )


def _headline(run: Recorded, found: Judged | None) -> str:
    reached = (
        f"the model reaches {run.bacc[-10:].mean():.1%} balanced accuracy"
        if run.rounds
        else "no round is recorded"
    )
    if found is None:
        return f"{reached[:1].upper()}{reached[1:]}; {_why_nobody(run)}."
    count = int(found.noisy.sum())
    if len(found.noisy) == 1:
        return f"There is one client, with nobody to compare it with; {reached}."
    if found.agreement is not None and found.agreement.mean() < FIRM:
        of = counted(len(found.noisy), "client")
        return f"{count} of {of} {is_are(count)} flagged, but not firmly; {reached}."
    verb = "looks" if count == 1 else "look"
    who = (
        f"{count} of {counted(len(found.noisy), 'client')} {verb} noisy"
        if count
        else (f"None of {counted(len(found.noisy), 'client')} looks noisy")
    )
    return f"{who}; {reached}."


def _why_nobody(run: Recorded) -> str:
    if run.named is not None:
        return (
            f"{len(run.named) or 'none'} of "
            f"{counted(len(run.names), 'client')} named noisy by the user"
        )
    if (run.path / "detection.json").exists():
        return "the verdicts about the clients cannot be read"
    if run.status != "finished" and run.choice("method") not in JUDGE_NOBODY:
        return "the clients have not been judged yet"
    return f"{run.choice('method')} has not judged the clients"


def _who(run: Recorded, found: Judged | None) -> list[str]:
    if found is None and run.named is not None:
        return [_by_user(run, run.named)]
    if found is None:
        said = _why_nobody(run)
        return [
            f"{said[:1].upper()}{said[1:]}. To have them judged, run the same with method=fednoro."
        ]
    lines = [_against_truth(run, found)]
    unscored = _named(run, found.clients[np.isnan(found.posterior)])
    if unscored:
        lines.append(
            f"{listed(unscored)} could not be scored and "
            f"{is_are(len(unscored))} not trusted for that."
        )
    unsure = _named(run, found.clients[(found.posterior > 0.05) & (found.posterior < 0.95)])
    if unsure:
        lines.append(f"Close calls, with a probability between 0.05 and 0.95: {listed(unsure)}.")
    if found.agreement is not None:
        lines.append(stability(run, found))
    return lines


def _by_user(run: Recorded, named: tuple[int, ...]) -> str:
    whom = _named(run, np.array(sorted({*named} & run.names.keys()), dtype=np.int64))
    said = f"Named noisy by the user with method.noisy: {listed(whom) if whom else 'nobody'}."
    return (
        f"{said} The method has judged nobody. To have noisy clients "
        "looked for, leave method.noisy out."
    )


def _against_truth(run: Recorded, found: Judged) -> str:
    if found.truth is None:
        return (
            f"Judged by {found.marked}. Whether that is right is not known: nobody "
            "has told which labels are wrong."
        )
    missed = _named(run, found.clients[found.truth & ~found.noisy])
    false = _named(run, found.clients[~found.truth & found.noisy])
    truly = int(found.truth.sum())
    if not missed and not false:
        these = (
            "This is exactly the one client"
            if truly == 1
            else f"These are exactly the {truly} clients"
        )
        return (
            f"{these} whose labels were made wrong."
            if truly
            else "No client’s labels were made wrong, and none looks so."
        )
    parts = [f"{counted(truly, 'client')} {is_are(truly)} truly noisy"]
    parts += [f"missed: {listed(missed)}"] if missed else []
    parts += [f"falsely flagged: {listed(false)}"] if false else []
    return "; ".join(parts) + "."


def _named(run: Recorded, clients: IntArray) -> list[str]:
    return [shortened(run.names[int(k)], 40) for k in clients]


def stability(run: Recorded, found: Judged) -> str:
    """Whether the verdicts stay when the mixture starts elsewhere."""
    assert found.agreement is not None
    shaky = found.agreement < 0.99
    if not shaky.any():
        return (
            f"Firm: {OTHER_STARTS} other starting points of the mixture give the "
            "same verdict for every client."
        )
    mean = found.agreement.mean()
    names = _named(run, found.clients[shaky])
    if mean < FIRM:
        return (
            f"Not firm: from {OTHER_STARTS} other starting points the mixture agrees with only "
            f"{mean:.0%} of these verdicts. There may be no two groups at all."
        )
    stay = (
        f"Mostly firm: from {OTHER_STARTS} other starting points {mean:.0%} of the verdicts stay."
    )
    return f"{stay} They change for {listed(names)}."


def _gained(run: Recorded) -> list[str]:
    if not run.rounds:
        return ["Nothing is recorded yet."]
    last = best_last(run.bacc).last
    shown = min(10, len(run.bacc))
    lines = []
    classes = len(run.classes)
    chance = f", where guessing gives {1 / classes:.0%}" if classes else ""
    lines.append(
        f"Balanced accuracy is {last:.1%} over the last {counted(shown, 'round')}{chance}."
    )
    stages = run.stages
    if len(stages) > 1:
        before = float(run.bacc[run.numbers <= stages[0][2]][-1])
        change = 100 * (last - before)
        word = "above" if change >= 0 else "below"
        lines.append(
            f"That is {abs(change):.1f} points {word} the end of {stages[0][0]} (round "
            f"{stages[0][2]}, {before:.1%}). Part of it is simply longer training."
        )
    lines.append(
        "What another method would have reached cannot be known from one run: train with the "
        f"same seed and method={'fednoro' if run.choice('method') == 'fedavg' else 'fedavg'}, "
        "then fednoro compare."
    )
    return lines


def _about_the_run(run: Recorded) -> list[str]:
    lines = []
    if run.status == "running":
        lines.append(f"The run goes on: {len(run.rounds)} of {run.planned} rounds are done.")
    elif run.status == "unfinished":
        lines.append(
            f"The run stopped after {len(run.rounds)} of {run.planned} rounds. Carry on "
            f"with: fednoro resume {run.path}"
        )
    held = run.holdings
    for part, found in (held.leakage if held is not None else {}).items():
        shared = {key: count for key, count in found.items() if count and isinstance(count, int)}
        if shared:
            said = [f"{count:,} {key.replace('_', ' ')}" for key, count in shared.items()]
            lines.append(
                f"The {part} part shares {listed(said)} with what was "
                "trained on: its figures flatter."
            )
    if run.ledger is not None:
        bad = sum(status not in ("ok", "") for status in run.ledger.status)
        if bad:
            lines.append(
                f"{bad:,} of {len(run.ledger.status):,} answers are missing: "
                "clients failed or dropped out."
            )
    for message, rounds in list(run.warnings.items())[:6]:
        where = (
            f"round {rounds[0]}"
            if len(rounds) == 1
            else f"{len(rounds)} rounds, first in {rounds[0]}"
        )
        lines.append(f"Warned in {where}: {message}")
    if len(run.warnings) > 6:
        lines.append(
            f"{counted(len(run.warnings) - 6, 'other warning')} "
            f"{is_are(len(run.warnings) - 6)} in rounds.jsonl."
        )
    return lines


def _about_the_detection(run: Recorded, found: Judged | None) -> list[str]:
    if found is None:
        return []
    if found.losses is None:
        return []
    lines = []
    clients, classes = found.losses.shape
    if clients == 1:
        return ["There is one client, so there is nobody to compare it with."]
    if found.truth is None or not found.truth.any():
        lines.append(
            "The mixture splits the clients in two whatever they are: if none is "
            "noisy, clean ones are flagged."
        )
    if clients < 2 * (classes + 1):
        lines.append(
            f"{counted(clients, 'client')} are few for a mixture over {classes} "
            "classes. Its probabilities come out near 0 or 1 even where it is wrong: "
            "read them as a verdict, not as a chance."
        )
    sent = np.isfinite(found.losses)
    if found.counts is not None and sent.any():
        middle = float(np.median(found.counts[sent]))
        if middle < FEW_IMAGES:
            lines.append(
                f"Half of the class losses come from {middle:.0f} images or fewer, so they scatter."
            )
    return lines


def _about_the_figures(run: Recorded) -> list[str]:
    if not run.rounds:
        return []
    best, last, _ = best_last(run.bacc)
    lines = []
    late, window = run.bacc[-10:], min(10, len(run.bacc))
    if best - last > FALL and int(run.bacc.argmax()) < len(run.bacc) - window:
        lines.append(
            f"Last is {100 * (best - last):.1f} points below Best: late "
            "rounds lose what earlier ones had."
        )
    elif len(late) > 2 and late[len(late) // 2 :].mean() - late[: len(late) // 2].mean() > FALL / 2:
        lines.append("BACC was still rising at the end: more rounds may well give more.")
    if run.confusion is not None:
        lines += _about_classes(run.confusion, run.classes)
    lines.append(
        "Best is chosen on the test set. This is one seed; seeds differ: run several and compare."
    )
    return lines


def _about_classes(confusion: IntArray, names: tuple[str, ...]) -> list[str]:
    recall, tested = per_class_recall(confusion), confusion.sum(axis=1)
    lines = []
    poor = [f"{quoted(names[c])} ({recall[c]:.0%})" for c in np.flatnonzero(recall < POOR_RECALL)]
    if poor:
        lines.append(f"Recognised less than half of the time: {listed(poor, 6)}.")
    absent = [quoted(names[c]) for c in np.flatnonzero(tested == 0)]
    if absent:
        them = "it" if len(absent) == 1 else "them"
        lines.append(
            f"The test set has no image of {listed(absent, 6)}, so nothing is known about {them}."
        )
    few = int(((tested > 0) & (tested < FEW_TESTED)).sum())
    error = _standard_error(recall, tested)
    said = f"The test set has {int(tested.sum()):,} images"
    said += f", fewer than {FEW_TESTED} in {few} of {len(names)} classes" if few else ""
    lines.append(
        f"{said}: its size alone leaves BACC uncertain by about ± {100 * 1.96 * error:.1f} points."
    )
    return lines


def _standard_error(recall: FloatArray, tested: IntArray) -> float:
    """Of BACC, from the binomial spread of each recall; a success and a failure
    more, as 0 and 1 would have none.
    """
    held = tested > 0
    share = (recall[held] * tested[held] + 1) / (tested[held] + 2)
    return math.sqrt(float((share * (1 - share) / tested[held]).sum())) / int(held.sum())


def _key_figures(run: Recorded, found: Judged | None) -> list[tuple[str, str, str]]:
    shown = []
    if run.rounds:
        best, last, _ = best_last(run.bacc)
        shown += [
            (f"{last:.1%}", "BACC, Last", f"mean of the last {min(10, len(run.bacc))} rounds"),
            (
                f"{best:.1%}",
                "BACC, Best",
                f"round {run.numbers[int(run.bacc.argmax())]}, chosen on the test set",
            ),
        ]
        if run.result.get("best_by_validation") is not None:
            chosen = float(run.result["best_by_validation"])
            shown.append(
                (
                    f"{chosen:.1%}",
                    "BACC, chosen",
                    "of the round that is best on the validation part",
                )
            )
    if found is not None:
        remark = "the truth is not known"
        if found.truth is not None:
            right = int((~found.wrong).sum())
            remark = f"{right} of {len(found.wrong)} verdicts are right"
        shown.append(
            (f"{int(found.noisy.sum())} of {len(found.noisy)}", "clients look noisy", remark)
        )
    return shown
