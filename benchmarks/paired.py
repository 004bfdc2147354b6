"""Methods against each other on the same federations: paired differences from the
CSV of `fednoro bench table1`.

python -m benchmarks.paired CSV… [--of fednoro-plus] [--against fedla fednoro] [--bound fedla]

For each setting: Best and Last of all rows, mean ± sample standard deviation over the seeds that
all rows have, then how far --of is ahead of each of --against with the same seed, and of the bound,
which is --bound on clean labels (the setting without noise), also as a share of it.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.machine import markdown, spread

Key = tuple[str, float, float, float]  # row, ρ, η's range
Runs = Mapping[Key, Mapping[int, Mapping[str, str]]]  # by seed


def read(paths: Sequence[Path]) -> Runs:
    """All finished runs; of two for one cell and seed the later file's."""
    runs: dict[Key, dict[int, Mapping[str, str]]] = {}
    for path in paths:
        with path.open(encoding="utf-8", newline="") as file:
            for line in csv.DictReader(file):
                if line["last"]:
                    key = (
                        line["row"],
                        float(line["rate"]),
                        float(line["low"] or 0),
                        float(line["high"] or 0),
                    )
                    runs.setdefault(key, {})[int(line["seed"])] = line
    return runs


def table(runs: Runs, of: str, against: Sequence[str], bound: str) -> Iterator[list[str]]:
    """A line for each setting and row."""
    clean = next(
        (found for (row, rate, *_), found in runs.items() if row == bound and not rate), {}
    )
    for setting in dict.fromkeys(key[1:] for key in runs):
        rows = {row: found for (row, *there), found in runs.items() if tuple(there) == setting}
        seeds = sorted(set.intersection(*(set(found) for found in rows.values())))
        if not seeds:
            continue
        rate, low, high = setting
        name = f"{rate:g}" if not rate else f"{rate:g}, ({low:g}, {high:g})"
        for row, found in rows.items():
            judged = [
                found[seed]["detection_exact"] for seed in seeds if found[seed]["detection_exact"]
            ]
            cells = [
                spread([float(found[seed][kind]) for seed in seeds]) for kind in ("best", "last")
            ]
            ahead: list[str] = []
            for other in against:
                comparable = row == of and other in rows
                ahead += [
                    _ahead(found, rows[other], seeds, k) if comparable else ""
                    for k in ("best", "last")
                ]
            reached = ""
            if row == of and rate and set(seeds) <= set(clean):
                shares = [float(found[seed]["last"]) / float(clean[seed]["last"]) for seed in seeds]
                reached = f"{_ahead(found, clean, seeds, 'last')} ({statistics.mean(shares):.0%})"
            exact = f"{judged.count('True')} of {len(judged)}" if judged else ""
            yield [name, row, *cells, *ahead, reached, exact, str(len(seeds))]


def _ahead(
    mine: Mapping[int, Mapping[str, str]],
    theirs: Mapping[int, Mapping[str, str]],
    seeds: Sequence[int],
    kind: str,
) -> str:
    return spread([float(mine[seed][kind]) - float(theirs[seed][kind]) for seed in seeds], "+")


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a Markdown table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="+", type=Path, metavar="CSV")
    parser.add_argument("--of", default="fednoro-plus")
    parser.add_argument("--against", nargs="+", default=["fedla", "fednoro"])
    parser.add_argument("--bound", default="fedla")
    options = parser.parse_args(arguments)
    ahead = [f"{kind} − {other}" for other in options.against for kind in ("Best", "Last")]
    header = ["ρ, η", "method", "Best", "Last", *ahead, "Last − bound", "flagged exactly", "seeds"]
    print(
        markdown(
            header, list(table(read(options.paths), options.of, options.against, options.bound))
        )
    )


if __name__ == "__main__":
    main()
