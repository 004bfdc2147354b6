"""One version of the package as definitions, and what each name in them refers to.

`benchmarks.moved` compares two such versions. Nothing here imports the package.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

PACKAGE = "fednoro"
IDENTIFIERS = {"id", "attr", "arg", "name", "names", "rest", "kind", "type_comment"}
Function = ast.FunctionDef | ast.AsyncFunctionDef
Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


@dataclass
class Scope:
    """A block of code: the names that it binds, each with the path that it is imported from."""

    names: dict[str, str]  # to "" if the name is not imported
    path: str = ""  # of a module or of a class of the package
    is_class: bool = False
    hints: dict[str, tuple[ast.expr, Chain]] = field(default_factory=dict)  # tell a name's class
    owners: dict[str, str] = field(default_factory=dict)  # the class of `self`
    renames: dict[str, str] = field(default_factory=dict)  # to the other version's names


Chain = tuple[Scope, ...]  # from the module inwards


@dataclass
class Definition:
    """A function, class, method, attribute or other statement, with the scopes around it."""

    path: str
    file: str
    node: ast.stmt
    scopes: Chain
    names: list[str]  # paths that it binds
    whole: ast.stmt  # of a class: with its members, which are definitions of their own

    @cached_property
    def shape(self) -> str:
        """The tree without identifiers."""
        return shape(self.whole)

    @property
    def name(self) -> str:
        """Its name in its module or class."""
        return self.path[len(self.scopes[-1].path) + 1 :]

    @property
    def place(self) -> str:
        """Its file and line."""
        return f"{self.file}:{self.node.lineno}"

    @property
    def owner(self) -> str:
        """The class of a method or attribute."""
        return self.scopes[-1].path if len(self.scopes) > 1 else ""


class Normaliser(ast.NodeTransformer):
    """Rewrites what can be written in several ways: f-strings and annotations in quotes."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        """Merges the constant pieces of an f-string."""
        self.generic_visit(node)
        values: list[ast.expr] = []
        for value in node.values:
            last = values[-1] if values else None
            if isinstance(value, ast.Constant) and isinstance(last, ast.Constant):
                merged = ast.Constant(str(last.value) + str(value.value))
                values[-1] = ast.copy_location(merged, last)
            else:
                values.append(value)
        node.values = [v for v in values if not (isinstance(v, ast.Constant) and not v.value)]
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        """Takes the annotation of a parameter out of its quotes."""
        node.annotation = unquote(node.annotation)
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        """Takes the annotation of a variable out of its quotes."""
        node.annotation = unquote(node.annotation) or node.annotation
        return self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        """Takes the annotation of a result out of its quotes."""
        node.returns = unquote(node.returns)
        return self.generic_visit(node)

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]  # noqa: N815


def unquote(node: Any) -> Any:
    """An annotation without the quotes of forward references, also of those in `list["Run"]`."""
    match node:
        case ast.Constant(value=str(text)):
            return ast.copy_location(ast.parse(text, mode="eval").body, node)
        case ast.Subscript(value=base) if ast.unparse(base).endswith(("Literal", "Annotated")):
            return node
        case ast.Subscript() | ast.BinOp() | ast.Tuple() | ast.List():
            for name, value in ast.iter_fields(node):
                is_list = isinstance(value, list)
                setattr(node, name, [unquote(v) for v in value] if is_list else unquote(value))
    return node


def significant(nodes: Iterable[Any]) -> list[Any]:
    """Statements without docstrings, imports and `pass`; other lists as they are."""
    return [node for node in nodes if not _is_silent(node)]


def _is_silent(node: Any) -> bool:
    match node:
        case ast.Import() | ast.ImportFrom() | ast.Pass() | ast.Expr(value=ast.Constant(str())):
            return True
        case ast.If(test=ast.Name("TYPE_CHECKING"), body=body, orelse=[]):
            return all(_is_silent(child) for child in body)
    return False


def shape(node: Any) -> str:
    """A tree as text in which every identifier is blank."""
    if isinstance(node, list):
        return f"[{', '.join(map(shape, significant(node)))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    root: Any = node
    while isinstance(root, ast.Attribute):
        root = root.value
    if isinstance(root, ast.Name):
        return "·"
    if isinstance(node, ast.Constant) and str(node.value).startswith(f"{PACKAGE}."):
        return "·"
    fields = (shape(value) for name, value in ast.iter_fields(node) if name not in IDENTIFIERS)
    return f"{type(node).__name__}({', '.join(fields)})"


def split(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module or class; `A, B = 1, 2` becomes two."""
    for node in significant(body):
        match node:
            case ast.Assign(targets=[ast.Tuple(names)], value=ast.Tuple(values)) if (
                len(names) == len(values)
                and all(isinstance(name, ast.Name) for name in names)
                and not any(isinstance(value, ast.Starred) for value in values)
            ):
                for name, value in zip(names, values, strict=True):
                    yield ast.copy_location(ast.Assign([name], value), name)
            case _:
                yield node


