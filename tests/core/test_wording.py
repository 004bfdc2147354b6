"""Numbers, names and lists in words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fednoro.core import wording


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (wording.percent(0.126), "13%"),
        (wording.megabytes(1_234_567_890), "1,234.6 MB"),
        (wording.memory_size(999e6), "999 MB"),
        (wording.memory_size(1.25e9), "1.2 GB"),
        (wording.quantity(1, "client"), "1 client"),
        (wording.quantity(1200, "client"), "1,200 clients"),
        (wording.quantity(2, "class", "classes"), "2 classes"),
        (wording.is_are(1) + wording.is_are(2), "isare"),
        (wording.join_words([]), ""),
        (wording.join_words(["a"]), "a"),
        (wording.join_words(["a", "b", "c"]), "a, b and c"),
        (wording.join_words(["a", "b", "c"], 2), "a, b and 1 more"),
        (wording.first_names(["a", "b"], 2), "a, b"),
        (wording.first_names(["a", "b", "c", "d"], 2), "a, b and 2 more"),
        (wording.one_line("a\nb\x1b[31m\u202e"), "a\ufffdb\ufffd[31m\ufffd"),
    ],
)
def test_words_are_those_that_people_read(text: str, expected: str) -> None:
    assert text == expected


@given(st.text())
def test_a_name_on_one_line_can_be_printed_and_keeps_its_length(text: str) -> None:
    line = wording.one_line(text)
    assert len(line) == len(text) and (not line or line.isprintable())


@given(st.lists(st.text(min_size=1)), st.integers(1, 20))
def test_no_name_of_a_list_is_lost_without_being_counted(names: list[str], most: int) -> None:
    text = wording.first_names(names, most)
    assert text.startswith(", ".join(names[:most]))
    assert (f" and {len(names) - most} more" in text) == (len(names) > most) or "more" in str(names)
