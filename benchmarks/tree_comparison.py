"""Compares the definitions of two versions up to consistent renames; see `benchmarks.moved`."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Any

from benchmarks.definitions import (
    PACKAGE,
    Chain,
    Definition,
    Function,
    Scope,
    Tree,
    bind,
    lookup,
    parameters,
    significant,
)

LENGTH = 100  # of code in the report
FORWARDING = ("functools.partial", "dataclasses.replace")  # pass keywords on to the package


class Difference(Exception):  # noqa: N818
    """The first nodes that differ; None where one version has nothing."""

    def __init__(self, old: Any, new: Any) -> None:
        """Takes a node of each version."""
        self.sides = (old, new)
        super().__init__(old, new)


class Comparison:
    """Pairs the definitions of two versions, and compares each pair."""

    def __init__(self, old: Tree, new: Tree, files: dict[str, str], allowed: Sequence[str]) -> None:
        """`files` are the new paths of renamed files, by their old ones."""
        self.old, self.new, self.files, self.allowed = old, new, files, allowed
        self.partners: dict[str, str] = {}  # definitions: old path to new path
        self.pairs: dict[str, str] = {}  # names: old path to new path
        self.backs: dict[str, str] = {}  # names: new path to old path
        self.moves: dict[str, set[str]] = defaultdict(set)  # modules: old path to new paths
        self.votes: dict[tuple[str, str], set[str]] = defaultdict(set)  # uses, owner unknown
        self.targets: dict[str, set[str]] = defaultdict(set)  # new names that such a use may have
        self.uses: dict[tuple[str, str], set[str]] = defaultdict(set)  # of new names
        self.locals: dict[str, dict[str, str]] = defaultdict(dict)
        self.strict = False
        self._verdicts: dict[tuple[str, str], bool] = {}
        self._proposed: dict[str, str] = {}
        self._settled: set[str] = set()  # definitions that are the same
        self._current = ""
        self._pair_all()
        self.strict = True
        for a, b in self.pairs.items():
            x, y = a.rpartition(".")[2], b.rpartition(".")[2]
            if a.endswith(")"):
                self.targets[f"{a.rpartition('(')[2][:-1]}="].add(f"{b.rpartition('(')[2][:-1]}=")
            elif a.rpartition(".")[0] in old.classes:
                self.targets[f".{x}"].add(f".{y}")
                if a in old.binders and not isinstance(old.binders[a].node, Function):
                    self.targets[f"{x}="].add(f"{y}=")  # fields of data classes
        self.differences = {path: self._difference(path) for path in self.partners}

    def couples(self) -> Iterator[tuple[Definition, Definition]]:
        """The pairs of definitions."""
        for a, b in self.partners.items():
            yield self.old.definitions[a], self.new.definitions[b]

    def is_allowed(self, *paths: str) -> bool:
        """Whether --allow names a definition by one of its paths."""
        return any(f"{p}.".startswith(f"{name}.") for p in paths for name in self.allowed)

    def _pair_all(self) -> None:
        """Pairs in steps: by name in the file, by name anywhere, by shape.

        A home is the file, or the class of a method, in its new version.
        """
        steps: tuple[tuple[Callable[[Definition, str | None], Any], bool], ...] = (
            (lambda d, home: home and (home, d.name, d.shape), False),
            (lambda d, home: not d.owner and (d.name, d.shape), False),
            (lambda d, home: home and (home, d.name), False),
            (lambda d, home: not d.owner and d.names and d.name, False),
            (lambda d, home: home and (home, d.shape), True),
            (lambda d, home: d.names and (d.name, d.shape), False),
            (lambda d, home: d.names and not d.owner and d.shape, True),
            (lambda d, home: home and (home, d.shape), False),
        )
        for number, (key, unique) in enumerate((*steps[:5], *steps)):
            self._match(key, unique)
            if number >= 4:
                self._learn()

    def _match(self, key: Callable[[Definition, str | None], Any], unique: bool) -> None:
        """Pairs the definitions that are left and have equal keys."""
        groups: dict[Any, tuple[list[Definition], list[Definition]]] = defaultdict(lambda: ([], []))
        paired = set(self.partners.values())
        for definition in self.old.definitions.values():
            home = self.pairs.get(definition.owner) if definition.owner else None
            if not definition.owner:
                home = self.files.get(definition.file, definition.file)
            if definition.path not in self.partners and (value := key(definition, home)):
                groups[value][0].append(definition)
        for definition in self.new.definitions.values():
            value = key(definition, definition.owner or definition.file)
            if definition.path not in paired and value:
                groups[value][1].append(definition)
        for olds, news in groups.values():
            if not unique or len(olds) == len(news) == 1:
                for pair in zip(olds, news, strict=False):
                    self._join(*pair)

    def _join(self, a: Definition, b: Definition) -> None:
        self.partners[a.path] = b.path
        names = list(zip(a.names, b.names, strict=False))
        if isinstance(a.node, Function) and isinstance(b.node, Function):
            x, y = ([arg.arg for arg in parameters(d.node)] for d in (a, b))
            same = zip(x, y, strict=True) if len(x) == len(y) else ((n, n) for n in x if n in y)
            names += [(f"{a.names[0]}({m})", f"{b.names[0]}({n})") for m, n in same]
        if a.path in self.old.classes and b.path in self.new.classes:
            common = self.old.members[a.path] & self.new.members[b.path]
            names += [(f"{a.path}.{name}", f"{b.path}.{name}") for name in sorted(common)]
        for old, new in names:
            if old not in self.pairs and new not in self.backs:
                self.pairs[old], self.backs[new] = new, old
        self.moves[a.scopes[0].path].add(b.scopes[0].path)

    def _learn(self) -> None:
        """Pairs names that take each other's place in definitions that are otherwise the same."""
        size = -1
        while size < len(self.partners) + len(self.pairs):
            size = len(self.partners) + len(self.pairs)
            for path in [path for path in self.partners if path not in self._settled]:
                if self._difference(path) is None:
                    self._settled.add(path)
                    for a, b in self._proposed.items():
                        self.pairs[a], self.backs[b] = b, a
                        x, y = self.old.binders.get(a), self.new.binders.get(b)
                        if x and y and x.path not in self.partners:
                            self._join(x, y)

    def _difference(self, path: str) -> Difference | None:
        self._proposed, self._current = {}, path
        a, b = self.old.definitions[path], self.new.definitions[self.partners[path]]
        try:
            self._compare(a.node, b.node, a.scopes, b.scopes)
        except Difference as difference:
            return difference
        return None

    def _compare(self, a: Any, b: Any, left: Chain, right: Chain) -> None:
        try:
            self._compare_nodes(a, b, left, right)
        except Difference as difference:
            # Shows the whole expression, if it is short; an operator alone has no line.
            lost = any(
                side is not None and not hasattr(side, "lineno") for side in difference.sides
            )
            if lost or all(_is_short(node) for node in (a, b)):
                raise Difference(a, b) from None
            raise

    def _compare_nodes(self, a: Any, b: Any, left: Chain, right: Chain) -> None:
        chains = left, right
        if isinstance(a, list) and isinstance(b, list):
            self._compare_lists(significant(a), significant(b), *chains)
            return
        if all(isinstance(node, ast.Name | ast.Attribute) for node in (a, b)):
            paths = self.old.path(a, left), self.new.path(b, right)
            if any(paths):
                demand(all(paths) and self._is_path(*paths), a, b)
                return
        demand(type(a) is type(b), a, b)
        match a:
            case ast.Name():
                demand(self._is_name(a.id, b.id, *chains), a, b)
            case ast.Attribute():
                self._compare(a.value, b.value, *chains)
                owners = self.old.class_of(a.value, left), self.new.class_of(b.value, right)
                demand(self._is_attribute(a.attr, b.attr, *owners), a, b)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                self._compare_functions(a, b, *chains)
            case ast.ClassDef():
                self._compare_classes(a, b, *chains)
            case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                self._compare(a.generators[0].iter, b.generators[0].iter, *chains)
                x, y = (Scope(bind([g.target for g in node.generators])) for node in (a, b))
                self._compare(_inside(a), _inside(b), (*left, x), (*right, y))
            case ast.Call():
                self._compare([a.func, a.args], [b.func, b.args], *chains)
                demand(len(a.keywords) == len(b.keywords), a, b)
                callees = self.old.callee(a.func, left), self.new.callee(b.func, right)
                for k, n in zip(a.keywords, b.keywords, strict=True):
                    self._compare(k.value, n.value, *chains)
                    demand(self._is_keyword(k.arg, n.arg, *callees), k, n)
            case ast.Constant():
                demand(self._is_constant(a.value, b.value), a, b)
            case ast.AST():
                self._compare_fields(a, b, *chains)
            case _:
                demand(a == b, a, b)

    def _compare_lists(self, a: list[Any], b: list[Any], left: Chain, right: Chain) -> None:
        for x, y in zip_longest(a, b):
            try:
                self._compare(x, y, left, right)
            except Difference:
                if len(a) != len(b):  # something was put in or left out here
                    raise Difference(x, y) from None
                raise
        demand(len(a) == len(b), a, b)

    def _compare_fields(self, a: ast.AST, b: ast.AST, left: Chain, right: Chain) -> None:
        for field in a._fields:
            x, y = getattr(a, field, None), getattr(b, field, None)
            if field in ("name", "rest", "names", "kwd_attrs"):
                x, y = ([v] if isinstance(v, str) else v or [] for v in (x, y))
                demand(len(x) == len(y), a, b)
                for m, n in zip(x, y, strict=True):
                    if field == "kwd_attrs":
                        demand(self._vote(f".{m}", f".{n}"), a, b)
                    else:
                        demand(self._is_name(m, n, left, right), a, b)
            elif field not in ("ctx", "kind", "type_comment"):
                self._compare(x, y, left, right)

    def _compare_functions(self, a: Any, b: Any, left: Chain, right: Chain) -> None:
        if not isinstance(a, ast.Lambda):
            demand(self._is_name(a.name, b.name, left, right), a, b)
        self._compare(_outside(a), _outside(b), left, right)
        inner = (*left, self.old.open(a, left)), (*right, self.new.open(b, right))
        for x, y in zip(parameters(a), parameters(b), strict=True):
            demand(self._is_name(x.arg, y.arg, *inner), x, y)
        self._compare(a.body, b.body, *inner)

    def _compare_classes(self, a: Any, b: Any, left: Chain, right: Chain) -> None:
        demand(self._is_name(a.name, b.name, left, right), a, b)
        x, y = ([node.decorator_list, node.bases, node.keywords] for node in (a, b))
        self._compare(x, y, left, right)
        inner = (*left, self.old.open_class(a, left)), (*right, self.new.open_class(b, right))
        self._compare(a.body, b.body, *inner)

    def _is_path(self, a: str, b: str) -> bool:
        """Whether two paths, one in each version, are of the same thing."""
        if a in self.old.modules or b in self.new.modules:
            return b in self.new.modules and (a == b or b in self.moves[a])
        if not all(path.startswith(f"{PACKAGE}.") for path in (a, b)):
            return a == b
        if a in self.pairs or b in self.backs:
            return self._note(a, b, self.pairs.get(a) == b)
        if a in self._proposed or b in self._proposed.values():
            return self._proposed.get(a) == b
        if a not in self.old.names and b not in self.new.names:
            return a == b
        kinds = [
            type(tree.binders[path].node) if path in tree.binders else path in tree.names
            for tree, path in ((self.old, a), (self.new, b))
        ]
        if self.strict or False in kinds or kinds[0] != kinds[1]:
            return False
        self._proposed[a] = b
        return True

    def _is_name(self, a: str, b: str, left: Chain, right: Chain) -> bool:
        paths = self.old.path(ast.Name(a), left), self.new.path(ast.Name(b), right)
        if any(paths):
            return all(paths) and self._is_path(*paths)
        x, y = lookup(a, left), lookup(b, right)
        if x is None or y is None or x[0] != y[0]:
            return False
        if x[1].path and y[1].path:
            return self._is_attribute(a, b, x[1].path, y[1].path)
        if self.strict and a != b:
            self.locals[self._current][a] = b
        return x[1].renames.setdefault(a, b) == b and y[1].renames.setdefault(b, a) == a

    def _is_attribute(self, a: str, b: str, owner: str, other: str) -> bool:
        if a != b and (a.endswith("__") or b.endswith("__")):
            return False  # Python itself calls these
        x, y = self.old.member(owner, a), self.new.member(other, b)
        return self._is_path(x, y) if x and y else self._vote(f".{a}", f".{b}")

    def _is_keyword(self, a: str | None, b: str | None, callee: str, other: str) -> bool:
        if a is None or b is None:
            return a is b
        x, y = self.old.parameter(callee, a), self.new.parameter(other, b)
        if x in self.old.names and y in self.new.names:
            return self._is_path(x, y)
        if callee and not callee.startswith(f"{PACKAGE}.") and callee not in FORWARDING:
            return a == b
        return self._vote(f"{a}=", f"{b}=")

    def _is_constant(self, a: Any, b: Any) -> bool:
        if isinstance(a, str) and isinstance(b, str) and a.startswith(f"{PACKAGE}."):
            x, y = a.replace(":", "."), b.replace(":", ".")
            if x in self.old.modules or x in self.old.names:
                return (":" in a) == (":" in b) and self._is_path(x, y)
        return repr(a) == repr(b)

    def _vote(self, a: str, b: str) -> bool:
        """Whether a name whose owner is unknown may have become another one."""
        if not self.strict:
            self.votes[a, b].add(self._current)
            return True
        if (a, b) not in self._verdicts:
            targets = self.targets
            rivals = [
                (x, y) for x, y in self.votes
                if (x == a) != (y == b) and y in targets.get(x, {x})
            ]  # fmt: skip
            mine, *others = ((len(self.votes[x, y]), x == y) for x, y in [(a, b), *rivals])
            usual = b in targets.get(a, {a}) and all(other < mine for other in others)
            self._verdicts[a, b] = usual or f"{a}:{b}" in self.allowed
        return self._note(a, b, self._verdicts[a, b])

    def _note(self, a: str, b: str, same: bool) -> bool:
        if self.strict and same and last(a) != last(b):
            self.uses[a, b].add(self._current)
        return same


