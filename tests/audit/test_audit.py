"""An audit as people use it: a run, its audit, the letters in a browser, and the
relabelled list in a new run.
"""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from browser import Page, browser, chromium

import fednoro
from fednoro.audit.audit_files import AuditOptions, FinishedAudit, audit_run
from fednoro.core.types import UserError
from fednoro.data.federation import Federation
from fednoro.experiment.checkpoint import checkpoints, load_checkpoint
from fednoro.experiment.drive import Run
from fednoro.experiment.run_folder.run_files import RunFolder
from fednoro.methods.fednoro_plus import SOFT

pytestmark = pytest.mark.usefixtures("one_thread")
# Few clients with enough images that an early model can tell, in a few seconds.
SMALL = (
    "digits",
    "data.imbalance=2",
    "partition={name: iid, clients: 5}",
    "noise={name: symmetric, low: 0.3, high: 0.4}",
    "model.width=8",
    "train.batch=16",
    "train.epochs=2",
    "train.lr=0.003",
    "device=cpu",
)
ROUNDS = ("train.rounds=7", "method.warmup=6")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    out = tmp_path_factory.mktemp("runs")
    return fednoro.run(*SMALL, *ROUNDS, f"out={out}", "name=first")


@pytest.fixture(scope="module")
def audited(run: Run) -> FinishedAudit:
    return audit_run(run.folder)


def wrong(federation: Federation) -> int:
    return int(np.sum(federation.clean[federation.train] != federation.observed[federation.train]))


def rows(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(path.read_bytes().decode(), newline="")))


def test_estimates_follow_the_truth(audited: FinishedAudit, run: Run) -> None:
    shares = {site.client: site.estimate for site in audited.findings.sites}
    assert sorted(shares) == list(range(5))
    rates = run.federation.rates
    for k, estimate in shares.items():
        assert estimate is not None
        if rates[k]:
            assert estimate.share is not None and abs(estimate.share - rates[k]) < 0.1
        else:
            assert (estimate.share if estimate.share is not None else estimate.high) < 0.1


def test_the_coordinator_learns_no_id_and_no_image(audited: FinishedAudit, run: Run) -> None:
    ids = {row["id"] for row in rows(audited.folder / "sites" / "accepted.csv")}
    assert len(ids) == len(run.federation.train)
    page, values = (audited.folder / name for name in ("index.html", "audit.json"))
    html = page.read_text(encoding="utf-8")
    assert "data:image" not in html and "<img" not in html and "data-id" not in html
    known = json.loads(values.read_text(encoding="utf-8"))
    assert not re.search(r'"(id|ids|image|suspicion)"', values.read_text(encoding="utf-8"))
    # Ids of this data are numbers; those too large to be a count or a share must not be anywhere.
    large = {i for i in ids if int(i) > 1000}
    assert len(large) > 300
    body = re.sub(r"<style>.*?</style>|<script>.*?</script>|<meta[^>]*>", "", html, flags=re.DOTALL)
    found = set(re.findall(r"\d+", body.replace(",", ""))) | set(
        re.findall(r"\d+", json.dumps(known))
    )
    assert not (found & large) - {str(known["images"])}


def test_the_relabelled_list_goes_back_in(audited: FinishedAudit, run: Run, tmp_path: Path) -> None:
    path = audited.folder / "sites" / "accepted.csv"
    noise = f"noise={{name: from_file, path: {path}}}"
    others = [item for item in SMALL if not item.startswith("noise=")]
    again = fednoro.run(*others, noise, *ROUNDS, f"out={tmp_path}", "name=again")
    np.testing.assert_array_equal(again.federation.train, run.federation.train)
    before, after = wrong(run.federation), wrong(again.federation)
    assert before > 100 and after < before / 2
    assert 0 < again.final <= 1 and again.final > run.final - 0.02


def test_the_list_as_given_changes_nothing(audited: FinishedAudit, run: Run) -> None:
    names = run.federation.classes
    for k, part in enumerate(run.federation.parts):
        listed = {row["id"]: row["label"] for row in rows(audited.letters[k].parent / "images.csv")}
        assert len(listed) == len(part)
        assert list(listed.values()).count(names[0]) == np.sum(run.federation.observed[part] == 0)


