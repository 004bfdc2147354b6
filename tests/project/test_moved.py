"""The check of moved code: what it takes for the same, and what it must find."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from benchmarks.moved import main

STACK = '''
"""Trains several clients at a time."""

import numpy as np

from fednoro.shapes import SIZE, Shape, area

LIMIT, FLOOR = 12, 3


class Stack:
    """Several networks."""

    width: int = 4

    def __init__(self, shape: Shape, most: int = 2) -> None:
        self.shape, self.most = shape, most

    @property
    def room(self) -> int:
        """How many clients fit."""
        return self.most * self.width

    def train(self, losses: list[float], rate: float = 0.1) -> float:
        """Trains them."""
        total, steps = 0.0, 1
        for loss in losses:
            total += loss * rate
            steps = steps + 1
        lowest = min(losses)
        print(f"{steps} steps " f"of {self.room}")
        return total / steps - lowest + np.mean(losses)


def plan(stack: Stack, sizes: dict[str, int]) -> int:
    """Plans a round."""
    small = {name: size for name, size in sizes.items() if size < LIMIT}
    wide = sorted(small, key=lambda name: small[name])
    return area(stack.shape, scale=2) + len(wide) + stack.width - SIZE
'''
SHAPES = '''
"""Shapes."""

from dataclasses import dataclass

SIZE = 64
WHERE = "fednoro.stack:Stack"


@dataclass(frozen=True)
class Shape:
    height: int
    depth: int = 1


def area(shape: Shape, scale: int) -> int:
    return shape.height * shape.depth * scale


def square(side: int) -> Shape:
    return Shape(height=side, depth=side)
'''
FILES = {"stack.py": STACK, "shapes.py": SHAPES}
Check = Callable[..., tuple[int, str]]


def write(files: Mapping[str, str]) -> None:
    for name, text in files.items():
        path = Path("fednoro", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


@pytest.fixture
def check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Check:
    """Commits FILES, replaces them by others, and returns the exit code and the report."""
    monkeypatch.chdir(tmp_path)
    write({"__init__.py": "", **FILES})
    who = ["-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "Add"]):
        subprocess.run(["git", *who, *command], check=True)

    def run(files: Mapping[str, str], *options: str) -> tuple[int, str]:
        for name in FILES.keys() - files.keys():
            Path("fednoro", name).unlink(missing_ok=True)
        write(files)
        subprocess.run(["git", "add", "-A", "-N", "."], check=True)
        code = main(["HEAD", *options])
        return code, capsys.readouterr().out

    return run


def replaced(text: str, *changes: tuple[str, str]) -> str:
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    return text


def in_cuda(text: str) -> str:
    """The text with the imports that it needs after both modules have moved."""
    return replaced(text, ("fednoro.shapes", "fednoro.core.shape"))


MOVED_SHAPES = replaced(SHAPES, ("fednoro.stack:", "fednoro.cuda.stacks:"))


def test_unchanged_files_are_the_same(check: Check) -> None:
    code, out = check(FILES)
    assert code == 0
    assert out == "15 of 15 definitions are the same; 0 differ, 0 are new, 0 are gone\n"


def test_a_moved_file_with_renamed_locals_and_another_layout_is_the_same(check: Check) -> None:
    text = replaced(
        in_cuda(STACK),
        ("total", "loss_sum"), ("steps", "count"), ("lowest", "least"),
        ("for loss in", "for one in"), ("+= loss *", "+= one *"), ("small", "few"),
        ("import numpy as np", "import numpy"),
        ("np.mean(losses)", "numpy.mean(\n            losses,\n        )  # of all"),
        ('"""Trains them."""', '"""Trains all of them\n\n        at once."""'),
        ('count} count " f"of', 'count} steps "\n            f"of'),
        ("LIMIT, FLOOR = 12, 3", "LIMIT = 12\nFLOOR = 3"), ("shape: Shape", 'shape: "Shape"'),
    )  # fmt: skip
    code, out = check({"cuda/stacks.py": text, "core/shape.py": MOVED_SHAPES}, "--locals")
    assert code == 0, out
    assert "  fednoro/stack.py → fednoro/cuda/stacks.py\n" in out
    assert "  fednoro/shapes.py → fednoro/core/shape.py\n" in out
    assert "fednoro.cuda.stacks.plan: small → few\n" in out
    assert "total → loss_sum" in out


def test_a_module_may_be_reached_by_its_name_or_imported_late(check: Check) -> None:
    text = replaced(
        STACK,
        ("from fednoro.shapes import SIZE, Shape, area", "from fednoro.core import shape as forms"),
        ("shape: Shape", "shape: forms.Shape"),
        ("    small =", "    from fednoro.core.shape import SIZE\n\n    small ="),
        ("area(stack", "forms.area(stack"),
    )
    code, out = check({"cuda/stacks.py": text, "core/shape.py": MOVED_SHAPES})
    assert code == 0, out


def test_a_split_module_is_the_same(check: Check) -> None:
    text, plan = STACK.split("\n\n\ndef plan")
    files = {
        "stack.py": text,
        "plan.py": "from fednoro.shapes import SIZE, area\nfrom fednoro.stack import LIMIT, "
        f"Stack\n\n\ndef plan{plan}",
        "shapes.py": SHAPES,
    }
    code, out = check(files)
    assert code == 0, out
    assert "  fednoro/stack.py → fednoro/stack.py (3), fednoro/plan.py (1)\n" in out


def test_new_names_that_are_used_everywhere_are_listed_once(check: Check) -> None:
    stack = replaced(
        STACK,
        ("area", "surface"), ("scale=", "factor="), ("width", "breadth"), ("SIZE", "PIXELS"),
        ("most", "limit"), ("class Stack", "class Pile"), ("stack: Stack", "pile: Pile"),
        ("stack.", "pile."),
    )  # fmt: skip
    shapes = replaced(
        SHAPES,
        ("def area", "def surface"), ("scale", "factor"), ("SIZE", "PIXELS"), ("height", "rows"),
        ("stack:Stack", "stack:Pile"),
    )  # fmt: skip
    code, out = check({"stack.py": stack, "shapes.py": shapes})
    assert code == 0, out
    assert out.count("fednoro.shapes.area → fednoro.shapes.surface") == 1
    assert "  fednoro.stack.Stack → fednoro.stack.Pile  (3)\n" in out
    assert "  width → breadth  (4)\n" in out


@pytest.mark.parametrize(
    ("old", "new", "where"),
    [
        ("LIMIT, FLOOR = 12, 3", "LIMIT, FLOOR = 12, 4", "FLOOR"),
        ("total / steps", "steps / total", "Stack.train"),
        ("steps + 1", "steps - 1", "Stack.train"),
        ("rate: float = 0.1", "rate: float = 0.2", "Stack.train"),
        ("rate: float", "rate: int", "Stack.train"),
        ('steps " f"of', 'rounds " f"of', "Stack.train"),
        ("            steps = steps + 1\n", "", "Stack.train"),
        ("min(losses)", "max(losses)", "Stack.train"),
        ("np.mean", "np.median", "Stack.train"),
        ("    @property\n", "", "Stack.room"),
        ("self.most * self.width", "self.most * self.most", "Stack.room"),
        ("= shape, most", "= most, shape", "Stack.__init__"),
        ("def __init__", "def initialise", "Stack.initialise"),
        ("small[name]", "sizes[name]", "plan"),
        ("size < LIMIT", "size <= LIMIT", "plan"),
        ("size < LIMIT", "size < SIZE", "plan"),
        ("sizes.items()", "sizes.copy()", "plan"),
        ("+ len(wide)", "+ len(small)", "plan"),
        ("stack.width", "stack.most", "plan"),
        ("scale=2", "factor=2", "plan"),
        ("wide = sorted", "size = sorted", "plan"),
        ("import area", "import square as area", "plan"),
    ],
)  # fmt: skip
def test_a_change_is_found_and_named(check: Check, old: str, new: str, where: str) -> None:
    source = replaced(STACK, ("SIZE, Shape, area", "SIZE, Shape\nfrom fednoro.shapes import area"))
    text = replaced(in_cuda(source), (old, new))
    code, out = check({"cuda/stacks.py": text, "core/shape.py": MOVED_SHAPES})
    assert code == 1
    assert [line.split()[1] for line in out.splitlines() if line.startswith("  differs")] == [
        f"fednoro.cuda.stacks.{where}"
    ]
    assert "fednoro/stack.py:" in out


def test_the_report_shows_the_code_of_both_versions(check: Check) -> None:
    code, out = check({**FILES, "stack.py": replaced(STACK, ("steps + 1", "steps - 1"))})
    assert code == 1
    assert "    - fednoro/stack.py:29  steps = steps + 1\n" in out
    assert "    + fednoro/stack.py:29  steps = steps - 1\n" in out
    assert out.endswith("14 of 15 definitions are the same; 1 differ, 0 are new, 0 are gone\n")


@pytest.mark.parametrize(
    ("old", "new", "where"),
    [
        ("class Shape:\n    height: int\n    depth: int = 1",
         "class Shape:\n    depth: int\n    height: int = 1", "Shape"),
        ("frozen=True", "frozen=False", "Shape"),
        ("fednoro.stack:Stack", "fednoro.stack:Heap", "WHERE"),
        ("height=side, depth=side", "depth=side, height=side", "square"),
        ("return shape.height *", "return shape.depth *", "area"),
    ],
)  # fmt: skip
def test_changes_of_data_classes_are_found(check: Check, old: str, new: str, where: str) -> None:
    code, out = check({**FILES, "shapes.py": replaced(SHAPES, (old, new))})
    assert code == 1
    assert f"  differs  fednoro.shapes.{where}\n" in out


def test_a_function_split_in_two_is_reported(check: Check) -> None:
    text = replaced(
        STACK,
        (
            "    small =",
            "    return _count(stack, sizes)\n\n\ndef _count(stack: Stack, sizes: "
            "dict[str, int]) -> int:\n    small =",
        ),
    )
    code, out = check({**FILES, "stack.py": text})
    assert code == 1
    assert "  differs  fednoro.stack.plan\n" in out
    assert "  new      fednoro.stack._count\n" in out
    code, out = check(
        {**FILES, "stack.py": text}, "--allow", "fednoro.stack.plan", "fednoro.stack._count"
    )
    assert code == 0
    assert out.endswith("1 differ, 1 are new, 0 are gone; 2 of these are allowed\n")


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ([("self.width", "self.breadth"), ("    width:", "    breadth:")], "plan"),
        ([("            total +=", "            sum_ +="), ("total, ", "sum_, ")], "Stack.train"),
        ([("self.most =", "self.limit =")], "Stack.room"),
    ],
)
def test_a_new_name_that_is_not_used_everywhere_is_found(
    check: Check, changes: list[tuple[str, str]], where: str
) -> None:
    code, out = check({**FILES, "stack.py": replaced(STACK, *changes)})
    assert code == 1
    assert f"  differs  fednoro.stack.{where}\n" in out


def test_a_use_of_an_attribute_whose_class_is_unknown_follows_the_usual_name(check: Check) -> None:
    text = replaced(STACK, ("stack: Stack, sizes", "stack, sizes"), ("width", "breadth"))
    git = ["git", "-c", "user.name=A", "-c", "user.email=a@example.org", "commit", "-qam", "Change"]
    write({"stack.py": replaced(STACK, ("stack: Stack, sizes", "stack, sizes"))})
    subprocess.run(git, check=True)
    assert check({**FILES, "stack.py": text})[0] == 0
    missed = replaced(text, ("stack.breadth", "stack.width"))
    code, out = check({**FILES, "stack.py": missed})
    assert code == 1
    assert "len(wide) + stack.width - SIZE\n" in out
    assert check({**FILES, "stack.py": missed}, "--allow", ".width:.width")[0] == 0


def test_definitions_that_are_gone_are_reported(check: Check) -> None:
    text = SHAPES[: SHAPES.index("\n\ndef square")]
    code, out = check({**FILES, "shapes.py": text})
    assert code == 1
    assert "  gone     fednoro.shapes.square\n    - fednoro/shapes.py:20\n" in out


def test_the_report_can_be_restricted_to_a_folder(check: Check) -> None:
    files = {
        "cuda/stacks.py": in_cuda(STACK),
        "core/shape.py": replaced(MOVED_SHAPES, ("SIZE = 64", "SIZE = 65")),
    }
    assert check(files)[0] == 1
    code, out = check(files, "--under", "fednoro/cuda")
    assert code == 0, out
    assert "shapes.py" not in out
    assert out.endswith("8 of 8 definitions are the same; 0 differ, 0 are new, 0 are gone\n")