def demand(same: bool, a: Any, b: Any) -> None:
    """Raises the difference of two nodes unless they are the same."""
    if not same:
        raise Difference(a, b)


def last(path: str) -> str:
    """The last name of a path, without its module or class."""
    return path.rpartition(".")[2]


def _is_short(node: Any) -> bool:
    is_code = isinstance(node, ast.expr | ast.stmt | ast.keyword) and not hasattr(node, "body")
    return is_code and len(ast.unparse(node)) <= LENGTH


def _outside(function: Any) -> list[Any]:
    """What Python evaluates before it enters a function, and how many parameters there are."""
    a = function.args
    counts = [len(a.posonlyargs), len(a.args), bool(a.vararg), len(a.kwonlyargs), bool(a.kwarg)]
    annotations = [arg.annotation for arg in parameters(function)]
    decorators, returns = (getattr(function, n, None) for n in ("decorator_list", "returns"))
    return [decorators or [], counts, a.defaults, a.kw_defaults, annotations, returns]


def _inside(comprehension: Any) -> list[Any]:
    """What Python evaluates for each item: all but the first iterable."""
    clauses = [[g.target, g.ifs, g.is_async] for g in comprehension.generators]
    results = [getattr(comprehension, name, None) for name in ("elt", "key", "value")]
    return [clauses, [g.iter for g in comprehension.generators[1:]], results]
