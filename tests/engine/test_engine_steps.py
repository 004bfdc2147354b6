"""What a loss is shown, and what becomes of what it writes and raises: the same on every engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from federations import BATCH, CLASSES, federation, network, same
from torch import Tensor, nn

import fednoro.engine.cpu as cpu
import fednoro.engine.lane as lane
from fednoro.core.seeds import generator
from fednoro.core.training import FURTHER, Augment, Training
from fednoro.core.types import Failure, Reply, Site, Step, Task
from fednoro.data.dataset import Dataset
from fednoro.engine.cpu import CpuEngine
from fednoro.engine.cuda.cuda_engine import CudaEngine
from fednoro.engine.eager import EagerEngine
from fednoro.engine.images import Images
from fednoro.engine.lane import schedule
from fednoro.methods import Method
from fednoro.models import Packed

pytestmark = pytest.mark.usefixtures("one_thread")

CPU, SEED, SIDE = torch.device("cpu"), 5, 8
# Whole batches only, a last batch of one, a last batch of three, less than a
# batch, one image, two batches.
SIZES = (8, 9, 11, 3, 1, 7)
PARTS = [[(k + i) % CLASSES for i in range(size)] for k, size in enumerate(SIZES)]
TRAINING = Training(
    batch=BATCH, epochs=3, lr=1e-3, augment=Augment(rotate=15, translate=0.1, flip=True)
)
ENGINES: dict[str, Callable[..., EagerEngine]] = {
    "eager": EagerEngine,
    "cpu, 1 lane": partial(CpuEngine, lanes=1),
    "cpu, 3 lanes": partial(CpuEngine, lanes=3),
    "cuda": partial(CudaEngine, lanes=2),
    "cuda, bf16": partial(CudaEngine, lanes=2, precision="bf16"),
}
every_engine = pytest.mark.parametrize("kind", ENGINES)
several_lanes = pytest.mark.parametrize("lanes", [2, 3])


def engine(
    kind: str, build: Callable[[], nn.Module] = network, training: Training = TRAINING
) -> EagerEngine:
    data, clients = federation(PARTS, SIDE)
    return ENGINES[kind](build, data, 1, training, SEED, CPU, clients)


START = Packed(network()).weights()
TASKS = {k: Task("train", 2, START) for k in range(len(SIZES))}


def cross_entropy(step: Step) -> Tensor:
    return F.cross_entropy(step.net(step.x), step.y)


# The same batches in the same order


@dataclass
class Recorder:
    """Cross-entropy that keeps what it was shown."""

    seen: list[dict[str, Tensor]] = field(default_factory=list)

    def __call__(self, step: Step) -> Tensor:
        kept = {"x": step.x, "y": step.y, "index": step.index, "u": step.u, **step.rows}
        self.seen.append({key: value.clone() for key, value in kept.items()})
        return cross_entropy(step)

    __hash__ = object.__hash__  # an engine remembers which step it has prepared


def shown(site: Any, recorder: Recorder, task: Task, **options: Any) -> None:
    """Trains twice and keeps what was shown in the second: before its first, a
    captured step is tried out once.
    """
    site.train(task, recorder, {}, **options)
    recorder.seen.clear()
    site.train(task, recorder, {}, **options)


def rows_of(size: int) -> dict[str, Tensor]:
    """Something different for every image: a matrix and a vector of integers."""
    return {"soft": torch.arange(3.0 * size).view(size, 3), "number": 100 + torch.arange(size)}


@pytest.mark.parametrize(
    "room", [1, 2, 3, 1000], ids=lambda batches: f"{batches} batches in a block"
)
@pytest.mark.parametrize("client", range(len(SIZES)), ids=lambda k: f"{SIZES[k]} images")
def test_every_step_is_shown_what_the_eager_engine_shows(
    client: int, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane, "BLOCK", room * BATCH * SIDE * SIDE * 4)
    seen = []
    for kind in ("eager", "cuda"):
        lab, recorder = engine(kind), Recorder()
        site = lab.site(lab.clients[client])
        shown(site, recorder, TASKS[client], draws=2, rows=rows_of(SIZES[client]))
        seen.append(recorder.seen)
        if isinstance(lab, CudaEngine):
            assert lab.lane.block == room * BATCH
    expected, found = seen
    assert len(found) == len(expected) == TRAINING.epochs * -(-SIZES[client] // BATCH)
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for key, value in other.items():
            assert one[key].shape == value.shape and one[key].dtype == value.dtype
            assert torch.equal(one[key], value), key


@every_engine
def test_rows_come_with_their_images(kind: str) -> None:
    lab, recorder = engine(kind), Recorder()
    rows = rows_of(SIZES[2])
    shown(lab.site(lab.clients[2]), recorder, TASKS[2], rows=rows)
    assert sorted(chain(*(step["index"].tolist() for step in recorder.seen))) == sorted(
        [*range(SIZES[2])] * 3
    )
    for step in recorder.seen:
        for key, value in rows.items():
            assert torch.equal(step[key], value[step["index"]])


@every_engine
def test_the_number_of_epochs_can_be_set_for_one_task(kind: str) -> None:
    lab, recorder = engine(kind), Recorder()
    site, task = lab.site(lab.clients[1]), TASKS[1]
    shown(site, recorder, task, epochs=1)
    assert [len(step["index"]) for step in recorder.seen] == [4, 4, 1]
    untouched, loss = site.train(task, recorder, {}, epochs=0)
    assert same(untouched, task.weights)
    assert float(loss) == 0


# What a loss writes


def centroid_loss(step: Step) -> Tensor:
    """Pulls to a running mean of the outputs, which it updates in place, and counts its batches."""
    logits = step.net(step.x)
    value = F.cross_entropy(logits, step.y) + (logits - step.aux["mean"]).square().mean()
    with torch.no_grad():
        step.aux["mean"].lerp_(logits.mean(0).float(), 0.5)
        step.aux["batches"].add_(1)
    return value


@dataclass(frozen=True)
class Centroids(Method):
    """Not registered: it keeps at each client what its loss updated from batch to batch."""

    def work(self, task: Task, site: Site) -> Reply:
        kept = {"mean": torch.zeros(CLASSES), "batches": torch.tensor(10)} | site.memory
        # what is remembered is replaced, never changed
        aux = {key: value.clone() for key, value in kept.items()}
        weights, loss = site.train(task, centroid_loss, aux)
        site.memory.update(aux)
        return Reply(site.client, site.size, weights, {"loss": loss})


@every_engine
def test_what_a_loss_updates_in_place_comes_back_and_goes_on(kind: str) -> None:
    lab, reference = engine(kind), engine("eager")
    for number in (1, 2):
        expected, found = (list(e.exchange(Centroids(), TASKS)) for e in (reference, lab))
        for one, other in zip(found, expected, strict=True):
            assert isinstance(one, Reply) and isinstance(other, Reply)
            assert one.weights is not None and other.weights is not None
            atol = 2e-2 if "bf16" in kind else 1e-6
            torch.testing.assert_close(one.weights.values, other.weights.values, rtol=0, atol=atol)
            here, there = (e.clients[one.client].memory for e in (lab, reference))
            torch.testing.assert_close(here["mean"], there["mean"], rtol=0, atol=atol)
            assert here["mean"].abs().max() > 0
            assert (
                here["batches"]
                == there["batches"]
                == 10 + number * TRAINING.epochs * -(-one.size // BATCH)
            )


@every_engine
def test_outputs_can_be_what_a_later_loss_goes_by(kind: str) -> None:
    """In a loss of one's own, as a tensor for all batches, and as rows."""
    lab = engine(kind)
    task, site = TASKS[2], lab.site(lab.clients[2])
    target = site.logits(task, task.weights)

    def towards_target(step: Step) -> Tensor:
        logits = step.net(step.x)
        return F.mse_loss(logits, step.rows["target"]) + F.mse_loss(
            logits.mean(0), step.aux["target"].mean(0)
        )

    F.mse_loss(torch.zeros_like(target, requires_grad=True), target).backward()  # type: ignore[no-untyped-call]
    weights, _ = site.train(task, towards_target, {"target": target}, rows={"target": target})
    assert weights.values.isfinite().all()


