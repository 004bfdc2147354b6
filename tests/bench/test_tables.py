"""What a bench asks for, what the paper says, and how a filled table looks."""

from __future__ import annotations

import csv
import io
import re
import statistics
import warnings
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fednoro.bench import paper
from fednoro.bench.formats import best, escape, figure, latex, markdown, tidy
from fednoro.bench.paper import CLEAN, GRIDS, MILD, STRONG, Setting
from fednoro.bench.plan import ROUND_OPTIONS, Order
from fednoro.bench.tables import (
    METHODS,
    STAGE_2,
    Cell,
    Comparison,
    Row,
    Table,
    paper_grid,
    settings_of,
)
from fednoro.bench.tables_and_figures import QUICK, Wish, show
from fednoro.core.types import FedNoRoWarning, UserError
from fednoro.experiment.config.configuration import flatten_config, resolve, section_name
from fednoro.methods import METHODS as REGISTERED
from fednoro.methods import FedNoRo

HARD = Setting(0.4, *STRONG)


def order(*overrides: str, source: str = "digits", rounds: int | None = None) -> Order:
    return Order(source, overrides, (0, 1), Path("/nowhere"), rounds)


# The order


def test_a_run_is_the_preset_with_its_method_noise_and_seed() -> None:
    config = order("train.lr=0.002").config("fedprox", HARD, 3)
    same = resolve(
        "digits",
        [
            "train.lr=0.002",
            "method=fedprox",
            "noise.rate=0.4",
            "noise.low=0.5",
            "noise.high=0.7",
            "seed=3",
        ],
    )
    differing = {
        key for key, value in flatten_config(config).items() if flatten_config(same)[key] != value
    }
    assert differing == {"name", "out"}
    assert (config.name, config.out) == ("digits-fedprox-rho0.4-eta0.5-0.7-seed3", "/nowhere/runs")
    assert order().config("fedla", CLEAN, 0).name == "digits-fedla-rho0-seed0"


@pytest.mark.parametrize("method", REGISTERED)
def test_every_method_has_a_configuration_at_few_rounds(method: str) -> None:
    config = order(rounds=4).config(method, HARD, 0)
    assert config.train.rounds == 4
    full = order().config(method, HARD, 0)
    for option in ROUND_OPTIONS.get(method, ()):
        before, after = getattr(full.method, option), getattr(config.method, option)
        assert after is None if before is None else after == max(1, round(before * 4 / 40)), option
    rest = {
        key for key, value in flatten_config(config).items() if flatten_config(full)[key] != value
    }
    assert rest <= {
        "train.rounds",
        *(f"method.{option}" for option in ROUND_OPTIONS.get(method, ())),
    }


def test_options_that_count_rounds_exist_and_all_of_them_are_scaled() -> None:
    for name, kind in REGISTERED.items():
        known = ("warmup", "ramp_end", "gradual", "finetune", "purge", "correct_every")
        counting = {key for key in kind.__dataclass_fields__ if key in known}
        assert counting == set(ROUND_OPTIONS.get(name, ())), name


def test_the_same_number_of_rounds_changes_nothing_and_what_was_said_stays() -> None:
    assert order(rounds=40).config("fednoro", HARD, 0) == order().config("fednoro", HARD, 0)
    method = order("methods.fednoro.warmup=3", rounds=20).config("fednoro", HARD, 0).method
    assert isinstance(method, FedNoRo) and method.warmup == 3


@pytest.mark.parametrize(
    ("override", "instead"),
    [
        ("seed=1", "--seeds"),
        ("out=x", "--out"),
        ("noise.rate=0.2", "--rates"),
        ("noise.high=0.2", "--ranges"),
        ("method=fedla", "--methods"),
        ("method.warmup=3", "methods.fednoro.warmup"),
        ("noise=none", "noise=h_idn"),
        ("train.rouns=3", "did you mean rounds"),
    ],
)
def test_what_bench_varies_itself_is_refused_with_the_way_to_say_it(
    override: str, instead: str
) -> None:
    with pytest.raises(UserError, match=instead):
        order(override)


def test_the_paper_s_data_without_a_path_is_the_ordinary_error() -> None:
    with pytest.raises(UserError, match=r"data\.path"):
        Wish().grid("table1")


# The paper


