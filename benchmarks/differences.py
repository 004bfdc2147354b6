"""Compares two folders byte for byte, apart from masked places such as durations."""

from __future__ import annotations

import csv
import re
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import zip_longest
from pathlib import Path

DURATION = r"(?:\d+ ms|\d+\.\d s|\d+ min|\d+ h \d+ min)"
CELL = r'(?:"(?:[^"]|"")*"|[^",\n]*)'
BEFORE, WIDTH = 50, 130  # characters of a line: before the first that differs, and in all


@dataclass(frozen=True)
class Mask:
    """Places in files that may differ."""

    name: str
    files: tuple[str, ...]  # patterns of paths; * also matches /
    pattern: str  # each match's last group is masked; "" masks the whole file
    why: str
    within: str = ""  # mask only inside matches of this pattern
    column: str = ""  # mask this column of a CSV file instead
    drop: bool = False  # the place may be missing on one side

    def matches(self, file: str) -> bool:
        """Whether the mask applies to a file of this path."""
        return any(fnmatchcase(file, pattern) for pattern in self.files)

    @property
    def covers_file(self) -> bool:
        """Whether it masks whole files."""
        return not (self.pattern or self.column)

    @property
    def shown(self) -> str:
        """What is masked, for people."""
        if self.covers_file:
            return "the whole file"
        place = f"column {self.column}" if self.column else self.pattern
        return f"{place}   within {self.within}" if self.within else place

    def apply(self, text: str) -> tuple[str, int]:
        """The text with the mask's name in each place, and the number of places."""
        parts, last, count = list[str](), 0, 0
        for start, end in self._spans(text):
            parts += [text[last:start], "" if self.drop else f"<{self.name}>"]
            last, count = end, count + 1
        return "".join([*parts, text[last:]]), count

    def _spans(self, text: str) -> Iterator[tuple[int, int]]:
        pattern, regions = self.pattern, [(0, len(text))]
        if self.column:
            head = text.partition("\n")[0]
            columns = next(csv.reader([head]), [])
            if self.column not in columns:
                return
            pattern = rf"^(?:{CELL},){{{columns.index(self.column)}}}({CELL})"
            regions = [(len(head) + 1, len(text))]
        if self.within:
            regions = [match.span() for match in re.finditer(self.within, text, re.DOTALL)]
        for start, end in regions:
            for match in re.compile(pattern, re.MULTILINE).finditer(text, start, end):
                yield match.span(match.lastindex or 0)


ARCHIVES = Mask(
    "archives",
    ("*.npz", "*.zip"),
    "dates of members",
    "members are compared, not the time of writing",
)  # compared by members, not by a pattern
CONSOLE = ("*.stdout",)
MASKS = (
    Mask("ETA", CONSOLE, r"  ETA (\d[\d hmins]*)$", "an estimate from the rounds' durations"),
    Mask("duration", CONSOLE, r"^BACC  best .* in (\d+\.\d s)$", "how long the rounds took"),
    Mask(
        "progress",
        CONSOLE,
        r"^(.+ …)(?: \d+(?:/\d+)?)?\n((?:\1 \d+(?:/\d+)?\n)+)",
        "progress is repeated every 10 s, so the number of lines depends on the speed",
        drop=True,
    ),
    Mask(
        "running",
        CONSOLE,
        r"^(running \S+: .*\n)",
        "a bench says every 30 s what is running",
        drop=True,
    ),
    Mask("seconds", ("*.json", "*.jsonl"), r'"seconds": ([\d.e+-]+)', "durations of rounds"),
    Mask("seconds", ("*/table[0-9].csv",), "", "durations of runs", column="seconds"),
    Mask(
        "duration",
        ("*.html",),
        rf"<span>\d+ rounds? in ({DURATION})</span>",
        "how long the rounds took",
    ),
    Mask(
        "bars of seconds",
        ("*.html",),
        r'<rect x="[\d.]+" y="\d+" width="([\d.]+)"|<text x="([\d.]+)" y="\d+" class="tick"'
        rf'|(?<![\w.])({DURATION})(?!\w)|<td class="n">(\d+\.\d\d+)</td>',
        "a figure of durations",
        within='<figure id="time">.*?</figure>',
    ),
    Mask("figure of seconds", ("*/figures/time.*",), "", "a drawing of durations"),
    Mask(
        "log size",
        ("*/checkpoints/round-*.safetensors",),
        r'\\"rounds\.jsonl\\": (\d+)|\\"checksum\\": \\"([0-9a-f]{64})\\"',
        "rounds.jsonl holds durations; the checksum covers its size, and the tensors are compared",
    ),
    Mask(
        "process",
        ("*/environment.json", "*/report.html"),
        r'--runtime-api-address(?:",\s+"| )127\.0\.0\.1:(\d+)|--token(?:",\s+"| )([0-9a-f]+)'
        r'|--parent-pid(?:",\s+"| )(\d+)',
        "Flower chooses a port and a token, the system a process id",
    ),
    Mask("Flower's run", ("*/flower.json",), r'^ "run": "([0-9a-f]{32})"', "a random id"),
    Mask("Flower's run", CONSOLE, r"^Flower's run (\d+) in ", "a random id"),
    ARCHIVES,
)