def test_command_line_audits_a_run_that_has_only_begun(run: Run, tmp_path: Path) -> None:
    begun, out = tmp_path / "begun", tmp_path / "there"
    begun.mkdir()
    for name in ("config.yaml", "split.npz"):
        shutil.copy(run.folder / name, begun / name)
    options = (
        "--scores",
        "cross_fit",
        "--rounds",
        "1",
        "--folds",
        "2",
        "--min-cell",
        "3",
        "--top",
        "4",
    )
    command = [sys.executable, "-m", "fednoro", "audit", str(begun), *options, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "client 0" in done.stdout and "No model has seen a label that it judges" in " ".join(
        done.stdout.split()
    )
    values = json.loads((out / "audit.json").read_text(encoding="utf-8"))
    assert (values["scores"], values["models"], values["min_cell"]) == ("cross_fit", 2, 3)
    assert {site["verdict"] for site in values["sites"]} == {None}
    letters = list(out.glob("sites/*/letter.html"))
    assert len(letters) == 5 and letters[0].read_bytes().count(b"<img") == 4


def test_benchmark_measures_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2]))
    benchmark = import_module("benchmarks.audit")
    overrides = [
        "noise={name: symmetric, rate: 0.5}",
        "partition={name: iid, clients: 4}",
        "method.warmup=2",
    ]
    rows = benchmark.one_seed(
        "digits", 0, ["early"], 2, [*overrides, "model.width=4", "train.epochs=1", "device=cpu"]
    )
    assert rows["chance"]["top n"] == pytest.approx(0.2, abs=0.1)
    assert rows["early: federated"]["top n"] > rows["chance"]["top n"]
    assert "pooled cross_fit, 2 rounds, cleanlab" in benchmark.table([rows])


def test_corrected_labels_are_judged_by_what_the_run_made_of_them(run: Run, tmp_path: Path) -> None:
    plus = fednoro.run(
        *SMALL, "method=fednoro-plus", "train.rounds=9", "method.warmup=6", f"out={tmp_path}"
    )
    assert plus.detection is not None and plus.detection["exact"], (
        "some are flagged, so that there are corrected labels"
    )
    logs = {
        path.name: path.read_bytes()
        for path in plus.folder.iterdir()
        if path.suffix in (".jsonl", ".csv")
    }
    done = audit_run(plus.folder, AuditOptions("corrected"))
    assert logs == {name: (plus.folder / name).read_bytes() for name in logs}, (
        "an audit changes nothing in the run"
    )
    ids = plus.config.data.load(plus.config.seed, lambda *_: None).ids
    assert ids is not None
    memories = load_checkpoint(checkpoints(RunFolder(plus.folder))[-1]).memories
    assert {k for k, memory in memories.items() if SOFT in memory} == set(plus.detection["flagged"])
    for k in plus.detection["flagged"]:
        q, part = memories[k][SOFT].numpy(), plus.federation.parts[k]
        listed = sorted(
            float(row["p_given"]) for row in rows(done.letters[k].parent / "images.csv")
        )
        kept = sorted(q[np.arange(len(part)), plus.federation.observed[part]].tolist())
        assert listed == pytest.approx(kept, abs=1e-3)
        first = [row["id"] for row in rows(done.letters[k].parent / "images.csv")][
            : round(0.3 * len(part))
        ]
        wrong = {ids[i] for i in part if plus.federation.clean[i] != plus.federation.observed[i]}
        assert np.mean([i in wrong for i in first]) > 0.8
        estimate = next(site.estimate for site in done.findings.sites if site.client == k)
        assert estimate is not None and estimate.share is not None
        assert abs(estimate.share - plus.federation.rates[k]) < 0.15
    page = (done.folder / "index.html").read_text(encoding="utf-8")
    assert (
        "corrected them to" in page
        and "nothing was trained for it" in page
        and "model was trained" not in page
    )
    with pytest.raises(UserError, match="has no corrected labels: fednoro-plus leaves them"):
        audit_run(run.folder, AuditOptions("corrected", out=tmp_path / "none"))


