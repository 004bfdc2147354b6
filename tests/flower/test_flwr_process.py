"""Commands around Flower: app folders, run-configs, and processes that do not outlive us."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from fednoro.cli import flower
from fednoro.core.types import UserError
from fednoro.experiment.config.configuration import resolve
from fednoro.flower.ops import run_follower
from fednoro.flower.ops.flwr_process import (  # fmt: skip
    COMPLETED,
    DEFAULTS,
    Link,
    Status,
    UnreachableError,
    app_toml,
    environment,
    free_port,
    owned_process,
)
from fednoro.flower.ops.run_follower import (
    Follower,
    RunFailedError,
    as_json,
    follow,
    read_items,
    with_run_folder,
)
from fednoro.flower.server.coordinator import read_config
from fednoro.flower.server.run_config import Deployment

EXAMPLES = Path(__file__).parents[2] / "examples" / "flower"


@settings(deadline=None)
@given(
    st.text(st.characters(exclude_categories=["Cs"])),
    st.floats(allow_nan=False, allow_infinity=False),
    st.integers(-(2**40), 2**40),
)
def test_app_folder_says_what_it_was_told(text: str, number: float, whole: int) -> None:
    told = {"fednoro": text, "round-timeout": number, "min-sites": whole}
    config = tomllib.loads(app_toml(told))["tool"]["flwr"]["app"]["config"]  # type: ignore[arg-type]
    assert config == {**DEFAULTS, **told}


def test_flower_accepts_the_app_folder(tmp_path: Path) -> None:
    from flwr.cli.config_utils import load_and_validate

    app = tmp_path / "app"
    app.mkdir()
    (app / "pyproject.toml").write_text(app_toml({"fednoro": as_json(resolve("digits"))}))
    config, warnings = load_and_validate(app / "pyproject.toml")
    assert (
        config["tool"]["flwr"]["app"]["components"]["clientapp"] == "fednoro.flower.client_app:app"
    )
    assert not warnings
    for example in ("app", "own-app"):
        assert not load_and_validate(EXAMPLES / example / "pyproject.toml")[1]


def test_every_key_of_the_run_config_has_its_default_in_the_app_and_the_options() -> None:
    assert Deployment.read(DEFAULTS) == Deployment()
    table = tomllib.loads((EXAMPLES / "app" / "pyproject.toml").read_text())["tool"]["flwr"]["app"][
        "config"
    ]
    assert table | {"fednoro-config": "", "round-timeout": 3600.0} == DEFAULTS


def test_configuration_survives_the_way_through_the_run_config() -> None:
    config = resolve(
        "digits",
        ["method=fedcorr", "train.augment.flip=true", "seed=7", "name=ä 'quoted' \"name\""],
    )
    table = tomllib.loads(app_toml({"fednoro": as_json(config)}))["tool"]["flwr"]["app"]["config"]
    assert read_config(table) == config


def test_app_folder_preset_and_file_are_all_ordered_with_overrides(tmp_path: Path) -> None:
    config, app, values = read_items(
        [str(EXAMPLES / "app"), "method=fedavg"], {"min-sites": 5, "round-timeout": None}
    )
    assert config == resolve("digits", ["method=fedavg"]) and app == EXAMPLES / "app"
    assert values["min-sites"] == 5 and values["round-timeout"] == 600.0
    (tmp_path / "my.yaml").write_text("preset: digits\nseed: 3\n")
    config, app, values = read_items([str(tmp_path / "my.yaml")], {"min-sites": None})
    assert config == resolve("digits", ["seed=3"]) and app is None and values == {}
    config, app, values = read_items([str(EXAMPLES / "own-app")], {})
    assert config is None and app == EXAMPLES / "own-app"


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (["digits", "ich"], "one preset, file or app folder at a time"),
        (["."], "is not the folder of a Flower app"),
        ([str(EXAMPLES / "own-app"), "seed=1"], "is an app of its own"),
    ],
)
def test_wrong_order_is_one_clear_line(
    items: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        read_items(items, {})


def test_run_folder_that_is_taken_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(UserError, match="exists already"):
        with_run_folder(resolve("digits", [f"out={tmp_path}", "name=mine"]))
    config, folder = with_run_folder(resolve("digits", [f"out={tmp_path}"]))
    assert folder == Path(config.out) / str(config.name) and folder.is_absolute()


# Processes

CHILD = (
    "import subprocess, sys, time\n"
    "subprocess.Popen([sys.executable, '-c', {inner!r}], start_new_session=True)\n"
    "time.sleep(600)"
)
INNER = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "print('here', flush=True); time.sleep(600)"
)


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
def test_owned_process_takes_its_children_with_it_even_those_that_left_its_group(
    tmp_path: Path,
) -> None:
    log = tmp_path / "log"
    with (
        log.open("wb") as file,
        owned_process(
            [sys.executable, "-c", CHILD.format(inner=INNER)], os.environ, file
        ) as process,
    ):
        deadline = time.monotonic() + 60
        while b"here" not in log.read_bytes():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        mark = next(
            item
            for item in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
            if b"FEDNORO_OWNER" in item
        )
        assert len(marked(mark)) == 2
    assert process.poll() is not None and not marked(mark)


def marked(mark: bytes) -> list[str]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                found.append(folder.name)
        except OSError:
            continue
    return found


# Following


class Scripted(Link):
    """A link that tells these statuses, one after the other and the last
    one for ever; None: it is away.
    """

    script: tuple[Status | None, ...] = ()

    def run(self, app: Path, values: Any = None, federation: str = "") -> int:
        return 7

    def status(self, run: int) -> Status:
        now, *later = self.script
        object.__setattr__(self, "script", tuple(later) or (now,))
        if now is None:
            raise UnreachableError("connection refused")
        return now


def scripted(*script: Status | None) -> Scripted:
    link = Scripted("x", {})
    object.__setattr__(link, "script", script)
    return link


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_follower, "ASK_EVERY", (0.0, 0.0))


def test_run_that_did_not_complete_is_an_error_with_flowers_reason(hasty: None) -> None:
    failed = Status("finished:failed", "ServerApp failed with exception: no such file")
    with pytest.raises(
        RunFailedError,
        match="ended as finished:failed: ServerApp failed with exception: no such file",
    ):
        follow(scripted(failed), 7, None)


def test_superlink_that_is_away_for_a_while_is_waited_for(hasty: None) -> None:
    assert (
        follow(scripted(Status(""), None, None, Status("running"), Status(COMPLETED)), 7, None).text
        == COMPLETED
    )


def test_superlink_that_stays_away_ends_the_waiting_with_a_code_of_its_own(
    hasty: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_follower, "GIVE_UP_AFTER", 0.3)
    with pytest.raises(typer.Exit) as ended:
        flower._run_and_follow(scripted(Status("running"), None), tmp_path, None, quiet=True)
    assert ended.value.exit_code == 3
    assert "the SuperLink could not be asked about run 7" in (said := capsys.readouterr().err)
    assert "connection refused" in said


def test_link_tells_a_superlink_that_is_down_from_a_run_without_a_status(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(
        '[superlink]\ndefault = "x"\n\n[superlink.x]\naddress = '
        f'"127.0.0.1:{free_port()}"\ninsecure = true\n'
    )
    with pytest.raises(UnreachableError, match="unavailable"):
        Link("x", environment(tmp_path)).status(7)


def test_follower_shows_each_round_and_each_refused_site_once(tmp_path: Path) -> None:
    console = Console(record=True, width=200, force_terminal=False)
    follower = Follower(console, tmp_path, 2, quiet=False)
    follower.look()
    (tmp_path / "sites.json").write_text(
        json.dumps({"sites": ["a"], "refused": {"b": "its classes are x, y"}})
    )
    record = {
        "round": 1,
        "stage": "warm-up",
        "seconds": 2.0,
        "bacc": 0.5,
        "warnings": ["client 1 is left out: late"],
    }
    line = json.dumps(record) + "\n"
    for text in (line[:20], line):  # half a line is not shown yet
        (tmp_path / "rounds.jsonl").write_text(text)
        follower.look()
        follower.look()
    said = console.export_text()
    assert said.count("site b is refused: its classes are x, y") == 1
    assert said.count("client 1 is left out: late") == 1
    assert said.count("round   1/2  warm-up                 BACC 50.00%  best 50.00%  ETA 2 s") == 1


def test_help_of_the_commands_comes_without_flower_or_torch() -> None:
    code = (
        "import sys; from fednoro.cli import app; import click; from typer.main import "
        "get_command;get_command(app).commands['flower']; print(*sorted({'flwr', "
        "'torch', 'ray'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
def test_sigterm_leaves_no_owned_process_behind(tmp_path: Path) -> None:
    code = (
        "import os, sys, time; from fednoro.flower.ops.flwr_process import owned_process\n"
        "with open(sys.argv[1], 'wb') as log, owned_process([sys.executable, '-c', 'import time; "
        "time.sleep(600)'],"
        " os.environ, log) as process:\n    print(process.pid, flush=True)\n    time.sleep(600)\n"
    )
    arguments = [sys.executable, "-c", code, str(tmp_path / "log")]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        process.terminate()
        assert process.wait(60) == 143
    assert not Path(f"/proc/{child}").exists()