@dataclass(frozen=True)
class Difference:
    """A file that differs, and where."""

    file: str
    text: str


class Comparison:
    """Compares files of two sides, and counts how often each mask applied."""

    def __init__(self, masks: Sequence[Mask] = MASKS) -> None:
        self.masks = masks
        self.counts = Counter[Mask]()

    def compare(self, base: Path, tree: Path, files: Iterable[str]) -> list[Difference]:
        """Differences between the files of these relative paths."""
        differences = []
        for file in files:
            text = self._compare(base / file, tree / file, file)
            if text:
                differences.append(Difference(file, text))
        return differences

    def _compare(self, base: Path, tree: Path, file: str) -> str:
        """Where the two files differ, or an empty string."""
        if not (base.exists() and tree.exists()):
            return f"is only in {'tree' if tree.exists() else 'base'}"
        contents = base.read_bytes(), tree.read_bytes()
        if contents[0] == contents[1]:
            return ""
        masks = [mask for mask in self.masks if mask.matches(file) and mask != ARCHIVES]
        for mask in masks:
            if mask.covers_file:
                self.counts[mask] += 1
                return ""
        if ARCHIVES.matches(file) and zipfile.is_zipfile(base) and zipfile.is_zipfile(tree):
            return self._compare_members(base, tree)
        (base_text, base_rest), (tree_text, tree_rest) = (_parts(file, raw) for raw in contents)
        base_text, tree_text = (self._masked(text, masks) for text in (base_text, tree_text))
        if base_text != tree_text:
            return first_line(base_text, tree_text)
        return first_byte(base_rest, tree_rest)

    def _masked(self, text: str, masks: Sequence[Mask]) -> str:
        for mask in masks:
            text, count = mask.apply(text)
            self.counts[mask] += count
        return text

    def _compare_members(self, base: Path, tree: Path) -> str:
        with zipfile.ZipFile(base) as one, zipfile.ZipFile(tree) as two:
            if one.namelist() != two.namelist():
                return first_line("\n".join(one.namelist()), "\n".join(two.namelist()))
            for name in one.namelist():
                if where := first_byte(one.read(name), two.read(name)):
                    return f"member {name}, {where}"
        self.counts[ARCHIVES] += 1
        return ""


def _parts(file: str, raw: bytes) -> tuple[str, bytes]:
    """A file's text, which masks apply to, and its remaining bytes."""
    if file.endswith(".safetensors"):
        end = 8 + int.from_bytes(raw[:8], "little")
        return raw[8:end].decode("utf-8", "replace").rstrip(" "), raw[end:]  # padded to 8 bytes
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        return "", raw
    return ("", raw) if "\0" in text else (text, b"")


def first_line(base: str, tree: str) -> str:
    """The first line that differs, from each side; an empty string if none does."""
    pairs = zip_longest(base.split("\n"), tree.split("\n"))
    for number, (one, two) in enumerate(pairs, 1):
        if one != two:
            place = _first(one or "", two or "")
            return f"line {number}\n  base: {_cut(one, place)}\n  tree: {_cut(two, place)}"
    return ""


def first_byte(base: bytes, tree: bytes) -> str:
    """The first byte that differs, and the sizes; an empty string if none does."""
    if base == tree:
        return ""
    sizes = "" if len(base) == len(tree) else f"; sizes {len(base)} in base, {len(tree)} in tree"
    return f"byte {_first(base, tree)} of its data{sizes}"


def _first(base: Sequence[object], tree: Sequence[object]) -> int:
    """Where two sequences begin to differ."""
    pairs = enumerate(zip(base, tree, strict=False))
    return next((i for i, (one, two) in pairs if one != two), min(len(base), len(tree)))


def _cut(line: str | None, place: int) -> str:
    """The part of a line around the first character that differs."""
    if line is None:
        return "(no such line)"
    start = max(0, place - BEFORE) if len(line) > WIDTH else 0
    end = start + WIDTH
    return f"{'…' if start else ''}{line[start:end]}{'…' if len(line) > end else ''}"
