"""FedCorr's three stages: who is asked what, what becomes of labels, and what goes wrong."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federations import GAPPED, ONE_IMAGE, ORDINARY, federation, network, start
from torch import Tensor

import fednoro
from fednoro.core.training import Training
from fednoro.core.types import Failure, Replies, Reply, State, Task, UserError, Weights
from fednoro.engine.eager import EagerEngine
from fednoro.experiment.checkpoint import checkpoints, load_checkpoint
from fednoro.experiment.config.configuration import resolve
from fednoro.experiment.drive import Watcher
from fednoro.experiment.rounds import Evaluation, Turn, play
from fednoro.experiment.run_folder.run_files import RunFolder
from fednoro.methods import METHODS, FedCorr, FedCorrLA
from fednoro.methods.fedcorr import FEWEST

pytestmark = pytest.mark.usefixtures("one_thread")
METHOD = FedCorr()
# 2 and 3 are flagged, but 3 is clean by its level
LIDS, MU = {0: 2.0, 1: 2.1, 2: 6.0, 3: 6.3}, {2: 0.4, 3: 0.05}
NOTHING = Evaluation(np.eye(4, dtype=np.int64), 0.0)


# Clients made of numbers: no network, no images
def model(value: float) -> Weights:
    return Weights(torch.full((3,), float(value)), torch.tensor([1]), (3,))


def begin(rounds: int = 4, seed: int = 0) -> State:
    return State(model(0), 0, rounds, 4, seed)


Answer = Callable[[int, Task], Reply | Failure]


def told(
    lids: Mapping[int, float] = LIDS, mu: Mapping[int, float] = MU, silent: Sequence[str] = ()
) -> Answer:
    """Clients that answer with these; those in `silent`, such as "visit-1 2", do not."""

    def answer(k: int, task: Task) -> Reply | Failure:
        if f"{task.name} {k}" in silent or f"{task.name.partition('-')[0]} {k}" in silent:
            return Failure(k, "away")
        if task.name.startswith("correct"):
            return Reply(k, 10, metrics={"mu": mu[k], "relabelled": 1.0})
        if task.name == "relabel":
            return Reply(k, 10, metrics={"relabelled": 1.0})
        metrics = (
            {"loss": 1.0, "lid": lids[k]}
            if task.name.startswith("visit") and k in lids
            else {"loss": 1.0}
        )
        return Reply(k, 10, model(k + 1), metrics)

    return answer


def played(
    answer: Answer | None = None,
    method: FedCorr = METHOD,
    clients: Sequence[int] = range(4),
    **options: Any,
) -> tuple[list[tuple[str, dict[int, Task]]], list[Turn]]:
    """A whole run: what was asked of whom, and the turns."""
    asked: list[tuple[str, dict[int, Task]]] = []
    answer = answer or told()

    def exchange(method: Any, tasks: Mapping[int, Task]) -> Any:
        (name,) = {task.name for task in tasks.values()}
        asked.append((name, dict(tasks)))
        return iter([answer(k, tasks[k]) for k in sorted(tasks)])

    state = options.pop("state", begin())
    turns = list(play(method, state, exchange, list(clients), lambda _: NOTHING, **options))
    return asked, turns


def visits(asked: Sequence[tuple[str, dict[int, Task]]], iteration: int) -> list[int]:
    return [k for name, tasks in asked for k in tasks if name == f"visit-{iteration}"]


def test_a_run_goes_through_its_stages_in_order() -> None:
    asked, turns = played()
    whom = [(name, sorted(tasks)) for name, tasks in asked]
    assert whom[4] == ("correct-1", [2, 3]) and whom[9] == ("correct-2", [2, 3])
    assert whom[10:12] == [("train", [0, 1, 3])] * 2  # T2 = 2 of 4 rounds on those with μ_k ≤ 0.1
    assert whom[12:] == [("relabel", [2]), *[("train", [0, 1, 2, 3])] * 2]
    assert [turn.state.round for turn in turns] == [0] * 10 + [1, 2, 2, 3, 4]
    assert [turn.state.stage for turn in turns if turn.evaluation] == ["fine-tuning"] * 2 + [
        "usual training"
    ] * 2


def test_every_iteration_visits_each_client_once_in_another_random_order() -> None:
    orders = set()
    for seed in range(4):
        asked, _ = played(state=begin(seed=seed))
        for iteration in (1, 2):
            assert sorted(visits(asked, iteration)) == [0, 1, 2, 3]
            orders.add(tuple(visits(asked, iteration)))
        assert all(len(tasks) == 1 for name, tasks in asked if name.startswith("visit"))
    assert len(orders) >= 6


def test_visits_of_different_iterations_have_different_draws() -> None:
    asked, _ = played()
    keys = [
        (task.name, task.round, k)
        for name, tasks in asked
        if "visit" in name
        for k, task in tasks.items()
    ]
    assert len(keys) == len(set(keys)) == 8  # name, round and client key a client's random draws


def test_the_global_model_becomes_the_visited_client_s() -> None:
    asked, turns = played()
    for (name, tasks), turn in zip(asked, turns, strict=True):
        if name.startswith("visit"):
            (k,) = tasks
            assert torch.equal(turn.state.model.values, model(k + 1).values)
            assert turn.state.notes == {k: {"weight": 1.0}}
    received = [
        task.weights.values[0]
        for name, tasks in asked
        if name == "visit-1"
        for task in tasks.values()
    ]
    assert received == [0, *(k + 1 for k in visits(asked, 1)[:-1])]


def test_noise_levels_reach_the_next_visits_and_only_those_above_zero() -> None:
    asked, _ = played()
    settings = {(name, k): dict(t.settings) for name, tasks in asked for k, t in tasks.items()}
    assert all(settings["visit-1", k] == {} for k in range(4))
    assert [settings["visit-2", k] for k in range(4)] == [{}, {}, {"mu": 0.4}, {"mu": 0.05}]
    assert all(not given for (name, _), given in settings.items() if name == "train")


def test_nobody_is_asked_to_correct_where_all_clients_look_alike() -> None:
    asked, turns = played(told(dict.fromkeys(range(4), 2.0)))
    assert [name for name, _ in asked] == ["visit-1"] * 4 + ["visit-2"] * 4 + ["train"] * 4
    assert all(len(tasks) == 4 for name, tasks in asked if name == "train")
    assert not any(row["noisy"] for row in turns[-1].state.memo["detection"]["clients"].values())


def test_a_level_of_an_earlier_iteration_is_forgotten_where_nobody_is_flagged_any_more() -> None:
    lids = [{0: 2.0, 1: 3.0}, {0: 3.0, 1: 2.0}]  # equal after two visits

    def answer(k: int, task: Task) -> Reply | Failure:
        return told(lids[task.name == "visit-2"], {1: 0.7})(k, task)

    asked, _ = played(answer, clients=(0, 1))
    assert [name for name, _ in asked if name.startswith("correct")] == ["correct-1"]
    assert [sorted(tasks) for name, tasks in asked if name == "train"] == [[0, 1]] * 4


def test_lids_are_averaged_so_that_a_missed_visit_does_not_look_clean() -> None:
    asked, turns = played(told(silent=["visit-1 3"]))
    assert turns[-1].state.memo["lids"]["3"] == [6.3]
    assert dict(asked[9][1]).keys() == {2, 3}


def test_stage_1_ends_although_a_client_always_fails() -> None:
    asked, turns = played(told(silent=["visit 0", "train 0"]))
    assert visits(asked, 1).count(0) == visits(asked, 2).count(0) == 1
    assert turns[-1].state.round == 4
    trained = [sorted(tasks) for name, tasks in asked if name == "train"]
    # never judged: not one to fine-tune on
    assert trained == [[1, 3], [1, 3], [0, 1, 2, 3], [0, 1, 2, 3]]
    assert [sorted(tasks) for name, tasks in asked if name == "relabel"] == [[2]]


def test_without_any_answer_the_model_stays_and_all_rounds_are_played() -> None:
    everything = [f"{name} {k}" for name in ("visit", "train") for k in range(4)]
    asked, turns = played(told(silent=everything))
    assert turns[-1].state.round == 4 and torch.equal(turns[-1].state.model.values, model(0).values)
    assert all(len(tasks) == 4 for name, tasks in asked if name == "train")


def test_a_flagged_client_that_does_not_say_its_level_is_not_trusted() -> None:
    asked, turns = played(told(silent=["correct 3"]))
    assert turns[-1].state.memo["mu"] == {"0": 0.0, "1": 0.0, "2": 0.4, "3": 1.0}
    assert next(sorted(tasks) for name, tasks in asked if name == "train") == [0, 1]
    _, turns = played(told(mu={2: 0.4, 3: 0.6}, silent=["correct-2 3"]))
    assert turns[-1].state.memo["mu"]["3"] == 0.6  # what it said before


def test_without_a_clean_client_all_take_part_and_it_is_said() -> None:
    asked, turns = played(told(lids={}))
    assert [sorted(tasks) for name, tasks in asked if name == "train"] == [[0, 1, 2, 3]] * 4
    said = [turn for turn in turns if any("no clean client" in text for text in turn.warnings)]
    assert [turn.state.round for turn in said] == [1, 2]


def test_fine_tuning_draws_as_many_clean_clients_as_take_part() -> None:
    lids = {k: 2.0 + k / 100 for k in range(8)} | {8: 6.0, 9: 6.1}
    answer = told(lids, {8: 0.5, 9: 0.5})
    asked, _ = played(answer, clients=range(10), participation=0.3, state=begin(rounds=12))
    tuned = [sorted(tasks) for name, tasks in asked if name == "train"][:6]
    assert all(len(drawn) == 3 and not {8, 9} & set(drawn) for drawn in tuned)
    assert len(set(map(tuple, tuned))) > 1
    assert sorted(visits(asked, 1)) == list(range(10))  # stage 1 visits everyone


def test_a_noisy_client_that_missed_its_relabelling_is_asked_again_when_drawn() -> None:
    silent = ["relabel 2"]
    answer, rounds = told(silent=silent), list[int]()

    def until_round_3(k: int, task: Task) -> Reply | Failure:
        if task.name == "relabel":
            rounds.append(task.round)
            if task.round == 3:
                silent.clear()
        return answer(k, task)

    _, turns = played(until_round_3, state=begin(rounds=6), method=replace(METHOD, finetune=1))
    assert rounds == [1, 2, 3]  # at most once a round, and not after it has answered
    assert turns[-1].state.memo["relabelled"] == [2]


def test_visits_go_on_where_they_were_after_any_exchange() -> None:
    asked, turns = played()
    for number in range(len(turns) - 1):
        state = turns[number].state
        memo = json.loads(json.dumps(state.memo, allow_nan=False))
        rest, _ = played(state=replace(state, memo=memo))
        assert [(name, sorted(tasks)) for name, tasks in rest] == [
            (n, sorted(t)) for n, t in asked[number + 1 :]
        ]


def test_what_is_known_about_the_clients_is_recorded() -> None:
    _, turns = played()
    found = turns[-1].state.memo["detection"]
    assert found["reason"] == "1 of 4 clients have a noise level above 0.1"
    assert [found["clients"][str(k)]["noisy"] for k in range(4)] == [False, False, True, False]
    assert found["clients"]["3"]["mu"] == 0.05 and found["clients"]["3"]["lid"] == pytest.approx(
        6.3
    )
    assert found["clients"]["0"]["posterior"] < 0.01 and found["clients"]["3"]["posterior"] > 0.99


def test_a_lid_that_is_not_a_number_is_left_out() -> None:
    state = METHOD.fold(
        begin(), Replies("visit-1", (0,), [Reply(0, 5, model(1), {"lid": math.nan})])
    )
    assert state.memo["lids"] == {} and state.memo["visited"] == [0]


def test_fine_tuning_lasts_for_half_of_the_rounds_unless_told() -> None:
    assert FedCorr().last_of_stage_2(100) == 50 and FedCorr(finetune=30).last_of_stage_2(100) == 30
    FedCorr(finetune=100).check(100)
    with pytest.raises(
        UserError, match=r"method\.finetune must be at most train\.rounds \(20\), got 50"
    ):
        FedCorr(finetune=50).check(20)
    asked, _ = played(method=FedCorr(finetune=0))
    assert [name for name, _ in asked][10:] == ["relabel"] + ["train"] * 4
    asked, _ = played(method=FedCorr(finetune=4))
    assert [name for name, _ in asked][10:] == ["train"] * 4


# Real clients


class Lab(EagerEngine):
    def __init__(self, parts: Sequence[Sequence[int]], equal: bool = False) -> None:
        data, clients = federation(parts)
        if equal:
            data.images[:] = data.images[:1]
        training = Training(rounds=4, batch=4, lr=0.01)
        super().__init__(network, data, 1, training, 0, torch.device("cpu"), clients)

    def ask(
        self, method: FedCorr, k: int, name: str, weights: Weights | None = None, **settings: float
    ) -> Reply:
        return method.work(
            Task(name, 0, weights or start().model, settings), self.site(self.clients[k])
        )


def decided(k: int, lab: Lab) -> Tensor:
    """The probabilities that the global model gives client k's images."""
    return lab.logits(start().model, lab.clients[k].index).double().softmax(1)


