"""Letters and pages: what they hold, what they never hold, and what
hostile names cannot do to them.
"""

from __future__ import annotations

import base64
import csv
import io
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from rich.console import Console

from fednoro.audit.audit_files import FinishedAudit, folder_names, summary
from fednoro.audit.audit_method import LEVELS, PROBABILITIES
from fednoro.audit.confident_learning import site_joint
from fednoro.audit.coordinator_page import (
    Account,
    disagreement,
    doubt,
    headline,
    lead,
    page,
    to_json,
    unjudged_text,
)
from fednoro.audit.csv_sheet import neutral, sheet
from fednoro.audit.estimates import Findings, findings
from fednoro.audit.site_letter import Holding, Judgement, thumbnail, write_letter
from fednoro.core.types import UserError
from fednoro.data.noise import observed_from_file
from fednoro.report.web.audit_shell import THEMES
from fednoro.report.web.palette import contrast, mix

HOSTILE = (
    '<script>alert("1")</script>',
    "</script><img src=x onerror=alert(2)>",
    "\"'><svg/onload=alert(3)>",
    "{{ 7 * 7 }}",
    '=HYPERLINK("http://evil")',
    "javascript:alert(4)",
    "a\u202eb\x1b[31m",
    "--></style><b>",
)


class Tags(HTMLParser):
    """Every tag with its attributes, and whatever could fetch or run something."""

    def __init__(self, html: bytes) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(html.decode())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def check_harmless(html: bytes) -> None:
    tags = Tags(html).tags
    assert [tag for tag, _ in tags].count("script") == 1
    policy = next(
        a["content"]
        for tag, a in tags
        if tag == "meta" and a.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy and "default-src 'none'" in policy and "script-src 'sha256-" in policy
    assert {tag for tag, _ in tags} & {"iframe", "object", "embed", "base", "form", "b>"} == set()
    for _, attributes in tags:
        assert not [name for name in attributes if name.startswith("on")]
        for name in ("src", "href", "xlink:href", "action", "srcset"):
            assert (attributes.get(name) or "data:").startswith(("data:", "#"))
    assert b"http://" not in re.sub(
        rb'data-\w+="[^"]*"|value="[^"]*"|>[^<]*<|alt="[^"]*"|aria-label="[^"]*"', b"", html
    )


def holding(
    images: int = 12, classes: tuple[str, ...] = ("cat", "dog", "owl"), **changes: object
) -> Holding:
    rng = np.random.default_rng(3)
    pixels = rng.integers(0, 256, (images, 8, 8, 1)).astype(np.uint8)
    given: dict[str, object] = {
        "name": "North", "images": pixels, "labels": rng.integers(0, len(classes), images),
        "ids": [f"IMG-{i:04d}" for i in range(images)], "classes": classes,
    }  # fmt: skip
    return Holding(**{**given, **changes})  # type: ignore[arg-type]


def judgement(site: Holding) -> Judgement:
    p = np.random.default_rng(4).dirichlet(np.full(len(site.classes), 0.4), len(site.labels))
    return Judgement(p, np.full(len(site.classes), 0.5), "An early model.")


def read(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(path.read_bytes().decode(), newline="")))


def test_letter_shows_the_top_and_csv_has_all(tmp_path: Path) -> None:
    site = holding()
    ranking = write_letter(tmp_path, site, judgement(site), top=5)
    rows = [
        a
        for tag, a in Tags((tmp_path / "letter.html").read_bytes()).tags
        if tag == "tr" and "data-id" in a
    ]
    images = read(tmp_path / "images.csv")
    assert [row["data-id"] for row in rows] == [row["id"] for row in images[:5]]
    assert len(images) == 12 and sorted(row["id"] for row in images) == sorted(site.ids)
    assert [float(row["suspicion"]) for row in images] == sorted(
        (float(r["suspicion"]) for r in images), reverse=True
    )
    assert all(row["label"] == row["given"] for row in images)
    accepted = read(tmp_path / "accepted.csv")
    changed = [row["label"] != row["given"] for row in accepted]
    assert changed == ranking.differs.tolist() and any(changed)
    assert all(
        row["label"] == row["suggested"] for row, c in zip(accepted, changed, strict=True) if c
    )


