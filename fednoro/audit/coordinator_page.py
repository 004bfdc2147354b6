"""The coordinator's page and its JSON: shares, names and counts of at least n; no image, no id."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fednoro.audit.confident_learning import NEVER
from fednoro.audit.estimates import Estimate, Findings, SiteFinding, judged_at_most
from fednoro.core.types import FloatArray
from fednoro.core.wording import first_names, percent
from fednoro.report.web.audit_shell import plain, render

MANY_WRONG = 0.1  # a site whose interval begins above this is named in the headline
# a share over all sites above which the model is to be doubted before the labels
DOUBTFUL_OVERALL = 0.5
# a share of a site's images that could not be judged, from which on the page says so
UNJUDGED_SHARE = 0.4
LISTED_AT_MOST = 12  # sites in a sentence
# a share that even the best of several sites exceeds: much of it is the model's own mistakes
DOUBTFUL_MINIMUM = 0.15


@dataclass(frozen=True)
class Account:
    """How an audit was made, in words for people and as values for JSON."""

    run: str
    explanation: str
    scores: str
    warmup: int
    models: int
    thresholds: FloatArray


def page(findings: Findings, account: Account) -> bytes:
    """The page as an HTML file."""
    sites = sort_sites(findings)
    shown_counts = [
        line.values[j] or 0
        for i, line in enumerate(findings.table)
        for j in range(len(findings.classes))
        if j != i
    ]
    return render(
        "page.html",
        title=f"Label audit: {plain(account.run)}",
        run=plain(account.run),
        headline=headline(findings),
        lead=lead(findings),
        doubt=doubt(findings),
        disagreement=disagreement(findings, account.scores),
        unjudged=unjudged_text(findings),
        findings=findings,
        sites=[{**_fields(site), "words": words(site.estimate)} for site in sites],
        truth=any(site.truth is not None for site in sites),
        verdicts=any(site.verdict is not None for site in sites),
        bounded=any(site.estimate is not None and site.estimate.share is None for site in sites),
        least=max(findings.least, 1),
        few=f"fewer than {findings.least}" if findings.least > 1 else "none",
        paired=any(site.pairs for site in sites),
        scarce=any(site.scarce for site in sites),
        most=max([*shown_counts, 1]),
        levels=_levels(findings, account),
        explanation=account.explanation,
        standing=bool(sites_standing_out(findings)),
        flagged_names=_join_names([plain(site.name) for site in sites_flagged_alone(findings)]),
        calm=_calm(findings),
        stamp=f"Made by fednoro from the sites' counts; {_training_text(account)}.",
    )


def to_json(findings: Findings, account: Account) -> dict[str, Any]:
    """What the page says, as JSON values."""
    return {
        "run": account.run,
        "headline": headline(findings),
        "lead": lead(findings),
        "scores": account.scores,
        "how": account.explanation,
        "rounds": account.warmup,
        "models": account.models,
        "min_cell": findings.least,
        "images": findings.images,
        "classes": list(findings.classes),
        "held_by_no_site": list(findings.unheld),
        "without_answer": list(findings.absent),
        "overall": _round_estimate(findings.overall),
        "doubt": doubt(findings),
        "otherwise": disagreement(findings, account.scores),
        "unjudged": unjudged_text(findings),
        "thresholds": [None if t == NEVER else round(float(t), 4) for t in account.thresholds],
        "sites": [
            {**_fields(site), "estimate": _round_estimate(site.estimate)} for site in findings.sites
        ],
        "labelled_looks_like": [
            {
                "labelled": findings.classes[i],
                "looks_like": {
                    name: _cell(line.text(j), line.values[j])
                    for j, name in enumerate(findings.classes)
                },
                "not_sure": _cell(line.text(len(findings.classes)), line.values[-1]),
                "total": line.total if line.total is not None else "withheld",
            }
            for i, line in enumerate(findings.table)
        ],
    }


def sort_sites(findings: Findings) -> list[SiteFinding]:
    """The sites, those with most to look at first."""

    def key(site: SiteFinding) -> tuple[float, float, int]:
        e = site.estimate
        return (
            -1.0 if e is None or e.share is None else e.share,
            0.0 if e is None else e.high,
            -site.client,
        )

    return sorted(findings.sites, key=key, reverse=True)


def sites_standing_out(findings: Findings) -> list[SiteFinding]:
    """Sites where more than chance says that many labels may be wrong."""
    return [
        s
        for s in sort_sites(findings)
        if s.estimate and s.estimate.share is not None and s.estimate.low > MANY_WRONG
    ]


def sites_flagged_alone(findings: Findings) -> list[SiteFinding]:
    """Sites that the run's detector calls noisy and the audit does not name."""
    listed_clients = {site.client for site in sites_standing_out(findings)}
    return [
        site
        for site in sort_sites(findings)
        if site.verdict == "noisy" and site.client not in listed_clients
    ]


def headline(findings: Findings) -> str:
    """The answer in one line."""
    count, others = len(sites_standing_out(findings)), len(sites_flagged_alone(findings))
    if not findings.sites:
        return "No site answered"
    if not count:
        text = (
            "No site stands out"
            if _bound(findings) <= MANY_WRONG
            else "No site is shown to stand out"
        )
        return f"{text}, though the run's detector flagged {others}" if others else text
    return (
        f"{count} of {len(findings.sites)} sites "
        f"{'has' if count == 1 else 'have'} many labels to look at"
    )