def test_a_visit_scores_the_client_s_own_model_with_the_labels_it_has() -> None:
    lab = Lab([ORDINARY])
    reply = lab.ask(METHOD, 0, "visit-1")
    assert reply.weights is not None
    logits = lab.logits(reply.weights, lab.clients[0].index).double()
    losses = torch.nn.functional.cross_entropy(logits, torch.tensor(ORDINARY), reduction="none")
    torch.testing.assert_close(lab.clients[0].memory["losses"], losses)
    assert reply.metrics.keys() == {"loss", "lid"} and float(reply.metrics["lid"]) > 0


@pytest.mark.parametrize("size", [1, 2, FEWEST - 1, FEWEST, 20, 21, 22])
def test_small_clients_work_and_have_a_lid_from_five_images_on(size: int) -> None:
    lab = Lab([[i % 4 for i in range(size)]])
    reply = lab.ask(METHOD, 0, "visit-1")
    assert ("lid" in reply.metrics) == (size >= FEWEST)
    assert math.isfinite(float(reply.metrics.get("lid", 0.0)))
    corrected = lab.ask(METHOD, 0, "correct-1")
    assert 0 <= float(corrected.metrics["mu"]) < 1 and len(lab.clients[0].labels) == size
    lab.ask(METHOD, 0, "relabel")
    assert lab.ask(FedCorrLA(), 0, "train").weights is not None