def test_an_audit_that_was_edited_is_not_written_over_unless_forced(
    run: Run, tmp_path: Path
) -> None:
    out = tmp_path / "audit"
    out.mkdir()
    # an empty folder will do
    letters = audit_run(run.folder, AuditOptions(rounds=1, out=out)).letters
    edited = letters[0].parent / "accepted.csv"
    edited.write_text("decided by hand")
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    command = [
        sys.executable,
        "-m",
        "fednoro",
        "audit",
        str(run.folder),
        "--rounds",
        "1",
        "--out",
        str(out),
    ]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert refused.returncode == 2
    assert (
        f"{out} exists already: choose another --out, or say --force to replace its files"
        in refused.stderr
    )
    assert before == {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    forced = subprocess.run(
        [*command, "--force"], capture_output=True, text=True, timeout=120, check=False
    )
    assert forced.returncode == 0, forced.stderr
    assert edited.read_text().startswith("id,")


def test_what_is_no_run_is_refused_in_words(run: Run, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no config\.yaml"):
        audit_run(tmp_path)
    assert not (tmp_path / "audit").exists()


@pytest.fixture(scope="module")
def tab() -> Iterator[Page]:
    if chromium() is None:
        pytest.skip("needs Chromium")
    with browser() as page:
        yield page


@pytest.mark.parametrize("width", [390, 1100])
@pytest.mark.parametrize("dark", [False, True])
def test_pages_open_without_errors_network_or_overflow(
    audited: FinishedAudit, tab: Page, width: int, dark: bool
) -> None:
    for path in (audited.folder / "index.html", audited.letters[0]):
        tab.errors.clear()
        tab.requests.clear()
        tab.see(width, dark=dark)
        tab.open(path)
        tab.settle()
        assert not tab.errors
        assert [url for url in tab.requests if not url.startswith(("file:", "data:"))] == []
        assert tab.run("document.documentElement.scrollWidth") <= width
        ground = tab.run("getComputedStyle(document.documentElement).backgroundColor")
        assert (ground == "rgb(21, 25, 28)") == dark
        button, seen = "document.querySelector('[data-theme-button]')", []
        for _ in range(3):
            tab.run(f"{button}.click()")
            seen.append(
                tab.run(
                    f"[{button}.textContent, "
                    "getComputedStyle(document.documentElement).backgroundColor]"
                )
            )
        assert [name for name, _ in seen] == ["light", "dark", "auto"]
        assert seen[0][1] != seen[1][1] == "rgb(21, 25, 28)" and seen[2][1] == ground


def test_a_letter_filters_sorts_edits_and_saves(
    audited: FinishedAudit, run: Run, tab: Page
) -> None:
    tab.see(1100)
    tab.open(audited.letters[int(run.federation.rates.argmax())])
    shown = "[...document.querySelectorAll('.review tbody tr')].filter(row => !row.hidden)"

    def choose(selector: str, value: str) -> None:
        tab.run(
            f"(e => {{ e.value = {json.dumps(value)}; e.dispatchEvent(new Event('change', "
            f"{{bubbles: true}})) }})(document.querySelector({json.dumps(selector)}))"
        )

    # What would be saved is caught instead, as a test has no folder for downloads.
    tab.run(
        "URL.createObjectURL = blob => { window.saved = blob.text(); return '#' "
        "};HTMLAnchorElement.prototype.click = function () {}"
    )
    choose("[data-filter=finding]", "looks different")
    findings = tab.run(f"{shown}.map(row => row.dataset.finding)")
    assert findings and set(findings) == {"looks different"}
    choose("[data-sort]", "-rank")
    ranks = tab.run(f"{shown}.map(row => +row.dataset.rank)")
    assert ranks == sorted(ranks, reverse=True)
    tab.run("document.querySelector('[data-all]').click()")
    assert f"Accepted {len(findings)} confident suggestions." in tab.run(
        "document.querySelector('[data-state]').textContent"
    )
    # One of them gets another label than the suggested one; its list is filled when it is reached.
    tab.run(f"{shown}[0].querySelector('select').focus()")
    assert tab.run(f"{shown}[0].querySelector('select').options.length") == 10
    other = tab.run(
        "(d => [...'0123456789'].find(c => c !== d.given && c !== "
        f"d.suggested))({shown}[0].dataset)"
    )
    tab.run(
        f"(e => {{ e.value = {json.dumps(other)}; e.dispatchEvent(new Event('change', {{bubbles: "
        f"true}})) }})({shown}[0].querySelector('select'))"
    )
    tab.run("document.querySelector('[data-save]').click()")
    saved = list(csv.DictReader(io.StringIO(tab.run("window.saved"), newline="")))
    assert len(saved) == len(findings)
    assert saved[0]["label"] == other and saved[0]["accepted"] == "no"
    assert all(row["label"] == row["suggested"] and row["accepted"] == "yes" for row in saved[1:])
    tab.run(
        "document.querySelector('[data-none]').click(); "
        "document.querySelector('[data-save]').click()"
    )
    saved = list(csv.DictReader(io.StringIO(tab.run("window.saved"), newline="")))
    assert all(row["label"] == row["given"] and row["accepted"] == "no" for row in saved)
    tab.run("window.onbeforeunload = null")
