"""Real Flower: its own simulation, and a SuperLink with TLS and node authentication
with SuperNodes on loopback.

Every message to a SuperNode starts a process that loads torch, so rounds are few. SuperNodes send
heartbeats as often as a SuperLink lets them, so that it gives a killed one up after 20 s, not 60.
All processes are started in groups of their own and end with the test, however it ends.
"""

from __future__ import annotations

import csv
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from fednoro.experiment import simulation
from fednoro.flower.ops.certificates import Certificates, make
from fednoro.flower.ops.flwr_process import (
    Link,
    app_toml,
    command,
    environment,
    free_port,
    healthy,
    owned_process,
)

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs process groups and SIGKILL"),
    pytest.mark.xdist_group("flower"),  # one federation, not one for each worker
]

PATIENCE = 300.0  # seconds; only a defect takes so long
# Flower has no option for it. The SuperLink takes 10 s to 30 min from its nodes.
SUPERNODE = """import sys, flwr.common.constant as constant
constant.HEARTBEAT_DEFAULT_INTERVAL = constant.HEARTBEAT_MIN_INTERVAL
from flwr.supernode.cli import flower_supernode
sys.argv[0] = "flower-supernode"
flower_supernode()
"""
EXAMPLE = Path(__file__).parents[2] / "examples" / "flower" / "app"
TINY = (
    "data.imbalance=3",
    "noise.epochs=1",
    "model.width=2",
    "train.epochs=1",
    "train.batch=32",
    "device=cpu",
)


