"""The audit of a run across its sites, as the coordinator plays it.

    RUN/audit/index.html, audit.json     what came of it: no image, no id
    RUN/audit/exchanges/                 who was asked what; a stopped audit goes on from there

Each site finds its letter on its own disk.
"""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import asdict, replace
from logging import INFO
from pathlib import Path
from typing import Any

import torch
from flwr.common import log
from flwr.serverapp import Grid

from fednoro.audit.audit_files import write_page
from fednoro.audit.audit_method import Answers, Audit
from fednoro.audit.coordinator_page import Account
from fednoro.audit.estimates import findings
from fednoro.audit.simulated_audit import end_of_run, skip_evaluation, verdicts_in
from fednoro.core.files import disk_errors, write_json
from fednoro.core.types import State, UserError
from fednoro.experiment.checkpoint import checkpoints, restore, save_checkpoint, to_device
from fednoro.experiment.config.configuration import Config, resolve, section_name
from fednoro.experiment.drive import Watcher, lock_run
from fednoro.experiment.rounds import Turn, play
from fednoro.experiment.run_folder.run_files import RunFolder
from fednoro.flower.server.coordinator import LogWatcher, moment, network_for, recalibrate_at_sites
from fednoro.flower.server.message_exchange import FlowerExchange
from fednoro.flower.server.roster import Roster
from fednoro.flower.server.run_config import AuditOrder, Deployment
from fednoro.flower.site.station import run_order


def audit_sites(grid: Grid, run_config: Mapping[str, Any], watcher: Watcher | None = None) -> Path:
    """Plays the audit that the run-config orders, or goes on with it; the folder with its page."""
    watcher, order = watcher or LogWatcher(), AuditOrder.read(str(run_config["audit"]))
    folder = RunFolder(order.exchanges)
    with disk_errors(folder.path):
        (folder.path / "checkpoints").mkdir(parents=True, exist_ok=True)
    with lock_run(folder, watcher):
        config, key = resolve(order.folder / "config.yaml"), _open_audit(folder, order)
        roster = Roster(
            grid, folder, Deployment.read(run_config), lambda line: log(INFO, "%s", line)
        )
        method = order.method()
        if method.scores == "corrected":
            end_of_run(order.folder)  # before sites are waited for
        site_counts = Answers.of(_play(roster, config, method, key, watcher, order.folder))
        page = _write(order, roster, site_counts)
        # Last: from now on the same order is a new audit.
        write_json(
            folder.path / "result.json", {"page": str(page), "answered": len(site_counts.joints)}
        )
        shutil.rmtree(folder.path / "checkpoints")
    log(
        INFO,
        "the page is %s; each site's letter is at the site, in audits/%s of its memory folder",
        page,
        key,
    )
    return page.parent


def _open_audit(folder: RunFolder, order: AuditOrder) -> str:
    """The audit's key; one that was finished, or ordered otherwise, begins anew."""
    file = folder.path / "flower.json"
    content = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    if content.get("order") == asdict(order) and not folder.finished:
        return str(content["run"])
    for path in (
        file,
        *(folder.path / name for name in ("result.json", "clients.csv", "rounds.jsonl")),
    ):
        path.unlink(missing_ok=True)
    for checkpoint in checkpoints(folder):
        checkpoint.unlink()
    # Clients have the numbers that they had in the run, which its verdicts speak of.
    run_sites = json.loads((order.folder / "sites.json").read_text(encoding="utf-8"))
    write_json(folder.path / "sites.json", {**run_sites, "refused": {}})
    key = uuid.uuid4().hex
    write_json(file, {"run": key, "order": asdict(order)})
    return key


def _play(
    roster: Roster,
    config: Config,
    method: Audit,
    key: str,
    watcher: Watcher,
    audited_run: Path,
) -> State:
    if any(visitor.simulated for visitor in roster.assemble()):
        raise UserError("simulated sites are audited in one process: fednoro audit RUN")
    roster.settle(None)
    assert roster.kind is not None
    classes = roster.kind[0]
    # Corrected labels are of those images alone that the run was trained on.
    held_out = method.scores == "corrected" and section_name(config, "data") == "sites"
    site_order = run_order(config, classes, held_out, None, method)
    folder = roster.folder
    exchange = FlowerExchange(
        roster.grid, roster, lambda: moment(folder, key, site_order), roster.options.round_timeout
    )
    state = restore(folder, {})
    if state is None:
        if method.scores == "corrected":
            start = end_of_run(audited_run).state.model
        else:
            start = network_for(config, roster.kind).weights()
            if config.model.recalibrate:
                start = recalibrate_at_sites(start, exchange, roster, watcher)
        state = State(start, 0, method.rounds, len(classes), config.seed)
    state = to_device(state, torch.device("cpu"))
    for turn in play(
        method, state, exchange, roster.clients, skip_evaluation, config.train.participation
    ):
        state = turn.state
        folder.record(_without_evaluation(turn))
        save_checkpoint(folder, state, {})
        for message in turn.warnings:
            watcher.warned(message)
        watcher.progress(f"audit, {turn.task}: rounds", state.round, method.rounds)
    return state


def _without_evaluation(turn: Turn) -> Turn:
    """The turn without its evaluation, of which an audit has none,
    but with the number of its round.
    """
    if turn.evaluation is None:
        return turn
    return replace(turn, evaluation=None, state=replace(turn.state, round=turn.state.round - 1))


def _write(order: AuditOrder, roster: Roster, site_counts: Answers) -> Path:
    assert roster.kind is not None
    method, folder = order.method(), order.folder / "audit"
    verdicts = verdicts_in(order.folder / "detection.json")
    audit_findings = findings(
        site_counts.counts,
        site_counts.joints,
        roster.sites,
        roster.kind[0],
        order.min_cell,
        verdicts,
    )
    explanation = method.explain()
    write_page(
        folder,
        audit_findings,
        Account(
            order.folder.name,
            explanation,
            order.scores,
            method.warmup,
            method.models,
            site_counts.thresholds,
        ),
    )
    return folder / "index.html"