@pytest.mark.parametrize("kind", ["cuda", "cuda, bf16"])
def test_the_anchor_can_be_asked_about_the_images_and_about_others(kind: str) -> None:
    def asks(step: Step) -> Tensor:
        logits = step.net(step.x)
        with torch.no_grad():
            own, mirrored = step.anchor(step.x), step.anchor(step.x.flip(3))
        return (
            F.cross_entropy(logits, step.y)
            + F.mse_loss(logits, own)
            + F.mse_loss(logits, 2 * mirrored)
        )

    lab, reference = engine(kind), engine("eager")
    for client in (2, 4, 2):
        (expected, loss), (found, other) = (
            e.site(e.clients[client]).train(TASKS[client], asks, {}) for e in (reference, lab)
        )
        atol = 2e-2 if "bf16" in kind else 1e-6
        torch.testing.assert_close(found.values, expected.values, rtol=0, atol=atol)
        assert float(other) == pytest.approx(float(loss), rel=2e-2 if "bf16" in kind else 1e-5)


# Who answers


@dataclass(frozen=True)
class Fails(Method):
    """Not registered: one client raises in the middle of its training."""

    who: int = 1

    def work(self, task: Task, site: Site) -> Reply:
        if site.client == self.who:
            site.train(task, self.loss, {}, epochs=1)
            raise RuntimeError("disk full")
        return super().work(task, site)