def wait_until(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        time.sleep(0.1)
    return found


def fednoro(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fednoro", *arguments],
        env=env, capture_output=True, text=True, check=False, timeout=PATIENCE,
    )  # fmt: skip


def same_bits(folder: Path, other: Path) -> None:
    for name in ("model.safetensors", "clients.csv"):
        assert (folder / name).read_bytes() == (other / name).read_bytes(), name


def rounds(folder: Path) -> list[int]:
    log = folder / "rounds.jsonl"
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    return [
        record["round"]
        for line in lines
        if line.endswith("\n") and "bacc" in (record := json.loads(line))
    ]


BROKEN = """from flwr.serverapp import ServerApp
app = ServerApp()
@app.main()
def main(grid, context):
    raise RuntimeError("no such patient register")
"""


def test_run_that_fails_ends_with_an_exit_code_that_says_so(tmp_path: Path) -> None:
    app = tmp_path / "broken-app"
    app.mkdir()
    text = app_toml(name="broken-app").replace("fednoro.flower.server_app:app", "broken:app")
    (app / "pyproject.toml").write_text(text)
    (app / "broken.py").write_text(BROKEN)
    port, home = free_port(), tmp_path / "flwr"
    home.mkdir()
    (home / "config.toml").write_text(
        '[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = '
        f'"127.0.0.1:{port}"\ninsecure = true\n'
    )
    env, link = (
        environment(home),
        [command("flower-superlink"), "--insecure", "--host", "127.0.0.1"],
    )
    with (
        (tmp_path / "log").open("wb") as log,
        owned_process(
            [*link, "--port", str(port), "--disable-runtime-dependency-installation"], env, log
        ),
    ):
        wait_until(lambda: healthy(port), "the SuperLink")
        done = fednoro("flower", "run", str(app), env=env)
    assert done.returncode == 1, done.stdout
    assert "ended as finished:failed" in done.stderr and "no such patient register" in done.stderr


def test_flowers_simulation_with_twenty_clients_has_the_bits_of_a_run_in_one_process(
    tmp_path: Path,
) -> None:
    overrides = (*TINY, "train.rounds=3", "method.warmup=1")
    env = {**environment(), "OMP_NUM_THREADS": "1"}
    done = fednoro(
        "flower", "simulate", str(EXAMPLE), *overrides, f"out={tmp_path}", "name=there", env=env
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert "round   3/3" in done.stdout and "BACC  best" in done.stdout
    here = simulation.run("digits", *overrides, f"out={tmp_path}", "name=here")
    same_bits(tmp_path / "there", here.folder)
    assert len(json.loads((tmp_path / "there" / "sites.json").read_text())["sites"]) == 20


@dataclass
class Federation:
    """A SuperLink and its nodes, each of which can be killed and started again."""

    root: Path
    keys: Certificates
    stack: ExitStack
    port: int = field(default_factory=free_port)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def env(self) -> dict[str, str]:
        return {**environment(self.root / "flwr"), "OMP_NUM_THREADS": "1"}

    def start(self, name: str, *arguments: str, home: str = "flwr") -> subprocess.Popen[bytes]:
        log = self.stack.enter_context((self.root / f"{name}.log").open("ab"))
        env = {**self.env, "FLWR_HOME": str(self.root / home)}
        process = self.stack.enter_context(owned_process(arguments, env, log))
        self.processes[name] = process
        return process

    def start_link(self) -> None:
        keys = self.keys
        self.start(
            "link",
            command("flower-superlink"),
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
            "--ssl-ca-certfile",
            str(keys.ca),
            "--ssl-certfile",
            str(keys.server),
            "--ssl-keyfile",
            str(keys.server_key),
            "--enable-supernode-auth",
            "--database",
            str(self.root / "state.db"),
            "--disable-runtime-dependency-installation",
        )

    def start_node(self, name: str, config: str, ca: Path | None = None) -> subprocess.Popen[bytes]:
        return self.start(
            name,
            sys.executable,
            "-c",
            SUPERNODE,
            "--superlink",
            f"127.0.0.1:{self.port}",
            "--root-certificates",
            str(ca or self.keys.ca),
            "--auth-supernode-private-key",
            str(self.keys.sites[name.split(":")[0]]),
            "--host",
            "127.0.0.1",
            "--port",
            str(free_port()),
            "--node-config",
            config,
            home=f"home-{name}",
        )

    def listening(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return True
        except OSError:
            return False

    def log(self, name: str) -> str:
        return (self.root / f"{name}.log").read_text(errors="replace")

    def kill(self, name: str) -> None:
        """SIGKILL for the process and all that it has started."""
        os.killpg(self.processes[name].pid, signal.SIGKILL)
        self.processes[name].wait()

    def online(self) -> int:
        answer = Link("dep", self.env)._ask(["supernode", "list", "dep", "--format", "json"])
        return sum(node["status"] == "online" for node in answer["nodes"])


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    root = tmp_path_factory.mktemp("federation")
    keys = make(root / "certs", ["127.0.0.1"], ["n0", "n1", "n2", "stranger"])
    with ExitStack() as stack:
        found = Federation(root, keys, stack)
        (root / "flwr").mkdir()
        (root / "flwr" / "config.toml").write_text(
            f'[superlink]\ndefault = "dep"\n\n[superlink.dep]\naddress = "127.0.0.1:{found.port}"\n'
            f'root-certificates = "{keys.ca}"\n'
        )
        found.start_link()
        wait_until(found.listening, "the SuperLink")
        link = Link("dep", found.env)
        for name in ("n0", "n1", "n2"):
            public = str(keys.public_key(name))
            wait_until(lambda public=public: registered(link, public), f"{name} to be registered")
        for k in range(3):
            found.start_node(f"n{k}", f"partition-id={k} num-partitions=3")
        yield found


def registered(link: Link, key: str) -> bool:
    done = subprocess.run(
        [command("flwr"), "supernode", "register", key, "dep"],
        env=dict(link.env),
        capture_output=True,
        check=False,
    )
    return done.returncode == 0


def test_fednoro_on_three_nodes_with_tls_and_authentication(
    federation: Federation, tmp_path: Path
) -> None:
    stranger = federation.start_node("stranger", "partition-id=0 num-partitions=3")
    other = make(tmp_path / "other", ["127.0.0.1"])
    impostor = federation.start_node("n0:impostor", "partition-id=0 num-partitions=3", ca=other.ca)

    overrides = ("digits", "partition.clients=3", *TINY, "train.rounds=2", "method.warmup=1")
    done = fednoro(
        "flower",
        "run",
        *overrides,
        f"out={tmp_path}",
        "name=there",
        "--superlink",
        "dep",
        "--min-sites",
        "3",
        env=federation.env,
    )
    assert done.returncode == 0, done.stderr + done.stdout + federation.log("link")[-4000:]
    here = simulation.run(*overrides, f"out={tmp_path}", "name=here")
    same_bits(tmp_path / "there", here.folder)
    files = {path.name for path in (tmp_path / "there").iterdir()}
    assert files >= {path.name for path in here.folder.iterdir()} | {"sites.json", "flower.json"}

    # An unregistered key, and a link whose certificate another authority would have to have signed.
    wait_until(
        lambda: stranger.poll() is not None or "refused" in federation.log("stranger").lower(),
        "the stranger",
    )
    assert federation.online() == 3
    assert "CERTIFICATE_VERIFY_FAILED" in federation.log("n0:impostor") or impostor.poll() not in (
        None,
        0,
    )
    for name in ("stranger", "n0:impostor"):
        if federation.processes[name].poll() is None:
            federation.kill(name)


def test_killed_node_and_killed_coordinator_cost_no_finished_round(
    federation: Federation, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    arguments = (
        "flower",
        "run",
        "digits",
        "partition.clients=3",
        "method=fedavg",
        *TINY,
        "train.rounds=3",
        "checkpoint_every=1",
        f"out={tmp_path}",
        "name=run",
        "--superlink",
        "dep",
        "--min-sites",
        "2",
        "--round-timeout",
        "90",
    )
    watching = subprocess.Popen([sys.executable, "-m", "fednoro", *arguments], env=federation.env)
    try:
        wait_until(lambda: rounds(folder)[:1] == [1], "round 1")
        federation.kill("n2")  # in round 2
        wait_until(lambda: 2 in rounds(folder), "round 2, once Flower gives the killed node up")
        federation.kill("link")  # in round 3
    finally:
        watching.kill()
        watching.wait()
    finished = (folder / "rounds.jsonl").read_text().splitlines()
    assert not (folder / "result.json").exists()
    lost = [
        line
        for line in (folder / "clients.csv").read_text().splitlines()
        if line.startswith("2,train,2,")
    ]
    assert lost and ",failed," in lost[0] and "no answer" in lost[0]

    federation.start_link()
    wait_until(federation.listening, "the SuperLink")
    assert_back(federation)
    done = fednoro("resume", str(folder), env=federation.env)
    assert done.returncode == 0, done.stderr + done.stdout + federation.log("link")[-4000:]
    assert rounds(folder) == [1, 2, 3]
    assert (folder / "rounds.jsonl").read_text().splitlines()[:2] == finished[:2]
    assert json.loads((folder / "sites.json").read_text())["sites"] == ["0", "1", "2"]
    last = [
        row
        for row in csv.reader((folder / "clients.csv").read_text().splitlines())
        if row[0] == "3"
    ]
    assert [row[2] for row in last] == ["0", "1", "2"] and any(row[3] == "ok" for row in last)
    # Flower may lose a message to a node that was still busy for the lost run, or forget a node for
    # a while; then the round goes on without it.
    assert all(
        row[3] == "ok" or row[-1].startswith(("no answer", "not connected")) for row in last
    ), last


def assert_back(federation: Federation) -> None:
    """Starts the killed node as systemd would, again and again until its last
    life's heartbeat has lapsed.
    """

    def back() -> bool:
        process = federation.processes["n2"]
        if process.poll() is not None:
            federation.start_node("n2", "partition-id=2 num-partitions=3")
            time.sleep(1)
        try:
            return federation.online() == 3 and federation.processes["n2"].poll() is None
        except Exception:  # the SuperLink is starting
            return False

    wait_until(back, "all three nodes to be connected again")
