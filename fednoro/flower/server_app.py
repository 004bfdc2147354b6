"""The ServerApp: Flower's way into the coordinator."""

from __future__ import annotations

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fednoro.flower.server.coordinated_audit import audit_sites
from fednoro.flower.server.coordinator import coordinate

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Plays the run, or the audit of one, that the run-config describes."""
    if context.run_config.get("audit"):
        audit_sites(grid, context.run_config)
    else:
        coordinate(grid, context.run_config)