def test_the_paper_s_tables_agree_where_they_overlap() -> None:
    for data, setting in paper.TABLE_4_SETTINGS.items():
        for row in ("fedla", "fednoro"):
            assert paper.TABLE_4[data][row] == paper.BACC[data][row, setting]
    for figures in paper.BACC.values():
        for (method, setting), (high, last) in figures.items():
            assert last <= high
            assert (
                setting == CLEAN or method == "fednoro" or high < figures["fednoro", setting].best
            )
    assert {
        len([1 for _, s in paper.BACC["ich"] if s == setting]) for setting in GRIDS["ich"][1:]
    } == {9}
    assert len([1 for _, s in paper.BACC["ich"] if s == CLEAN]) == 3


def test_the_paper_s_grids() -> None:
    rates, ranges = paper_grid("table1", "ich")
    assert settings_of(rates, ranges) == GRIDS["ich"] and len(GRIDS["ich"]) == 9
    assert settings_of(*paper_grid("table2", "isic2019")) == GRIDS["isic2019"]
    assert settings_of(*paper_grid("table3", "ich")) == (Setting(0.3, *MILD), Setting(0.4, *MILD))
    assert settings_of(*paper_grid("table4", "ich")) == (Setting(0.4, *MILD),)
    assert settings_of(*paper_grid("table4", "ham10000")) == (Setting(0.6, *STRONG),)


def test_a_quick_version_has_every_row_and_is_on_digits() -> None:
    for name in QUICK:
        grid = Wish(quick=True).grid(name)
        assert grid.order.data == "digits" and len(grid.settings) <= 3
    grid = Wish(quick=True).grid("table1")
    assert (
        isinstance(grid, Comparison)
        and grid.rows == METHODS
        and len(METHODS) == 9
        and set(METHODS) <= set(REGISTERED)
    )
    ablation = Wish(quick=True).grid("table4")
    assert isinstance(ablation, Comparison) and ablation.rows == tuple(STAGE_2)


def test_the_paper_s_figures_stand_beside_ours_only_for_the_same_data() -> None:
    wish = Wish(data="isic2019", overrides=("data.path=x",))
    ours = wish.grid("table2")
    assert isinstance(ours, Comparison)
    assert ours.paper_result("fednoro", Setting(0.6, *STRONG)) == (66.00, 60.65)
    assert ours.paper_result("rofl", CLEAN) is None
    ablation = wish.grid("table4")
    assert isinstance(ablation, Comparison) and ablation.paper_result(
        "kd-only", Setting(0.6, *STRONG)
    ) == (60.79, 43.57)
    other = Wish(data="digits").grid("table2")
    assert (
        isinstance(other, Comparison)
        and other.paper_result("fednoro", Setting(0.6, *STRONG)) is None
    )


# Filled tables


def small(*cells: Cell, **more: Any) -> Table:
    rows = tuple(
        Row((f"M{i // 2}", kind), (cell,), kind)
        for i, (cell, kind) in enumerate(zip(cells, ("Best", "Last") * 9, strict=False))
    )
    return Table("t", "A caption.", ("Method", ""), (("ρ = 0.4", "η ∈ (0.5, 0.7)"),), rows, **more)


def test_a_cell_is_the_mean_with_the_sample_deviation() -> None:
    values = (70.123, 71.5, 69.0)
    text = f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}"
    assert figure(Cell(values, 3)) == text
    assert figure(Cell((70.126,), 1)) == "70.13", "one seed has no deviation"
    assert figure(Cell(values, 4)) == f"{text} [3 of 4]"
    assert figure(Cell((), 2)) == "–"


def test_the_best_of_each_kind_is_bold_and_equal_ones_are_too() -> None:
    cells = [Cell((v,)) for v in (70.001, 60.0, 70.004, 61.0, 69.99, 59.0)]
    table = small(*cells)
    assert best(table.rows) == {(0, 0), (2, 0), (3, 0)}
    lines = markdown(table).splitlines()
    assert [line.split("|")[-2].strip() for line in lines[4:10]] == [
        "**70.00**",
        "60.00",
        "**70.00**",
        "**61.00**",
        "69.99",
        "59.00",
    ]
    assert not best(small(Cell((1.0,)), Cell((1.0,))).rows), "alone is not best"
    assert best(small(Cell(()), Cell(()), Cell((1.0,)), Cell(()), Cell((2.0,))).rows) == {(4, 0)}