def test_thumbnails_are_the_images() -> None:
    grey = np.arange(64, dtype=np.uint8).reshape(8, 8, 1)
    back = Image.open(io.BytesIO(base64.b64decode(thumbnail(grey).partition(",")[2])))
    np.testing.assert_array_equal(np.asarray(back), grey[..., 0])
    colour = np.random.default_rng(0).integers(0, 256, (300, 200, 3)).astype(np.uint8)
    back = Image.open(io.BytesIO(base64.b64decode(thumbnail(colour).partition(",")[2])))
    assert back.size == (64, 96) and back.mode == "RGB"


@pytest.mark.parametrize("hostile", HOSTILE)
def test_hostile_names_do_nothing(tmp_path: Path, hostile: str) -> None:
    classes = (hostile, "dog", hostile + "2")
    site = holding(classes=classes, name=hostile, ids=[f"{hostile}{i}" for i in range(12)])
    write_letter(tmp_path, site, judgement(site))
    html = (tmp_path / "letter.html").read_bytes()
    check_harmless(html)
    rows = [a for tag, a in Tags(html).tags if tag == "tr" and "data-id" in a]
    assert {row["data-id"] for row in rows} == set(site.ids)  # escaped, not lost
    check_harmless(page(told(names=[hostile, "b", "c"], classes=classes), account(run=hostile)))
    assert b"\x1b" not in re.sub(rb'data-[\w-]+="[^"]*"|value="[^"]*"', b"", html)


def told(
    names: list[str] | None = None, classes: tuple[str, ...] = ("cat", "dog", "owl"), least: int = 5
) -> Findings:
    joints = {0: [[30, 19, 0], [12, 30, 0], [1, 0, 25]], 1: [[40, 1, 0], [0, 40, 0], [0, 0, 40]]}
    tables = {k: np.array(joint) for k, joint in joints.items()}
    counts = {k: table.sum(axis=1) + 3 for k, table in tables.items()}
    judged = {
        "clients": {
            "0": {"noisy": True, "posterior": 0.9},
            "1": {"noisy": False, "posterior": None},
        }
    }
    return findings(
        counts, tables, names or ["North", "South", "East"], classes, least, judged, [0.2, 0.0, 0.0]
    )


def account(run: str = "first") -> Account:
    return Account(run, "An early model.", "early", 10, 1, np.array([0.5, 0.6, 2.0]))


def test_page_opens_with_the_answer() -> None:
    html = page(told(), account()).decode()
    assert "<h1>1 of 2 sites has many labels to look at</h1>" in html
    assert "North (25%)" in html and "Without an answer:</b> East" in html
    assert "not scored" in html and "cat, looks like dog" in html
    quiet = findings({0: np.array([50, 50])}, {0: np.diag([40, 40])}, ["a"], ["x", "y"], 5)
    assert headline(quiet) == "No site stands out"
    nobody = findings({}, {}, ["a"], ["x", "y"], 5)
    assert b"No site answered" in page(
        nobody, Account("r", "", "early", 1, 1, np.array([2.0, 2.0]))
    )


def few_images(verdicts: dict[int, bool] | None = None) -> Findings:
    """Three sites of 30 images with two wrong labels each at most; at
    the last, 10 could be judged.
    """
    counts = {k: np.array([15, 15]) for k in range(3)}
    joints = {k: np.diag([14, 14]) for k in range(2)} | {2: np.array([[4, 1], [1, 4]])}
    judged = {
        "clients": {str(k): {"noisy": v, "posterior": 0.9} for k, v in (verdicts or {}).items()}
    }
    return findings(counts, joints, ["North", "South", "East"], ["x", "y"], 5, judged)


def account_of_two(scores: str = "early") -> Account:
    return Account("r", "An early model.", scores, 10, 1, np.array([0.5, 0.5]))


def page_of(found: Findings, scores: str = "early") -> str:
    return page(found, account_of_two(scores)).decode()


