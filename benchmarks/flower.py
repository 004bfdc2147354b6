"""What Flower costs: seconds per round and bytes on the wire, next to the same run in one process.

    python -m benchmarks.flower                          ResNet-18, 3 clients with a few images each
    python -m benchmarks.flower --network cnn --rounds 2

Training is next to nothing, so that what is left is the way to the clients and back.
Three ways: in one process; Flower's own simulation; a SuperLink and one SuperNode per
client on loopback, without TLS.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from benchmarks.machine import describe, markdown
from fednoro.flower.ops.flwr_process import (
    COMPLETED,
    Link,
    app_toml,
    command,
    environment,
    free_port,
    owned_process,
    simulation_link,
)

PATIENCE = 900.0


def settings(network: str, clients: int, rounds: int) -> tuple[str, ...]:
    """A run in which nobody has much to do."""
    model = "model={name: cnn, width: 8}" if network == "cnn" else f"model={network}"
    return (
        "digits",
        "data=synthetic",
        f"data.images={24 * clients}",
        "data.classes=4",
        "data.size=32",
        "data.channels=3",
        f"partition={{name: iid, clients: {clients}}}",
        "noise=none",
        "method=fedavg",
        model,
        f"train.rounds={rounds}",
        "train.epochs=1",
        "train.batch=16",
        "device=cpu",
        "checkpoint_every=1000",
    )


def per_round(folder: Path) -> float:
    """Median seconds of a round; the first one has start-up in it."""
    lines = (folder / "rounds.jsonl").read_text(encoding="utf-8").splitlines()
    seconds = [float(json.loads(line)["seconds"]) for line in lines]
    return statistics.median(seconds[1:] or seconds)


@contextmanager
def deployment(root: Path, clients: int) -> Iterator[Link]:
    """A SuperLink and its SuperNodes."""
    port = free_port()
    (root / "flwr").mkdir(parents=True)
    text = (
        '[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = '
        f'"127.0.0.1:{port}"\ninsecure = true\n'
    )
    (root / "flwr" / "config.toml").write_text(text, encoding="utf-8")
    env = environment(root / "flwr")
    with ExitStack() as stack:
        log = stack.enter_context((root / "log").open("wb"))
        link = [
            command("flower-superlink"),
            "--insecure",
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
        ]
        stack.enter_context(
            owned_process([*link, "--disable-runtime-dependency-installation"], env, log)
        )
        for k in range(clients):
            node = [
                command("flower-supernode"),
                "--insecure",
                "--superlink",
                f"127.0.0.1:{port}",
                "--host",
                "127.0.0.1",
                "--port",
                str(free_port()),
                "--node-config",
                f"partition-id={k} num-partitions={clients}",
            ]
            stack.enter_context(owned_process(node, environment(root / f"node{k}"), log))
        yield Link("here", env)


def on_flower(
    way: str, chosen: Sequence[str], clients: int, root: Path
) -> tuple[float, tuple[int, int]]:
    """Seconds per round, and bytes from the nodes and to them in all."""
    from fednoro.core.types import UserError
    from fednoro.experiment.config.configuration import resolve
    from fednoro.flower.ops.run_follower import as_json

    config = resolve(chosen[0], [*chosen[1:], f"out={root}", "name=run"])
    (root / "app").mkdir(parents=True)
    (root / "app" / "pyproject.toml").write_text(
        app_toml({"fednoro": as_json(config)}), encoding="utf-8"
    )
    simulated = way == "simulation"
    with simulation_link(root / "flwr") if simulated else deployment(root, clients) as link:
        federation = (
            f"num-supernodes={clients} client-resources-num-cpus=1 init-args-num-cpus=2"
            if simulated
            else ""
        )
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                run = link.run(root / "app", federation=federation)
                break
            except UserError:  # the SuperLink is starting
                if time.monotonic() > deadline:
                    raise
                time.sleep(1)
        while not (status := link.status(run)).over and time.monotonic() < deadline:
            time.sleep(5)
    if status.text != COMPLETED:
        raise SystemExit(f"the run ended as {status.text}: {status.details}")
    return per_round(root / "run"), status.traffic


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a Markdown table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--network", default="resnet18")
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--ways", default="process,simulation,deployment")
    given = parser.parse_args(arguments)
    import fednoro

    chosen = settings(given.network, given.clients, given.rounds)
    rows = []
    with tempfile.TemporaryDirectory() as place:
        for way in given.ways.split(","):
            root = Path(place) / way
            if way == "process":
                run = fednoro.run(*chosen, f"out={root}", "name=run")
                rows.append([way, f"{per_round(run.folder):.2f} s", "–", "–"])
                continue
            seconds, (inbound, outbound) = on_flower(way, chosen, given.clients, root)
            known = [
                f"{traffic / given.rounds / 1e6:,.1f} MB" if traffic else "–"
                for traffic in (outbound, inbound)
            ]
            rows.append([way, f"{seconds:.2f} s", *known])
    print(markdown(["way", "a round", "to the sites, a round", "from the sites, a round"], rows))
    print(f"\n{given.network}, {given.clients} clients. {describe(torch.device('cpu'))}")


if __name__ == "__main__":
    main()
