"""Which labels look wrong by their losses, and which ones a model may replace."""

from __future__ import annotations

import math

import numpy as np
import torch

from fednoro.methods.relabel import largest_losses, sure_labels, upper_component


def test_upper_component_finds_two_groups_and_nothing_where_there_are_none() -> None:
    rng = np.random.default_rng(0)
    values = np.concatenate([rng.normal(0.2, 0.05, 70), rng.normal(2.0, 0.3, 30)])
    assert ((upper_component(values) > 0.5) == (np.arange(100) >= 70)).all()
    for nothing in ([], [1.0], [2.0] * 9, [1.0, math.nan, 3.0], [1.0, math.inf]):
        assert not upper_component(np.array(nothing, dtype=np.float64)).any()
    assert (upper_component(np.array([1.0, 1.0, 1.0, 1e6])) > 0.5).tolist() == [
        False,
        False,
        False,
        True,
    ]
    assert (upper_component(np.array([5.0, 5.0, 1.0])) > 0.5).tolist() == [True, True, False]


def test_only_the_allowed_and_sure_samples_take_the_model_s_label() -> None:
    p = torch.tensor([[0.9, 0.1, 0.0], [0.5, 0.3, 0.2], [0.1, 0.2, 0.7], [0.0, 0.6, 0.4]])
    given = torch.tensor([2, 2, 2, 2])
    assert sure_labels(given, p, 0.5).tolist() == [0, 2, 2, 1]  # ½ is not above ½
    assert sure_labels(given, p, 0.5, candidates=torch.tensor([3, 1])).tolist() == [2, 2, 2, 1]
    assert sure_labels(given, p, 0.5, candidates=torch.tensor([], dtype=torch.int64)).tolist() == [
        2,
        2,
        2,
        2,
    ]
    assert given.tolist() == [2, 2, 2, 2]
    assert (
        largest_losses(np.array([1.0, 3.0, 3.0, 2.0]), 2).tolist() == [1, 2]
        and len(largest_losses(np.ones(3), 0)) == 0
    )