def test_what_too_few_images_cannot_show_is_not_called_fine() -> None:
    found = few_images()
    assert headline(found) == "No site is shown to stand out"
    shown = "At no site is it shown that more than 10% of the labels are wrong"
    assert lead(found) == f"{shown}; with so few images even 40% would not show."
    html = page_of(found)
    assert (
        "Nothing has to be done" not in html
        and "even 40% would not show" in html
        and "at most 40%" in html
        and "share of those judged" in html
    )
    quiet = findings({0: np.array([50, 50])}, {0: np.diag([40, 40])}, ["a"], ["x", "y"], 5)
    assert lead(quiet).endswith(
        "are wrong; up to 5% would not show."
    ) and "Nothing has to be done" in page_of(quiet)
    assert "Nothing has to be done" not in page_of(findings({}, {}, ["a"], ["x", "y"], 5))


def test_a_site_that_only_the_detector_flags_is_named_with_what_to_do() -> None:
    found = few_images({0: False, 1: False, 2: True})
    assert headline(found) == "No site is shown to stand out, though the run's detector flagged 1"
    html = page_of(found)
    assert "The run&#39;s own detector flagged East, where" in html and "--scores cross_fit" in html
    assert "Ask East to look at" in html and "Nothing has to be done" not in html
    again = page_of(found, "cross_fit")
    assert (
        "--scores cross_fit" not in again
        and "The images at the top of its letter will tell more." in again
    )
    # the audit names one, the detector both
    wide = {0: np.array([[30, 30], [0, 40]]), 1: np.diag([50, 50])}
    judged = {"clients": {k: {"noisy": True, "posterior": 0.9} for k in "01"}}
    both = findings(
        {k: j.sum(axis=1) for k, j in wide.items()}, wide, ["a", "b"], ["x", "y"], 5, judged
    )
    assert headline(both) == "1 of 2 sites has many labels to look at"
    assert (disagreement(both, "early") or "").startswith("The run's own detector flagged b, where")
    assert disagreement(few_images({0: False, 2: False}), "early") is None


def test_a_site_whose_images_could_mostly_not_be_judged_is_named() -> None:
    said = (
        "Many images could not be judged, so that nothing is known about their "
        "labels: East (at least 63% of 30)."
    )
    assert (
        unjudged_text(few_images()) == to_json(few_images(), account_of_two())["unjudged"] == said
    )
    assert said in page_of(few_images())
    none = findings({0: np.array([15, 15])}, {0: np.diag([1, 1])}, ["a"], ["x", "y"], 5)
    assert "a (at least 86% of 30)" in (unjudged_text(none) or "")
    assert unjudged_text(told()) is None


def test_the_terminal_says_what_speaks_against_an_audit() -> None:
    done = FinishedAudit(Path("audit"), few_images({2: True}), (), account_of_two())
    console = Console(width=400)
    with console.capture() as shown:
        console.print(summary(done))
    assert "flagged East, where" in shown.get() and "East (at least 63% of 30)" in shown.get()


def test_a_model_that_finds_fault_with_most_labels_is_itself_in_doubt() -> None:
    assert to_json(told(), account())["doubt"] is None
    weak = findings(
        {0: np.array([50, 50])}, {0: np.array([[10, 30], [30, 10]])}, ["a"], ["x", "y"], 5
    )
    html = page(weak, Account("r", "", "early", 1, 1, np.array([0.5, 0.5]))).decode()
    assert "Distrust this." in html and "audit again with more rounds" in html
    both = {0: np.array([[60, 40], [30, 70]]), 1: np.array([[75, 25], [20, 80]])}
    everywhere = findings(
        {k: j.sum(axis=1) for k, j in both.items()}, both, ["a", "b"], ["x", "y"], 5
    )
    assert "Even at the best site 22% of the labels look wrong." in (doubt(everywhere) or "")
    alone = findings({0: both[0].sum(axis=1)}, {0: both[0]}, ["a"], ["x", "y"], 5)
    assert doubt(alone) is None, "a single site may be as it is"
    good = both | {2: np.array([[100, 0], [1, 99]])}
    some = findings(
        {k: j.sum(axis=1) for k, j in good.items()}, good, ["a", "b", "c"], ["x", "y"], 5
    )
    assert some.sites[2].estimate is not None and some.sites[2].estimate.share is None
    assert doubt(some) is None, "one site has hardly any, though how many may not be shown"
    tiny = {k: np.array([[6, 1], [1, 6]]) for k in range(2)}
    few = findings({k: j.sum(axis=1) for k, j in tiny.items()}, tiny, ["a", "b"], ["x", "y"], 5)
    assert all(
        site.estimate and site.estimate.share is None and site.estimate.high > 0.2
        for site in few.sites
    )
    assert doubt(few) is None, "none at all may be wrong"