def test_equal_images_have_a_finite_lid() -> None:
    lab = Lab([ORDINARY], equal=True)
    assert float(lab.ask(METHOD, 0, "visit-1").metrics["lid"]) == 0


def test_correction_relabels_the_worst_half_of_what_looks_wrong_where_the_model_is_sure() -> None:
    lab = Lab([ORDINARY])
    client, p = lab.clients[0], decided(0, lab)
    wrong = [1, 3, 4, 6]
    client.memory["losses"] = torch.full((9,), 0.1, dtype=torch.float64)
    client.memory["losses"][wrong] = torch.tensor([3.0, 3.3, 3.2, 3.1], dtype=torch.float64)
    surest = p.max(1).values
    # one of the two worst, 3 and 4, is sure enough
    method = FedCorr(confidence=float(surest[[3, 4]].min()))
    reply = lab.ask(method, 0, "correct-1")
    (sure,) = [i for i in (3, 4) if surest[i] > method.confidence]
    expected = torch.tensor(ORDINARY)
    expected[sure] = p.argmax(1)[sure]
    assert float(reply.metrics["mu"]) == 4 / 9 and reply.weights is None
    assert torch.equal(client.memory["labels"], expected)
    assert float(reply.metrics["relabelled"]) == float((expected != torch.tensor(ORDINARY)).sum())