@every_engine
@pytest.mark.parametrize("held", [1, 2**30], ids=["few at a time", "all at once"])
def test_replies_come_in_client_order_and_one_that_raises_is_a_failure(
    kind: str, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "WAITING_BYTES", held)
    monkeypatch.setattr(CudaEngine, "_room", lambda self: held)
    lab, fine = engine(kind), engine(kind)
    asked = {k: TASKS[k] for k in (5, 1, 0, 4, 3, 2)}
    answers, expected = list(lab.exchange(Fails(), asked)), list(fine.exchange(Method(), asked))
    assert [answer.client for answer in answers] == [0, 1, 2, 3, 4, 5]
    assert isinstance(answers[1], Failure)
    assert answers[1].reason == "RuntimeError: disk full"
    assert isinstance(answers[1].error, RuntimeError)
    for answer, other in zip(answers, expected, strict=True):
        if answer.client != 1:
            assert isinstance(answer, Reply) and isinstance(other, Reply)
            assert answer.weights is not None and other.weights is not None
            assert same(answer.weights, other.weights)


@several_lanes
def test_torchs_own_generator_is_left_alone(lanes: int) -> None:
    data, clients = federation(PARTS, SIDE)
    lab = CpuEngine(network, data, 1, TRAINING, SEED, CPU, clients, lanes=lanes)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    for _ in range(10):  # with threads, once may be luck
        list(lab.exchange(Method(), TASKS))
        assert torch.equal(torch.get_rng_state(), state)


# Stopping early


@dataclass(frozen=True)
class Endless(Method):
    """Not registered: client 0 answers, the others would train for hours."""

    def work(self, task: Task, site: Site) -> Reply:
        weights, loss = site.train(task, self.loss, {}, epochs=1 if site.client == 0 else 1_000)
        return Reply(site.client, site.size, weights, {"loss": loss})


def stopped(replies: Any, how: str) -> None:
    if how == "close":
        replies.close()
    else:
        with pytest.raises(KeyboardInterrupt):
            replies.throw(KeyboardInterrupt())


@pytest.mark.parametrize("how", ["close", "interrupt"])
@several_lanes
def test_an_exchange_that_is_stopped_ends_at_once_and_leaves_a_usable_engine(
    lanes: int, how: str
) -> None:
    data, clients = federation(PARTS[2::-1], SIDE)  # the largest, which begins first, is client 0
    training = Training(batch=1, lr=1e-3)
    asked = {k: TASKS[k] for k in range(3)}
    lab = CpuEngine(network, data, 1, training, SEED, CPU, clients, lanes=lanes)
    threads = torch.get_num_threads()
    replies = lab.exchange(Endless(), asked)
    first = next(replies)
    assert isinstance(first, Reply) and first.client == 0
    began = time.perf_counter()
    stopped(replies, how)
    assert time.perf_counter() - began < 2  # to the end they would take 40 s and more
    assert torch.get_num_threads() == threads
    reference = EagerEngine(network, data, 1, training, SEED, CPU, clients)
    expected = reference.exchange(Method(), asked)
    for found, other in zip(lab.exchange(Method(), asked), expected, strict=True):
        assert isinstance(found, Reply) and isinstance(other, Reply)
        assert found.weights is not None and other.weights is not None
        assert same(found.weights, other.weights)


