"""Checks that a refactoring changes no result, with two versions of the package on one machine.

python -m benchmarks.same BASE [--only JOB …] [--without JOB …] [--keep FOLDER]

BASE is any git revision. The other version is the working tree with its uncommitted changes. Both
versions run the same jobs (`benchmarks.same_jobs`) as real processes, side by side on one thread
each. All files must be equal byte for byte, apart from masked places (`benchmarks.differences`).

The tool imports nothing from fednoro, so that it works whatever a change moves.
All jobs take some 5 minutes on two cores. `--without flower` saves one of them.
"""

from __future__ import annotations

import argparse
import io
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from benchmarks.differences import MASKS, Comparison, Difference, Mask
from benchmarks.same_jobs import Job, Place, Side, all_jobs

ROOT = Path(__file__).resolve().parents[1]


def select(jobs: Sequence[Job], only: Sequence[str], without: Sequence[str]) -> list[Job]:
    """The chosen jobs and those that they need."""
    names = [job.name for job in jobs]
    if unknown := [name for name in (*only, *without) if name not in names]:
        raise SystemExit(f"no such job: {', '.join(unknown)}; there are {', '.join(names)}")
    chosen = {name for name in only or names if name not in without}
    for job in reversed(jobs):
        if job.name in chosen:
            chosen |= {job.start, job.equal_to} - {""}
    return [job for job in jobs if job.name in chosen]


def perform(job: Job, side: Side) -> Place:
    """Runs a job on one side."""
    place, began = Place(side, side.folder / job.name), time.perf_counter()
    place.folder.mkdir()
    if job.start and (side.folder / job.start / "runs").exists():
        shutil.copytree(side.folder / job.start / "runs", place.folder / "runs")
    before = stamps(place.folder)
    job.work(place)
    after = stamps(place.folder)
    place.untouched = {file for file, stamp in before.items() if after.get(file) == stamp}
    place.seconds = time.perf_counter() - began
    return place


def stamps(folder: Path) -> dict[str, tuple[int, int]]:
    """When each file was last written, and its size."""
    stats = {path: path.stat() for path in sorted(folder.rglob("*")) if path.is_file()}
    return {
        path.relative_to(folder).as_posix(): (stat.st_mtime_ns, stat.st_size)
        for path, stat in stats.items()
    }


def check(
    job: Job, places: Sequence[Place], comparison: Comparison
) -> tuple[int, list[Difference]]:
    """The number of files that a job wrote, and how they differ."""
    base, tree = places
    files = sorted({*stamps(base.folder), *stamps(tree.folder)} - (base.untouched & tree.untouched))
    differences = comparison.compare(base.folder, tree.folder, files)
    differences += [Difference(*text.split(": ", 1)) for text in base.complaints + tree.complaints]
    for place in places if job.equal_to else ():
        there, here = (place.side.folder / name / "runs" for name in (job.equal_to, job.name))
        for difference in comparison.compare(there, here, sorted({*stamps(there), *stamps(here)})):
            text = f"differs from {job.equal_to} (shown as base): {difference.text}"
            differences.append(Difference(f"{place.side.name}/runs/{difference.file}", text))
    return len(files), differences


def check_all(
    jobs: Sequence[Job], sides: Sequence[Side], comparison: Comparison
) -> tuple[int, int]:
    """Runs every job on both sides and prints what differs; counts files and differences."""
    files = differences = 0
    with ThreadPoolExecutor(len(sides)) as pool:
        for job in jobs:
            places = list(pool.map(partial(perform, job), sides))
            count, different = check(job, places, comparison)
            took = ", ".join(f"{place.side.name} {place.seconds:5.1f} s" for place in places)
            outcome = f"{len(different)} different" if different else "equal"
            print(f"{job.name:<13} {took}  {count:>3} files  {outcome}", flush=True)
            for difference in different:
                print(f"  {job.name}: {difference.file}: {difference.text}", flush=True)
            files, differences = files + count, differences + len(different)
    return files, differences


def show_masks(comparison: Comparison) -> None:
    """Every mask, and in how many places of the files that differ it applied."""
    print("\nMasks, and the places where they applied:")
    for mask in comparison.masks:
        print(f"{comparison.counts[mask]:>6}  {mask.name}, in {' '.join(mask.files)}: {mask.why}")
        print(f"        {mask.shown}")


@contextmanager
def checkout(revision: str) -> Iterator[Path]:
    """A temporary folder with the files of a git revision."""
    arguments = ["git", "-C", str(ROOT), "archive", "--format=tar", revision]
    done = subprocess.run(arguments, capture_output=True)
    if done.returncode:
        reason = " ".join(done.stderr.decode(errors="replace").split())
        raise SystemExit(f"git has no revision {revision}: {reason}")
    with tempfile.TemporaryDirectory(prefix="fednoro-base-") as folder:
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
            archive.extractall(folder, filter="data")
        yield Path(folder).resolve()


@contextmanager
def workspace(folder: Path | None) -> Iterator[Path]:
    """The folder for what the jobs write: a new one that stays, or a temporary one."""
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="fednoro-same-") as temporary:
            yield Path(temporary).resolve()
        return
    if folder.exists() and any(folder.iterdir()):
        raise SystemExit(f"--keep needs a new or an empty folder, and {folder} has files")
    folder.mkdir(parents=True, exist_ok=True)
    yield folder.resolve()


def path_masks(sides: Sequence[Side]) -> list[Mask]:
    """Masks for the absolute paths of the two sides."""
    why = "each side has its own folder"
    return [
        Mask(name, ("*",), f"({'|'.join(re.escape(str(path)) for path in paths)})(?![\\w.-])", why)
        for name, paths in (
            ("folder", [side.folder for side in sides]),
            ("source", [side.source for side in sides]),
        )
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints what differs; the exit code is 1 if anything does."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("base", help="git revision to compare the working tree with")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="JOB", help="these jobs, and what they need"
    )
    parser.add_argument(
        "--without", nargs="+", default=[], metavar="JOB", help="not these, such as flower"
    )
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep both sides' files here")
    options = parser.parse_args(arguments)
    began = time.perf_counter()
    with checkout(options.base) as source, workspace(options.keep) as root:
        sides = [Side("base", source, root / "base"), Side("tree", ROOT, root / "tree")]
        for side in sides:
            side.folder.mkdir()
        registered = [side.methods() for side in sides]
        only_once = sorted(set(registered[0]) ^ set(registered[1]))
        methods = list(dict.fromkeys([*registered[0], *registered[1]]))
        jobs = select(all_jobs(methods), options.only, options.without)
        comparison = Comparison([*path_masks(sides), *MASKS])
        for name in only_once:
            print(f"method {name} is only in {'base' if name in registered[0] else 'tree'}")
        files, differences = check_all(jobs, sides, comparison)
    show_masks(comparison)
    differences += len(only_once)
    print(f"\nTook {time.perf_counter() - began:.0f} s.")
    if differences:
        print(f"different: {differences}, in {files} files of {len(jobs)} jobs")
        return 1
    print(f"same: {files} files of {len(jobs)} jobs are equal")
    return 0


if __name__ == "__main__":
    sys.exit(main())