def test_relabelling_replaces_labels_and_never_changes_them_in_place() -> None:
    lab = Lab([ORDINARY])
    client, method = lab.clients[0], FedCorr(confidence=0.0)
    observed = client.observed.copy()
    lab.ask(method, 0, "relabel")
    first = client.memory["labels"]
    assert torch.equal(first, decided(0, lab).argmax(1)) and (client.observed == observed).all()
    kept = first.clone()
    other = lab.ask(method, 0, "train").weights
    lab.ask(method, 0, "relabel", other)
    assert client.memory["labels"] is not first and torch.equal(first, kept)
    assert first.dtype == torch.int64


def test_logit_adjustment_follows_the_corrected_labels() -> None:
    lab, method = Lab([ORDINARY]), FedCorrLA()
    site, task = lab.site(lab.clients[0]), Task("train", 0, start().model)
    assert method.aux(task, site)["log_pi"].exp().tolist() == pytest.approx(
        [3 / 9, 2 / 9, 2 / 9, 2 / 9]
    )
    lab.clients[0].memory["labels"] = torch.tensor([1] * 6 + [2] * 3)
    assert method.aux(task, site)["log_pi"].exp().tolist() == pytest.approx([0, 6 / 9, 3 / 9, 0])
    assert "log_pi" not in FedCorr().aux(task, site)