def bind(nodes: Iterable[ast.AST]) -> dict[str, str]:
    """Names that code binds in its own scope, each with the path of its import, or ""."""
    names: dict[str, str] = {}
    elsewhere: set[str] = set()
    stack = list(nodes)[::-1]
    while stack:
        node = stack.pop()
        match node:
            case ast.Import():
                for alias in node.names:
                    top = alias.name.partition(".")[0]
                    names[alias.asname or top] = alias.name if alias.asname else top
            case ast.ImportFrom(module=module, level=level):
                for alias in node.names:
                    path = f"{'.' * level}{module or ''}.{alias.name}"
                    names[alias.asname or alias.name] = path
            case ast.Global() | ast.Nonlocal():
                elsewhere |= set(node.names)
            case ast.Name(id=name, ctx=ast.Store() | ast.Del()) | ast.MatchMapping(rest=str(name)):
                names.setdefault(name, "")
            case (
                ast.FunctionDef(name=str(name)) | ast.AsyncFunctionDef(name=str(name))
                | ast.ClassDef(name=str(name)) | ast.ExceptHandler(name=str(name))
                | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name))
            ):  # fmt: skip
                names.setdefault(name, "")
        if isinstance(node, Comprehension):
            stack += [n.target for n in ast.walk(node) if isinstance(n, ast.NamedExpr)]
        elif not isinstance(node, Function | ast.ClassDef | ast.Lambda):
            stack += list(ast.iter_child_nodes(node))[::-1]
    return {name: path for name, path in names.items() if name not in elsewhere}


def parameters(node: Any) -> list[ast.arg]:
    """The parameters of a function in their order."""
    a: ast.arguments = node.args
    every = [*a.posonlyargs, *a.args, a.vararg, *a.kwonlyargs, a.kwarg]
    return [arg for arg in every if arg is not None]


def lookup(name: str, chain: Chain) -> tuple[int, Scope] | None:
    """The scope that binds a name, and its depth."""
    for depth in range(len(chain) - 1, -1, -1):
        hidden = chain[depth].is_class and depth < len(chain) - 1
        if name in chain[depth].names and not hidden:
            return depth, chain[depth]
    return None


