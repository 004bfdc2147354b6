"""Options as people write them, checked against their dataclass;
what is wrong is said with the way out.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from typing import Any, get_type_hints

from fednoro.core.types import UserError


def validate(
    kind: type[Any], values: Any, section: str, registry: Mapping[str, type[Any]] | None = None
) -> Any:
    """The dataclass with these values;
    `registry` has the other choices of the section, whose options they may be.
    """
    from pydantic import TypeAdapter, ValidationError

    if not isinstance(values, Mapping):
        raise UserError(f"{section} must be a mapping of options, got {values!r}")
    _refuse_booleans_for_numbers(kind, values, section)
    try:
        return TypeAdapter(kind).validate_python(dict(values))
    except ValidationError as error:
        raise UserError(_explain(error.errors()[0], section, kind, registry or {})) from error


def _refuse_booleans_for_numbers(kind: type[Any], values: Mapping[str, Any], section: str) -> None:
    # To pydantic `rounds: yes` is one round.
    for name, hint in get_type_hints(kind).items():
        value, where = values.get(name), f"{section}.{name}" if section else name
        if isinstance(value, bool) and hint in (int, float, int | None):
            raise UserError(f"{where} should be a number, got {value}")
        if dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
            _refuse_booleans_for_numbers(hint, value, where)  # type: ignore[arg-type]


def _explain(
    problem: Mapping[str, Any], section: str, kind: type[Any], registry: Mapping[str, type[Any]]
) -> str:
    cause = problem.get("ctx", {}).get("error")
    if isinstance(cause, UserError):
        return str(cause)
    first, *rest = problem["loc"]
    nested_kind = get_type_hints(kind).get(str(first))
    if not dataclasses.is_dataclass(nested_kind):
        # Other parts of `loc` name members of a union.
        nested_kind, rest = kind, [part for part in rest if isinstance(part, int)]
    where = ".".join(str(part) for part in (section, first, *rest) if part != "")
    if problem["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        names = [item.name for item in dataclasses.fields(nested_kind if rest else kind)]
        advice = _name_owners(section, kind, first, registry) or suggest((first, *rest)[-1], names)
        return f"unknown key {where}{advice}"
    if problem["type"] in ("missing", "missing_argument"):
        example = {
            item.name: item.metadata.get("example") for item in dataclasses.fields(kind)
        }.get(str(first))
        return f"{where} is required{f', as in {where}={example}' if example else ''}"
    if problem["type"] in ("tuple_type", "list_type"):
        value = problem["input"]
        return f"{where} must be a list, as in {where}=[{value}]; got {value!r}"
    message = problem["msg"].removeprefix("Input ").lower()
    return f"{where} {message}, got {problem['input']!r}"


def _name_owners(section: str, kind: type[Any], key: str, registry: Mapping[str, type[Any]]) -> str:
    """Whose option it is, where another choice of the section has it."""
    owners = [
        name
        for name, other in registry.items()
        if key in {item.name for item in dataclasses.fields(other)}
    ]
    choice = next((name for name, other in registry.items() if other is kind), "")
    return (
        f": {section} {choice} has no {key}; it belongs to {', '.join(owners)}"
        if owners and choice
        else ""
    )


def suggest(key: Any, names: Iterable[str], more: str = "") -> str:
    """The known name that is closest to `key`, or all of them; `more` is said after it."""
    names = list(names)
    close = difflib.get_close_matches(str(key), names, 1)
    if close:
        return f": did you mean {close[0]}?{more and ' '}{more}"
    return f": known are {', '.join(names)}{more and '. '}{more}" if names else ""