def test_json_says_what_the_page_says() -> None:
    values = to_json(told(), account())
    assert values["without_answer"] == ["East"] and values["thresholds"] == [0.5, 0.6, None]
    first, second = values["sites"]
    assert first["suspected"] == "withheld" and second["suspected"] == "<5"
    assert second["estimate"] == {"share": None, "low": 0.0, "high": 0.05}
    row = values["labelled_looks_like"][0]
    assert row["looks_like"]["dog"] == 20 and row["looks_like"]["owl"] == "<5"


@given(st.text(max_size=12))
def test_no_cell_begins_like_a_formula(text: str) -> None:
    assert not neutral(text).startswith(("=", "+", "-", "@", "\t", "\r", "\n"))


def test_neutralised_ids_and_labels_are_read_back(tmp_path: Path) -> None:
    ids = ["=1+1", "'=1+1", "-5", "+a", "@b", "plain", "it's", "'quoted'", "''-x"]
    classes = ("-", "=sum", "ok")
    labels = np.arange(len(ids)) % 3
    (tmp_path / "labels.csv").write_bytes(
        sheet(
            ("id", "label", "note"),
            [(i, classes[c], "=x") for i, c in zip(ids, labels.tolist(), strict=True)],
        )
    )
    back = observed_from_file(
        tmp_path / "labels.csv", ids, classes, np.zeros(len(ids), dtype=np.int64)
    )
    np.testing.assert_array_equal(back, labels)


def test_every_site_has_a_plain_folder_of_its_own() -> None:
    names = ["../../etc", "St. Mary's", "St Mary s", "", "北京", "a/b", "client 03"]
    folders = folder_names(names)
    assert len(set(folders)) == len(names)
    assert all(re.fullmatch(r"[a-z0-9][a-z0-9-]*", folder) for folder in folders)
    assert folders[-1] == "client-03"


def test_a_letter_of_one_image_and_of_one_class(tmp_path: Path) -> None:
    site = holding(images=1)
    write_letter(tmp_path / "one", site, judgement(site))
    check_harmless((tmp_path / "one" / "letter.html").read_bytes())
    alone = holding(images=3, classes=("only",))
    ranking = write_letter(tmp_path / "single", alone, Judgement(np.ones((3, 1)), np.ones(1), ""))
    assert not ranking.differs.any()
    assert site_joint(np.ones((3, 1)), alone.labels, np.ones(1)).tolist() == [[3]]


def test_a_letter_needs_a_finished_audit() -> None:
    memory = {PROBABILITIES: torch.full((2, 2), 0.5, dtype=torch.float64)}
    with pytest.raises(UserError, match="has not taken part"):
        Judgement.from_memory(memory, "")
    memory[LEVELS] = torch.full((2,), 0.5, dtype=torch.float64)
    assert Judgement.from_memory(memory, "early").thresholds.tolist() == [0.5, 0.5]


def test_a_site_must_have_as_many_labels_as_images() -> None:
    with pytest.raises(UserError, match="12 images, 1 labels and 12 ids"):
        holding(labels=np.zeros(1, dtype=np.int64))


@pytest.mark.parametrize("theme", THEMES.values(), ids=THEMES)
def test_text_and_controls_have_contrast(theme: dict[str, str]) -> None:
    colour = {name: mix(value, value, 1) for name, value in theme.items()}
    for text in ("ink", "soft", "accent", "noisy"):
        for ground in ("paper", "wash") if text != "noisy" else ("paper",):
            assert contrast(colour[text], colour[ground]) >= 4.5, (text, ground)
    assert contrast(colour["paper"], colour["accent"]) >= 4.5  # the main button's text
    assert contrast(colour["edge"], colour["paper"]) >= 3
    deepest = mix(theme["noisy"], theme["paper"], 0.35)  # a cell of the table
    assert contrast(colour["ink"], deepest) >= 4.5
