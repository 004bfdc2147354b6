"""Options with a range: the dataclasses that describe data, partition,
noise, model, training and method.

They are plain frozen dataclasses, so the training path needs nothing but the standard library here.
A range is kept in the field's metadata and checked whenever an object is made, by the command line
and by library users alike. Types and unknown keys are checked at the edge, in
`experiment/config/validation.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
import operator
from collections.abc import Mapping
from numbers import Real
from typing import Any, ClassVar

from fednoro.core.types import UserError


def option(
    default: Any = dataclasses.MISSING,
    help: str = "",
    *,
    example: str | None = None,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
) -> Any:
    """A dataclass field with a one-line description and bounds;
    `example` is told whoever leaves a required one out.
    """
    bounds = {"ge": ge, "gt": gt, "le": le, "lt": lt}
    return dataclasses.field(
        default=default, metadata={"help": help, "bounds": bounds, "example": example}
    )


def range_text(field: dataclasses.Field[Any]) -> str:
    """The field's range in words: `in [0, 1]`, `> 0`; empty where there is none."""
    bounds = field.metadata.get("bounds", {})
    ge, gt, le, lt = (bounds.get(key) for key in ("ge", "gt", "le", "lt"))
    has_low, has_high = (ge, gt) != (None, None), (le, lt) != (None, None)
    if has_low and has_high:
        return (
            f"in {f'({gt:g}' if gt is not None else f'[{ge:g}'}, "
            f"{f'{lt:g})' if lt is not None else f'{le:g}]'}"
        )
    if has_low:
        return f"> {gt:g}" if gt is not None else f">= {ge:g}"
    if has_high:
        return f"< {lt:g}" if lt is not None else f"<= {le:g}"
    return ""


def summary(kind: type[Any]) -> str:
    """The first paragraph of a class's docstring, on one line."""
    return " ".join((kind.__doc__ or "").partition("\n\n")[0].split())


def import_named(name: str, what: str) -> Any:
    """What `module:name` in a configuration stands for;
    whatever goes wrong in the user's module is told as such.
    """
    module, _, attribute = name.partition(":")
    try:
        return functools.reduce(getattr, attribute.split("."), importlib.import_module(module))
    except ModuleNotFoundError as error:
        advice = ""
        if error.name and f"{module}.".startswith(f"{error.name}."):
            advice = f": is {error.name} in the folder that you are in, or on PYTHONPATH?"
        raise UserError(f"{what} {name!r} cannot be imported ({error}){advice}") from error
    except Exception as error:
        raise UserError(
            f"{what} {name!r} cannot be imported ({type(error).__name__}: {error})"
        ) from error


def _in_bounds(value: Any, bounds: Mapping[str, float | None]) -> bool:
    comparisons = {"ge": operator.ge, "gt": operator.gt, "le": operator.le, "lt": operator.lt}
    return bool(abs(value) < math.inf) and all(
        limit is None or comparisons[key](value, limit) for key, limit in bounds.items()
    )


@dataclasses.dataclass(frozen=True)
class Options:
    """Base of every options dataclass; `section` is its place in a configuration file."""

    section: ClassVar[str] = ""
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if (
                isinstance(value, Real)
                and range_text(field)
                and not _in_bounds(value, field.metadata["bounds"])
            ):
                name = f"{self.section}.{field.name}" if self.section else field.name
                raise UserError(f"{name} must be {range_text(field)}, got {value}")