def test_wrong_labels_of_a_fitted_federation_are_found_and_corrected() -> None:
    """A client with a third of its labels wrong, and a global model that knows better."""
    right = [i % 4 for i in range(60)]
    lab = Lab([right, right])
    lab.training = Training(epochs=60, batch=10, lr=0.01)
    trained = lab.ask(METHOD, 0, "train").weights
    lab.clients[1].observed[::3] = (lab.clients[1].observed[::3] + 1) % 4
    lab.training = Training(epochs=1, batch=10, lr=0.003)
    lab.ask(METHOD, 1, "visit-1", trained)
    reply = lab.ask(METHOD, 1, "correct-1", trained)
    assert float(reply.metrics["mu"]) == pytest.approx(1 / 3, abs=0.02)
    # half of the 20 may change
    assert (lab.clients[1].labels == torch.tensor(right)).sum() == pytest.approx(50, abs=1)
    lab.ask(METHOD, 1, "relabel", trained)
    assert (lab.clients[1].labels == torch.tensor(right)).all()


def test_a_run_with_a_client_of_one_image_judges_the_others() -> None:
    lab = Lab([ORDINARY, GAPPED, ONE_IMAGE])
    *_, last = play(METHOD, start(rounds=4), lab.exchange, [0, 1, 2], lambda _: NOTHING)
    # one image has no LID
    assert last.state.round == 4 and last.state.memo["lids"].keys() == {"0", "1"}


# Runs


QUICK = (
    "train.rounds=4",
    "train.epochs=1",
    "partition.clients=5",
    "noise.epochs=2",
    "model.width=4",
    "device=cpu",
)


@pytest.mark.parametrize("name", ["fedcorr", "fedcorr-la"])
def test_a_run_on_digits_keeps_its_corrected_labels(name: str, tmp_path: Path) -> None:
    run = fednoro.run("digits", f"method={name}", *QUICK, f"out={tmp_path}")
    assert len(run.bacc) == 4 and run.detection is not None and len(run.detection["clients"]) == 5
    saved = load_checkpoint(checkpoints(RunFolder(run.folder))[-1])
    assert all("losses" in memory for memory in saved.memories.values())
    flagged = {k for k, row in run.detection["clients"].items() if row["mu"] > 0}
    assert flagged and all("labels" in saved.memories[int(k)] for k in flagged)
    log = (run.folder / "clients.csv").read_text()
    assert log.count("visit-1") == log.count("visit-2") == 5


class Stopper(Watcher):
    """Stops the run after so many exchanges, as a user does."""

    def __init__(self, exchanges: int) -> None:
        self.left = exchanges

    def turned(self, turn: Turn) -> None:
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


# in the first iteration, after its correction, in the rounds
@pytest.mark.parametrize("exchanges", [3, 6, 14])
def test_a_stopped_run_goes_on_with_the_same_labels(exchanges: int, tmp_path: Path) -> None:
    whole = fednoro.run("digits", "method=fedcorr", *QUICK, f"out={tmp_path}", "name=whole")
    with pytest.raises(KeyboardInterrupt):
        fednoro.run(
            "digits",
            "method=fedcorr",
            *QUICK,
            f"out={tmp_path}",
            "name=part",
            watcher=Stopper(exchanges),
        )
    part = fednoro.resume(tmp_path / "part")
    ends = [load_checkpoint(checkpoints(RunFolder(run.folder))[-1]) for run in (whole, part)]
    assert whole.bacc == part.bacc and whole.detection == part.detection
    lists = [
        {k: {key: v.tolist() for key, v in m.items()} for k, m in end.memories.items()}
        for end in ends
    ]
    assert lists[0] == lists[1]


def test_presets_have_the_paper_s_iterations() -> None:
    for preset, iterations in {"ich": 2, "isic2019": 5, "ham10000": 5}.items():
        for name in ("fedcorr", "fedcorr-la"):
            method = resolve(preset, [f"method={name}", "data.path=somewhere"]).method
            assert type(method) is METHODS[name] and method == METHODS[name](iterations=iterations)  # type: ignore[call-arg]
