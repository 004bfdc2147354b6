"""A whole audit of a simulated run, from its folder to page, JSON and letters."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Group
from rich.table import Table
from rich.text import Text

from fednoro.audit.audit_method import Audit, Scores
from fednoro.audit.coordinator_page import (
    Account,
    doubt,
    headline,
    lead,
    ordered,
    otherwise,
    page,
    to_json,
    unjudged,
    words,
)
from fednoro.audit.csv_sheet import sheet
from fednoro.audit.estimates import Findings, SiteFinding, findings
from fednoro.audit.simulated_audit import Examined, Subject, examine, subject
from fednoro.audit.site_letter import COLUMNS, TOP, Holding, Judgement, rows, write_letter
from fednoro.core.files import disk_errors, write_json, write_whole
from fednoro.core.types import UserError
from fednoro.experiment.drive import Watcher, warnings_to
from fednoro.report.web.audit_shell import percent, plain


@dataclass(frozen=True)
class Audited:
    """A finished audit."""

    folder: Path
    found: Findings
    letters: tuple[Path, ...]
    account: Account


def audit_run(
    run: Path,
    scores: Scores = "early",
    min_cell: int = 5,
    out: Path | None = None,
    rounds: int | None = None,
    folds: int = 5,
    top: int = TOP,
    device: str | None = None,
    watcher: Watcher | None = None,
    force: bool = False,
) -> Audited:
    """Audits a run: index.html and audit.json for the coordinator, sites/NAME/
    with a letter for each site.

    A folder that holds something already, decisions perhaps, is left alone unless `force` is given.
    """
    watcher = watcher or Watcher()
    folder = (run / "audit" if out is None else out).expanduser()
    with disk_errors(folder):
        if not force and folder.is_dir() and any(folder.iterdir()):
            raise UserError(
                f"{folder} exists already: choose another --out, or "
                "say --force to replace its files"
            )
    with warnings_to(watcher), subject(run, watcher, device) as of:
        method = Audit(scores=scores, warmup=rounds or of.warmup, folds=folds)
        examined, how = examine(of, method), method.explain()
        found = _findings(of, examined, min_cell)
        with disk_errors(folder):
            (folder / "sites").mkdir(parents=True, exist_ok=True)
        account = Account(
            run.resolve().name, how, scores, method.warmup, method.models, examined.thresholds
        )
        write_page(folder, found, account)
        letters = _letters(folder / "sites", of, examined, how, top)
    return Audited(folder, found, letters, account)


def write_page(folder: Path, found: Findings, account: Account) -> None:
    """What the coordinator gets: index.html and audit.json."""
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "index.html", page(found, account))
    write_json(folder / "audit.json", to_json(found, account))


def _findings(of: Subject, examined: Examined, min_cell: int) -> Findings:
    federation = of.federation
    return findings(
        examined.counts,
        examined.joints,
        federation.names,
        federation.classes,
        min_cell,
        of.detection,
        None if federation.noisy is None else federation.rates,
    )


def _letters(folder: Path, of: Subject, examined: Examined, how: str, top: int) -> tuple[Path, ...]:
    """What the sites do, each on its own disk; here, side by side, as all of them are simulated."""
    federation, dataset = of.federation, of.dataset
    ids = dataset.ids or tuple(str(i) for i in range(len(dataset)))
    names, accepted, written = folder_names(federation.names), list[tuple[str, ...]](), list[Path]()
    for k, p in sorted(examined.probabilities.items()):
        index = federation.parts[k]
        images, mine = dataset.images[index], [ids[i] for i in index]
        site = Holding(
            federation.names[k], images, federation.observed[index], mine, federation.classes
        )
        ranking = write_letter(folder / names[k], site, Judgement(p, examined.thresholds, how), top)
        accepted += rows(site, ranking, accept=True)
        written.append(folder / names[k] / "letter.html")
        of.lab.watcher.progress("writing letters", len(written), len(examined.probabilities))
    # nobody could, outside a simulation
    write_whole(folder / "accepted.csv", sheet(COLUMNS, accepted))
    return tuple(written)


def folder_names(names: Sequence[str]) -> list[str]:
    """A plain folder name for each site, no two alike."""
    plains = [re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:60] for name in names]
    return [
        name if name and plains.count(name) == 1 else f"{name or 'site'}-{k}"
        for k, name in enumerate(plains)
    ]


def summary(done: Audited) -> Group:
    """The audit for a terminal."""
    found = done.found
    warned = otherwise(found, done.account.scores), unjudged(found), doubt(found)
    lines = [f"{headline(found)}. {lead(found)}", done.account.how, *filter(None, warned)]
    if found.absent:
        lines.append(f"without an answer: {', '.join(map(plain, found.absent))}")
    lines.append(f"page: {done.folder / 'index.html'}")
    if done.letters:
        lines.append(
            f"letters: {len(done.letters)} under "
            f"{done.folder / 'sites'}, the first {done.letters[0]}"
        )
    return Group(site_table(ordered(found)), *map(Text, lines))


def site_table(sites: Sequence[SiteFinding]) -> Table:
    """One line for each site."""
    table = Table()
    truth = any(site.truth is not None for site in sites)
    judged = any(site.verdict is not None for site in sites)
    headings = [
        "site",
        "images",
        "differ",
        "may be wrong,\nof those judged",
        *["truth"] * truth,
        *["detector"] * judged,
    ]
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("site", "detector") else "right")
    for site in sites:
        cells = [plain(site.name), f"{site.images:,}", site.suspected, words(site.estimate)]
        cells += [percent(site.truth or 0)] if truth else []
        cells += [site.verdict or ""] if judged else []
        table.add_row(*map(Text, cells))
    return table
