"""How numbers, names and lists are put into words, in every page, message and table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def percent(share: float) -> str:
    """A share in whole percent."""
    return f"{100 * share:.0f}%"


def megabytes(count: int) -> str:
    """Bytes, to a tenth of a megabyte."""
    return f"{count / 1e6:,.1f} MB"


def memory_size(count: float) -> str:
    """Bytes in megabytes, or in gigabytes where there are many."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def quantity(number: int, thing: str, things: str = "") -> str:
    """A number with its noun: 1 client, 2 clients."""
    return f"{number:,} {thing if number == 1 else things or thing + 's'}"


def is_are(number: int) -> str:
    return "is" if number == 1 else "are"


def join_words(words: Sequence[str], most: int = 12) -> str:
    """A list as it is said: a, b and c; what is beyond `most` is counted."""
    words = list(words)
    if len(words) > most:
        return f"{', '.join(words[:most])} and {len(words) - most} more"
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else "".join(words)


def first_names(names: Iterable[str], most: int = 6) -> str:
    """The first names of a long list, divided by commas; the others are counted."""
    all_names = list(names)
    others = len(all_names) - most
    return ", ".join(all_names[:most]) + (f" and {others} more" if others > 0 else "")


def one_line(text: str) -> str:
    """A name without line ends, and without what steers a terminal or turns writing round."""
    return "".join(char if char.isprintable() else "\ufffd" for char in text)
