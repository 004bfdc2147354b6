"""The coordinator's page and its JSON: shares, names and counts of at least n; no image, no id."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fednoro.audit.confident_learning import NEVER
from fednoro.audit.estimates import Estimate, Findings, SiteFinding, judged_at_most
from fednoro.core.types import FloatArray
from fednoro.report.web.audit_shell import percent, plain, render

MANY = 0.1  # a site whose interval begins above this is named in the headline
WEAK = 0.5  # a share over all sites above which the model is to be doubted before the labels
# a share of a site's images that could not be judged, from which on the page says so
UNJUDGED = 0.4
NAMED = 12  # sites in a sentence
# a share that even the best of several sites exceeds: much of it is the model's own mistakes
EVERYWHERE = 0.15


@dataclass(frozen=True)
class Account:
    """How an audit was made, in words for people and as values for JSON."""

    run: str
    how: str
    scores: str
    warmup: int
    models: int
    thresholds: FloatArray


def page(found: Findings, account: Account) -> bytes:
    """The page as an HTML file."""
    sites = ordered(found)
    shown = [
        line.values[j] or 0
        for i, line in enumerate(found.table)
        for j in range(len(found.classes))
        if j != i
    ]
    return render(
        "page.html",
        title=f"Label audit: {plain(account.run)}",
        run=plain(account.run),
        headline=headline(found),
        lead=lead(found),
        doubt=doubt(found),
        otherwise=otherwise(found, account.scores),
        unjudged=unjudged(found),
        found=found,
        sites=[{**_fields(site), "words": words(site.estimate)} for site in sites],
        truth=any(site.truth is not None for site in sites),
        verdicts=any(site.verdict is not None for site in sites),
        bounded=any(site.estimate is not None and site.estimate.share is None for site in sites),
        least=max(found.least, 1),
        few=f"fewer than {found.least}" if found.least > 1 else "none",
        paired=any(site.pairs for site in sites),
        scarce=any(site.scarce for site in sites),
        most=max([*shown, 1]),
        levels=_levels(found, account),
        how=account.how,
        standing=bool(standing_out(found)),
        asked=_listed([plain(site.name) for site in flagged_alone(found)]),
        calm=_calm(found),
        stamp=f"Made by fednoro from the sites' counts; {_trained(account)}.",
    )


def to_json(found: Findings, account: Account) -> dict[str, Any]:
    """What the page says, as JSON values."""
    return {
        "run": account.run,
        "headline": headline(found),
        "lead": lead(found),
        "scores": account.scores,
        "how": account.how,
        "rounds": account.warmup,
        "models": account.models,
        "min_cell": found.least,
        "images": found.images,
        "classes": list(found.classes),
        "held_by_no_site": list(found.unheld),
        "without_answer": list(found.absent),
        "overall": _rounded(found.overall),
        "doubt": doubt(found),
        "otherwise": otherwise(found, account.scores),
        "unjudged": unjudged(found),
        "thresholds": [None if t == NEVER else round(float(t), 4) for t in account.thresholds],
        "sites": [{**_fields(site), "estimate": _rounded(site.estimate)} for site in found.sites],
        "labelled_looks_like": [
            {
                "labelled": found.classes[i],
                "looks_like": {
                    name: _cell(line.text(j), line.values[j])
                    for j, name in enumerate(found.classes)
                },
                "not_sure": _cell(line.text(len(found.classes)), line.values[-1]),
                "total": line.total if line.total is not None else "withheld",
            }
            for i, line in enumerate(found.table)
        ],
    }


def ordered(found: Findings) -> list[SiteFinding]:
    """The sites, those with most to look at first."""

    def key(site: SiteFinding) -> tuple[float, float, int]:
        e = site.estimate
        return (
            -1.0 if e is None or e.share is None else e.share,
            0.0 if e is None else e.high,
            -site.client,
        )

    return sorted(found.sites, key=key, reverse=True)


def standing_out(found: Findings) -> list[SiteFinding]:
    """Sites where more than chance says that many labels may be wrong."""
    return [
        s
        for s in ordered(found)
        if s.estimate and s.estimate.share is not None and s.estimate.low > MANY
    ]


def flagged_alone(found: Findings) -> list[SiteFinding]:
    """Sites that the run's detector calls noisy and the audit does not name."""
    named = {site.client for site in standing_out(found)}
    return [site for site in ordered(found) if site.verdict == "noisy" and site.client not in named]