def lead(findings: Findings) -> str:
    """The answer in a sentence or two."""
    if not findings.sites:
        return "Nothing can be said about the labels."
    sites = sites_standing_out(findings)
    if not sites:
        most = max((site.estimate.high for site in findings.sites if site.estimate), default=1.0)
        few = "with so few images even" if most > MANY_WRONG else "up to"
        return (
            f"At no site is it shown that more than {percent(MANY_WRONG)} of the labels are wrong; "
            f"{few} {percent(most)} would not show."
        )
    descriptions = [
        f"{plain(s.name)} ({percent(s.estimate.share or 0)})" for s in sites if s.estimate
    ]
    where = "this site" if len(descriptions) == 1 else "these sites"
    return (
        f"At {where} more than {percent(MANY_WRONG)} of the labels may be wrong, "
        f"beyond what chance explains: {_join_names(descriptions)}."
    )


def disagreement(findings: Findings, scores: str) -> str | None:
    """Where the run's own detector says otherwise, and what to do then."""
    if not (sites := sites_flagged_alone(findings)):
        return None
    text = (
        f"The run's own detector flagged {_join_names([plain(site.name) for site in sites])}, "
        f"where the audit does not show that more than {percent(MANY_WRONG)} of the labels are "
        "wrong."
    )
    if scores == "cross_fit":
        return f"{text} The images at the top of its letter will tell more."
    return (
        f"{text} Audit again with --scores cross_fit: "
        "its models have not seen the labels that they judge."
    )


def unjudged_text(findings: Findings) -> str | None:
    """Where a large share of the images could not be judged."""
    unjudged_counts = [
        (site, site.images - judged_at_most(site, findings.least))
        for site in sort_sites(findings)
        if site.images
    ]
    descriptions = [
        f"{plain(site.name)} (at least {100 * count // site.images}% of {site.images:,})"
        for site, count in unjudged_counts
        if site.estimate is None or count >= UNJUDGED_SHARE * site.images
    ]
    text = "Many images could not be judged, so that nothing is known about their labels"
    return f"{text}: {_join_names(descriptions)}." if descriptions else None


def doubt(findings: Findings) -> str | None:
    """What speaks against the whole audit, if anything does."""
    if findings.overall.share is not None and findings.overall.share > DOUBTFUL_OVERALL:
        return (
            f"Over all sites more than {percent(DOUBTFUL_OVERALL)} of the labels look wrong. A "
            "model that has learnt too little looks like that too: audit again with more "
            "rounds before you write to anybody."
        )
    estimates = [site.estimate for site in findings.sites if site.estimate is not None]
    # A share that is not shown may well be 0.
    shares = [estimate.share for estimate in estimates if estimate.share is not None]
    if 1 < len(shares) == len(estimates) and min(shares) > DOUBTFUL_MINIMUM:
        return (
            f"Even at the best site {percent(min(shares))} of the labels look wrong. Much of every "
            "share will be the model's own mistakes: compare sites with each other, and read the "
            "letters from the top, rather than trust a share."
        )
    return None


def words(estimate: Estimate | None) -> str:
    """An estimate as a person would say it."""
    if estimate is None:
        return "too few images could be judged"
    if estimate.share is None:
        return f"at most {percent(estimate.high)}"
    return f"{percent(estimate.share)} ({percent(estimate.low)[:-1]}–{percent(estimate.high)})"


def _bound(findings: Findings) -> float:
    """The largest share of wrong labels that would not show at some site."""
    return max(
        (1.0 if site.estimate is None else site.estimate.high for site in findings.sites),
        default=1.0,
    )


def _calm(findings: Findings) -> bool:
    """Whether nothing has to be done, which is more than that nothing was shown."""
    return _bound(findings) <= MANY_WRONG and not (
        sites_standing_out(findings) or sites_flagged_alone(findings) or unjudged_text(findings)
    )


def _join_names(names: Sequence[str]) -> str:
    return first_names(names, LISTED_AT_MOST)


def _training_text(account: Account) -> str:
    if account.scores == "corrected":
        return "nothing was trained for it"
    models = "one model was" if account.models == 1 else f"{account.models} models were"
    return f"{models} trained for {account.warmup} {'round' if account.warmup == 1 else 'rounds'}"


def _round_estimate(estimate: Estimate | None) -> dict[str, float | None] | None:
    """In whole percent, as the page has it."""
    if estimate is None:
        return None
    return {k: None if v is None else round(v, 2) for k, v in dataclasses.asdict(estimate).items()}


def _fields(site: SiteFinding) -> dict[str, Any]:
    return {item.name: getattr(site, item.name) for item in dataclasses.fields(site)}


def _cell(text: str, value: int | None) -> int | str:
    return text if value is None else value


def _levels(findings: Findings, account: Account) -> list[tuple[str, str]]:
    levels = zip(findings.classes, account.thresholds, strict=True)
    return [(name, "none" if level == NEVER else f"{level:.2f}") for name, level in levels]
