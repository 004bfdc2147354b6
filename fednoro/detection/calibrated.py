"""The calibrated detector:
who is noisy, nobody, some or everybody, on a scale that is found on the spot.

Its constants are the same for every data set. Two measures make a client's doubt: which share of
its labels it cannot explain (`fednoro.detection.explained`), and how badly heads that are learnt
from the others part its labels (`fednoro.detection.leave_one_out_heads`). The second asks for an
exchange of its own before clients are scored, `moments`: each sends two sums over the global
model's features, and receives their totals with the question for its score. Where no heads can be
learnt, explained shares decide alone: if no more than four clients send sums (from the total of
two, each could tell the other's), with a network that has no `features`, and if a method asks for
it. Heads can be learnt from a sketch of 64 numbers of each image too, with sums that are 56 times
smaller for a ResNet-18 and 8 classes; of very many features they always are.

A cut between two groups stays: whoever comes later is judged by it, from one measure with the model
and the totals that the others were scored with. A method may look again once clean clients alone
have trained for a while (`reconsider`): the two groups are farther apart then. Until there is a
cut, everybody is judged anew whenever somebody comes later, and whenever a method asks again.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fednoro.core.types import (
    Clients,
    FedNoRoWarning,
    FloatArray,
    Reply,
    Site,
    State,
    Task,
    UserError,
    Weights,
)
from fednoro.detection import explained, leave_one_out_heads
from fednoro.detection.explained import FEW, SENT, Judgement
from fednoro.detection.leave_one_out_heads import Scale
from fednoro.detection.verdicts import SCORING_MODEL, scoring_model, verdicts

MOMENTS = "moments"  # the task; among a state's models: the totals
PRODUCTS, SUMS = "products", "sums"  # among the arrays that are sent: XᵀX, and X summed up by class
AREAS, COUNTS = "areas", "counts"  # and with a score
# In a state: the totals of the first verdict, while a second one is looked for.
FIRST = "first_moments"
AGAIN = "again"  # in the memo: when that was, and whether it changed the verdict
WIDTH = "width"  # among the settings of a question for sums: of more features a sketch is summed up
COUNTED = "counted"  # among the settings of a score: whether the client has a part in the totals
WIDEST, SKETCH = 2048, 64  # features: sums over more would be larger than the model
# Of the sums, by the detector's name; 0: no heads.
WIDTHS = {"calibrated": WIDEST, "sketched": SKETCH, "shares": 0}


# Client


def sum_features(task: Task, site: Site) -> Reply:
    """A client's part of the sums that heads are learnt from;
    nothing where the network has no features.
    """
    try:
        features = site.features(task.weights)
    except UserError:  # it says that there are none
        return Reply(site.client, site.size)
    features = features.cpu()
    if features.shape[1] > min(int(task.settings[WIDTH]), WIDEST):  # a server may not ask for more
        features = leave_one_out_heads.sketch(features, SKETCH)
    a, b = leave_one_out_heads.moments(features, site.labels.cpu(), site.classes)
    return Reply(
        site.client, site.size, arrays={PRODUCTS: a.numpy(), SUMS: b.t().contiguous().numpy()}
    )


def score(task: Task, site: Site) -> Reply:
    """What a client explains of its labels, and what the others' heads part of them,
    where their totals came along.
    """
    reply = explained.score(task, site)
    return replace(reply, arrays=measure_areas(task, site)) if PRODUCTS in task.arrays else reply


def measure_areas(task: Task, site: Site) -> dict[str, FloatArray]:
    """How well the others' head parts each pair of a client's classes,
    and how many labels each class has.
    """
    a, b = torch.from_numpy(task.arrays[PRODUCTS]), torch.from_numpy(task.arrays[SUMS]).t()
    features, labels = site.features(task.weights).cpu(), site.labels.cpu()
    if features.shape[1] >= len(a):  # the totals are of sketches
        features = leave_one_out_heads.sketch(features, len(a) - 1)
    outputs = leave_one_out_heads.outputs(features, labels, a, b, bool(task.settings[COUNTED]))
    return {
        AREAS: leave_one_out_heads.areas(outputs.numpy(), labels.numpy()),
        COUNTS: site.counts.double().cpu().numpy(),
    }


# Server


def questions(
    state: State, clients: Clients, candidates: Iterable[int], width: int, anew: bool = False
) -> dict[int, Task]:
    """What to ask of clients that are to be scored, `anew` by the present model:
    first for sums, then for scores.

    Args:
        state: the server's.
        clients: whom the server can ask.
        candidates: those to be scored.
        width: the most features that others' heads are learnt from; 0 where these shall not count.
        anew: everybody is judged again.
    """
    first = anew or "detector" not in state.memo
    model = state.model if first else scoring_model(state)
    moments: Mapping[str, Any] = state.memo.get(MOMENTS, {})
    if first and width and len(clients.present) > FEW and moments.get("round") != state.round:
        return {k: Task(MOMENTS, state.round, model, {WIDTH: width}) for k in clients.present}
    if not width or not _totals_there(state, first):
        return {k: Task("score", state.round, model) for k in candidates}
    totals = _unpacked(state.models[MOMENTS], state.classes)
    return {
        k: Task("score", state.round, model, {COUNTED: k in moments["clients"]}, totals)
        for k in candidates
    }


def _totals_there(state: State, first: bool) -> bool:
    """Whether scores are asked for with the totals:
    those of this round for a first verdict, later those it had.
    """
    moments: Mapping[str, Any] = state.memo.get(MOMENTS, {})
    expected_round = state.round if first else state.memo.get("detection", {}).get("summed_in")
    return bool(moments.get("clients")) and moments["round"] == expected_round


def add_up(
    state: State, replies: Iterable[Reply], otherwise: str = "explained shares decide alone"
) -> State:
    """Keeps the totals of the clients' sums, and who has a part in them;
    those of the commonest width count.

    Where there are too few, it is said what happens `otherwise`.
    """
    totals: dict[int, tuple[FloatArray, list[int]]] = {}
    for reply in replies:
        if not {PRODUCTS, SUMS} <= reply.arrays.keys():
            continue
        products, sums = reply.arrays[PRODUCTS], reply.arrays[SUMS]
        width = sums.shape[-1] if sums.ndim else 0
        shapes = products.shape, sums.shape
        if shapes == ((width, width), (state.classes, width)) and 1 < width <= WIDEST + 1:
            before, parts = totals.get(width, (0.0, []))
            with np.errstate(over="ignore"):
                total = before + np.concatenate([products.ravel(), sums.ravel()])
            if np.isfinite(total).all():
                totals[width] = total, [*parts, reply.client]
                continue
        _left_out(reply.client)
    best = max(totals.values(), key=lambda item: len(item[1]), default=None)
    for total, parts in totals.values():
        if best is not None and total is not best[0]:
            for client in parts:
                _left_out(client)
    models = {name: model for name, model in state.models.items() if name != MOMENTS}
    parts = [] if best is None else best[1]
    if best is not None and len(parts) > FEW:
        models[MOMENTS] = Weights(torch.from_numpy(best[0]), torch.zeros(0, dtype=torch.int64))
    elif parts:
        message = (
            f"only {len(parts)} clients sent sums that heads could be learnt from: {otherwise}"
        )
        warnings.warn(message, FedNoRoWarning, stacklevel=2)
        parts = []
    memo = {**state.memo, MOMENTS: {"round": state.round, "clients": parts}}
    return replace(state, memo=memo, stage="detection", notes={}, models=models)


def add_up_again(state: State, replies: Iterable[Reply]) -> State:
    """The same for a second verdict;
    the first one's totals are kept until it is known which of the two counts.
    """
    after = add_up(state, replies, otherwise="the verdict stays as it is")
    if not after.memo[MOMENTS]["clients"]:  # perhaps in a later round
        return replace(
            state, memo={**state.memo, "asked_in": state.round}, stage="detection", notes={}
        )
    models, memo = (
        {**after.models, FIRST: state.models[MOMENTS]},
        {**after.memo, FIRST: state.memo[MOMENTS]},
    )
    return replace(after, models=models, memo=memo)


def _left_out(client: int) -> None:
    message = f"client {client} sent sums that cannot be used: heads are learnt without it"
    warnings.warn(message, FedNoRoWarning, stacklevel=3)


def _unpacked(totals: Weights, classes: int) -> dict[str, FloatArray]:
    values = totals.values.double().cpu().numpy()
    # There are side² + classes · side values.
    side = round((math.sqrt(classes**2 + 4 * len(values)) - classes) / 2)
    return {
        PRODUCTS: values[: side**2].reshape(side, side),
        SUMS: values[side**2 :].reshape(classes, side),
    }


def judge(
    rows: Sequence[Mapping[str, Any]],
    before: Mapping[str, Any] | None = None,
    wider: float = leave_one_out_heads.WIDER,
) -> Judgement:
    """Flags clients by their doubts, or by their explained shares where there are none.

    Args:
        rows: what each client has sent, at least one: `SENT`, and `AREAS` (pairs) and
            `COUNTS` where there are heads.
        before: an earlier verdict that parted two groups, as it is in the memo;
            for clients that come later.
        wider: how much noisy clients' doubts scatter, in clean ones'.
    """
    evidence = [[row[name] for name in SENT] for row in rows]
    heads = all(AREAS in row for row in rows)
    if before is not None and "pairs" not in before:
        return explained.judge(evidence, (before["cut"], before["steepness"]))
    alone = explained.judge(evidence)
    if not heads or (before is None and len(rows) <= FEW):
        return alone
    areas = np.array([row[AREAS] for row in rows], dtype=np.float64)  # None becomes NaN
    counts = np.array([row[COUNTS] for row in rows], dtype=np.float64)
    if before is None:
        scale = leave_one_out_heads.difficulty(areas, counts)
        comparable = ~np.isnan(areas) & ~np.isnan(scale.pairs)
        if comparable.any(axis=1).sum() <= FEW:  # clients share no classes
            return alone
    else:
        scale = Scale(np.array(before["pairs"], dtype=np.float64), before["mean"])
    error = leave_one_out_heads.errors(areas, counts, scale)
    doubt = leave_one_out_heads.doubts(error, alone.explained)
    valid = ~np.isnan(doubt) & np.array([any(row) for row in evidence])
    if before is None:
        split = leave_one_out_heads.find_cut(
            doubt[valid], error[valid], alone.explained[valid], wider
        )
        if split is None:
            return explained.judge(evidence, alike=True)
        cut, steepness = split
    else:
        cut, steepness = before["cut"], before["steepness"]
    noisy = valid & (np.where(valid, doubt, 0.0) > cut)
    power = np.where(valid, steepness * (math.log(cut) - np.log(np.where(valid, doubt, 1.0))), 0.0)
    span = _span(doubt[valid])
    reason = f"{int(noisy.sum())} of {len(rows)} clients flagged: doubts {span}, cut at {cut:.2f}"
    return Judgement(
        alone.explained,
        tuple(bool(flag) for flag in noisy),
        leave_one_out_heads.chance(power),
        cut,
        steepness,
        parted=True,
        everybody=False,
        reason=reason,
        error=error,
        doubt=doubt,
        scale=scale,
    )


def _span(values: FloatArray) -> str:
    """The least and the largest value."""
    return f"{values.min():.2f} to {values.max():.2f}" if len(values) else "none"


def record(
    state: State, scores: Sequence[Reply], wider: float = leave_one_out_heads.WIDER
) -> State:
    """Judges the clients that have answered,
    by the cut found before where it parted two groups; writes to the memo.
    """
    memo = {**state.memo, "asked_in": state.round}
    before: Mapping[str, Any] = memo.get("detection", {})
    # Judged again: by the present model. What clients said of an earlier one is not on its scale.
    anew = bool(before.get("clients", {}).keys() & {str(reply.client) for reply in scores})
    # What was asked for decides, not what came.
    heads = _totals_there(state, anew or "detector" not in memo)
    usable = _usable_rows(scores, state.classes, heads)
    if "pairs" in before and not heads and not anew:
        usable = {}  # the totals that those before were judged with are gone
    if not usable:
        message = (
            f"round {state.round + 1}: no client could be scored, those not known are not trusted"
        )
        warnings.warn(message, FedNoRoWarning, stacklevel=2)
        return replace(state, memo=memo, stage="detection", notes={})
    model = scoring_model(state)
    if anew:
        before, model = {}, state.model
    earlier: Mapping[str, Any] = before.get("clients", {})
    rounds = dict.fromkeys(usable, state.round) | {k: row["round"] for k, row in earlier.items()}
    if before.get("parted"):
        judgement = judge(list(usable.values()), before)
        reason = before["reason"]
    else:
        usable = {
            k: row for k, row in earlier.items() if None not in [row.get(name) for name in SENT]
        } | usable
        judgement = judge(list(usable.values()), wider=wider)
        reason = judgement.reason
    rows = {
        k: {**row, **judgement.row(i), "round": rounds[k]}
        for i, (k, row) in enumerate(usable.items())
    }
    memo["detection"] = {
        "reason": reason,
        "cut": judgement.cut,
        "steepness": judgement.steepness,
        "parted": judgement.parted,
        "round": before.get("round", state.round)
        if before.get("parted") == judgement.parted
        else state.round,
        **(
            {}
            if judgement.scale is None
            else {"pairs": numbers(judgement.scale.pairs), "mean": judgement.scale.mean}
        ),
        **({"summed_in": memo[MOMENTS]["round"]} if heads else {}),
        "clients": {**earlier, **rows},
    }
    if not before.get("parted"):
        memo["detector"] = {"everybody": judgement.everybody}
    models = {**state.models, SCORING_MODEL: model}
    return replace(state, memo=memo, stage="detection", notes={}, models=models)


def _usable_rows(scores: Sequence[Reply], classes: int, heads: bool) -> dict[str, dict[str, Any]]:
    """What clients have sent that can be judged, as JSON, by client."""
    return {
        str(reply.client): row
        for reply in scores
        if (row := _evidence(reply, classes, heads)) is not None
    }


def can_reconsider(state: State) -> bool:
    """Whether heads have parted two groups, and nobody has looked again."""
    return (
        AGAIN not in state.memo
        and "pairs" in state.memo.get("detection", {})
        and MOMENTS in state.models
    )


def reconsider(state: State, scores: Sequence[Reply]) -> State:
    """Judges everybody again;
    where that parts no two groups, or too few have answered, the first verdict stays.

    Who does not answer keeps the verdict it had. If nobody does, the
    second verdict is still to come.
    """
    after, first = record(state, scores, leave_one_out_heads.PURGED_WIDER), state.memo["detection"]
    second = after.memo["detection"]
    answered = second["clients"].keys() & first["clients"].keys() if second is not first else set()
    if "pairs" in second and 2 * len(answered) > len(first["clients"]):
        memo, models = {**after.memo, "detection": _in_place_of(first, second)}, dict(after.models)
    else:
        memo, models = {**state.memo, "asked_in": state.round}, dict(state.models)
        memo[MOMENTS], models[MOMENTS] = memo[FIRST], models[FIRST]
    del memo[FIRST], models[FIRST]
    if answered:
        now = verdicts(replace(state, memo=memo))
        changed = any(now[k] != noisy for k, noisy in verdicts(state).items())
        memo[AGAIN] = {"round": state.round, "changed": changed}
    return replace(state, memo=memo, stage="detection", notes={}, models=models)


def _in_place_of(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """A second verdict, with those of the first who have not answered:
    their doubts are not on the scale of its cut.
    """
    earlier = {
        k: {key: value for key, value in row.items() if key not in ("error", "doubt")}
        for k, row in first["clients"].items()
        if k not in second["clients"]
    }
    more = f"; {len(earlier)} did not answer and stay as they were" if earlier else ""
    reason, clients = f"{second['reason']} (judged again{more})", {**earlier, **second["clients"]}
    return {**second, "reason": reason, "round": first["round"], "clients": clients}


def _evidence(reply: Reply, classes: int, heads: bool) -> dict[str, Any] | None:
    """What a client has sent, as JSON; None where it cannot be used."""
    row: dict[str, Any] = {name: float(reply.metrics.get(name, math.nan)) for name in SENT}
    if not all(0 <= value < math.inf for value in row.values()):
        return None
    if not heads:
        return row
    areas, counts = (np.asarray(reply.arrays.get(name, math.nan)) for name in (AREAS, COUNTS))
    if areas.shape != (classes, classes) or counts.shape != (classes,):
        return None
    if not ((counts >= 0) & (counts < math.inf)).all():
        return None
    pairs, present = (
        leave_one_out_heads.pairs_of(areas),
        leave_one_out_heads.pairs_of(np.outer(counts, counts)) > 0,
    )
    if not np.where(present, (pairs >= 0) & (pairs <= 1), np.isnan(pairs)).all():
        return None
    return row | {AREAS: numbers(pairs), COUNTS: [int(n) for n in counts]}


def numbers(values: FloatArray) -> list[float | None]:
    return [None if math.isnan(value) else float(value) for value in values]


def judged_in(state: State, default: int) -> int:
    """How many rounds were over when the verdict was found; `default` before that."""
    return int(state.memo.get("detection", {}).get("round", default))


def nobody_trusted(state: State) -> bool:
    """Whether there is a verdict, and it is that everybody is noisy."""
    detector: Mapping[str, Any] | None = state.memo.get("detector")
    if detector is None:
        return False
    # Older checkpoints have no `everybody`.
    return bool(detector["everybody"] if "everybody" in detector else detector["trust"] is None)


def suspects(state: State, clients: Collection[int]) -> set[int]:
    """Those of `clients` that are not trusted: noisy, or not judged while others are.

    Where everybody is noisy, nobody is suspected more than others.
    """
    if "detector" not in state.memo or nobody_trusted(state):
        return set()
    rows = state.memo["detection"]["clients"]
    return {k for k in clients if str(k) not in rows or rows[str(k)]["noisy"]}
