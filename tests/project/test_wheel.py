"""The wheel: everything of the package is in it, and it works where only the wheel is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[2]
BRIEF = (
    "digits", "train.rounds=2", "method.warmup=1", "partition.clients=4", "noise.epochs=1",
    "device=cpu",
)  # fmt: skip

pytestmark = pytest.mark.skipif(
    not (ROOT / ".git").exists() or shutil.which("git") is None,
    reason="which files belong to the package, only git can say",
)


def call(*command: str | Path, cwd: Path) -> str:
    """Runs a command that sees neither the checkout nor the network, and returns what it prints."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    environment = {key: value for key, value in os.environ.items() if key not in hidden}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**environment, "OMP_NUM_THREADS": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def source() -> list[str]:
    """The repository's files: tracked ones, and new ones that git does not ignore."""
    git = ("git", "-c", "safe.directory=*", "ls-files", "-z", "-co", "--exclude-standard")
    names = sorted({name for name in call(*git, cwd=ROOT).split("\0") if name})
    return [name for name in names if (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def wheel(source: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that no build folder is left in the checkout."""
    copy, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in source:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    offline = ("--no-build-isolation", "--no-deps", "--no-index")
    call(sys.executable, "-m", "pip", "wheel", ".", *offline, "-w", target, cwd=copy)
    (built,) = target.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def scripts(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Commands of a fresh environment: the wheel, and this environment's other packages."""
    folder = tmp_path_factory.mktemp("environment")
    venv.EnvBuilder(symlinks=True).create(folder)
    scripts = folder / "bin"
    pip = (sys.executable, "-m", "pip", "--python", scripts / "python")
    call(*pip, "install", "--no-deps", "--no-index", "--no-compile", wheel, cwd=folder)
    # An editable installation's own .pth files are not read in folders that a .pth file adds.
    (site,) = folder.glob("**/site-packages")
    places = dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
    (site / "others.pth").write_text("".join(f"{place}\n" for place in places), encoding="utf-8")
    return scripts


def test_the_wheel_has_every_file_of_the_package(source: list[str], wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = {name for name in source if name.startswith("fednoro/")}
    for kind in (".py", ".yaml", ".html", ".css", ".js", "py.typed"):
        assert any(name.endswith(kind) for name in expected), f"the package has no {kind}"
    assert sorted(expected - names) == [], "missing in the wheel"
    assert sorted(names - expected) == [], "not of the package"


def test_the_installed_wheel_is_the_one_that_runs(scripts: Path, tmp_path: Path) -> None:
    program = "import fednoro; print(fednoro.__file__)"
    path = Path(call(scripts / "python", "-c", program, cwd=tmp_path).strip())
    assert path.is_relative_to(scripts.parent)


def test_an_installed_wheel_runs_reports_and_audits(scripts: Path, tmp_path: Path) -> None:
    command, folder = scripts / "fednoro", Path("runs/digits-fednoro-seed0")
    call(command, "run", *BRIEF, cwd=tmp_path)
    page = tmp_path / folder / "report.html"
    page.unlink()
    call(command, "report", folder, cwd=tmp_path)
    assert "</html>" in page.read_text(encoding="utf-8")
    call(command, "audit", folder, "--rounds", "1", cwd=tmp_path)
    letters = list((tmp_path / folder).rglob("letter.html"))
    assert letters and (tmp_path / folder / "audit" / "index.html").is_file()