# Networks that draw random numbers


def with_dropout() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(SIDE * SIDE, CLASSES))


def test_a_network_with_dropout_gets_one_lane_and_the_eager_bits() -> None:
    data, clients = federation(PARTS, SIDE)
    reference = EagerEngine(with_dropout, data, 1, TRAINING, SEED, CPU, clients)
    lab = CpuEngine(with_dropout, data, 1, TRAINING, SEED, CPU, clients, lanes=3)
    assert len(lab.lanes) == 1
    task = {k: Task("train", 0, reference.net.weights()) for k in lab.clients}
    for found, other in zip(
        lab.exchange(Method(), task), reference.exchange(Method(), task), strict=True
    ):
        assert isinstance(found, Reply) and isinstance(other, Reply)
        assert found.weights is not None and other.weights is not None
        assert same(found.weights, other.weights)


@several_lanes
def test_looking_for_random_draws_leaves_the_network_and_the_generator_alone(lanes: int) -> None:
    data, clients = federation(PARTS, SIDE)
    state = torch.get_rng_state()
    lab = CpuEngine(network, data, 1, TRAINING, SEED, CPU, clients, lanes=lanes)
    assert len(lab.lanes) == lanes
    assert torch.equal(torch.get_rng_state(), state)
    assert same(
        lab.net.weights(), EagerEngine(network, data, 1, TRAINING, SEED, CPU, clients).net.weights()
    )


# Outputs


@pytest.mark.parametrize("part", [512, 7, 3])
@every_engine
def test_outputs_are_the_eager_ones(kind: str, part: int) -> None:
    lab, reference = engine(kind), engine("eager")
    for one in (lab, reference):
        one.evaluation_batch = part
    weights, index = reference.net.weights(), np.random.default_rng(0).permutation(sum(SIZES))
    expected, found = reference.logits(weights, index), lab.logits(weights, index)
    assert found.shape == (sum(SIZES), CLASSES) and found.dtype == torch.float32
    if kind.startswith("cpu"):
        assert torch.equal(found, expected)
    else:
        atol = 2e-2 if "bf16" in kind else 1e-6
        torch.testing.assert_close(found, expected, rtol=0, atol=atol)
    task = Task("score", 1, weights)
    for augment in (False, True):
        mine, theirs = (
            one.site(one.clients[2]).logits(task, weights, augment) for one in (lab, reference)
        )
        torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-2 if "bf16" in kind else 1e-6)


@every_engine
def test_a_model_is_saved_under_the_same_names_and_loads_into_a_plain_network(kind: str) -> None:
    lab, reference = engine(kind), engine("eager")
    trained = lab.site(lab.clients[1]).train(TASKS[1], cross_entropy, {})[0]
    saved, expected = lab.net.state_dict(trained), reference.net.state_dict(trained)
    assert list(saved) == list(expected) == list(network().state_dict())
    for name, value in expected.items():
        assert torch.equal(saved[name], value), name
    plain = network()
    plain.load_state_dict(saved)
    assert same(Packed(plain).weights(), trained)


@every_engine
def test_re_estimating_running_statistics_leaves_training_as_it_was(kind: str) -> None:
    lab, reference = engine(kind), engine("eager")
    expected, found = (one.recalibrate(START, one.clients[2]) for one in (reference, lab))
    torch.testing.assert_close(found.values, expected.values, rtol=1e-5, atol=1e-6)
    assert not torch.equal(found.values, START.values)
    modes = []

    def loss(step: Step) -> Tensor:
        modes.extend(module.training for module in step.net.modules())
        return cross_entropy(step)

    after = lab.site(lab.clients[0]).train(TASKS[0], loss, {})[0]
    assert modes and all(modes)
    fresh = engine(kind)
    assert same(after, fresh.site(fresh.clients[0]).train(TASKS[0], cross_entropy, {})[0])


# Where the images are


