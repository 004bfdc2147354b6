"""The run folder: whole files, logs that follow their checkpoint, damage that is
noticed, one process at a time.
"""

from __future__ import annotations

import csv
import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from fednoro.core.files import disk_errors, write_json, write_whole
from fednoro.core.types import State, UserError, Weights
from fednoro.data.client import Client
from fednoro.experiment.checkpoint import (
    CHECKPOINTS_PER_RUN,
    Snapshot,
    checkpoints,
    environment,
    load_checkpoint,
    restore,
    save_checkpoint,
    take_snapshot,
    write_checkpoint,
)
from fednoro.experiment.drive import load
from fednoro.experiment.rounds import Answer, Evaluation, Turn
from fednoro.experiment.run_folder.run_files import CLIENT_COLUMNS, RunFolder
from fednoro.experiment.simulation import resume

MEMO = {
    "detection": {
        "reason": "two groups",
        "clients": {"0": {"noisy": True, "posterior": 0.1 + 0.2}},
    },
    "none": None,
}


def state_at(number: int, memo: dict[str, object] | None = None) -> State:
    rng = torch.Generator().manual_seed(number)
    model = Weights(torch.randn(50, generator=rng), torch.tensor([number, 7]), (20, 30))
    return State(model, number, 9, 3, 5, stage="warm-up", memo=MEMO if memo is None else memo)


def clients(count: int = 3) -> dict[int, Client]:
    index = np.arange(4)
    return {k: Client(k, f"site {k}", index, index % 2) for k in range(count)}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def turn_at(number: int, task: str = "train", completed: bool = True) -> Turn:
    confusion = np.array([[3, 1, 0], [0, 2, 0], [0, 0, 0]])
    trained = Answer(0, "ok", 10, {"loss": 0.5}), Answer(1, "ok", 30, {"loss": 1.5})
    evaluation = Evaluation(confusion, 0.25) if completed else None
    return Turn(
        state_at(number), task, (*trained, Answer(2, "failed", reason="lost")), 0.5, (), evaluation
    )


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path / "run")
    made.create()
    return made


def same(a: State, b: State) -> bool:
    facts = ("round", "rounds", "classes", "seed", "stage", "memo")
    return (
        torch.equal(a.model.values, b.model.values)
        and torch.equal(a.model.counters, b.model.counters)
        and a.model.segments == b.model.segments
        and all(getattr(a, name) == getattr(b, name) for name in facts)
    )


# Whole files


