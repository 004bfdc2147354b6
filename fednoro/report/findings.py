"""The answer in words: which clients look noisy and how sure that is,
what was gained, what to distrust.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fednoro.core.metrics import best_last, per_class_recall
from fednoro.core.types import FloatArray, IntArray
from fednoro.core.wording import is_are, join_words, quantity
from fednoro.experiment.run_folder.recorded_run import Recorded
from fednoro.report.drawing.figure import quote
from fednoro.report.drawing.scene import shorten
from fednoro.report.recorded_verdict import OTHER_STARTS, RecordedVerdict

POOR_RECALL, CLEAR_FALL, FEW_TEST_IMAGES, FEW_IMAGES = 0.5, 0.03, 30, 5
METHODS_WITHOUT_VERDICTS = ("fedavg", "fedprox", "fedla", "rofl", "rhfl", "fedlsr")
FIRM_SHARE = 0.8  # of the verdicts must stay when the mixture starts elsewhere


@dataclass(frozen=True)
class Findings:
    """What the page opens with."""

    headline: str
    flagged: tuple[str, ...]  # names of the clients that look noisy
    noisy: tuple[str, ...]  # sentences on who looks noisy and how sure that is
    gains: tuple[str, ...]
    distrust: tuple[str, ...]
    figures: tuple[tuple[str, str, str], ...]  # value, what it is, and a remark


def findings(run: Recorded, verdict: RecordedVerdict | None) -> Findings:
    """Reads the run as a careful colleague would."""
    flagged = (
        () if verdict is None else tuple(run.names[int(k)] for k in verdict.clients[verdict.noisy])
    )
    return Findings(
        headline=_headline(run, verdict),
        flagged=flagged,
        noisy=tuple(_about_verdicts(run, verdict)),
        gains=tuple(_gains(run)),
        distrust=(
            *_about_run(run),
            *_about_detection(run, verdict),
            *_about_accuracy(run),
        ),
        figures=tuple(_key_figures(run, verdict)),
    )


def _headline(run: Recorded, verdict: RecordedVerdict | None) -> str:
    accuracy = (
        f"the model reaches {run.bacc[-10:].mean():.1%} balanced accuracy"
        if run.rounds
        else "no round is recorded"
    )
    if verdict is None:
        return f"{accuracy[:1].upper()}{accuracy[1:]}; {_why_no_verdict(run)}."
    count = int(verdict.noisy.sum())
    if len(verdict.noisy) == 1:
        return f"There is one client, with nobody to compare it with; {accuracy}."
    if verdict.agreement is not None and verdict.agreement.mean() < FIRM_SHARE:
        clients = quantity(len(verdict.noisy), "client")
        return f"{count} of {clients} {is_are(count)} flagged, but not firmly; {accuracy}."
    verb = "looks" if count == 1 else "look"
    noisy_clients = (
        f"{count} of {quantity(len(verdict.noisy), 'client')} {verb} noisy"
        if count
        else (f"None of {quantity(len(verdict.noisy), 'client')} looks noisy")
    )
    return f"{noisy_clients}; {accuracy}."


def _why_no_verdict(run: Recorded) -> str:
    if run.named_noisy is not None:
        return (
            f"{len(run.named_noisy) or 'none'} "
            f"of {quantity(len(run.names), 'client')} named noisy by the user"
        )
    if (run.path / "detection.json").exists():
        return "the verdicts about the clients cannot be read"
    if run.status != "finished" and run.choice("method") not in METHODS_WITHOUT_VERDICTS:
        return "the clients have not been judged yet"
    return f"{run.choice('method')} has not judged the clients"


def _about_verdicts(run: Recorded, verdict: RecordedVerdict | None) -> list[str]:
    if verdict is None and run.named_noisy is not None:
        return [_about_user_choice(run, run.named_noisy)]
    if verdict is None:
        reason = _why_no_verdict(run)
        return [
            f"{reason[:1].upper()}{reason[1:]}. "
            "To have them judged, run the same with method=fednoro."
        ]
    lines = [_against_truth(run, verdict)]
    unscored_names = _client_names(run, verdict.clients[np.isnan(verdict.posterior)])
    if unscored_names:
        lines.append(
            f"{join_words(unscored_names)} could not be scored "
            f"and {is_are(len(unscored_names))} not trusted for that."
        )
    close_calls = _client_names(
        run, verdict.clients[(verdict.posterior > 0.05) & (verdict.posterior < 0.95)]
    )
    if close_calls:
        lines.append(
            f"Close calls, with a probability between 0.05 and 0.95: {join_words(close_calls)}."
        )
    if verdict.agreement is not None:
        lines.append(stability(run, verdict))
    return lines


def _about_user_choice(run: Recorded, named_clients: tuple[int, ...]) -> str:
    names = _client_names(
        run, np.array(sorted({*named_clients} & run.names.keys()), dtype=np.int64)
    )
    text = f"Named noisy by the user with method.noisy: {join_words(names) if names else 'nobody'}."
    return (
        f"{text} The method has judged nobody. "
        "To have noisy clients looked for, leave method.noisy out."
    )


def _against_truth(run: Recorded, verdict: RecordedVerdict) -> str:
    if verdict.truth is None:
        return (
            f"Judged by {verdict.evidence}. "
            "Whether that is right is not known: nobody has told which labels are wrong."
        )
    missed_names = _client_names(run, verdict.clients[verdict.truth & ~verdict.noisy])
    falsely_flagged = _client_names(run, verdict.clients[~verdict.truth & verdict.noisy])
    noisy_count = int(verdict.truth.sum())
    if not missed_names and not falsely_flagged:
        subject = (
            "This is exactly the one client"
            if noisy_count == 1
            else f"These are exactly the {noisy_count} clients"
        )
        return (
            f"{subject} whose labels were made wrong."
            if noisy_count
            else "No client’s labels were made wrong, and none looks so."
        )
    parts = [f"{quantity(noisy_count, 'client')} {is_are(noisy_count)} truly noisy"]
    parts += [f"missed: {join_words(missed_names)}"] if missed_names else []
    parts += [f"falsely flagged: {join_words(falsely_flagged)}"] if falsely_flagged else []
    return "; ".join(parts) + "."


def _client_names(run: Recorded, clients: IntArray) -> list[str]:
    return [shorten(run.names[int(k)], 40) for k in clients]


def stability(run: Recorded, verdict: RecordedVerdict) -> str:
    """Whether the verdicts stay when the mixture starts elsewhere."""
    assert verdict.agreement is not None
    changes = verdict.agreement < 0.99
    if not changes.any():
        return (
            f"Firm: {OTHER_STARTS} other starting points "
            "of the mixture give the same verdict for every client."
        )
    mean = verdict.agreement.mean()
    names = _client_names(run, verdict.clients[changes])
    if mean < FIRM_SHARE:
        return (
            f"Not firm: from {OTHER_STARTS} other starting points the mixture agrees "
            f"with only {mean:.0%} of these verdicts. There may be no two groups at all."
        )
    text = (
        f"Mostly firm: from {OTHER_STARTS} other starting points {mean:.0%} of the verdicts stay."
    )
    return f"{text} They change for {join_words(names)}."


def _gains(run: Recorded) -> list[str]:
    if not run.rounds:
        return ["Nothing is recorded yet."]
    last = best_last(run.bacc).last
    rounds = min(10, len(run.bacc))
    lines = []
    classes = len(run.classes)
    chance = f", where guessing gives {1 / classes:.0%}" if classes else ""
    lines.append(
        f"Balanced accuracy is {last:.1%} over the last {quantity(rounds, 'round')}{chance}."
    )
    stages = run.stages
    if len(stages) > 1:
        before = float(run.bacc[run.numbers <= stages[0][2]][-1])
        change = 100 * (last - before)
        word = "above" if change >= 0 else "below"
        lines.append(
            f"That is {abs(change):.1f} points {word} the end of {stages[0][0]} "
            f"(round {stages[0][2]}, {before:.1%}). Part of it is simply longer training."
        )
    lines.append(
        "What another method would have reached cannot be known from one run: train with the "
        f"same seed and method={'fednoro' if run.choice('method') == 'fedavg' else 'fedavg'}, "
        "then fednoro compare."
    )
    return lines


def _about_run(run: Recorded) -> list[str]:
    lines = []
    if run.status == "running":
        lines.append(f"The run goes on: {len(run.rounds)} of {run.planned_rounds} rounds are done.")
    elif run.status == "unfinished":
        lines.append(
            f"The run stopped after {len(run.rounds)} of {run.planned_rounds} rounds. "
            f"Carry on with: fednoro resume {run.path}"
        )
    holdings = run.holdings
    for part, counts in (holdings.leakage if holdings is not None else {}).items():
        overlaps = {key: count for key, count in counts.items() if count and isinstance(count, int)}
        if overlaps:
            overlap_texts = [
                f"{count:,} {key.replace('_', ' ')}" for key, count in overlaps.items()
            ]
            lines.append(
                f"The {part} part shares {join_words(overlap_texts)} with what was trained on: "
                "its figures flatter."
            )
    if run.ledger is not None:
        missing_answers = sum(status not in ("ok", "") for status in run.ledger.status)
        if missing_answers:
            lines.append(
                f"{missing_answers:,} of {len(run.ledger.status):,} answers are missing: "
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
            f"{quantity(len(run.warnings) - 6, 'other warning')} "
            f"{is_are(len(run.warnings) - 6)} in rounds.jsonl."
        )
    return lines


def _about_detection(run: Recorded, verdict: RecordedVerdict | None) -> list[str]:
    if verdict is None:
        return []
    if verdict.losses is None:
        return []
    lines = []
    clients, classes = verdict.losses.shape
    if clients == 1:
        return ["There is one client, so there is nobody to compare it with."]
    if verdict.truth is None or not verdict.truth.any():
        lines.append(
            "The mixture splits the clients in two whatever they are: "
            "if none is noisy, clean ones are flagged."
        )
    if clients < 2 * (classes + 1):
        lines.append(
            f"{quantity(clients, 'client')} are few for a mixture over {classes} "
            "classes. Its probabilities come out near 0 or 1 even where it is wrong: "
            "read them as a verdict, not as a chance."
        )
    has_loss = np.isfinite(verdict.losses)
    if verdict.counts is not None and has_loss.any():
        median = float(np.median(verdict.counts[has_loss]))
        if median < FEW_IMAGES:
            lines.append(
                f"Half of the class losses come from {median:.0f} images or fewer, so they scatter."
            )
    return lines


def _about_accuracy(run: Recorded) -> list[str]:
    if not run.rounds:
        return []
    best, last, _ = best_last(run.bacc)
    lines = []
    late, window = run.bacc[-10:], min(10, len(run.bacc))
    if best - last > CLEAR_FALL and int(run.bacc.argmax()) < len(run.bacc) - window:
        lines.append(
            f"Last is {100 * (best - last):.1f} points below Best: "
            "late rounds lose what earlier ones had."
        )
    elif (
        len(late) > 2
        and late[len(late) // 2 :].mean() - late[: len(late) // 2].mean() > CLEAR_FALL / 2
    ):
        lines.append("BACC was still rising at the end: more rounds may well give more.")
    if run.confusion is not None:
        lines += _about_classes(run.confusion, run.classes)
    lines.append(
        "Best is chosen on the test set. This is one seed; seeds differ: run several and compare."
    )
    return lines


def _about_classes(confusion: IntArray, names: tuple[str, ...]) -> list[str]:
    recall, test_images = per_class_recall(confusion), confusion.sum(axis=1)
    lines = []
    poor_classes = [
        f"{quote(names[c])} ({recall[c]:.0%})" for c in np.flatnonzero(recall < POOR_RECALL)
    ]
    if poor_classes:
        lines.append(f"Recognised less than half of the time: {join_words(poor_classes, 6)}.")
    absent_classes = [quote(names[c]) for c in np.flatnonzero(test_images == 0)]
    if absent_classes:
        them = "it" if len(absent_classes) == 1 else "them"
        lines.append(
            f"The test set has no image of {join_words(absent_classes, 6)}, "
            f"so nothing is known about {them}."
        )
    small_classes = int(((test_images > 0) & (test_images < FEW_TEST_IMAGES)).sum())
    error = _standard_error(recall, test_images)
    text = f"The test set has {int(test_images.sum()):,} images"
    text += (
        f", fewer than {FEW_TEST_IMAGES} in {small_classes} of {len(names)} classes"
        if small_classes
        else ""
    )
    lines.append(
        f"{text}: its size alone leaves BACC uncertain by about ± {100 * 1.96 * error:.1f} points."
    )
    return lines


def _standard_error(recall: FloatArray, test_images: IntArray) -> float:
    """Of BACC, from the binomial spread of each recall;
    a success and a failure more, as 0 and 1 would have none.
    """
    has_images = test_images > 0
    share = (recall[has_images] * test_images[has_images] + 1) / (test_images[has_images] + 2)
    variance = float((share * (1 - share) / test_images[has_images]).sum())
    return math.sqrt(variance) / int(has_images.sum())


def _key_figures(run: Recorded, verdict: RecordedVerdict | None) -> list[tuple[str, str, str]]:
    key_figures = []
    if run.rounds:
        best, last, _ = best_last(run.bacc)
        key_figures += [
            (f"{last:.1%}", "BACC, Last", f"mean of the last {min(10, len(run.bacc))} rounds"),
            (
                f"{best:.1%}",
                "BACC, Best",
                f"round {run.numbers[int(run.bacc.argmax())]}, chosen on the test set",
            ),
        ]
        if run.result.get("best_by_validation") is not None:
            best_by_validation = float(run.result["best_by_validation"])
            key_figures.append(
                (
                    f"{best_by_validation:.1%}",
                    "BACC, chosen",
                    "of the round that is best on the validation part",
                )
            )
    if verdict is not None:
        remark = "the truth is not known"
        if verdict.truth is not None:
            right_verdicts = int((~verdict.wrong).sum())
            remark = f"{right_verdicts} of {len(verdict.wrong)} verdicts are right"
        key_figures.append(
            (f"{int(verdict.noisy.sum())} of {len(verdict.noisy)}", "clients look noisy", remark)
        )
    return key_figures