@pytest.mark.parametrize("kind", [kind for kind in ENGINES if "bf16" not in kind])
def test_training_on_images_that_stay_on_disk_gives_the_same_bits(
    kind: str, tmp_path: Path
) -> None:
    data, clients = federation(PARTS, SIDE)
    np.save(tmp_path / "images.npy", data.images)
    mapped = Dataset(np.load(tmp_path / "images.npy", mmap_mode="r"), data.labels, data.classes)
    assert isinstance(mapped.images, np.memmap)
    engines = [ENGINES[kind](network, d, 1, TRAINING, SEED, CPU, clients) for d in (data, mapped)]
    assert engines[1].images.pixels is None
    answers = [list(lab.exchange(Method(), TASKS)) for lab in engines]
    for one, other in zip(*answers, strict=True):
        assert isinstance(one, Reply) and isinstance(other, Reply)
        assert one.weights is not None and other.weights is not None
        assert same(one.weights, other.weights)


def test_images_can_be_told_to_stay_where_they_are() -> None:
    data, _ = federation(PARTS, SIDE)
    kept, moved = (
        Images(data.images, 1, TRAINING.augment, CPU, resident=resident)
        for resident in (False, True)
    )
    assert kept.pixels is None and moved.pixels is not None
    index, u = (
        torch.tensor([4, 0, 4, 30]),
        torch.rand(4, 4, generator=torch.Generator().manual_seed(0)),
    )
    assert torch.equal(kept.batch(index), moved.batch(index))
    assert torch.equal(kept.batch(index, u), moved.batch(index, u))


def test_an_epochs_order_is_its_own_and_the_same_for_every_engine() -> None:
    def drawn() -> Iterator[Any]:
        return schedule(SEED, Task("train", 2, START), 1, 9, 2, 3, Augment())

    epochs, again = list(drawn()), list(drawn())
    assert len(epochs) == 3
    for one, other in zip(epochs, again, strict=True):
        assert sorted(one.order.tolist()) == list(range(9))
        assert one.u.shape == (9, 6) and one.u.dtype == np.float32
        assert np.array_equal(one.order, other.order) and np.array_equal(one.u, other.u)
    assert len({tuple(epoch.order.tolist()) for epoch in epochs}) == 3


@pytest.mark.parametrize("kind", ENGINES)
def test_a_task_can_have_images_turned_and_shifted_further(kind: str) -> None:
    seen, narrow, wide = [], Augment(10, 0.02, True), Augment(60, 0.12, True)
    for augment, times in ((narrow, 6.0), (wide, 1.0), (narrow, 1.0)):
        lab, recorder = engine(kind, training=replace(TRAINING, augment=augment)), Recorder()
        shown(lab.site(lab.clients[2]), recorder, replace(TASKS[2], settings={FURTHER: times}))
        seen.append(recorder.seen)
    for moved, expected, usual in zip(*seen, strict=True):
        assert torch.equal(moved["index"], expected["index"])
        torch.testing.assert_close(moved["x"], expected["x"], rtol=0, atol=1e-4)
        assert not torch.allclose(moved["x"], usual["x"], atol=1e-2)


@pytest.mark.parametrize(
    ("augment", "times", "expected"),
    [
        (Augment(10, 0.02, True), 6.0, (6.0, 6.0)),
        (Augment(10, 0.02), 100.0, (18.0, 12.5)),  # half a turn, a quarter of the side
        (Augment(180, 0.5), 6.0, (1.0, 1.0)),  # farther than that already
        (Augment(0, 0.1), 2.0, (1.0, 2.0)),
        (Augment(), 6.0, (1.0, 1.0)),
    ],
)
def test_images_are_moved_no_further_than_there_is_something_to_see(
    augment: Augment, times: float, expected: tuple[float, float]
) -> None:
    assert augment.spread(times) == pytest.approx(expected)
    task, size = Task("train", 2, START, {FURTHER: times}), 2000
    (moved,) = schedule(SEED, task, 1, size, 2, 1, augment)
    rng, (angle, shift) = generator(SEED, "train", 2, 1), expected
    assert np.array_equal(moved.order, rng.permutation(size))
    u = rng.random((size, 6), dtype=np.float32)
    np.testing.assert_allclose(
        moved.u[:, :3] - 0.5, (u[:, :3] - 0.5) * [angle, shift, shift], rtol=1e-5, atol=1e-6
    )
    assert np.array_equal(moved.u[:, 3:], u[:, 3:])
    assert expected != (1.0, 1.0) or np.array_equal(moved.u, u), "to the bit"
