"""`make same`: masks hide durations and nothing else, and whatever differs is named."""

from __future__ import annotations

import io
import json
import struct
import subprocess
import zipfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
CHECKPOINT = "runs/a/checkpoints/round-00004.safetensors"
TIME = """<figure id="time"><rect x="1.5" y="11" width="{0}.7" height="18" class="accent">
<title>warm-up, rounds 1 to 4: {0} ms, {0} ms a round</title></rect>
<text x="{0}" y="24" class="tick">{0} ms</text><td class="n">1 to 4</td><td class="n">0.{0}</td>
</figure>"""
FLOWER = "flwr --runtime-api-address 127.0.0.1:{0} --token ab{0} --parent-pid {0}"
TABLE = "row,best,seconds,folder\n{},{},{},runs/a\n"


@pytest.fixture(autouse=True)
def from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))


def checkpoint(size: int = 100, tensor: float = 1.0, **facts: Any) -> bytes:
    """A file as safetensors writes it, with a header that is padded to 8 bytes."""
    state = {"round": 4, **facts, "logs": {"rounds.jsonl": size, "clients.csv": 7}}
    state["checksum"] = f"{size:064x}"
    head = json.dumps({"__metadata__": {"state": json.dumps(state)}}).encode()
    head += b" " * (-len(head) % 8)
    return struct.pack("<Q", len(head)) + head + struct.pack("<f", tensor)


def archive(value: int = 1, year: int = 2020) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as file:
        file.writestr(zipfile.ZipInfo("labels", (year, 1, 1, 0, 0, 0)), bytes([value]))
    return content.getvalue()


def compare(tmp_path: Path, file: str, base: str | bytes, tree: str | bytes) -> tuple[str, int]:
    """Where the sides' files differ, and in how many places masks applied."""
    for side, content in (("base", base), ("tree", tree)):
        path = tmp_path / side / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    comparison = import_module("benchmarks.differences").Comparison()
    differences = comparison.compare(tmp_path / "base", tmp_path / "tree", [file])
    assert all(difference.file == file for difference in differences)
    return "".join(difference.text for difference in differences), comparison.counts.total()


MASKED: list[tuple[str, str | bytes, str | bytes]] = [
    ("1.stdout", "round 1/2  BACC 50.00%  ETA 9 s\n", "round 1/2  BACC 50.00%  ETA 12 s\n"),
    ("1.stdout", "1/2  runs/a  done  ETA 9 s\n", "1/2  runs/a  done  ETA 1 min 02 s\n"),
    ("1.stdout", "BACC  best 9.00%  in 1.3 s\n", "BACC  best 9.00%  in 15.0 s\n"),
    ("1.stdout", "reading … 1/9\n", "reading … 1/9\nreading … 4/9\nreading … 8/9\n"),
    (
        "1.stdout",
        "2/2  done\n",
        "running runs/a: round 3/4; runs/b: starting  ETA 2 s\n2/2  done\n",
    ),
    ("1.stdout", "Flower's run 432 in runs/a\n", "Flower's run 9 in runs/a\n"),
    ("runs/a/rounds.jsonl", '{"seconds": 0.1, "bacc": 0.5}', '{"seconds": 1e-05, "bacc": 0.5}'),
    ("bench/table1.csv", TABLE.format("a", 0.5, 1.2), TABLE.format("a", 0.5, 12.25)),
    ("bench/table1.csv", TABLE.format('"a,b"', 0.5, 1.2), TABLE.format('"a,b"', 0.5, 3.4)),
    ("runs/a/report.html", "<span>2 rounds in 1.9 s</span>", "<span>2 rounds in 972 ms</span>"),
    ("runs/a/report.html", TIME.format(123), TIME.format(45)),
    ("runs/a/figures/time.png", b"\x89PNG\xff1", b"\x89PNG\xff2"),
    (CHECKPOINT, checkpoint(99), checkpoint(1234)),
    ("runs/a/split.npz", archive(year=2020), archive(year=2021)),
    ("runs/a/environment.json", *(json.dumps(FLOWER.format(i).split(), indent=1) for i in (7, 12))),
    ("runs/a/report.html", FLOWER.format(7), FLOWER.format(12)),
]


@pytest.mark.parametrize(("file", "base", "tree"), MASKED)
def test_durations_and_facts_of_processes_are_masked(
    tmp_path: Path, file: str, base: str | bytes, tree: str | bytes
) -> None:
    text, places = compare(tmp_path, file, base, tree)
    assert not text
    assert places


