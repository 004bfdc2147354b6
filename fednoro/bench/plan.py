"""What was asked for, and the configuration of each run that follows from it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fednoro.bench.paper import Setting
from fednoro.core.types import UserError
from fednoro.data.noise import Flips
from fednoro.experiment.config.configuration import Config, resolve, section_name
from fednoro.methods import METHODS, Method

# Options that count rounds:
# they shrink and grow with `--rounds`, so that a short version keeps its proportions.
ROUND_OPTIONS = {
    "fednoro": ("warmup", "ramp_end"),
    "fedlsr": ("warmup",),
    "rofl": ("warmup", "gradual"),
    "fedcorr": ("finetune",),
    "fedcorr-la": ("finetune",),
    "fednoro-plus": ("warmup", "purge", "correct_every"),
}
BENCH_OPTIONS = {
    "seed": "--seeds",
    "out": "--out",
    "name": "the names that bench gives",
    "noise.rate": "--rates",
    "noise.low": "--ranges",
    "noise.high": "--ranges",
    "method": "--methods",
}


@dataclass(frozen=True)
class Order:
    """One call of `fednoro bench`: the data, what is changed for every run,
    the seeds, and where things go.
    """

    source: str
    overrides: tuple[str, ...]
    seeds: tuple[int, ...]
    out: Path
    rounds: int | None = None

    def __post_init__(self) -> None:
        for override in self.overrides:
            key = override.partition("=")[0].strip()
            if key in BENCH_OPTIONS:
                raise UserError(
                    f"override {override!r}: bench sets {key} for each run; "
                    f"use {BENCH_OPTIONS[key]}"
                )
            if key.startswith("method."):
                option = key.removeprefix("method.")
                raise UserError(
                    f"override {override!r}: say for which method, as in methods.fednoro.{option}=…"
                )
        if not isinstance(self.base().noise, Flips):
            name = section_name(self.base(), "noise")
            raise UserError(
                f"bench varies noise.rate, noise.low and noise.high, which noise {name} "
                "does not have: use noise=h_idn, noise=symmetric or noise=pair_flip"
            )

    def base(self, method: str = "fedavg") -> Config:
        """The configuration before anything is varied."""
        return _base(self.source, self.overrides, method)

    @property
    def data(self) -> str:
        """The data set's name."""
        return section_name(self.base(), "data")

    def config(
        self,
        row: str,
        setting: Setting,
        seed: int,
        method: str | None = None,
        options: Sequence[str] = (),
    ) -> Config:
        """One run: a row of a table
        (a method by that name, or `method` with `options`) under one kind of noise.
        """
        method = row if method is None else method
        noise = [f"noise.{key}={value!r}" for key, value in setting._asdict().items()]
        name = f"{self.data}-{row.replace(':', '.')}-{setting.slug}-seed{seed}"
        run_overrides = [
            f"method={method}",
            *options,
            *self._scaled_options(method),
            *noise,
            f"seed={seed}",
            f"name={name}",
        ]
        config = resolve(self.source, [*self.overrides, *run_overrides])
        return dataclasses.replace(config, out=str(self.out.absolute() / "runs"))

    def _scaled_options(self, method: str) -> list[str]:
        if self.rounds is None:
            return []
        base = self.base(method)
        overridden_keys = {override.partition("=")[0].strip() for override in self.overrides}
        share, options = self.rounds / base.train.rounds, [f"train.rounds={self.rounds}"]
        for option in _round_options(type(base.method)):
            value = getattr(base.method, option)
            if value is not None and f"methods.{method}.{option}" not in overridden_keys:
                options.append(f"method.{option}={max(1, round(value * share))}")
        return options


def _round_options(kind: type[Method]) -> tuple[str, ...]:
    """Which options count rounds: a method's own, or those of the one that it extends."""
    names = {method: name for name, method in METHODS.items()}
    return next(
        (ROUND_OPTIONS[names[base]] for base in kind.__mro__ if names.get(base) in ROUND_OPTIONS),
        (),
    )


@functools.cache
def _base(source: str, overrides: tuple[str, ...], method: str) -> Config:
    # `noise={}`: whoever calls bench asks for noise, so that no warning is due.
    return resolve(source, [*overrides, f"method={method}", "noise={}"])