def test_a_file_is_replaced_whole_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    write_whole(file, b"old")
    write_whole(file, b"new")
    assert file.read_bytes() == b"new" and names(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_the_old_content_stays_when_writing_fails(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.txt"
    write_whole(file, b"old")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full) if failing == "fsync" else monkeypatch.setattr(
        Path, "replace", full
    )
    with pytest.raises(
        UserError,
        match=r"no space left while writing .*a\.txt: free some, then run or resume again",
    ):
        write_whole(file, b"new")
    assert file.read_bytes() == b"old" and names(tmp_path) == ["a.txt"]


def test_the_old_content_stays_when_the_process_is_killed_while_writing(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    write_whole(file, b"old")
    code = (
        "import os, sys, pathlib\n"
        "from fednoro.core import files\n"
        "files.os.fsync = lambda _: os.kill(os.getpid(), 9)\n"
        "files.write_whole(pathlib.Path(sys.argv[1]), b'new' * 1000)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(file)], check=False).returncode == -9
    assert file.read_bytes() == b"old" and len(names(tmp_path)) == 2
    write_whole(file, b"newer")
    assert file.read_bytes() == b"newer"


def test_numbers_that_json_cannot_hold_leave_the_old_file(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"a": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "a.json", {"a": float("nan")})
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": 1}


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENAMETOOLONG, errno.EIO])
def test_every_failure_of_the_disk_is_one_line(code: int, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught, disk_errors(tmp_path / "x"):
        raise OSError(code, os.strerror(code))
    assert str(caught.value) == f"cannot write {tmp_path / 'x'}: {os.strerror(code)}"


# The folder


def test_a_folder_that_exists_is_never_taken_over(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match=r"mine exists already: choose another name=$"):
        RunFolder(tmp_path / "mine").create()
    assert names(tmp_path / "mine") == ["thesis.txt"]


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (
        tmp_path / "file" / "run",
        tmp_path / "file" / "deeper" / "run",
        tmp_path / ("x" * 300),
    ):
        with pytest.raises(UserError, match=r"^cannot write .*: \w+"):
            RunFolder(path).create()


def test_a_second_process_is_kept_out_until_the_first_lets_go(folder: RunFolder) -> None:
    code = (
        "import fcntl, sys\n"
        "file = open(sys.argv[1], 'w')\n"
        "fcntl.flock(file, fcntl.LOCK_EX)\n"
        "print('held', flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", code, str(folder.path / ".lock")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=r"run is in use by another process"):
            folder.lock()
        other.kill()
    folder.lock()
    second = RunFolder(folder.path)
    with pytest.raises(UserError, match="in use"):
        second.lock()
    folder.unlock()
    second.lock()
    second.unlock()


def test_the_environment_says_what_the_run_was_made_with() -> None:
    made_with = environment(torch.device("cpu"))
    assert made_with["packages"]["numpy"] == np.__version__ and made_with["fednoro"]
    assert made_with["device"] == "cpu" and made_with["threads"] == torch.get_num_threads()
    json.dumps(made_with, allow_nan=False)


# The logs


def test_a_round_is_recorded_with_its_figures(folder: RunFolder) -> None:
    folder.record(turn_at(1))
    [record] = folder.rounds()
    assert record["round"] == 1 and record["confusion"] == [[3, 1, 0], [0, 2, 0], [0, 0, 0]]
    assert record["recall"] == [0.75, 1.0, None], "a class that the test set lacks has no recall"
    assert record["bacc"] == 0.875 and record["loss"] == 0.25
    assert record["train_loss"] == pytest.approx((10 * 0.5 + 30 * 1.5) / 40)
    assert record["clients"] == 2 and record["failed"] == [2]


def test_clients_are_logged_with_one_header(folder: RunFolder) -> None:
    folder.record(turn_at(1))
    folder.record(turn_at(1, "score", completed=False))
    folder.record(turn_at(2))
    with (folder.path / "clients.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == CLIENT_COLUMNS
    assert [(row["round"], row["task"], row["client"]) for row in rows] == [
        (number, task, str(k))
        for number, task in (("1", "train"), ("2", "score"), ("2", "train"))
        for k in range(3)
    ]
    assert (
        rows[2]["status"] == "failed" and rows[2]["reason"] == "lost" and rows[1]["loss"] == "1.5"
    )
    assert json.loads((folder.path / "detection.json").read_text()) == MEMO["detection"]
    assert [record["round"] for record in folder.rounds()] == [1, 2]


def test_a_line_that_was_not_finished_does_not_count(folder: RunFolder) -> None:
    assert folder.rounds() == []
    folder.record(turn_at(1))
    folder.record(turn_at(2))
    log = folder.path / "rounds.jsonl"
    whole = log.read_bytes()
    for cut in (1, 20, len(whole) // 2 - 1):
        log.write_bytes(whole[:-cut])
        assert [record["round"] for record in folder.rounds()] == [1]


@pytest.mark.parametrize("damage", [b"{\n", b"3\n", b"\xff\xfe\n", b"\n", b"null\n"])
def test_a_damaged_line_is_one_clear_line(damage: bytes, folder: RunFolder) -> None:
    folder.record(turn_at(1))
    log = folder.path / "rounds.jsonl"
    log.write_bytes(damage + log.read_bytes())
    with pytest.raises(UserError, match=r"rounds\.jsonl is damaged: "):
        folder.rounds()


# Checkpoints


def test_a_checkpoint_gives_back_state_and_memories_to_the_bit(folder: RunFolder) -> None:
    told, state = clients(), state_at(4)
    odd = torch.tensor([float("nan"), -0.0, 1e-45])
    told[0].memory.update(
        labels=torch.tensor([1, 0, 1, 0]), odd=odd, scale=torch.tensor(0.1, dtype=torch.float64)
    )
    told[2].memory.update(
        {
            "flags": torch.tensor([True, False]),
            "half": torch.ones(3, dtype=torch.bfloat16),
            "dotted.name": odd[:0],
        }
    )
    told[2].memory["shared"] = state.model.values  # the same storage twice
    told[2].memory["turned"] = torch.arange(6).view(2, 3).T
    save_checkpoint(folder, state, told)

    fresh = clients()
    fresh[1].memory["stale"] = torch.ones(1)
    found = restore(RunFolder(folder.path), fresh)
    assert found is not None and same(found, state)
    assert fresh[1].memory == {}
    for k in (0, 2):
        assert fresh[k].memory.keys() == told[k].memory.keys()
        for name, value in told[k].memory.items():
            restored = fresh[k].memory[name]
            assert restored.dtype == value.dtype and restored.shape == value.shape
            assert (
                restored.contiguous()
                .flatten()
                .view(torch.uint8)
                .equal(value.contiguous().flatten().view(torch.uint8))
            )
    assert fresh[0].labels.tolist() == [1, 0, 1, 0], "corrected labels are trained on again"


def test_the_newest_checkpoints_are_kept(folder: RunFolder) -> None:
    for number in range(1, 13):
        save_checkpoint(folder, state_at(number), {})
    kept = [path.name for path in checkpoints(folder)]
    assert kept == [
        f"round-{number:05d}.safetensors" for number in range(13 - CHECKPOINTS_PER_RUN, 13)
    ]
    assert names(folder.path / "checkpoints") == kept
    found = restore(folder, {})
    assert found is not None and found.round == 12


def test_a_snapshot_is_the_moment_it_was_taken(folder: RunFolder) -> None:
    told = clients()
    told[0].memory["labels"] = torch.tensor([1])
    folder.record(turn_at(1))
    snapshot = take_snapshot(folder, state_at(1), told)
    sizes = [(folder.path / name).stat().st_size for name in ("rounds.jsonl", "clients.csv")]

    told[0].memory["labels"] = torch.tensor([0])
    told[1].memory["new"] = torch.tensor([0])
    with (folder.path / "rounds.jsonl").open("a") as file:
        file.write('{"round": 2, "ba')
    write_checkpoint(folder, snapshot)

    fresh = clients()
    assert restore(folder, fresh) is not None
    assert fresh[0].memory["labels"].tolist() == [1] and not fresh[1].memory
    assert [
        (folder.path / name).stat().st_size for name in ("rounds.jsonl", "clients.csv")
    ] == sizes


def test_logs_longer_than_the_checkpoint_are_cut(folder: RunFolder) -> None:
    folder.record(turn_at(1))
    save_checkpoint(folder, state_at(1), {})
    before = {name: (folder.path / name).read_bytes() for name in ("rounds.jsonl", "clients.csv")}
    folder.record(turn_at(2))
    with (folder.path / "rounds.jsonl").open("a") as file:
        file.write('{"round": 3, "stage": "warm')
    restore(folder, {})
    assert {name: (folder.path / name).read_bytes() for name in before} == before
    folder.record(turn_at(2))
    assert [record["round"] for record in folder.rounds()] == [1, 2]


@pytest.mark.parametrize("name", ["rounds.jsonl", "clients.csv"])
@pytest.mark.parametrize("missing", [False, True])
def test_logs_shorter_than_the_checkpoint_are_refused_untouched(
    name: str, missing: bool, folder: RunFolder
) -> None:
    folder.record(turn_at(1))
    save_checkpoint(folder, state_at(1), {})
    folder.record(turn_at(2))
    save_checkpoint(folder, state_at(2), {})
    log, newest = folder.path / name, checkpoints(folder)[-1]
    log.unlink() if missing else os.truncate(log, log.stat().st_size - 1)
    left = {path.name: path.read_bytes() for path in folder.path.iterdir() if path.is_file()}
    with pytest.raises(UserError) as caught:
        restore(folder, {})
    assert str(log) in str(caught.value) and str(newest) in str(caught.value)
    assert {
        path.name: path.read_bytes() for path in folder.path.iterdir() if path.is_file()
    } == left
    if not missing:
        newest.unlink()  # the way out that the message names
        found = restore(folder, {})
        assert found is not None and found.round == 1


def test_without_a_checkpoint_the_logs_start_anew(folder: RunFolder) -> None:
    folder.record(turn_at(1))
    assert restore(folder, {}) is None
    assert (
        not (folder.path / "rounds.jsonl").exists() and not (folder.path / "clients.csv").exists()
    )


def test_what_killed_writes_left_behind_is_swept_away(folder: RunFolder) -> None:
    save_checkpoint(folder, state_at(1), {})
    stale = [
        folder.path / "checkpoints" / ".round-00002.safetensors.123.tmp",
        folder.path / ".split.npz.9.tmp",
    ]
    for path in stale:
        path.write_bytes(b"half")
    found = restore(folder, {})
    assert found is not None and found.round == 1 and not any(path.exists() for path in stale)


def corrupt(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        load_checkpoint(path)
    line = str(caught.value)
    assert line.startswith(f"checkpoint {path} is corrupt (") and len(line.splitlines()) == 1
    assert line.endswith("): delete it to resume from the one before")
    return line


def test_a_corrupt_checkpoint_is_named_and_deleting_it_is_the_way_out(folder: RunFolder) -> None:
    save_checkpoint(folder, state_at(1), {})
    save_checkpoint(folder, state_at(2), {})
    first, newest = checkpoints(folder)
    os.truncate(newest, 100)
    with pytest.raises(UserError, match=f"checkpoint {newest} is corrupt"):
        restore(folder, {})
    newest.unlink()
    found = restore(folder, {})
    assert found is not None and same(found, state_at(1))
    first.unlink()
    assert restore(folder, {}) is None


def test_a_truncated_checkpoint_is_corrupt_wherever_it_ends(folder: RunFolder) -> None:
    save_checkpoint(folder, state_at(1), {})
    [path] = checkpoints(folder)
    whole = path.read_bytes()
    for size in [0, 1, 7, 8, 9, 100, len(whole) // 2, *range(len(whole) - 10, len(whole))]:
        path.write_bytes(whole[:size])
        corrupt(path)


@given(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_flipped_bit_is_noticed_wherever_it_matters(
    folder: RunFolder, where: float, bit: int
) -> None:
    path = folder.path / "checkpoints" / "round-00001.safetensors"
    told = clients(1)
    told[0].memory["labels"] = torch.arange(4)
    (folder.path / "rounds.jsonl").write_text("x" * 40)
    save_checkpoint(folder, state_at(1), told)
    expected, content = load_checkpoint(path), bytearray(path.read_bytes())
    content[int(where * len(content))] ^= 1 << bit
    path.write_bytes(content)
    try:
        found = load_checkpoint(path)
    except UserError as error:
        assert "is corrupt" in str(error)
        return
    # Nothing but padding may change unnoticed.
    assert same(found.state, expected.state) and found.logs == expected.logs
    assert found.memories[0]["labels"].equal(expected.memories[0]["labels"])


def test_files_of_another_kind_are_corrupt_checkpoints(folder: RunFolder) -> None:
    path = folder.path / "checkpoints" / "round-00001.safetensors"
    path.write_bytes(b"\x80\x04pickle")
    corrupt(path)
    path.write_text("not a checkpoint at all, but some text of a fair length")
    corrupt(path)
    tensors = {"values": torch.zeros(2), "counters": torch.zeros(1, dtype=torch.int64)}
    save_file(tensors, path)
    assert "it has no 'state'" in corrupt(path)
    for facts in ("{}", "[]", "3", "null", "{", '{"checksum": "abc", "logs": {}}'):
        save_file(tensors, path, {"state": facts})
        corrupt(path)
    path.unlink()
    path.mkdir()
    corrupt(path)


def test_a_checkpoint_of_another_version_is_corrupt_not_a_crash(folder: RunFolder) -> None:
    from safetensors import safe_open

    from fednoro.experiment.checkpoint import _checksum

    save_checkpoint(folder, state_at(1), {})
    [path] = checkpoints(folder)
    with safe_open(path, framework="pt") as file:
        facts = json.loads(file.metadata()["state"])
        tensors = {name: file.get_tensor(name).clone() for name in ("values", "counters")}
    del facts["checksum"]
    facts["flavour"] = "new"
    save_file(
        tensors, path, {"state": json.dumps({**facts, "checksum": _checksum(facts, tensors)})}
    )
    assert "flavour" in corrupt(path)


def test_a_full_disk_leaves_the_former_checkpoint_whole(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(folder, state_at(1), {})
    write = os.fsync

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"no space left while writing .*round-00002"):
        save_checkpoint(folder, state_at(2), {})
    monkeypatch.setattr(os, "fsync", write)
    assert [path.name for path in checkpoints(folder)] == ["round-00001.safetensors"]
    found = restore(folder, {})
    assert found is not None and same(found, state_at(1))


def test_a_snapshot_on_disk_is_the_snapshot_in_memory(folder: RunFolder) -> None:
    folder.record(turn_at(3))
    told = clients()
    told[1].memory["labels"] = torch.tensor([2, 2])
    taken = take_snapshot(folder, state_at(3), told)
    write_checkpoint(folder, taken)
    read = load_checkpoint(checkpoints(folder)[0])
    assert isinstance(read, Snapshot) and same(read.state, taken.state) and read.logs == taken.logs
    assert read.logs["rounds.jsonl"] > 0 and read.memories[1]["labels"].tolist() == [2, 2]


# Folders that are no runs


def test_loading_and_resuming_say_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is not a run folder: it has no config\.yaml"):
        resume(tmp_path)
    with pytest.raises(UserError, match=r"nowhere does not exist"):
        resume(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"holds no finished run: result\.json: No such file"):
        load(tmp_path)
    for damage in ("", "{", "[]", "3", "{}", '{"best": 1}'):
        (tmp_path / "result.json").write_text(damage)
        with pytest.raises(
            UserError, match=r"result\.json is damaged: delete it and resume the run"
        ):
            load(tmp_path)
    assert not (tmp_path / ".lock").exists(), "a folder that is no run is left as it was"
