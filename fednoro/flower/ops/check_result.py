"""One finding of `fednoro flower site check`:
what was looked at, how it stands and what to do about it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Literal, TypeVar

from fednoro.core.types import UserError

Status = Literal["ok", "warning", "failed"]
Finding = TypeVar("Finding")


@dataclass(frozen=True)
class Check:
    """One line."""

    name: str
    status: Status
    message: str
    remedy: str = ""

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


def ok(name: str, message: str) -> Check:
    return Check(name, "ok", message)


def warning(name: str, message: str, remedy: str) -> Check:
    return Check(name, "warning", message, remedy)


def failed(name: str, message: str, remedy: str) -> Check:
    return Check(name, "failed", message, remedy)


def run_inspection(
    name: str, inspect: Callable[[], Iterable[Finding]]
) -> Iterator[Finding | Check]:
    """The checks of one inspection;
    where it breaks off, that is a failed check too and the others go on.
    """
    try:
        yield from inspect()
    except UserError as error:
        yield failed(name, str(error), "mend that and check again")
    except OSError as error:
        yield failed(name, f"{type(error).__name__}: {error}", "mend that and check again")


def passed(checks: Iterable[Check]) -> bool:
    return all(check.status != "failed" for check in checks)
