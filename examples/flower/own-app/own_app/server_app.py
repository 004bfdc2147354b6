"""The server's side: one line differs from an app with FedAvg."""

from __future__ import annotations

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from fednoro.flower import FedNoRo
from own_app.task import CLASSES, network

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Trains for some rounds and says who was found to be noisy."""
    strategy = FedNoRo(classes=CLASSES, warmup=int(context.run_config["warmup"]))
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(network().state_dict()),
        num_rounds=int(context.run_config["num-server-rounds"]),
    )
    print("noisy nodes:", sorted(node for node, noisy in strategy.noisy.items() if noisy))
