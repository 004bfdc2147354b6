"""Whole runs in one precision against another, on the same seeds: how far apart their results are.

python -m benchmarks.precision [PRESET] [--first 0] [--seeds 3]
                               [--precisions fp32 bf16] [key=value …]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence

import fednoro
from benchmarks.machine import describe, markdown, spread
from fednoro.engine.choose import choose_device


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints each run as it ends, then a Markdown table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("preset", nargs="?", default="ham10000")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--precisions", nargs=2, default=["fp32", "bf16"])
    parser.add_argument("overrides", nargs="*", help="key=value")
    options = parser.parse_intermixed_args(arguments)
    rows, best, last = list[list[str]](), list[float](), list[float]()
    with tempfile.TemporaryDirectory(prefix="fednoro-") as out:
        for seed in range(options.first, options.first + options.seeds):
            pair = []
            for number, precision in enumerate(options.precisions):
                began = time.perf_counter()
                given = [
                    f"seed={seed}",
                    f"precision={precision}",
                    f"out={out}",
                    f"name={seed}-{number}",
                ]
                run = fednoro.run(options.preset, *options.overrides, *given)
                wall = time.perf_counter() - began
                flagged = (
                    "–" if run.detection is None else " ".join(map(str, run.detection["flagged"]))
                )
                rows.append(
                    [
                        str(seed),
                        precision,
                        f"{100 * run.best:.2f}",
                        f"{100 * run.last:.2f}",
                        flagged,
                        f"{wall:.1f}",
                    ]
                )
                print(*rows[-1], sep=" | ", flush=True)
                pair.append(run)
            best.append(pair[1].best - pair[0].best)
            last.append(pair[1].last - pair[0].last)
    first, second = options.precisions
    print("\n" + markdown(["seed", "precision", "Best", "Last", "flagged", "s"], rows))
    ahead = f"Best {spread(best, '+')}, Last {spread(last, '+')}"
    print(f"\n{second} − {first}, mean ± std over {options.seeds} seeds: {ahead} points")
    print(f"\n{options.preset} {' '.join(options.overrides)}. {describe(choose_device('auto'))}")


if __name__ == "__main__":
    main()