DIFFERENT: list[tuple[str, str | bytes, str | bytes]] = [
    ("1.stdout", "round 1/2  BACC 50.00%  ETA 9 s\n", "round 1/2  BACC 50.01%  ETA 9 s\n"),
    (
        "1.stdout",
        "BACC  best 9.00%  final 8.00%  in 1.3 s\n",
        "BACC  best 9.00%  final 8.01%  in 1.3 s\n",
    ),
    ("1.stdout", "it took 3 s\n", "it took 4 s\n"),
    ("1.stdout", "reading … 1/9\n", "reading … 1/9\nwriting … 4/9\n"),
    ("1.stderr", "  ETA 9 s\n", "  ETA 8 s\n"),
    ("1.exit", "0\n", "1\n"),
    ("runs/a/rounds.jsonl", '{"seconds": 0.1, "bacc": 0.5}', '{"seconds": 0.2, "bacc": 0.51}'),
    ("runs/a/config.yaml", "seconds: 1\n", "seconds: 2\n"),
    ("runs/a/clients.csv", "client,seconds\n1,2\n", "client,seconds\n1,3\n"),
    ("bench/table1.csv", TABLE.format("a", 0.5, 1.2), TABLE.format("a", 0.6, 1.2)),
    ("runs/a/report.html", TIME.format(9), TIME.format(9).replace("warm-up", "start")),
    ("runs/a/report.html", TIME.format(9), TIME.format(9).replace("1 to 4", "1 to 5")),
    (
        "runs/a/report.html",
        TIME.format(9).replace("time", "bacc"),
        TIME.format(8).replace("time", "bacc"),
    ),
    ("runs/a/report.html", "<span>2 rounds in 1.9 s</span>", "<span>3 rounds in 1.9 s</span>"),
    ("runs/a/environment.json", '{"threads": 1}', '{"threads": 2}'),
    ("runs/a/figures/bacc.png", b"\x89PNG\xff1", b"\x89PNG\xff2"),
    (CHECKPOINT, checkpoint(99), checkpoint(99, tensor=1.5)),
    (CHECKPOINT, checkpoint(99), checkpoint(1234, stage="purge")),
    ("runs/a/model.safetensors", checkpoint(99), checkpoint(100)),
    ("runs/a/split.npz", archive(1), archive(2)),
    ("text.csv", "a\n", "a\r\n"),
    ("text.csv", "a\n", "a"),
]


@pytest.mark.parametrize(("file", "base", "tree"), DIFFERENT)
def test_nothing_else_is_masked(
    tmp_path: Path, file: str, base: str | bytes, tree: str | bytes
) -> None:
    assert compare(tmp_path, file, base, tree)[0]


def test_equal_files_need_no_mask(tmp_path: Path) -> None:
    assert compare(tmp_path, "1.stdout", "  ETA 9 s\n", "  ETA 9 s\n") == ("", 0)


def test_a_changed_label_is_shown_with_its_line_and_both_sides(tmp_path: Path) -> None:
    rows = [f"image {i},{'x' * 300},label {i}" for i in range(5)]
    base = "\n".join(rows)
    text, _ = compare(tmp_path, "runs/a/split.csv", base, base.replace("label 3", "label 7"))
    number, one, two = text.splitlines()
    assert number == "line 4"
    assert one.startswith("  base: …x") and one.endswith("xxx,label 3")
    assert two.startswith("  tree: …x") and two.endswith("xxx,label 7")
    assert len(one) < 160


def test_a_difference_in_binary_data_is_shown_with_its_place(tmp_path: Path) -> None:
    assert compare(tmp_path, "a.png", b"\xff12", b"\xff13")[0] == "byte 2 of its data"
    assert compare(tmp_path, "a.png", b"\xff12", b"\xff1")[0].endswith("3 in base, 2 in tree")
    assert compare(tmp_path, "a.npz", archive(1), archive(2))[0].startswith("member labels, byte 0")


def test_arrays_are_compared_in_numpys_archives(tmp_path: Path) -> None:
    contents = []
    for value in (0, 1):
        content = io.BytesIO()
        np.savez_compressed(content, noisy=np.array([True, False]), labels=np.array([value]))
        contents.append(content.getvalue())
    assert compare(tmp_path, "split.npz", *contents)[0].startswith("member labels.npy, byte")


# Jobs


def sides(tmp_path: Path) -> list[Any]:
    made = []
    for name in ("base", "tree"):
        source, folder = tmp_path / f"{name}-source", tmp_path / name
        source.mkdir()
        folder.mkdir()
        made.append(import_module("benchmarks.same_jobs").Side(name, source, folder))
    return made


def check(
    tmp_path: Path, made: list[Any], name: str, work: Callable[[Any], None], **needs: str
) -> tuple[int, list[str]]:
    """The number of files that a job wrote, and what differs."""
    same, jobs = import_module("benchmarks.same"), import_module("benchmarks.same_jobs")
    job = jobs.Job(name, work, **needs)
    comparison = import_module("benchmarks.differences").Comparison(same.path_masks(made))
    count, differences = same.check(job, [same.perform(job, side) for side in made], comparison)
    return count, [f"{difference.file}: {difference.text}" for difference in differences]


def write(place: Any, file: str, text: str) -> None:
    path = place.folder / "runs" / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    def work(place: Any) -> None:
        write(place, f"{place.side.name}.csv", "a")

    different = ["runs/base.csv: is only in base", "runs/tree.csv: is only in tree"]
    assert check(tmp_path, sides(tmp_path), "job", work) == (2, different)


