"""Checks that moved, split or renamed files of the package still hold the same code.

python -m benchmarks.moved BASE [--under PATH] [--allow NAME …] [--locals]

It compares syntax trees, so it also covers code that cannot run on this machine. A definition is a
function, a class, a method, an attribute or another statement of a module. Two definitions are the
same if they differ only in formatting, comments, docstrings, imports and consistent new names:

- A local name has one new name in its scope.
- A name of the package follows its definition from the old module to the new one.
- So does an attribute or a keyword, if the code tells its class or function. Otherwise the new name
  must belong to some renamed attribute, and be the usual choice in the whole package.
- Names from elsewhere (builtins, torch, …) do not change.

--allow takes a definition (fednoro.engine.eager.EagerEngine.site), the prefix of several
(fednoro.experiment.simulation), or a name whose class is unknown (.size:.width, or size=:width=).
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.definitions import PACKAGE, Tree
from benchmarks.tree_comparison import LENGTH, Comparison, Difference, last


def git(*arguments: str) -> str:
    """The output of a git command."""
    command = ["git", "-c", "core.quotePath=off", *arguments]
    return subprocess.run(command, check=True, capture_output=True, encoding="utf-8").stdout


def compare(base: str, allowed: Sequence[str] = ()) -> Comparison:
    """Compares a revision with the working tree of the current folder."""
    listing = git("ls-tree", "-r", "--name-only", base, PACKAGE).splitlines()
    old = {path: git("show", f"{base}:{path}") for path in listing if path.endswith(".py")}
    paths = sorted(Path(PACKAGE).rglob("*.py"))
    new = {path.as_posix(): path.read_text(encoding="utf-8") for path in paths}
    status = git("diff", "--find-renames=40%", "--name-status", base, "--", PACKAGE)
    rows = (line.split("\t") for line in status.splitlines() if line.startswith("R"))
    files = {source: target for _, source, target in rows}
    return Comparison(Tree(old), Tree(new), files, allowed)


def show_moves(comparison: Comparison, under: Path) -> Iterator[str]:
    """Lists the modules that were moved or split, with the number of definitions in each part."""
    rows: dict[str, Counter[str]] = defaultdict(Counter)
    for source, target in comparison.files.items():
        rows[source][target] += 0  # so that modules without definitions are listed too
    for a, b in comparison.couples():
        rows[a.file][b.file] += not a.owner
    for source, targets in sorted(rows.items()):
        parts = {target: n for target, n in targets.items() if n or len(targets) == 1}
        if any(t != source and Path(t).is_relative_to(under) for t in parts):
            counts = (f"{t} ({n})" if len(parts) > 1 else t for t, n in parts.items())
            yield f"  {source} → {', '.join(counts)}"


def show_renames(comparison: Comparison, shown: set[str]) -> Iterator[str]:
    """Lists the new names of the package, with the number of definitions that use them."""
    attributes: dict[str, set[str]] = defaultdict(set)
    for a, b in sorted(comparison.pairs.items() | comparison.uses.keys()):
        users = comparison.uses[a, b] & shown
        if last(a) == last(b) or not users:
            continue
        if a in comparison.old.binders and not comparison.old.binders[a].owner:
            yield f"  {a} → {b}  ({len(users)})"
        else:
            attributes[f"{last(a)} → {last(b)}"] |= users
    for names, users in sorted(attributes.items()):
        yield f"  {names}  ({len(users)})"


def show_difference(comparison: Comparison, path: str, difference: Difference) -> str:
    """Names a definition that differs, and shows the code of both versions."""
    a = comparison.old.definitions[path]
    b = comparison.new.definitions[comparison.partners[path]]
    lines = [f"  differs  {b.path}" + (f" (was {a.path})" if a.path != b.path else "")]
    for sign, definition, node in zip("-+", (a, b), difference.sides, strict=True):
        line = getattr(node, "lineno", definition.node.lineno)
        code = " ".join(ast.unparse(node).split()) if isinstance(node, ast.AST) else "(nothing)"
        code = code if len(code) <= LENGTH else f"{code[: LENGTH - 1]}…"
        lines.append(f"    {sign} {definition.file}:{line}  {code}")
    return "\n".join(lines)


def report(comparison: Comparison, under: Path, with_locals: bool) -> tuple[list[str], bool]:
    """The lines of the report, and whether everything is the same or allowed."""
    couples = [(a, b) for a, b in comparison.couples() if Path(b.file).is_relative_to(under)]
    modules = {a.scopes[0].path for a, _ in couples}  # whose other definitions may be gone
    gone = [
        a for a in comparison.old.definitions.values()
        if a.path not in comparison.partners
        and (a.scopes[0].path in modules or Path(a.file).is_relative_to(under))
    ]  # fmt: skip
    paired = set(comparison.partners.values())
    new = [
        b for b in comparison.new.definitions.values()
        if b.path not in paired and Path(b.file).is_relative_to(under)
    ]  # fmt: skip
    shown = {a.path for a, _ in couples}
    differing = {a.path: d for a, _ in couples if (d := comparison.differences[a.path])}
    entries: list[tuple[tuple[str, ...], str]] = [
        ((path, comparison.partners[path]), show_difference(comparison, path, difference))
        for path, difference in differing.items()
    ]
    entries += [((d.path,), f"  new      {d.path}\n    + {d.place}") for d in new]
    entries += [((d.path,), f"  gone     {d.path}\n    - {d.place}") for d in gone]
    open_ = [text for paths, text in entries if not comparison.is_allowed(*paths)]
    sections = {
        "Modules that moved": show_moves(comparison, under),
        "New names (definitions that use them)": show_renames(comparison, shown),
        "New names of locals": (
            f"  {comparison.partners[path]}: {', '.join(f'{a} → {b}' for a, b in names.items())}"
            for path, names in comparison.locals.items()
            if with_locals and path in shown
        ),
        "Definitions that are not the same": iter(open_),
    }
    lines = []
    for title, rows in ((title, list(rows)) for title, rows in sections.items()):
        lines += [title, *rows, ""] if rows else []
    same, total = len(couples) - len(differing), len(couples) + len(new) + len(gone)
    ending = (
        f"; {len(entries) - len(open_)} of these are allowed" if len(open_) < len(entries) else ""
    )
    lines.append(
        f"{same} of {total} definitions are the same; {len(differing)} differ, {len(new)} are "
        f"new, {len(gone)} are gone{ending}"
    )
    return lines, not open_


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the report; 1 if a definition is not the same and is not allowed to be."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("base", metavar="BASE", help="the revision to compare the files with")
    parser.add_argument("--under", type=Path, default=Path(PACKAGE), metavar="PATH")
    parser.add_argument("--allow", nargs="+", default=[], action="extend", metavar="NAME")
    parser.add_argument("--locals", action="store_true", help="list new names of locals too")
    options = parser.parse_args(arguments)
    lines, is_same = report(compare(options.base, options.allow), options.under, options.locals)
    print("\n".join(lines))
    return 0 if is_same else 1


if __name__ == "__main__":
    sys.exit(main())