class Tree:
    """The definitions of one version, by path, and the names that code can reach them by."""

    def __init__(self, files: Mapping[str, str]) -> None:
        """Reads the files, given as text by their path from the root of the repository."""
        self.modules: dict[str, Scope] = {}
        self.definitions: dict[str, Definition] = {}
        self.binders: dict[str, Definition] = {}  # by the paths that they bind
        self.classes: dict[str, tuple[ast.ClassDef, Chain]] = {}
        self.members: dict[str, set[str]] = {}  # of each class, with those that methods assign
        self.names: set[str] = set()  # paths of all definitions, members and parameters
        self.hints: dict[str, tuple[ast.expr, Chain]] = {}
        self._inferred: dict[int, str] = {}
        for file, text in files.items():
            module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            body = Normaliser().visit(ast.parse(text, file)).body
            self.modules[module] = Scope(bind(body), module)
            for node in split(body):
                self._define(file, node, (self.modules[module],))
        for path, (node, chain) in self.classes.items():
            self._find_members(path, node, chain)

    def _define(self, file: str, node: ast.stmt, chain: Chain) -> None:
        bound = [name for name, origin in bind([node]).items() if not origin]
        if bound == ["__all__"]:
            return
        path = f"{chain[-1].path}.{', '.join(bound) or type(node).__name__}"
        names, whole = [f"{chain[-1].path}.{name}" for name in bound], node
        if isinstance(node, ast.ClassDef) and len(chain) == 1:
            inner = (*chain, Scope(bind(node.body), path, is_class=True))
            self.classes[path] = (node, inner)
            fields = [n for n in split(node.body) if isinstance(n, ast.Assign | ast.AnnAssign)]
            for child in split(node.body):
                self._define(file, child, inner)
            order: list[ast.stmt] = [  # of fields, which are the parameters of a data class
                ast.copy_location(ast.Expr(ast.copy_location(ast.Name(n, ast.Load()), f)), f)
                for f in fields for n in bind([f])
            ]  # fmt: skip
            header = ast.ClassDef(node.name, node.bases, node.keywords, order, node.decorator_list)
            node = ast.copy_location(header, node)
        elif isinstance(node, Function):
            self.names.update(f"{path}({arg.arg})" for arg in parameters(node))
            if node.returns:
                self.hints[path] = (node.returns, chain)
        elif isinstance(node, ast.AnnAssign):
            self.hints[path] = (node.annotation, chain)
        unique, number = path, 1
        while unique in self.definitions:
            number += 1
            unique = f"{path}#{number}"
        definition = Definition(unique, file, node, chain, names, whole)
        self.definitions[unique] = definition
        self.names.update(names)
        for name in names:
            self.binders.setdefault(name, definition)

    def _find_members(self, path: str, node: ast.ClassDef, chain: Chain) -> None:
        self.members[path] = set(bind(node.body))
        for method in node.body:
            if not isinstance(method, Function) or not method.args.args:
                continue
            inner, first = (*chain, self.open(method, chain)), method.args.args[0].arg
            for part in ast.walk(method):
                match part:
                    case ast.Attribute(ast.Name(name), attr, ast.Store()) if name == first:
                        self.members[path].add(attr)
                    case ast.Assign([ast.Attribute(ast.Name(name), attr)], value) | ast.AnnAssign(
                        ast.Attribute(ast.Name(name), attr), value
                    ) if name == first and f"{path}.{attr}" not in self.hints:
                        hint = part.annotation if isinstance(part, ast.AnnAssign) else value
                        self.hints[f"{path}.{attr}"] = (hint, inner)
        self.names.update(f"{path}.{attr}" for attr in self.members[path])

    def open(self, node: Any, chain: Chain) -> Scope:
        """The scope of a function."""
        body = node.body if isinstance(node.body, list) else [node.body]
        scope = Scope(dict.fromkeys((arg.arg for arg in parameters(node)), "") | bind(body))
        counts: dict[str, int] = {}
        for part in (part for statement in body for part in ast.walk(statement)):
            match part:
                case ast.Assign([ast.Name(name)], value):
                    counts[name] = counts.get(name, 0) + 1
                    scope.hints[name] = (value, (*chain, scope))
        scope.hints = {n: h for n, h in scope.hints.items() if counts[n] == 1}
        for arg in parameters(node):
            scope.hints.pop(arg.arg, None)
            if arg.annotation:
                scope.hints[arg.arg] = (arg.annotation, chain)
        if chain[-1].is_class and node.args.args and not node.args.args[0].annotation:
            scope.owners[node.args.args[0].arg] = chain[-1].path
        return scope

    def open_class(self, node: ast.ClassDef, chain: Chain) -> Scope:
        """The scope of a class."""
        path = self.path(ast.Name(node.name), chain)
        if path in self.classes:
            return self.classes[path][1][-1]
        return Scope(bind(node.body), is_class=True)

    def path(self, node: Any, chain: Chain) -> str:
        """The path of what a name stands for, or an attribute of a module; "" for anything else."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.insert(0, node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return ""
        place = lookup(node.id, chain)
        if place is None:
            start = f"builtins.{node.id}"
        elif place[1].names[node.id]:
            start = place[1].names[node.id]
        elif place[0] == 0:
            start = f"{place[1].path}.{node.id}"
        else:
            return ""  # a local name, or one of a class
        return self._locate(".".join([start, *parts]))

    def _locate(self, path: str) -> str:
        """Follows imports from module to module; "" for an attribute of a value."""
        for _ in range(10):
            module = self.module(path)
            if not module or module == path:
                return path
            name, _, rest = path[len(module) + 1 :].partition(".")
            origin = self.modules[module].names.get(name)
            if not origin:
                return "" if rest else path
            path = f"{origin}.{rest}" if rest else origin
        return path

    def module(self, path: str) -> str:
        """The module that a path begins with."""
        while path and path not in self.modules:
            path = path.rpartition(".")[0]
        return path

    def class_of(self, node: Any, chain: Chain) -> str:
        """The class of the package that an expression is, or is an instance of, if code tells."""
        if id(node) not in self._inferred:
            self._inferred[id(node)] = ""  # while it is being inferred
            self._inferred[id(node)] = self._infer(node, chain)
        return self._inferred[id(node)]

    def _infer(self, node: Any, chain: Chain) -> str:
        hint: tuple[ast.expr, Chain] | None = None
        match node:
            case ast.Call():
                return self.class_of(node.func, chain)
            case ast.BinOp(left, ast.BitOr(), right):
                return self.class_of(left, chain) or self.class_of(right, chain)
            case ast.Name() | ast.Attribute() if path := self.path(node, chain):
                if path in self.classes:
                    return path
                hint = self.hints.get(path)
            case ast.Name(name) if place := lookup(name, chain):
                if name in place[1].owners:
                    return place[1].owners[name]
                hint = place[1].hints.get(name)
            case ast.Attribute(value, attr):
                hint = self.hints.get(self.member(self.class_of(value, chain), attr))
        return self.class_of(*hint) if hint else ""

    def lineage(self, owner: str) -> Iterator[str]:
        """A class and the classes of the package that it inherits from."""
        if owner in self.classes:
            yield owner
            node, chain = self.classes[owner]
            for base in node.bases:
                yield from self.lineage(self.path(base, chain[:1]))

    def member(self, owner: str, attr: str) -> str:
        """The path of an attribute in the topmost class that has it, or ""."""
        paths = [f"{c}.{attr}" for c in self.lineage(owner) if attr in self.members[c]]
        return paths[-1] if paths else ""

    def callee(self, node: Any, chain: Chain) -> str:
        """The path of the function or class that a call names, or ""."""
        path = self.path(node, chain)
        if not path and isinstance(node, ast.Attribute):
            path = self.member(self.class_of(node.value, chain), node.attr)
        return path

    def parameter(self, callee: str, name: str) -> str:
        """The path of a parameter; that of a data class is a field."""
        if callee not in self.classes:
            return f"{callee}({name})"
        for owner in self.lineage(callee):
            if "__init__" in self.members[owner]:
                return f"{owner}.__init__({name})"
        return self.member(callee, name)
