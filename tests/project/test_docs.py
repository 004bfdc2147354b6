"""The documentation: built strictly, without anything from elsewhere, and as the code is."""

from __future__ import annotations

import dataclasses
import re
import shlex
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml

from fednoro.core.options import range_text
from fednoro.experiment.config.configuration import presets
from fednoro.methods import METHODS, Method

ROOT = Path(__file__).parents[2]
QUICK = ("device=cpu", "partition.clients=4")
HEAD = ["| option | default | |", "|---|---|---|"]


def option_rows(method: type[Method]) -> list[str]:
    """What the page on methods has to say about each option."""
    rows = []
    for item in dataclasses.fields(method):
        choices = re.findall(r'"([^"]+)"', str(item.type)) if "Literal" in str(item.type) else []
        about = [
            item.metadata["help"],
            range_text(item),
            ", ".join(f"`{choice}`" for choice in choices),
        ]
        text = "; ".join(part for part in about if part).replace("|", "\\|")
        rows.append(f"| `{item.name}` | {'–' if item.default is None else item.default} | {text} |")
    return rows


def preset_rows() -> list[str]:
    rows = []
    for name, line in presets().items():
        tree = yaml.safe_load(
            (files("fednoro.experiment") / "presets" / f"{name}.yaml").read_text(encoding="utf-8")
        )
        chosen = [
            f"`{method}`: {', '.join(f'{key} {value}' for key, value in options.items())}"
            for method, options in tree.get("methods", {}).items()
        ]
        rows.append(f"| `{name}` | {line} | {'; '.join(chosen)} |")
    return rows


def section(page: str, heading: str) -> str:
    found = re.search(
        rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", page, re.DOTALL | re.MULTILINE
    )
    assert found, f"docs/methods.md has no section {heading}"
    return found[1]


@pytest.fixture(scope="module")
def methods_page() -> str:
    return (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", METHODS)
def test_every_option_of_every_method_is_documented(name: str, methods_page: str) -> None:
    told = [line for line in section(methods_page, name).splitlines() if line.startswith("| `")]
    assert told == option_rows(METHODS[name])
    assert f"](#{name})" in methods_page, "missing in the table at the top"


def test_every_preset_is_documented(methods_page: str) -> None:
    told = [
        line for line in section(methods_page, "Presets").splitlines() if line.startswith("| `")
    ]
    assert told == preset_rows()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        str(target),
    ]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return target


def test_the_site_is_built_strictly_with_every_page(site: Path) -> None:
    docs = ROOT / "docs"
    pages = {path.relative_to(docs).with_suffix("") for path in docs.rglob("*.md")}
    built = {path.relative_to(site).with_suffix("") for path in site.rglob("*.html")}
    assert built - {Path("404")} == pages
    assert not (site / "_site").exists()


def test_no_page_asks_for_anything_elsewhere(site: Path) -> None:
    loads = re.compile(
        r"""<(?:script|link|img|iframe|source)\b[^>]*?(?:src|href)=["']?(?:https?:)?//[^"'> ]+"""
    )
    for page in site.rglob("*.html"):
        found = [
            match
            for match in loads.findall(page.read_text(encoding="utf-8"))
            if 'rel="canonical"' not in match
        ]
        assert not found, f"{page.name}: {found[0]}"
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\(\s*[\"']?https?:", sheet.read_text(encoding="utf-8")), sheet


def test_the_example_of_a_method_works_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs" / "adding-a-method.md").read_text(encoding="utf-8")
    first, second = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len([line for line in first.splitlines() if line.strip()]) <= 22
    monkeypatch.chdir(tmp_path)
    known = dict(METHODS)
    try:
        names: dict[str, Any] = {"__name__": __name__}  # dataclasses look their module up
        exec(first, names)
        exec(
            second.replace('"train.rounds=2"', f'"train.rounds=2", {", ".join(map(repr, QUICK))}'),
            names,
        )
    finally:
        METHODS.clear()
        METHODS.update(known)
    assert len(names["run"].bacc) == 2 and names["run"].config.method.q == 0.5
    (tmp_path / "mine.py").write_text(first)
    commands = re.search(r"```sh\n(.*?)```", page, re.DOTALL)
    assert commands is not None
    run, resume = commands[1].splitlines()
    for command in (
        [*shlex.split(run), *QUICK, "out=by-hand"],
        ["fednoro", "resume", "by-hand/digits-fedgce-seed0"],
    ):
        subprocess.run([sys.executable, "-m", *command], check=True, timeout=120)
    assert shlex.split(resume, comments=True)[2].endswith("/digits-fedgce-seed0")