def test_paths_of_the_two_sides_are_masked_and_no_others(tmp_path: Path) -> None:
    made = sides(tmp_path)
    count, different = check(
        tmp_path, made, "folder", lambda place: write(place, "a", f"in {place.folder}/runs")
    )
    assert (count, different) == (1, [])
    other = check(
        tmp_path, made, "other", lambda place: write(place, "a", f"in /{place.side.name}")
    )
    assert other[1] == ["runs/a: line 1\n  base: in /base\n  tree: in /tree"]
    longer = check(
        tmp_path, made, "longer", lambda p: write(p, "a", f"{p.side.folder}-{p.side.name}")
    )
    assert longer[1]


def test_a_job_compares_what_it_wrote_and_not_what_it_began_with(tmp_path: Path) -> None:
    made = sides(tmp_path)

    def first(place: Any) -> None:
        for file in ("a", "b"):
            write(place, file, place.side.name)

    def second(place: Any) -> None:
        write(place, "b", "equal by now")

    assert check(tmp_path, made, "first", first)[0] == 2
    assert check(tmp_path, made, "second", second, start="first") == (1, [])
    third = check(
        tmp_path, made, "third", lambda place: (place.folder / "runs/a").unlink(), start="first"
    )
    assert third == (0, []), "both sides removed the file"


def test_a_resumed_run_must_equal_the_uninterrupted_one(tmp_path: Path) -> None:
    made = sides(tmp_path)
    check(tmp_path, made, "whole", lambda place: write(place, "model", "1"))
    assert (
        check(tmp_path, made, "same", lambda place: write(place, "model", "1"), equal_to="whole")[1]
        == []
    )
    count, different = check(
        tmp_path, made, "other", lambda place: write(place, "model", "2"), equal_to="whole"
    )
    assert count == 1
    assert [text.split(":")[0] for text in different] == ["base/runs/model", "tree/runs/model"]


def package(folder: Path, body: str) -> None:
    """Something that Python takes for fednoro."""
    (folder / "fednoro" / "methods").mkdir(parents=True)
    (folder / "fednoro" / "__init__.py").touch()
    (folder / "fednoro" / "methods" / "__init__.py").write_text("METHODS = {'b': 1, 'a': 2}\n")
    (folder / "fednoro" / "__main__.py").write_text(body, encoding="utf-8")


def test_a_version_from_another_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, tree = sides(tmp_path)
    package(base.source, "")
    assert base.methods() == ["a", "b"]
    monkeypatch.setenv("PYTHONPATH", str(base.source))
    with pytest.raises(SystemExit, match=r"tree: fednoro comes from .*base-source"):
        tree.methods()


def test_commands_leave_their_output_and_unexpected_exit_codes_are_reported(tmp_path: Path) -> None:
    made = sides(tmp_path)
    for side in made:
        package(side.source, "import sys\nprint(sys.argv[1:])\nsys.exit(sys.argv[1] == 'bad')\n")
    commands = import_module("benchmarks.same_jobs").commands
    count, different = check(tmp_path, made, "job", commands("good seed=1", "bad"))
    assert (count, len(different)) == (6, 2)
    assert different[0] == "base: fednoro bad: exit code 1, expected 0"
    assert (made[1].folder / "job" / "01-good.stdout").read_text() == "['good', 'seed=1']\n"


def test_the_help_of_every_command_is_read(tmp_path: Path) -> None:
    made = sides(tmp_path)[:1]
    panel = "╭─ Commands ─╮\\n│ run     Run it │\\n│         again  │\\n╰─╯"
    package(made[0].source, f"import sys\nprint('{panel}' if sys.argv[1:] == ['--help'] else '')\n")
    jobs = import_module("benchmarks.same_jobs")
    place = jobs.Place(made[0], made[0].folder)
    jobs.show_help(place)
    codes = sorted(path.name for path in place.folder.glob("*.exit"))
    assert codes == ["01.exit", "02-run.exit"]


def test_jobs_come_with_those_that_they_need() -> None:
    same, jobs = import_module("benchmarks.same"), import_module("benchmarks.same_jobs")
    every = jobs.all_jobs(["fedavg", "fednoro", "fednoro-plus"])
    chosen = same.select(every, ["resume", "audit-plus"], [])
    assert [job.name for job in chosen] == ["fednoro", "fednoro-plus", "resume", "audit-plus"]
    assert "flower" not in [job.name for job in same.select(every, [], ["flower"])]
    with pytest.raises(SystemExit, match="no such job: rum; there are help"):
        same.select(every, ["rum"], [])


def test_an_unknown_revision_is_one_line() -> None:
    with (
        pytest.raises(SystemExit, match="no revision no-such-thing") as stopped,
        import_module("benchmarks.same").checkout("no-such-thing"),
    ):
        pass
    assert "\n" not in str(stopped.value)


def test_make_says_what_is_missing() -> None:
    done = subprocess.run(
        ["make", "--no-print-directory", "same", "BASE="],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode
    assert done.stdout == "make same needs a git revision to compare with: make same BASE=main\n"
