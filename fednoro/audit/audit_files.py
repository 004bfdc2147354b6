"""A whole audit of a simulated run, from its folder to page, JSON and letters."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Group
from rich.table import Table
from rich.text import Text

from fednoro.audit import estimates
from fednoro.audit.audit_method import Audit, Scores
from fednoro.audit.coordinator_page import (
    Account,
    disagreement,
    doubt,
    headline,
    lead,
    page,
    sort_sites,
    to_json,
    unjudged_text,
    words,
)
from fednoro.audit.csv_sheet import sheet
from fednoro.audit.estimates import Findings, SiteFinding
from fednoro.audit.simulated_audit import Outcome, Subject, examine, open_subject
from fednoro.audit.site_letter import COLUMNS, TOP, Holding, Judgement, rows, write_letter
from fednoro.core.files import disk_errors, write_json, write_whole
from fednoro.core.types import UserError
from fednoro.core.wording import percent
from fednoro.experiment.drive import Watcher, warnings_to
from fednoro.report.web.audit_shell import plain


@dataclass(frozen=True)
class AuditOptions:
    """How a run is audited, and where the files go."""

    scores: Scores = "early"
    min_cell: int = 5  # counts below this are not shown to the coordinator
    out: Path | None = None  # RUN/audit if not given
    rounds: int | None = None  # before a model judges; the run's warm-up if not given
    folds: int = 5  # parts of each site's images in cross-fitting
    top: int = TOP  # images in a letter
    device: str | None = None  # the run's own if not given
    force: bool = False  # replace the files of an earlier audit


@dataclass(frozen=True)
class FinishedAudit:
    """A finished audit."""

    folder: Path
    findings: Findings
    letters: tuple[Path, ...]
    account: Account


def audit_run(
    run: Path, options: AuditOptions | None = None, watcher: Watcher | None = None
) -> FinishedAudit:
    """Audits a run: index.html and audit.json for the coordinator,
    sites/NAME/ with a letter for each site.

    A folder that holds something already, decisions perhaps, is left alone unless `options` say
    `force`.
    """
    options, watcher = options or AuditOptions(), watcher or Watcher()
    folder = (run / "audit" if options.out is None else options.out).expanduser()
    with disk_errors(folder):
        if not options.force and folder.is_dir() and any(folder.iterdir()):
            raise UserError(
                f"{folder} exists already: "
                "choose another --out, or say --force to replace its files"
            )
    with warnings_to(watcher), open_subject(run, watcher, options.device) as subject:
        warmup = options.rounds or subject.warmup
        method = Audit(scores=options.scores, warmup=warmup, folds=options.folds)
        outcome, explanation = examine(subject, method), method.explain()
        findings = _findings(subject, outcome, options.min_cell)
        with disk_errors(folder):
            (folder / "sites").mkdir(parents=True, exist_ok=True)
        account = Account(
            run.resolve().name,
            explanation,
            options.scores,
            method.warmup,
            method.models,
            outcome.thresholds,
        )
        write_page(folder, findings, account)
        letters = _letters(folder / "sites", subject, outcome, explanation, options.top)
    return FinishedAudit(folder, findings, letters, account)


def write_page(folder: Path, findings: Findings, account: Account) -> None:
    """What the coordinator gets: index.html and audit.json."""
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "index.html", page(findings, account))
    write_json(folder / "audit.json", to_json(findings, account))


def _findings(subject: Subject, outcome: Outcome, min_cell: int) -> Findings:
    federation = subject.federation
    return estimates.findings(
        outcome.counts,
        outcome.joints,
        federation.names,
        federation.classes,
        min_cell,
        subject.detection,
        None if federation.noisy is None else federation.rates,
    )


def _letters(
    folder: Path, subject: Subject, outcome: Outcome, explanation: str, top: int
) -> tuple[Path, ...]:
    """What the sites do, each on its own disk; here, side by side, as all of them are simulated."""
    federation, dataset = subject.federation, subject.dataset
    ids = dataset.ids or tuple(str(i) for i in range(len(dataset)))
    names = folder_names(federation.names)
    accepted_rows, letters = list[tuple[str, ...]](), list[Path]()
    for k, p in sorted(outcome.probabilities.items()):
        index = federation.parts[k]
        images, image_ids = dataset.images[index], [ids[i] for i in index]
        site = Holding(
            federation.names[k], images, federation.observed[index], image_ids, federation.classes
        )
        ranking = write_letter(
            folder / names[k], site, Judgement(p, outcome.thresholds, explanation), top
        )
        accepted_rows += rows(site, ranking, accept=True)
        letters.append(folder / names[k] / "letter.html")
        subject.lab.watcher.progress("writing letters", len(letters), len(outcome.probabilities))
    # Only a simulation can write one file for all sites.
    write_whole(folder / "accepted.csv", sheet(COLUMNS, accepted_rows))
    return tuple(letters)


def folder_names(names: Sequence[str]) -> list[str]:
    """A plain folder name for each site, no two alike."""
    plain_names = [re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:60] for name in names]
    return [
        name if name and plain_names.count(name) == 1 else f"{name or 'site'}-{k}"
        for k, name in enumerate(plain_names)
    ]


def summary(audit: FinishedAudit) -> Group:
    """The audit for a terminal."""
    findings = audit.findings
    cautions = (
        disagreement(findings, audit.account.scores),
        unjudged_text(findings),
        doubt(findings),
    )
    lines = [
        f"{headline(findings)}. {lead(findings)}",
        audit.account.explanation,
        *filter(None, cautions),
    ]
    if findings.absent:
        lines.append(f"without an answer: {', '.join(map(plain, findings.absent))}")
    lines.append(f"page: {audit.folder / 'index.html'}")
    if audit.letters:
        lines.append(
            f"letters: {len(audit.letters)} under {audit.folder / 'sites'}, "
            f"the first {audit.letters[0]}"
        )
    return Group(site_table(sort_sites(findings)), *map(Text, lines))


def site_table(sites: Sequence[SiteFinding]) -> Table:
    """One line for each site."""
    table = Table()
    has_truth = any(site.truth is not None for site in sites)
    has_verdicts = any(site.verdict is not None for site in sites)
    headings = [
        "site",
        "images",
        "differ",
        "may be wrong,\nof those judged",
        *["truth"] * has_truth,
        *["detector"] * has_verdicts,
    ]
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("site", "detector") else "right")
    for site in sites:
        cells = [plain(site.name), f"{site.images:,}", site.suspected, words(site.estimate)]
        cells += [percent(site.truth or 0)] if has_truth else []
        cells += [site.verdict or ""] if has_verdicts else []
        table.add_row(*map(Text, cells))
    return table
