"""The report as a browser sees it: drawn, quiet, offline, usable by pointer and
keys, on a desk and on a phone.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Page, browser, chromium
from run_folders import make_run

from fednoro.report.comparison import compare
from fednoro.report.comparison_page import render as render_comparison
from fednoro.report.page import write_report

pytestmark = pytest.mark.skipif(
    chromium() is None, reason="no Chromium: install it, or name it in $CHROMIUM"
)

FIGURES = (
    "partition",
    "losses",
    "posterior",
    "mixture",
    "bacc",
    "recall",
    "confusion",
    "weights",
    "distances",
    "ramp",
    "time",
)
SHOWN = "[...document.querySelectorAll('svg')].filter(s => s.getBoundingClientRect().width)"
EVIL = (
    "<script>window.hit=1</script>",
    "\"'><img src=x onerror=window.hit=1>",
    "a" * 500,
    "\u202eevil\u2066\x07\n",
    "مستشفى",
)


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def default_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default run, by the command that users type."""
    out = tmp_path_factory.mktemp("default")
    command = [sys.executable, "-m", "fednoro", "run", "digits", f"out={out}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    report = out / "digits-fednoro-seed0" / "report.html"
    assert f"report: {report}" in done.stdout.splitlines()
    return report


def quiet_and_offline(page: Page) -> bool:
    return not page.errors and all(
        url.startswith(("file:", "data:", "about:")) for url in page.requests
    )


def overflow(page: Page) -> int:
    return int(
        page.run("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    )


def test_the_default_run_is_drawn_whole_without_errors_or_network(
    page: Page, default_run: Path
) -> None:
    page.see(1180)
    page.open(default_run)
    assert quiet_and_offline(page), (page.errors, page.requests)
    assert page.run(f"{SHOWN}.map(s => s.closest('figure').id)") == list(FIGURES)
    marks = page.run(
        f"{SHOWN}.map(s => [...s.children].filter(m => m.getBBox().width + "
        "m.getBBox().height > 0).length)"
    )
    assert min(marks) > 5
    outside = page.run(f"""{SHOWN}.flatMap(s => [...s.querySelectorAll('text')].filter(t => {{
        const a = t.getBoundingClientRect(), b = s.getBoundingClientRect();
        return a.left < b.left - 3 || a.right > b.right + 3 || a.bottom > b.bottom + 3 || a.top < \
b.top - 3;
    }}).map(t => t.textContent))""")
    assert outside == []
    assert "clients" in page.run("document.querySelector('.lead').textContent")
    assert page.run("document.querySelector('.missing')") is None


def test_every_figure_has_words_and_a_table(page: Page, default_run: Path) -> None:
    page.open(default_run)
    bare = page.run("""[...document.querySelectorAll('figure')].filter(f => !(
        f.querySelector('figcaption').textContent.length > 40 && f.querySelector('details table \
td') &&
        [...f.querySelectorAll('svg')].every(s => s.getAttribute('aria-label')))).map(f => f.id)""")
    assert bare == []


@pytest.mark.parametrize("figure", FIGURES)
def test_a_mark_tells_its_numbers_when_pointed_at(
    page: Page, default_run: Path, figure: str
) -> None:
    if figure == FIGURES[0]:
        page.see(1180)
        page.open(default_run)
    page.send("Input.dispatchMouseEvent", type="mouseMoved", x=1, y=1)
    aim = (
        "[...document.querySelectorAll('#FIGURE svg.wide > "
        "*')].findLast(m => m.querySelector('title'))"
    )
    wanted = page.run(
        f"(m => (m.id = 'aim-{figure}', "
        f"m.querySelector('title').textContent))({aim.replace('FIGURE', figure)})"
    )
    if figure in ("weights", "distances", "ramp"):  # the middle of a bent line is not on it
        page.run(
            f"document.getElementById('aim-{figure}').dispatchEvent(new "
            "PointerEvent('pointermove', {bubbles: true}))"
        )
    else:
        page.hover(f"#aim-{figure}")
    assert page.run("document.getElementById('tip').hidden") is False
    assert page.run("document.getElementById('tip').textContent") == wanted


def test_arrow_keys_go_from_mark_to_mark(page: Page, default_run: Path) -> None:
    page.see(1180)
    page.open(default_run)
    page.run("document.querySelector('#posterior svg').focus()")
    told = []
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft", "End"):
        page.key(key)
        page.settle()
        told.append(page.run("document.getElementById('tip').textContent"))
    assert told[0] == told[2] != told[1] != told[3]
    page.key("Escape")
    assert page.run("document.getElementById('tip').hidden") is True


def test_the_theme_follows_the_system_and_the_switch(page: Page, default_run: Path) -> None:
    def paper() -> str:
        return str(page.run("getComputedStyle(document.body).backgroundColor"))

    page.see(1180, dark=True)
    page.open(default_run)
    dark = paper()
    page.see(1180)
    light = paper()
    assert light != dark
    seen = []
    for _ in range(3):
        page.run("document.getElementById('theme').click()")
        seen.append((page.run("document.getElementById('theme').textContent"), paper()))
    assert seen == [("light", light), ("dark", dark), ("auto", light)]


def test_a_legend_entry_hides_and_shows_its_series(page: Page, default_run: Path) -> None:
    page.see(1180)
    page.open(default_run)
    series = "[...document.querySelectorAll('#weights svg.wide [data-s=noisy]')]"
    count = f"{series}.filter(m => getComputedStyle(m).visibility === 'hidden').length"
    entry = "document.querySelector('#weights svg.wide text[data-toggle=noisy]')"
    page.run(f"{entry}.focus()")
    page.key("Enter")
    assert page.run(count) > 5 and page.run(f"{entry}.getAttribute('aria-pressed')") == "false"
    page.key("Enter")
    assert page.run(count) == 0


def test_a_heading_sorts_its_table_by_numbers(page: Page, default_run: Path) -> None:
    page.open(default_run)
    column = (
        "[...document.querySelectorAll('#recall tbody tr')].map(r => "
        "parseFloat(r.cells[1].textContent))"
    )
    before = page.run(column)
    for order in (sorted(before), sorted(before, reverse=True)):
        page.run("document.querySelectorAll('#recall thead button')[1].click()")
        assert page.run(column) == order


@pytest.mark.parametrize("width", [360, 390, 760, 761, 1180])
def test_nothing_overflows_at_any_width(page: Page, default_run: Path, width: int) -> None:
    page.see(width)
    page.open(default_run)
    page.run("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    assert overflow(page) <= 0
    assert page.run(f"{SHOWN}.length") == len(FIGURES)


def test_it_prints_light_and_without_controls(page: Page, default_run: Path) -> None:
    page.see(1180, dark=True)
    page.open(default_run)
    page.see(1180, dark=True, media="print")
    assert page.run("getComputedStyle(document.getElementById('theme')).display") == "none"
    red, green, blue = page.run(
        "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)"
    )
    assert min(red, green, blue) > 240
    page.see(1180)
    assert page.pdf().startswith(b"%PDF")


@pytest.mark.parametrize("width", [360, 1180])
def test_hostile_names_neither_run_nor_break_the_layout(
    page: Page, tmp_path: Path, width: int
) -> None:
    run = make_run(tmp_path / "<b>run & co", 5, 5, names=EVIL, class_names=EVIL[::-1])
    page.see(width)
    page.open(write_report(run))
    page.settle()
    assert page.run("window.hit") is None and page.run("document.images.length") == 0
    assert page.run("document.scripts.length") == 1
    assert quiet_and_offline(page), page.errors
    assert overflow(page) <= 0
    assert page.run(f"{SHOWN}.length") == len(FIGURES)


@pytest.mark.parametrize(
    ("clients", "classes", "known", "method"),
    [
        (1, 2, True, "fednoro"),
        (2, 2, False, "fednoro"),
        (9, 30, True, "fednoro"),
        (60, 3, True, "fednoro"),
        (4, 3, True, "fedavg"),
    ],
)
def test_any_shape_of_run_fits(
    page: Page, tmp_path: Path, clients: int, classes: int, known: bool, method: str
) -> None:
    report = write_report(make_run(tmp_path / "run", clients, classes, known=known, method=method))
    for width in (360, 1180):
        page.see(width)
        page.open(report)
        assert overflow(page) <= 0 and quiet_and_offline(page)
        assert (
            page.run(f"{SHOWN}.length")
            == page.run("document.querySelectorAll('figure').length")
            > 3
        )


def test_a_comparison_is_drawn_as_well(page: Page, tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / f"{m}{s}", method=m, seed=s, lift=0.2 * (m == "fednoro"))
        for m in ("fednoro", "fedavg")
        for s in range(3)
    ]
    target = tmp_path / "compare.html"
    target.write_text(render_comparison(compare(runs)), encoding="utf-8")
    for width in (360, 1180):
        page.see(width)
        page.open(target)
        assert quiet_and_offline(page) and overflow(page) <= 0
        assert page.run(f"{SHOWN}.map(s => s.closest('figure').id)") == ["curves", "differences"]