def headline(found: Findings) -> str:
    """The answer in one line."""
    count, others = len(standing_out(found)), len(flagged_alone(found))
    if not found.sites:
        return "No site answered"
    if not count:
        said = "No site stands out" if _bound(found) <= MANY else "No site is shown to stand out"
        return f"{said}, though the run's detector flagged {others}" if others else said
    return (
        f"{count} of {len(found.sites)} sites "
        f"{'has' if count == 1 else 'have'} many labels to look at"
    )


def lead(found: Findings) -> str:
    """The answer in a sentence or two."""
    if not found.sites:
        return "Nothing can be said about the labels."
    sites = standing_out(found)
    if not sites:
        most = max((site.estimate.high for site in found.sites if site.estimate), default=1.0)
        few = "with so few images even" if most > MANY else "up to"
        return (
            f"At no site is it shown that more than {percent(MANY)} of the labels are wrong; {few} "
            f"{percent(most)} would not show."
        )
    named = [f"{plain(s.name)} ({percent(s.estimate.share or 0)})" for s in sites if s.estimate]
    where = "this site" if len(named) == 1 else "these sites"
    return (
        f"At {where} more than {percent(MANY)} of the labels may be wrong, beyond what "
        f"chance explains: {_listed(named)}."
    )


def otherwise(found: Findings, scores: str) -> str | None:
    """Where the run's own detector says otherwise, and what to do then."""
    if not (sites := flagged_alone(found)):
        return None
    said = (
        f"The run's own detector flagged {_listed([plain(site.name) for site in sites])}, where "
        f"the audit does not show that more than {percent(MANY)} of the labels are wrong."
    )
    if scores == "cross_fit":
        return f"{said} The images at the top of its letter will tell more."
    return (
        f"{said} Audit again with --scores cross_fit: its models have not "
        "seen the labels that they judge."
    )


def unjudged(found: Findings) -> str | None:
    """Where a large share of the images could not be judged."""
    missing = [
        (site, site.images - judged_at_most(site, found.least))
        for site in ordered(found)
        if site.images
    ]
    named = [
        f"{plain(site.name)} (at least {100 * count // site.images}% of {site.images:,})"
        for site, count in missing
        if site.estimate is None or count >= UNJUDGED * site.images
    ]
    said = "Many images could not be judged, so that nothing is known about their labels"
    return f"{said}: {_listed(named)}." if named else None


def doubt(found: Findings) -> str | None:
    """What speaks against the whole audit, if anything does."""
    if found.overall.share is not None and found.overall.share > WEAK:
        return (
            f"Over all sites more than {percent(WEAK)} of the labels look wrong. A model "
            "that has learnt too little looks like that too: audit again with more "
            "rounds before you write to anybody."
        )
    estimates = [site.estimate for site in found.sites if site.estimate is not None]
    # others may well be 0
    shares = [estimate.share for estimate in estimates if estimate.share is not None]
    if 1 < len(shares) == len(estimates) and min(shares) > EVERYWHERE:
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


def _bound(found: Findings) -> float:
    """The largest share of wrong labels that would not show at some site."""
    return max(
        (1.0 if site.estimate is None else site.estimate.high for site in found.sites), default=1.0
    )


def _calm(found: Findings) -> bool:
    """Whether nothing has to be done, which is more than that nothing was shown."""
    return _bound(found) <= MANY and not (
        standing_out(found) or flagged_alone(found) or unjudged(found)
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:NAMED]) + (
        f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    )


def _trained(account: Account) -> str:
    if account.scores == "corrected":
        return "nothing was trained for it"
    models = "one model was" if account.models == 1 else f"{account.models} models were"
    return f"{models} trained for {account.warmup} {'round' if account.warmup == 1 else 'rounds'}"


def _rounded(estimate: Estimate | None) -> dict[str, float | None] | None:
    """In whole percent, as the page has it."""
    if estimate is None:
        return None
    return {k: None if v is None else round(v, 2) for k, v in dataclasses.asdict(estimate).items()}


def _fields(site: SiteFinding) -> dict[str, Any]:
    return {item.name: getattr(site, item.name) for item in dataclasses.fields(site)}


def _cell(text: str, value: int | None) -> int | str:
    return text if value is None else value


def _levels(found: Findings, account: Account) -> list[tuple[str, str]]:
    levels = zip(found.classes, account.thresholds, strict=True)
    return [(name, "none" if level == NEVER else f"{level:.2f}") for name, level in levels]
