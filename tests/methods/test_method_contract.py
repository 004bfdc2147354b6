"""What every registered method owes to the engines, the round loop and the run folder."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from federations import (
    BATCH,
    CLASSES,
    GAPPED,
    MIXED,
    ORDINARY,
    ROUNDS,
    TRAINING,
    every_method,
    every_variant,
    federation,
    network,
    small,
    start,
)  # fmt: skip
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fednoro.core.options import summary
from fednoro.core.types import Clients, Failure, Replies, Reply, Site, State, Step, Task, Weights
from fednoro.data.client import Client
from fednoro.engine.eager import EagerEngine, EagerSite
from fednoro.experiment.checkpoint import restore, save_checkpoint
from fednoro.experiment.rounds import Evaluation, Turn, play
from fednoro.experiment.run_folder.run_files import RunFolder
from fednoro.methods import METHODS, Method, RoFL
from fednoro.models import Packed

pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass(frozen=True)
class Sample:
    """A step as the engine made it, kept for later."""

    loss: Callable[[Step], Tensor]
    net: Weights
    anchor: Weights
    x: Tensor
    y: Tensor
    index: Tensor
    aux: dict[str, Tensor]
    u: Tensor
    rows: dict[str, Tensor]

    @property
    def structure(self) -> tuple[Any, ...]:
        aux, rows = (
            tuple((key, value.shape, value.dtype) for key, value in sorted(tensors.items()))
            for tensors in (self.aux, self.rows)
        )
        return aux, rows, self.x.shape, self.u.shape


class RecordingSite(EagerSite):
    """Keeps every step that is taken on it."""

    def train(
        self,
        task: Task,
        loss: Callable[[Step], Tensor],
        aux: Mapping[str, Tensor],
        draws: int = 0,
        epochs: int | None = None,
        rows: Mapping[str, Tensor] | None = None,
    ) -> tuple[Weights, Tensor]:
        engine = self.engine
        assert isinstance(engine, Lab)

        def recorded(step: Step) -> Tensor:
            kept, mine = (
                {key: value.clone() for key, value in given.items()}
                for given in (step.aux, step.rows)
            )
            models = self.lane.net.weights(), self.lane.anchor.weights()
            engine.samples.append(
                Sample(
                    loss, *models, step.x.clone(), step.y, step.index, kept, step.u.clone(), mine
                )
            )
            return loss(step)

        return super().train(task, recorded, aux, draws, epochs, rows)


class Lab(EagerEngine):
    """The eager engine over clients given by their labels, with sites
    that record and faults to order.
    """

    def __init__(
        self,
        parts: Sequence[Sequence[int]],
        raising: Sequence[int] = (),
        sending_nan: Sequence[int] = (),
    ):
        dataset, clients = federation(parts)
        super().__init__(network, dataset, 1, TRAINING, 0, torch.device("cpu"), clients)
        self.raising, self.sending_nan = raising, sending_nan
        self.samples: list[Sample] = []
        self.asked: list[tuple[str, int, tuple[int, ...]]] = []

    def site(self, client: Client) -> EagerSite:
        if client.id in self.raising:
            raise RuntimeError(f"the disk of client {client.id} is gone")
        return RecordingSite(self, self.lane, client)

    def exchange(self, method: Method, tasks: Mapping[int, Task]) -> Iterator[Reply | Failure]:
        for task in tasks.values():
            self.asked.append((task.name, task.round, tuple(tasks)))
            break
        for item in super().exchange(method, tasks):
            if (
                isinstance(item, Reply)
                and item.weights is not None
                and item.client in self.sending_nan
            ):
                broken = item.weights.values.clone()
                broken[len(broken) // 2] = torch.nan
                item = replace(item, weights=replace(item.weights, values=broken))
            yield item


def turns(method: Any, lab: Lab, state: State | None = None, **options: Any) -> Iterator[Turn]:
    clients = options.pop("clients", sorted(lab.clients))
    nothing = Evaluation(np.eye(CLASSES, dtype=np.int64), 0.0)
    played = play(method, state or start(), lab.exchange, clients, lambda _: nothing, **options)
    return islice(played, 10 * ROUNDS)  # a method that never finishes must not hang the tests


def same(a: State, b: State) -> bool:
    return (
        torch.equal(a.model.values, b.model.values)
        and torch.equal(a.model.counters, b.model.counters)
        and (a.round, a.stage, a.memo) == (b.round, b.stage, b.memo)
    )


class Spy:
    """A method whose folds are kept: the state before, a copy of it, the
    replies, and the state after.
    """

    def __init__(self, method: Method) -> None:
        self._method = method
        self.folds: list[tuple[State, State, list[Reply], State]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._method, name)

    def fold(self, state: State, replies: Replies) -> State:
        model = Weights(
            state.model.values.clone(), state.model.counters.clone(), state.model.segments
        )
        before = replace(state, model=model, memo=json.loads(json.dumps(state.memo)))
        kept = list(replies)
        after = self._method.fold(state, Replies(replies.task, replies.asked_clients, iter(kept)))
        self.folds.append((state, before, kept, after))
        return after


# The loss is a pure tensor function


def step_of(sample: Sample, lab: Lab) -> Step:
    lab.net.load(sample.net)
    lab.lane.anchor.load(sample.anchor)
    for norm in lab.net.norms:
        norm.training = len(sample.x) > 1
    aux = {key: value.clone() for key, value in sample.aux.items()}
    return Step(
        lab.net.net,
        lab.lane.anchor.net,
        sample.x,
        sample.y,
        sample.index,
        aux,
        sample.u,
        sample.rows,
    )


def run_without_values(sample: Sample) -> Tensor:
    """Forward and backward on tensors that have a shape and no content: reading a value raises."""
    with FakeTensorMode() as mode:
        net, anchor = network().train(), network().eval().requires_grad_(False)
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.training = len(sample.x) > 1
        x, y, index, u = (mode.from_tensor(t) for t in (sample.x, sample.y, sample.index, sample.u))
        aux, rows = (
            {key: mode.from_tensor(t) for key, t in given.items()}
            for given in (sample.aux, sample.rows)
        )
        value = sample.loss(Step(net, anchor, x, y, index, aux, u, rows))
        value.backward()  # type: ignore[no-untyped-call]
        return value


@functools.cache
def recorded(method: Method) -> tuple[Lab, list[State]]:
    lab = Lab(MIXED)
    states = [turn.state for turn in turns(method, lab)]
    assert states[-1].round == ROUNDS
    return lab, states


@every_variant
def test_loss_reads_no_tensor_value_for_any_structure_that_a_run_produces(method: Method) -> None:
    by_structure = {sample.structure: sample for sample in recorded(method)[0].samples}
    assert {len(sample.x) for sample in by_structure.values()} >= {1, BATCH}
    for sample in by_structure.values():
        assert run_without_values(sample).shape == ()


def test_reading_a_tensor_value_is_noticed() -> None:
    def reads_an_item(step: Step) -> Tensor:
        return step.net(step.x).mean() * float(step.y.sum().item())

    def branches_on_a_value(step: Step) -> Tensor:
        value = step.net(step.x).mean()
        return value if value > 0 else -value

    def uses_numpy(step: Step) -> Tensor:
        return step.net(step.x).mean() * float(step.x.numpy().sum())

    sample = recorded(Method())[0].samples[0]
    for impure in (reads_an_item, branches_on_a_value, uses_numpy):
        with pytest.raises(RuntimeError):
            run_without_values(replace(sample, loss=impure))


@every_variant
def test_loss_is_deterministic_and_leaves_its_inputs_alone(method: Method) -> None:
    lab, _ = recorded(method)
    for sample in {sample.structure: sample for sample in lab.samples}.values():
        given = [sample.x, sample.y, sample.index, sample.u, *sample.rows.values()]
        inputs = [tensor.clone() for tensor in given]
        chance = torch.get_rng_state()
        first = sample.loss(step_of(sample, lab)).detach().clone()
        step = step_of(sample, lab)
        places = {
            key: (value.data_ptr(), value.shape, value.dtype) for key, value in step.aux.items()
        }
        second = sample.loss(step)
        assert torch.equal(first, second)
        assert torch.equal(chance, torch.get_rng_state()), "randomness comes from step.u alone"
        assert all(map(torch.equal, inputs, given))
        assert torch.equal(lab.lane.anchor.weights().values, sample.anchor.values)
        # What a client updates from batch to batch lives in `aux`, but must be updated in place.
        assert {
            key: (value.data_ptr(), value.shape, value.dtype) for key, value in step.aux.items()
        } == places


@every_variant
def test_loss_and_gradients_are_finite_on_every_kind_of_client(method: Method) -> None:
    lab, _ = recorded(method)
    rounds = 2 if leaves_out(method) else ROUNDS  # of the warm-up alone
    assert len(lab.samples) >= rounds * sum(-(-len(part) // BATCH) for part in MIXED)
    moving = 0
    for sample in lab.samples:
        value = sample.loss(step_of(sample, lab))
        gradients = torch.autograd.grad(value, lab.lane.parameters)
        assert value.shape == () and value.isfinite()
        assert all(gradient.isfinite().all() for gradient in gradients)
        moving += any(bool(gradient.any()) for gradient in gradients)
    assert moving > len(lab.samples) // 2  # a client of one class may have nothing to learn


def leaves_out(method: Method) -> bool:
    """Whether flagged clients are not asked to train."""
    return getattr(method, "noisy_clients", "") == "leave_out"


# Whole federations


@dataclass(frozen=True)
class Scenario:
    """A federation and what goes wrong in it."""

    parts: Sequence[Sequence[int]] = tuple(MIXED)
    raising: tuple[int, ...] = ()
    sending_nan: tuple[int, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    seen: Callable[[list[Turn]], bool] = lambda turns: True  # that the scenario really happened


def _statuses(turns: list[Turn], status: str) -> list[set[int]]:
    return [
        {a.client for a in turn.answers if a.status == status}
        for turn in turns
        if turn.task == "train"
    ]


def _only(turns: list[Turn], status: str, client: int) -> bool:
    """`client` alone has that status, and no other; a method may leave it out of some
    rounds, but not of the last.
    """
    seen = _statuses(turns, status)
    return (
        seen[-1] == {client}
        and set().union(*seen) == {client}
        and not any(client in ok for ok in _ok(turns))
    )


def _ok(turns: list[Turn]) -> list[set[int]]:
    return _statuses(turns, "ok")


SCENARIOS = {
    # A method may train on some of those who are there, but on all of them in the end.
    "everyone takes part": Scenario(
        seen=lambda turns: (
            len(_ok(turns)[-1]) == 5
            and {a.status for turn in turns for a in turn.answers} == {"ok"}
        )
    ),
    "half are drawn": Scenario(
        options={"participation": 0.5},
        seen=lambda turns: max(map(len, _ok(turns))) == len(_ok(turns)[-1]) == 2,
    ),
    "some drop out": Scenario(
        options={"failures": 0.3}, seen=lambda turns: any(_statuses(turns, "dropped"))
    ),
    "all drop out in one round": Scenario(
        options={"failures": 0.95},
        seen=lambda turns: any(len(gone) == 5 for gone in _statuses(turns, "dropped")),
    ),
    "one raises every time": Scenario(raising=(1,), seen=lambda turns: _only(turns, "failed", 1)),
    "one sends NaN": Scenario(sending_nan=(1,), seen=lambda turns: _only(turns, "failed", 1)),
    "all send NaN": Scenario(
        sending_nan=tuple(range(5)),
        seen=lambda turns: not any(_ok(turns)) and len(_statuses(turns, "failed")[-1]) == 5,
    ),
    "one is away": Scenario(options={"clients": (0, 2, 3, 4)}),
    "one is away, half of the others are drawn": Scenario(
        options={"clients": (0, 2, 3, 4), "participation": 0.5}
    ),
    "one client": Scenario([ORDINARY]),
    "two clients": Scenario([ORDINARY, GAPPED]),
    "two clients, one raises": Scenario([ORDINARY, GAPPED], raising=(0,)),
    "clients of one image": Scenario([[0], [1], [2], [2]]),
    "one client of one image": Scenario([[3]]),
    "one class in all": Scenario([[1] * 4, [1] * 6, [1] * 5]),
}


@pytest.mark.parametrize("name", SCENARIOS)
@every_method
def test_federation_completes_all_rounds(method: Method, name: str) -> None:
    scenario = SCENARIOS[name]
    lab = Lab(scenario.parts, scenario.raising, scenario.sending_nan)
    present = set(scenario.options.get("clients", lab.clients))
    played = list(turns(method, lab, **scenario.options))

    assert played[-1].state.round == ROUNDS
    assert scenario.seen(played), "the scenario did not happen"
    before = 0
    for turn in played:
        assert turn.state.round - before == (turn.task == "train")
        assert (turn.evaluation is not None) == (turn.task == "train")
        assert turn.state.model.values.isfinite().all()
        assert {answer.client for answer in turn.answers} <= present
        before = turn.state.round
    assert all(set(asked) <= present for _, _, asked in lab.asked)


@every_method
def test_training_fits_the_clients_labels(method: Method) -> None:
    """A method that went through all the motions without learning
    would pass everything else here.
    """
    lab = Lab([ORDINARY, GAPPED, ORDINARY[::-1]])
    if isinstance(method, RoFL):
        # else it learns the pseudo-labels of a model that has learnt nothing
        method = replace(method, warmup=18)
    *_, last = turns(method, lab, start(rounds=20))
    index = np.concatenate([client.index for client in lab.clients.values()])
    labels = torch.cat([client.labels for client in lab.clients.values()])
    before, after = (
        F.cross_entropy(lab.logits(w, index), labels) for w in (start().model, last.state.model)
    )
    assert last.state.round == 20 and after < 0.7 * before


@every_variant
def test_same_seed_gives_the_same_bits_whatever_the_order_of_the_clients(method: Method) -> None:
    spy = Spy(method)
    again = [turn.state for turn in turns(spy, Lab(MIXED), clients=(3, 1, 4, 0, 2))]
    once = recorded(method)[1]
    assert len(once) == len(again) and all(map(same, once, again))
    for _, _, replies, _ in spy.folds:
        assert [reply.client for reply in replies] == sorted({reply.client for reply in replies})
    everybody = spy.folds[0 if leaves_out(method) else -1]
    assert [reply.client for reply in everybody[2]] == [0, 1, 2, 3, 4]


@every_method
def test_another_seed_gives_other_bits(method: Method) -> None:
    lab = Lab(MIXED)
    first = next(turns(method, lab)).state.model.values
    lab.seed = 1
    assert not torch.equal(first, next(turns(method, lab, start(seed=1))).state.model.values)


# State: a value, saved and loaded


@functools.cache
def folds(method: Method) -> list[tuple[State, State, list[Reply], State]]:
    spy = Spy(method)
    assert list(turns(spy, Lab(MIXED), failures=0.2))[-1].state.round == ROUNDS
    return spy.folds


@every_variant
def test_fold_leaves_the_incoming_state_alone(method: Method) -> None:
    for state, copy, _, after in folds(method):
        assert same(state, copy)
        assert after is not state
        assert (
            after.model is state.model
            or after.model.values.data_ptr() != state.model.values.data_ptr()
        )


@every_variant
def test_fold_leaves_the_replies_alone(method: Method) -> None:
    state, lab = start(), Lab(MIXED)
    tasks = method.plan(state, Clients((0, 1, 2, 3, 4), (0, 1, 2, 3, 4)))
    replies = [reply for reply in lab.exchange(method, tasks) if isinstance(reply, Reply)]
    copies = [reply.weights.values.clone() for reply in replies if reply.weights is not None]
    name = next(iter(tasks.values())).name
    method.fold(state, Replies(name, tuple(tasks), iter(replies)))
    assert len(copies) == len(tasks) >= 1
    assert all(
        torch.equal(reply.weights.values, copy) for reply, copy in zip(replies, copies, strict=True)
    )  # type: ignore[union-attr]


@every_variant
def test_memo_holds_json_values_only(method: Method) -> None:
    for _, _, _, after in folds(method):
        assert json.loads(json.dumps(after.memo, allow_nan=False)) == after.memo


@dataclass(frozen=True)
class Relabelling(Method):
    """Not registered: it keeps corrected labels at the clients, so
    that what they remember matters.
    """

    def work(self, task: Task, site: Site) -> Reply:
        site.memory["labels"] = (site.labels + 1) % site.classes
        return super().work(task, site)


@pytest.mark.parametrize(
    "method",
    [
        *(pytest.param(small(cls), id=name) for name, cls in METHODS.items()),
        pytest.param(Relabelling()),
    ],
)
def test_playing_on_from_a_checkpoint_after_any_exchange_gives_the_same_bits(
    method: Method, tmp_path: Path
) -> None:
    trouble = {"participation": 0.7, "failures": 0.2}
    lab = Lab(MIXED)
    whole = []
    for number, turn in enumerate(turns(method, lab, **trouble)):
        folder = RunFolder(tmp_path / str(number))
        folder.create()
        save_checkpoint(folder, turn.state, lab.clients)
        whole.append(turn.state)
    memories = {k: client.memory for k, client in lab.clients.items()}
    assert whole[-1].round == ROUNDS
    if isinstance(method, Relabelling):
        shifts = [int(c.labels[0] - c.observed[0]) % CLASSES for c in lab.clients.values()]
        assert max(shifts) > 1, "clients must go on from what they remember"

    for number in range(len(whole) - 1):
        resumed = Lab(MIXED)
        state = restore(RunFolder(tmp_path / str(number)), resumed.clients)
        assert state is not None and same(state, whole[number])
        rest = [turn.state for turn in turns(method, resumed, state, **trouble)]
        assert len(rest) == len(whole) - number - 1
        assert all(same(a, b) for a, b in zip(rest, whole[number + 1 :], strict=True))
        for k, client in resumed.clients.items():
            assert client.memory.keys() == memories[k].keys()
            assert all(torch.equal(client.memory[key], value) for key, value in memories[k].items())


# Aggregation


@every_variant
def test_models_are_averaged_with_the_noted_weights_and_counters_are_copied(method: Method) -> None:
    packed = Packed(network())
    statistics = torch.cat(
        [
            torch.full((size,), "running" in name)
            for name, size in zip(packed.names, packed.segments, strict=True)
        ]
    )
    assert 0 < statistics.sum() < len(statistics)
    folded = 0
    for state, _, replies, after in folds(method):
        trained = [(reply.client, reply.weights) for reply in replies if reply.weights is not None]
        if not trained:
            assert torch.equal(after.model.values, state.model.values)
            continue
        shares = {k: after.notes[k]["weight"] for k, _ in trained}
        assert sum(shares.values()) == pytest.approx(1, abs=1e-12)
        expected = np.zeros(len(packed.values))
        for k, weights in trained:
            expected += shares[k] * weights.values.numpy().astype(np.float64)
        actual = after.model.values.numpy().astype(np.float64)
        np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-9)
        moved, moves = (
            any(
                not torch.equal(w.values[statistics], state.model.values[statistics])
                for w in models
            )
            for models in ([after.model], [weights for _, weights in trained])
        )
        # a client of one image leaves them alone
        assert moved == moves, "running statistics are averaged too"
        assert after.model.counters.dtype == torch.int64
        assert any(torch.equal(after.model.counters, weights.counters) for _, weights in trained)
        assert after.model.segments == packed.segments
        assert moved or after.round == state.round
        folded += after.round - state.round
    assert folded == ROUNDS


# What users read


@pytest.mark.parametrize("name", METHODS)
def test_method_and_its_options_describe_themselves(name: str) -> None:
    cls = METHODS[name]
    assert name == name.lower() and cls.section == "method"
    assert "__doc__" in vars(cls) and cls.__doc__ and not cls.__doc__.startswith(f"{cls.__name__}(")
    assert summary(cls).endswith(".")
    for f in dataclasses.fields(cls):
        assert f.metadata.get("help"), f"{name}.{f.name} has no help"
        assert f.default is not dataclasses.MISSING, f"{name}.{f.name} has no default"
    assert cls.__dataclass_params__.frozen  # type: ignore[attr-defined]
