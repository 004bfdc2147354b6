"""The jobs of `benchmarks.same`: commands of fednoro that two versions of it run."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

import numpy as np
from PIL import Image

PATIENCE = 900  # seconds for one command
TRIES = 5  # to stop a run between its first checkpoint and its second
FACTS = """
import fednoro.methods
print(fednoro.__file__, *sorted(fednoro.methods.METHODS), sep="\\n")
"""

DIGITS = "run digits partition.clients=8"
SHORT = f"{DIGITS} train.rounds=10"  # long enough for every stage of every method
STAGES = {  # options that bring a method through its stages in so few rounds
    "fednoro": "method.warmup=4",
    "fednoro-plus": "method.warmup=4",
    "fedlsr": "method.warmup=4",
    "rofl": "method.warmup=4 method.gradual=4",
}
RUN, PLUS = "runs/digits-fednoro-seed0", "runs/digits-fednoro-plus-seed0"


@dataclass(frozen=True)
class Side:
    """One version of the package, and the folder in which its jobs run."""

    name: str
    source: Path
    folder: Path

    def environment(self, threads: int = 1) -> dict[str, str]:
        """For processes that must import this version."""
        path = os.pathsep.join(filter(None, [str(self.source), os.environ.get("PYTHONPATH")]))
        fixed = {"PYTHONPATH": path, "OMP_NUM_THREADS": str(threads), "MPLBACKEND": "Agg"}
        return {**os.environ, **fixed}

    def methods(self) -> list[str]:
        """The registered methods; ends the program if Python imports another version."""
        arguments = [sys.executable, "-c", FACTS]
        done = subprocess.run(
            arguments, cwd=self.folder, env=self.environment(), capture_output=True, text=True
        )
        if done.returncode:
            raise SystemExit(f"{self.name}: fednoro cannot be imported:\n{done.stderr}")
        file, *methods = done.stdout.splitlines()
        if not Path(file).resolve().is_relative_to(self.source):
            raise SystemExit(f"{self.name}: fednoro comes from {file}, not from {self.source}")
        return methods


@dataclass
class Place:
    """One side's folder for one job."""

    side: Side
    folder: Path
    complaints: list[str] = field(default_factory=list)
    commands: int = 0
    untouched: set[str] = field(default_factory=set)  # files that the job left as they were
    seconds: float = 0.0

    def fednoro(self, text: str, code: int = 0, threads: int = 1) -> str:
        """Runs a command, keeps its output and exit code as files, and returns its output."""
        words = shlex.split(text)
        self.commands += 1
        names = takewhile(lambda word: re.fullmatch("[a-z][a-z-]*", word), words)
        stem = self.folder / "-".join([f"{self.commands:02d}", *names])
        with (
            stem.with_suffix(".stdout").open("wb") as output,
            stem.with_suffix(".stderr").open("wb") as errors,
        ):
            done = subprocess.run(
                [sys.executable, "-m", "fednoro", *words],
                cwd=self.folder,
                env=self.side.environment(threads),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                timeout=PATIENCE,
            )
        stem.with_suffix(".exit").write_text(f"{done.returncode}\n")
        if done.returncode != code:
            expected = f"exit code {done.returncode}, expected {code}"
            self.complaints.append(f"{self.side.name}: fednoro {text}: {expected}")
        return stem.with_suffix(".stdout").read_text(encoding="utf-8", errors="replace")


@dataclass(frozen=True)
class Job:
    """Commands that are compared."""

    name: str
    work: Callable[[Place], None]
    start: str = ""  # begins with a copy of this job's runs
    equal_to: str = ""  # ends with the same files as this job's runs


def commands(*texts: str, code: int = 0, threads: int = 1) -> Callable[[Place], None]:
    """Work that is one command after another."""

    def work(place: Place) -> None:
        for text in texts:
            place.fednoro(text, code, threads)

    return work


def show_help(place: Place, words: str = "") -> None:
    """The help of a command and of all below it, read off its own list of them."""
    text = place.fednoro(f"{words} --help")
    _, _, listed = text.partition("─ Commands ")
    for name in re.findall(r"^│ ([a-z][a-z0-9-]*) ", listed, re.MULTILINE):
        show_help(place, f"{words} {name}")


