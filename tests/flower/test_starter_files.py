"""What `fednoro flower init` and `site init` write: Flower takes the app, settings
are read back, nothing is lost.
"""

from __future__ import annotations

import io
import tomllib
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("flwr")

import typer
from flwr.cli.build import build_fab_from_disk
from flwr.cli.config_utils import load_and_validate
from flwr.common.config import fuse_dicts
from typer.testing import CliRunner

from fednoro.cli import flower_setup
from fednoro.core.types import UserError
from fednoro.experiment.config.configuration import resolve
from fednoro.flower.ops.starter_files import write_app, write_site
from fednoro.flower.server.coordinator import read_config
from fednoro.flower.server.run_config import Deployment
from fednoro.flower.site.station import read_site

OVERRIDES = ("data=sites", "partition=by_column", "noise=none", "train.rounds=7", "method.warmup=2")


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")  # Flower's own
def test_flower_validates_and_builds_the_app(tmp_path: Path) -> None:
    write_app(tmp_path / "federation", "digits", OVERRIDES)
    config, warnings = load_and_validate(tmp_path / "federation" / "pyproject.toml")
    assert not warnings
    assert config["tool"]["flwr"]["app"]["components"] == {
        "serverapp": "fednoro.flower.server_app:app",
        "clientapp": "fednoro.flower.client_app:app",
    }
    with zipfile.ZipFile(io.BytesIO(build_fab_from_disk(tmp_path / "federation"))) as fab:
        names = {name for name in fab.namelist() if not name.startswith(".info")}
    assert {"pyproject.toml", "README.md"} <= names and not [
        name for name in names if name.endswith(".py")
    ]


def test_the_run_that_was_asked_for_is_the_run_that_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_app(Path("federation"), "digits", OVERRIDES)
    monkeypatch.chdir("/")  # a ServerApp starts where it likes
    given = tomllib.loads((tmp_path / "federation" / "pyproject.toml").read_text())["tool"]["flwr"][
        "app"
    ]["config"]
    config = read_config(given)
    asked = resolve("digits", OVERRIDES)
    assert (config.method, config.train, config.model, config.data) == (
        asked.method,
        asked.train,
        asked.model,
        asked.data,
    )
    assert config.out == str(tmp_path / "runs")
    assert Deployment.read(given) == Deployment()


def test_flower_takes_every_key_of_the_app_as_an_override(tmp_path: Path) -> None:
    write_app(tmp_path / "federation", "digits", OVERRIDES)
    given = tomllib.loads((tmp_path / "federation" / "pyproject.toml").read_text())["tool"]["flwr"][
        "app"
    ]["config"]
    changed = {"min-sites": 3, "round-timeout": 60.0, "resume": "/runs/first"}
    fused = fuse_dicts(given, changed)
    assert Deployment.read(fused) == Deployment(min_sites=3, round_timeout=60.0)


def test_the_readme_names_the_files_and_folders(tmp_path: Path) -> None:
    made = write_app(
        tmp_path / "federation", "digits", [*OVERRIDES, f"out={tmp_path / 'elsewhere'}"]
    )
    assert (
        files(tmp_path / "federation") == ["README.md", "config.yaml", "pyproject.toml"]
        and len(made) == 3
    )
    text = (tmp_path / "federation" / "README.md").read_text()
    assert (
        str(tmp_path / "federation" / "config.yaml") in text and str(tmp_path / "elsewhere") in text
    )


def test_an_empty_folder_is_filled_and_any_other_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    write_app(tmp_path / "empty", "digits")
    before = {path: path.read_bytes() for path in (tmp_path / "empty").iterdir()}
    with pytest.raises(UserError, match="not empty: choose another"):
        write_app(tmp_path / "empty", "digits", ["seed=5"])
    assert {path: path.read_bytes() for path in (tmp_path / "empty").iterdir()} == before
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="choose another"):
        write_app(tmp_path / "file", "digits")


@pytest.mark.parametrize("name", ["my_app", "3sites", "a b", "a" * 40])
def test_a_folder_name_that_flower_refuses_is_refused_here(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="letters, digits and hyphens"):
        write_app(tmp_path / name, "digits")
    assert not (tmp_path / name).exists()


def test_a_mistake_in_the_configuration_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"train\.rounds"):
        write_app(tmp_path / "federation", "digits", ["train.rounds=none-at-all"])
    assert not (tmp_path / "federation").exists()


def test_site_yaml_can_be_read_as_it_is_written(tmp_path: Path) -> None:
    write_site(tmp_path / "site.yaml")
    options = read_site(tmp_path / "site.yaml")
    assert options.data == {"name": "folder", "path": "/data/images", "size": 224}
    assert (options.min_count, options.score_epsilon, options.held_out, options.device) == (
        0,
        None,
        0.2,
        "auto",
    )


def test_every_suggestion_in_site_yaml_is_valid_too(tmp_path: Path) -> None:
    write_site(tmp_path / "site.yaml")
    lines = (tmp_path / "site.yaml").read_text().splitlines()
    keys = ("csv", "classes", "cache", "threads", "score_epsilon")
    wanted = {f"# {key}:": f"{key}:" for key in keys}
    for old, new in wanted.items():
        assert sum(line.lstrip().startswith(old) for line in lines) == 1
        lines = [
            line.replace(old, new) if line.lstrip().startswith(old) else line for line in lines
        ]
    (tmp_path / "full.yaml").write_text("\n".join(lines))
    options = read_site(tmp_path / "full.yaml")
    assert (
        options.data["classes"] == ["a", "b", "c"]
        and options.threads == 4
        and options.score_epsilon == 3
    )


def test_a_site_yaml_that_is_there_is_kept(tmp_path: Path) -> None:
    (tmp_path / "site.yaml").write_text("mine")
    with pytest.raises(UserError, match="is there already"):
        write_site(tmp_path / "site.yaml")
    assert (tmp_path / "site.yaml").read_text() == "mine"
    with pytest.raises(UserError, match="does not exist: make it first"):
        write_site(tmp_path / "nowhere" / "site.yaml")


def test_the_commands_say_what_they_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    app = typer.Typer()
    app.command("init")(flower_setup.init)
    app.command("certs")(flower_setup.certs)
    app.add_typer(flower_setup.site, name="site")
    done = CliRunner().invoke(app, ["init", "federation", "digits", *OVERRIDES])
    assert (
        done.exit_code == 0
        and done.output.splitlines()[-1] == "next: fednoro flower run federation"
    )
    done = CliRunner().invoke(app, ["init", "simulated", "digits"])
    assert done.exit_code == 0 and done.output.splitlines()[-2:] == [
        "next: fednoro flower simulate simulated",
        "or, with a SuperLink and its sites up: fednoro flower run simulated",
    ]
    done = CliRunner().invoke(app, ["init", "other", "digits", "ich"])
    assert isinstance(done.exception, UserError) and "one preset or file at a time" in str(
        done.exception
    )
    done = CliRunner().invoke(app, ["site", "init", "site.yaml"])
    assert done.exit_code == 0 and "fednoro flower site check site.yaml" in done.output
    done = CliRunner().invoke(
        app, ["certs", "certs", "--host", "localhost", "--host", "127.0.0.1", "--sites", "a, b"]
    )
    assert done.exit_code == 0 and "expires on" in done.output and "in 364 days" in done.output
    assert (
        "a: register certs/keys/a.pub; the site gets certs/keys/a and certs/ca.crt" in done.output
    )
    again = CliRunner().invoke(app, ["certs", "certs"])
    assert again.exit_code == 0 and "nothing to do" in again.output
