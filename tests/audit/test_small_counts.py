"""Small counts stay hidden from whoever knows everything that is shown."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fednoro.audit.estimates import SiteFinding, findings, judged_at_most
from fednoro.audit.small_counts import Line, suppress
from fednoro.core.types import UserError


def possible(line: Line, i: int) -> set[int]:
    """Every value that cell i may have for somebody who knows the line as
    shown; by trying all of them.
    """
    assert line.total is not None
    hidden = [j for j, mark in enumerate(line.marks) if mark != "shown"]
    rest = line.total - sum(value for value in line.values if value is not None)
    ranges = [
        range(line.least) if line.marks[j] == "small" else range(line.least, rest + 1)
        for j in hidden
        if j != i
    ]
    # Sums that the other hidden cells can reach, cell by cell.
    sums = {0}
    for values in ranges:
        sums = {
            total + value
            for total, value in itertools.product(sums, values)
            if total + value <= rest
        }
    return {value for value in range(line.least) if rest - value in sums}


@settings(deadline=None, max_examples=150)
@given(st.lists(st.integers(0, 14), min_size=1, max_size=7), st.integers(2, 6), st.data())
def test_the_total_tells_nothing_more_about_a_small_cell(
    cells: list[int], least: int, data: st.DataObject
) -> None:
    first = data.draw(st.lists(st.sampled_from(range(len(cells))), max_size=2, unique=True))
    line = suppress(cells, least, first)
    for value, mark, cell in zip(line.values, line.marks, cells, strict=True):
        assert (value == cell) if mark == "shown" else value is None
        assert (mark == "small") == (cell < least)
    if line.total is not None:
        assert line.total == sum(cells) >= least
        for i, mark in enumerate(line.marks):
            if mark == "small":
                assert possible(line, i) == set(range(least))


def test_one_small_cell_takes_another_with_it() -> None:
    line = suppress([2, 40, 30], 5)
    assert line.marks == ("small", "withheld", "shown") and line.total == 72
    assert [line.text(i) for i in range(3)] == ["<5", "withheld", "30"]
    assert suppress([2, 40, 30], 5, hide_first=[2]).marks == ("small", "shown", "withheld")


def test_where_nothing_is_small_everything_is_shown() -> None:
    assert suppress([7, 40], 5) == Line((7, 40), ("shown", "shown"), 47, 5)
    assert suppress([0, 1], 1).values == (0, 1)
    assert suppress([], 5).total is None  # a total of nothing is a small count too


def test_a_total_that_would_tell_is_hidden() -> None:
    assert suppress([1], 5).total is None
    assert suppress([2, 2], 5).total is None
    with pytest.raises(UserError):
        suppress([-1], 5)


def told(joints: list[list[list[int]]], least: int = 5, **more: Any) -> Any:
    tables = {k: np.array(joint) for k, joint in enumerate(joints)}
    counts = {k: joint.sum(axis=1) + 2 for k, joint in tables.items()}
    return findings(counts, tables, [f"s{k}" for k in tables], ["a", "b"], least, **more)


def test_findings_hide_a_site_that_the_others_would_give_away() -> None:
    found = told([[[20, 9], [8, 20]], [[30, 6], [0, 30]], [[30, 1], [0, 30]]])
    assert [site.suspected for site in found.sites] == ["withheld", "6", "<5"]
    first, second, third = (site.estimate for site in found.sites)
    # in steps of 5%
    assert first.share == pytest.approx(0.3) and (first.low, first.high) == (0.15, 0.45)
    assert second.share == pytest.approx(6 / 66)
    assert third.share is None and third.high == 0.1  # 4 of 61, rounded up


def test_findings_name_pairs_without_counts_and_none_below_the_least() -> None:
    found = told([[[20, 9], [4, 20]]])
    assert found.sites[0].pairs == (("a", "b"),)
    assert told([[[20, 9], [4, 20]]], least=0).sites[0].pairs == (("a", "b"), ("b", "a"))


def test_findings_say_who_is_missing() -> None:
    counts, joints = {0: np.array([9, 3, 0])}, {0: np.diag([9, 3, 0])}
    found = findings(counts, joints, ["here", "away"], ["a", "b", "c"], 5)
    assert found.absent == ("away",)
    assert found.sites[0].scarce == ("b", "c")
    assert found.unheld == ("c",)
    # b has fewer than 5 images in all, so no row may have its total: all images
    # less the others would tell.
    assert [line.total for line in found.table] == [None, None, None]


def test_findings_of_nobody() -> None:
    found = findings({}, {}, ["away"], ["a", "b"], 5)
    assert not found.sites and found.images == 0 and found.overall.share is None


@settings(deadline=None)
@given(st.lists(st.tuples(*[st.integers(0, 40)] * 5), min_size=1, max_size=4), st.integers(0, 6))
def test_how_many_images_were_judged_is_never_put_too_low(
    sites: list[tuple[int, ...]], least: int
) -> None:
    joints = {k: np.array(cells[:4]).reshape(2, 2) for k, cells in enumerate(sites)}
    counts = {k: joints[k].sum(axis=1) + np.array([cells[4], 0]) for k, cells in enumerate(sites)}
    found = findings(counts, joints, [f"site {k}" for k in joints], ["x", "y"], least)
    for site in found.sites:
        assert joints[site.client].sum() <= judged_at_most(site, least) <= site.images


@pytest.mark.parametrize("least", [2, 5, 6])
def test_how_many_were_judged_is_the_most_that_the_shown_bound_allows(least: int) -> None:
    def site(judged: int) -> SiteFinding:
        return findings(
            {0: np.array([100, 0])}, {0: np.diag([judged, 0])}, ["a"], ["x", "y"], least
        ).sites[0]

    sites = {judged: site(judged) for judged in range(101)}
    for one in sites.values():
        assert judged_at_most(one, least) == max(
            m for m, other in sites.items() if other.estimate == one.estimate
        )