def list_choices(place: Place) -> None:
    """`fednoro ls`, and `fednoro ls SECTION` for each section that it names."""
    _, *lines = place.fednoro("ls").splitlines()
    for name in re.findall(r"^ ?([a-z]+) ", "\n".join(lines), re.MULTILINE):
        place.fednoro(f"ls {name}")


def stop_and_resume(place: Place) -> None:
    """A run that is killed after its first checkpoint, then resumed."""
    words = shlex.split(f"{SHORT} method=fednoro {STAGES['fednoro']}")
    arguments, env = [sys.executable, "-m", "fednoro", *words], place.side.environment()
    checkpoints, nowhere = place.folder / RUN / "checkpoints", subprocess.DEVNULL
    for _ in range(TRIES):
        shutil.rmtree(place.folder / "runs", ignore_errors=True)
        process = subprocess.Popen(
            arguments, cwd=place.folder, env=env, stdout=nowhere, stderr=nowhere
        )
        while process.poll() is None and not list(checkpoints.glob("*.safetensors")):
            time.sleep(0.002)
        process.kill()
        process.wait()
        # With a second checkpoint, one side would go on after another round than the other.
        if len(list(checkpoints.glob("*.safetensors"))) == 1:
            break
    else:
        place.complaints.append(f"{place.side.name}: could not be killed after one checkpoint")
    place.fednoro(f"resume {RUN}")


def predict(place: Place) -> None:
    """Predictions for two images and a file that is none."""
    images = place.folder / "images"
    images.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (2, 8, 8), dtype=np.uint8)
    for name, content in zip(("first.png", "second.png"), pixels, strict=True):
        Image.fromarray(content).save(images / name)
    (images / "broken.png").write_bytes(b"no image")
    place.fednoro(f"predict {RUN} images --top 3 --to predictions.csv --to predictions.json")


def all_jobs(methods: Sequence[str]) -> list[Job]:
    """Every job, each after those that it needs."""
    warmup, few = STAGES["fednoro"], f"{DIGITS} train.rounds=5"
    options = "split.validation=0.15 train.participation=0.6 train.failures=0.2"
    bench = "--quick --seeds 0 --out bench"
    pair = [f"runs/digits-{method}-seed{seed}" for method in ("fedla", "fedavg") for seed in (0, 1)]
    start = "fednoro"
    return [
        Job("help", show_help),
        Job("ls", list_choices),
        Job("config", commands("config digits", "config digits method=fedcorr-la seed=3")),
        Job("errors", commands("run digits train.rounds=none", "resume runs/nowhere", code=2)),
        *(Job(name, commands(f"{SHORT} method={name} {STAGES.get(name, '')}")) for name in methods),
        Job("options", commands(f"{SHORT} method=fednoro {warmup} {options}")),
        Job("eager", commands(f"{few} method=fednoro method.warmup=2 engine=eager")),
        Job("lanes", commands(f"{few} method=fednoro method.warmup=2", threads=2)),
        Job("resume", stop_and_resume, equal_to="fednoro"),
        Job(
            "audit",
            commands(f"audit {RUN}", f"audit {RUN} --scores cross_fit --folds 2 --out unseen"),
            start,
        ),
        Job("audit-plus", commands(f"audit {PLUS} --scores corrected"), "fednoro-plus"),
        Job("report", commands(f"report {RUN}"), start),
        Job("figures", commands(f"figures {RUN} --format png,svg"), start),
        Job("export", commands(f"export {RUN} --safetensors a.safetensors --onnx a.onnx"), start),
        Job("predict", predict, start),
        Job("seeds", commands(*(f"{few} method={name} seed=0..1" for name in ("fedla", "fedavg")))),
        Job("compare", commands(f"compare {' '.join(pair)}"), "seeds"),
        Job(
            "bench",
            commands(
                f"bench table1 {bench} --methods fedavg,fednoro,fedla --rounds 4",
                f"bench table3 {bench} --rounds 10 --mixture-seeds 100",
            ),
        ),
        Job("flower-init", commands("flower init app digits method=fednoro seed=3")),
        Job(
            "flower",
            commands(
                "flower simulate digits --sites 4 method=fednoro train.rounds=6 method.warmup=2"
            ),
        ),
    ]