def test_markdown_lines_have_the_same_number_of_cells() -> None:
    table = small(
        Cell((1.0,), paper=2.0),
        Cell(()),
        Cell((3.0, 4.0), 2),
        Cell((1.0,)),
        notes=("Seeds 0.", "a|b"),
    )
    lines = [line for line in markdown(table).splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {4}
    assert "1.00 (2.00) |" in lines[2] and "a\\|b" in markdown(table)


def test_latex_escapes_what_latex_would_take_for_its_own() -> None:
    assert escape("a_b & 5% of #1 {x} ~ ^ \\ $") == (
        r"a\_b \& 5\% of \#1 \{x\} \textasciitilde{} \textasciicircum{} \textbackslash{} \$"
    )
    assert escape("--seeds 0 – 1 ± 2") == r"-{}-seeds 0 \textendash{} 1 $\pm$ 2"
    assert escape("fünf 雪") == "fünf ?"


def test_latex_is_balanced_and_every_line_has_all_columns() -> None:
    columns = tuple(
        (rho, "η ∈ (0.3, 0.5)", name)
        for rho in ("ρ = 0.3", "ρ = 0.4")
        for name in ("Re", "Pr", "MR")
    )
    rows = tuple(
        Row((f"row_{i} & co", "✓"), tuple(Cell((50.0 + i, 51.0), 2, 7.5) for _ in columns))
        for i in range(3)
    )
    text = latex(
        Table("table3", "50% of it_all", ("Indicator", "LA"), columns, rows, ("made by --x_y #1",))
    )
    assert text.isascii()
    for begin, end in re.findall(r"\\begin\{(\w+)\}", text) and [("begin", "end")]:
        assert (
            re.findall(rf"\\{begin}\{{(\w+)\}}", text)
            == re.findall(rf"\\{end}\{{(\w+)\}}", text)[::-1]
        )
    bare = re.sub(r"\\[\\{}&%#_$]", "", text)
    assert bare.count("{") == bare.count("}") and bare.count("$") % 2 == 0
    lines = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert len(lines) == 3 + 3
    for line in lines:
        spans = [int(n) for n in re.findall(r"\\multicolumn\{(\d+)\}", line)]
        assert len(re.findall(r"(?<!\\)&", line)) + 1 + sum(n - 1 for n in spans) == 2 + 6, line
    assert (
        r"\multicolumn{3}{c}{$\rho$ = 0.4}" in lines[0]
        and r"\textbf{51.50 $\pm$ 0.71}" in lines[-1]
    )
    for rule in ("toprule", "midrule", "bottomrule"):
        assert text.count(f"\\{rule}") == 1


def test_tidy_csv_has_one_line_for_each_record() -> None:
    records = (
        {"seed": 0, "best": 0.5, "failed": None},
        {"seed": 1, "best": None, "failed": 'a, "b"'},
    )
    rows = list(csv.DictReader(io.StringIO(tidy(small(records=records)))))
    assert rows == [
        {"seed": "0", "best": "0.5", "failed": ""},
        {"seed": "1", "best": "", "failed": 'a, "b"'},
    ]


@pytest.mark.parametrize("width", [20, 80, 300])
def test_a_table_is_shown_in_full_however_narrow_the_console(width: int) -> None:
    columns = tuple((f"ρ = 0.{i}", "η ∈ (0.5, 0.7)") for i in range(9))
    rows = (Row(("fednoro-plus", "Last"), tuple(Cell((50.0 + i, 51.0), 2) for i in range(9))),)
    text = io.StringIO()
    table = Table("t", "A caption.", ("Method", ""), columns, rows, ("a note",))
    show((table, [Path("t.md")]), Console(file=text, width=width))
    lines = text.getvalue().splitlines()
    cells = [
        cell.strip()
        for cell in next(line for line in lines if "fednoro-plus" in line).strip("│").split("│")
    ]
    assert cells == ["fednoro-plus", "Last", *(figure(cell) for cell in rows[0].cells)]
    assert lines[-2:] == ["a note", "written: t.md"] and "…" not in text.getvalue()


def test_bench_is_a_request_for_noise_on_whatever_data() -> None:
    order = Order("digits", ("data=folder", "data.path=images"), (0,), Path("bench"))
    with warnings.catch_warnings():
        warnings.simplefilter("error", FedNoRoWarning)
        assert section_name(order.config("fedavg", CLEAN, 0), "noise") == "h_idn"
