"""Verdicts about clients, as they are kept in a state's memo and written to detection.json.

A client that has not been scored (it was absent, it failed, it sent NaN) counts as noisy until it
is. It is asked again whenever it is drawn, and judged by the mixture already fitted, with the model
that this mixture was fitted to: the losses of a later one are on another scale.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fednoro.core.types import Clients, FedNoRoWarning, Reply, State, Weights
from fednoro.detection.mixture_detector import NoisyClientDetector

SCORING_MODEL = "scored"  # among a state's models


def clients_to_score(state: State, clients: Clients) -> list[int]:
    """Whom to score now, asked at most once a round:
    everyone at first, later those drawn who have no score yet.
    """
    if state.memo.get("asked_in") == state.round:
        return []
    scored_clients = {
        int(k) for k, row in _client_rows(state).items() if row["posterior"] is not None
    }
    candidates = clients.drawn if "detector" in state.memo else clients.present
    return [k for k in candidates if k not in scored_clients]


def scoring_model(state: State) -> Weights:
    """What clients are scored with: the model as it was when the verdict was found."""
    return state.models.get(SCORING_MODEL, state.model)


def verdicts(state: State) -> dict[int, bool]:
    """Who is noisy, as far as it is known."""
    return {int(k): bool(row["noisy"]) for k, row in _client_rows(state).items()}


def judge(state: State, scores: Sequence[Reply], detector: NoisyClientDetector) -> State:
    """Fits `detector` to the clients' class losses, or uses the one fitted before;
    records what it says.
    """
    memo = {**state.memo, "asked_in": state.round}
    scores = _well_formed(scores, state.classes)
    if not scores:
        message = (
            f"round {state.round + 1}: "
            "no client could be scored, those not known are treated as noisy"
        )
        warnings.warn(message, FedNoRoWarning, stacklevel=2)
        return replace(state, memo=memo, stage="detection", notes={})
    rows = {
        str(reply.client): {
            "losses": [float(v) if np.isfinite(v) else None for v in reply.arrays["losses"]],
            "counts": [int(n) for n in reply.arrays["counts"]],
            "round": state.round,
        }
        for reply in scores
    }
    fitted = memo.get("detector", {}).get("mixture") is not None
    if not fitted:  # with a late client there may be two groups: everybody known is judged anew
        rows = {**_client_rows(state), **rows}
    # None becomes NaN
    losses = np.array([row["losses"] for row in rows.values()], dtype=np.float64)
    counts = np.array([row["counts"] for row in rows.values()], dtype=np.float64)
    if fitted:
        noisy, posterior = NoisyClientDetector.from_dict(memo["detector"]).predict(
            losses, counts, list(rows)
        )
        reason = memo["detection"]["reason"]
    else:
        detector.fit(losses, counts, list(rows))
        noisy, posterior, reason = detector.noisy_, detector.posterior_, detector.reason_
        memo["detector"] = detector.to_dict()
    verdict_rows = {
        k: {**row, "noisy": bool(flag), "posterior": float(p) if np.isfinite(p) else None}
        for (k, row), flag, p in zip(rows.items(), noisy, posterior, strict=True)
    }
    memo["detection"] = {"reason": reason, "clients": {**_client_rows(state), **verdict_rows}}
    models = {**state.models, SCORING_MODEL: scoring_model(state)}
    return replace(state, memo=memo, stage="detection", notes={}, models=models)


def _well_formed(scores: Sequence[Reply], classes: int) -> list[Reply]:
    """Scores that have a loss and a count for each class; who sent others is asked again."""
    usable = []
    for reply in scores:
        shapes = [np.shape(reply.arrays.get(name, ())) for name in ("losses", "counts")]
        if shapes == [(classes,)] * 2 and not np.isnan(reply.arrays["counts"]).any():
            usable.append(reply)
        else:
            message = (
                f"client {reply.client} sent no loss and count for each of {classes} classes: "
                "it is not scored"
            )
            warnings.warn(message, FedNoRoWarning, stacklevel=3)
    return usable


def _client_rows(state: State) -> Mapping[str, Any]:
    detection: Mapping[str, Any] = state.memo.get("detection", {})
    clients: Mapping[str, Any] = detection.get("clients", {})
    return clients
