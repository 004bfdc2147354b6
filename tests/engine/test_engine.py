"""The eager engine against a plain PyTorch loop, and the promises that local training rests on."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fednoro.core.seeds import generator
from fednoro.core.training import Augment, Training
from fednoro.core.types import Failure, Reply, Step, Task, Weights
from fednoro.data.client import Client
from fednoro.data.dataset import Dataset
from fednoro.engine.eager import EagerEngine
from fednoro.engine.images import DRAWS, Images
from fednoro.methods import FedNoRo, Method
from fednoro.models import Cnn, Model, Packed, Resnet18, initialise

CPU = torch.device("cpu")
CNN = Cnn(width=4)
SEED, CLASSES = 7, 3
AUGMENT = Augment(rotate=15, translate=0.1, flip=True)
SHORT = Training(batch=4, lr=1e-3, augment=AUGMENT)

needs_cuda = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="this machine has no CUDA device"
)


def dataset(n: int = 40, side: int = 8, channels: int = 3) -> Dataset:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (n, side, side, channels), dtype=np.uint8)
    return Dataset(images, rng.integers(0, CLASSES, n), tuple("abc"))


def engine(
    data: Dataset,
    model: Model = CNN,
    training: Training = SHORT,
    seed: int = SEED,
    device: torch.device = CPU,
    network: Callable[[], nn.Module] | None = None,
) -> EagerEngine:
    channels = data.images.shape[3]
    build = network or partial(initialise, model, model.inputs(channels), CLASSES, 0)
    clients = [Client(k, f"client {k}", i, data.labels[i]) for k, i in enumerate(shares(data))]
    return EagerEngine(build, data, model.inputs(channels), training, seed, device, clients)


def shares(data: Dataset) -> list[np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """Ten images for each client, out of order; the last batch of four has two."""
    return np.array_split(np.random.default_rng(1).permutation(len(data)), len(data) // 10)


def start(engine: EagerEngine) -> Weights:
    """The initial weights with running statistics and counters that have seen the data."""
    engine.net.net.train()
    with torch.no_grad():
        for first in range(5):
            engine.net.net(engine.images.batch(torch.arange(first, first + 15)))
    return engine.net.weights()


def cross_entropy(step: Step) -> Tensor:
    return F.cross_entropy(step.net(step.x), step.y)


def same(a: Weights, b: Weights) -> bool:
    return torch.equal(a.values, b.values) and torch.equal(a.counters, b.counters)


def slow_training(
    engine: EagerEngine,
    data: Dataset,
    task: Task,
    client: Client,
    inputs: int,
    loss: Callable[[Step], Tensor],
) -> tuple[dict[str, Tensor], float]:
    """Local epochs as one would write them down: a plain copy of the network, a plain optimizer."""
    net = copy.deepcopy(engine.net.net)
    net.load_state_dict(engine.net.state_dict(task.weights))
    anchor = copy.deepcopy(net).eval()
    options = engine.training
    optimizer = torch.optim.Adam(
        net.parameters(),
        lr=options.lr,
        betas=(0.9, 0.999),
        weight_decay=options.weight_decay,
        foreach=False,
    )
    rng = generator(engine.seed, task.name, task.round, client.id)
    pixels = Images(data.images, inputs, options.augment, CPU)
    losses: list[float] = []
    net.train()
    for _ in range(options.epochs):
        order = rng.permutation(len(client.index))
        u = torch.from_numpy(rng.random((len(order), DRAWS), dtype=np.float32))
        for first in range(0, len(order), options.batch):
            mine = order[first : first + options.batch]
            x = pixels.batch(torch.from_numpy(client.index[mine]), u[first : first + options.batch])
            y = torch.tensor([int(client.observed[i]) for i in mine])
            optimizer.zero_grad()
            value = loss(Step(net, anchor, x, y, torch.from_numpy(mine), {}, u[:0]))
            value.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses += [value.item()] * len(mine)
    return net.state_dict(), sum(losses) / len(losses)


def towards_the_anchor(step: Step) -> Tensor:
    """Cross-entropy, and a pull to the outputs of the received model: both networks take part."""
    logits = step.net(step.x)
    return F.cross_entropy(logits, step.y) + 0.5 * F.mse_loss(logits, step.anchor(step.x))


@dataclass
class Recorder:
    """Cross-entropy that keeps what it was shown."""

    index: list[list[int]]
    x: list[Tensor]
    y: list[Tensor]
    u: list[Tensor]
    aux: list[Mapping[str, Tensor]]
    anchored: list[Tensor]
    probe: Tensor | None = None

    @classmethod
    def new(cls, probe: Tensor | None = None) -> Recorder:
        return cls([], [], [], [], [], [], probe)

    def __call__(self, step: Step) -> Tensor:
        self.index.append(step.index.tolist())
        self.x.append(step.x.clone())
        self.y.append(step.y.clone())
        self.u.append(step.u.clone())
        self.aux.append(step.aux)
        if self.probe is not None:
            assert not step.anchor.training
            self.anchored.append(step.anchor(self.probe))
        return cross_entropy(step)


# Parity.


@pytest.mark.parametrize("loss", [cross_entropy, towards_the_anchor])
@pytest.mark.parametrize(
    ("model", "side", "channels", "batch", "epochs", "tolerance"),
    # Adam divides by gradients that are almost 0 for some of 11 million weights:
    # their rounding is seen there.
    [(CNN, 8, 1, 4, 3, 1e-6), (CNN, 9, 3, 5, 2, 1e-6), (Resnet18(), 32, 1, 5, 1, 1e-4)],
    ids=["small cnn, grey", "small cnn, rgb", "resnet18, grey"],
)
def test_local_training_is_what_a_plain_loop_with_adam_gives(
    loss: Callable[[Step], Tensor],
    model: Model,
    side: int,
    channels: int,
    batch: int,
    epochs: int,
    tolerance: float,
) -> None:
    data = dataset(20, side, channels)
    lab = engine(
        data,
        model,
        Training(batch=batch, epochs=epochs, lr=3e-4, weight_decay=5e-4, augment=AUGMENT),
    )
    task, client = Task("train", 2, start(lab)), lab.clients[1]
    weights, mean_loss = lab.site(client).train(task, loss, {})
    expected, expected_loss = slow_training(lab, data, task, client, model.inputs(channels), loss)
    received, before = lab.net.state_dict(weights), lab.net.state_dict(task.weights)
    assert float(mean_loss) == pytest.approx(expected_loss, rel=1e-5)
    for name, value in expected.items():
        off, moved = (received[name] - value).double(), (value - before[name]).double()
        assert off.abs().max() <= tolerance, name
        assert moved.norm() > 0, name  # parameters, running statistics and counters alike
        assert off.norm() <= 1e-3 * moved.norm(), name


def test_labels_corrected_by_a_method_are_the_ones_trained_on() -> None:
    data = dataset()
    lab = engine(data)
    task, client = Task("train", 0, start(lab)), lab.clients[0]
    corrected = (client.labels + 1) % CLASSES
    as_given = lab.site(client).train(task, cross_entropy, {})[0]
    client.memory["labels"] = corrected
    recorder = Recorder.new()
    as_corrected = lab.site(client).train(task, recorder, {})[0]
    assert not same(as_given, as_corrected)
    for index, y in zip(recorder.index, recorder.y, strict=True):
        assert torch.equal(y, corrected[index])


# Reproducibility.


@pytest.mark.parametrize("model", [CNN, Resnet18()], ids=["cnn", "resnet18"])
def test_the_same_task_gives_the_same_bits_whatever_was_trained_before(model: Model) -> None:
    data = dataset(20)
    lab, other = engine(data, model), engine(data, model)
    task = Task("train", 0, start(lab))
    alone = other.site(other.clients[1]).train(task, cross_entropy, {})
    first = lab.site(lab.clients[0]).train(task, cross_entropy, {})
    after = lab.site(lab.clients[1]).train(task, cross_entropy, {})
    again = lab.site(lab.clients[0]).train(task, cross_entropy, {})
    assert same(alone[0], after[0])
    assert torch.equal(alone[1], after[1])
    assert same(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not same(first[0], after[0])


def test_a_client_that_diverged_leaves_nothing_behind() -> None:
    lab = engine(dataset())
    task, site = Task("train", 0, start(lab)), lab.site(lab.clients[0])
    expected = site.train(task, cross_entropy, {})[0]
    broken = site.train(task, lambda step: step.net(step.x).sum() * torch.nan, {})[0]
    assert broken.values.isnan().any()
    assert same(site.train(task, cross_entropy, {})[0], expected)


def test_dropout_is_drawn_from_the_seed_and_leaves_torchs_own_state_alone() -> None:
    def network() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(192, CLASSES))

    lab = engine(dataset(), network=network)
    task = Task("train", 0, lab.net.weights())
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = lab.site(lab.clients[0]).train(task, cross_entropy, {})[0]
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    lab.net.net.eval()  # training turns dropout on by itself
    assert same(lab.site(lab.clients[0]).train(task, cross_entropy, {})[0], first)


@pytest.mark.parametrize("change", ["round", "client", "seed", "task"])
def test_another_round_client_seed_or_task_sees_other_batches(change: str) -> None:
    data = dataset()
    orders, draws = [], []
    for changed in (False, True):
        lab = engine(data, seed=SEED + (changed and change == "seed"))
        name = "tune" if changed and change == "task" else "train"
        task = Task(name, int(changed and change == "round"), start(lab))
        site = lab.site(lab.clients[int(changed and change == "client")])
        recorder = Recorder.new()
        site.train(task, recorder, {}, draws=2)
        orders.append(recorder.index)
        draws.append(torch.cat(recorder.u))
    assert orders[0] != orders[1]
    assert not torch.equal(*draws)


# What a step is given.


def test_every_image_is_seen_once_in_an_epoch_and_the_last_batch_is_the_rest() -> None:
    lab = engine(dataset(), training=Training(batch=4, epochs=3))
    recorder = Recorder.new()
    lab.site(lab.clients[0]).train(Task("train", 0, start(lab)), recorder, {})
    assert [len(index) for index in recorder.index] == [4, 4, 2] * 3
    epochs = [list(chain(*recorder.index[i : i + 3])) for i in (0, 3, 6)]
    for seen in epochs:
        assert sorted(seen) == list(range(10))
    assert epochs[0] != epochs[1] != epochs[2]


def test_the_number_of_epochs_can_be_set_for_one_task() -> None:
    lab = engine(dataset(), training=Training(batch=4, epochs=3))
    recorder = Recorder.new()
    task, site = Task("train", 0, start(lab)), lab.site(lab.clients[0])
    site.train(task, recorder, {}, epochs=1)
    assert [len(index) for index in recorder.index] == [4, 4, 2]
    untouched, loss = site.train(task, recorder, {}, epochs=0)
    assert same(untouched, task.weights)
    assert float(loss) == 0


def test_index_images_and_labels_of_a_step_belong_together() -> None:
    data = dataset()
    lab = engine(data, training=Training(batch=4))  # not augmented
    client, recorder, aux = lab.clients[2], Recorder.new(), {"lam": torch.tensor(0.5)}
    lab.site(client).train(Task("train", 0, start(lab)), recorder, aux)
    for index, x, y in zip(recorder.index, recorder.x, recorder.y, strict=True):
        where = client.index[index]
        assert y.tolist() == data.labels[where].tolist()
        assert torch.equal(x, lab.images.batch(torch.from_numpy(where)))
    assert all(given is aux for given in recorder.aux)


def test_a_step_has_the_uniforms_its_method_asked_for() -> None:
    lab = engine(dataset(), training=Training(batch=4, epochs=20, augment=AUGMENT))
    task, site = Task("train", 0, start(lab)), lab.site(lab.clients[0])
    first, again, none = Recorder.new(), Recorder.new(), Recorder.new()
    site.train(task, first, {}, draws=3)
    site.train(task, again, {}, draws=3)
    site.train(task, none, {})
    assert [tuple(u.shape) for u in first.u[:3]] == [(4, 3), (4, 3), (2, 3)]
    assert all(u.shape == (len(index), 0) for u, index in zip(none.u, none.index, strict=True))
    u = torch.cat(first.u)
    assert torch.equal(u, torch.cat(again.u))
    assert u.min() >= 0
    assert u.max() < 1
    assert len(set(u.flatten().tolist())) > 0.99 * u.numel()
    assert abs(float(u.mean()) - 0.5) < 0.05


def test_augmentation_and_method_have_uniforms_of_their_own() -> None:
    lab, plain = engine(dataset()), engine(dataset(), training=Training(batch=4))
    task, client = Task("train", 0, start(lab)), lab.clients[0]
    augmented, unaugmented = Recorder.new(), Recorder.new()
    lab.site(client).train(task, augmented, {}, draws=2)
    plain.site(plain.clients[0]).train(task, unaugmented, {}, draws=2)
    rng = generator(SEED, "train", 0, 0)
    order = rng.permutation(10)
    u = torch.from_numpy(rng.random((10, DRAWS + 2), dtype=np.float32))
    for recorder in (augmented, unaugmented):
        assert list(chain(*recorder.index)) == order.tolist()
        assert torch.equal(torch.cat(recorder.u), u[:, DRAWS:])
    where = torch.from_numpy(client.index[order[:4]])
    assert torch.equal(augmented.x[0], lab.images.batch(where, u[:4, :DRAWS]))
    assert torch.equal(unaugmented.x[0], lab.images.batch(where))
    assert not torch.equal(augmented.x[0], unaugmented.x[0])


def test_the_anchor_stays_the_received_model_and_takes_no_gradients() -> None:
    data = dataset()
    lab = engine(data, training=Training(batch=4, epochs=2, lr=0.05))
    task = Task("train", 0, start(lab))
    received = copy.deepcopy(lab.net.net)
    received.load_state_dict(lab.net.state_dict(task.weights))
    probe = lab.images.batch(torch.arange(6))
    recorder = Recorder.new(probe)
    weights, _ = lab.site(lab.clients[0]).train(task, recorder, {})
    expected = received.eval()(probe)
    assert len(recorder.anchored) == 6
    for outputs in recorder.anchored:
        assert torch.equal(outputs, expected)
        assert not outputs.requires_grad
    assert not any(parameter.requires_grad for parameter in lab.lane.anchor.net.parameters())
    assert same(lab.lane.anchor.weights(), task.weights)
    assert not torch.allclose(lab.logits(weights, np.arange(6)), expected, atol=1e-2)


def test_the_received_weights_are_not_written_to() -> None:
    lab = engine(dataset())
    task = Task("train", 0, start(lab))
    values, counters = task.weights.values.clone(), task.weights.counters.clone()
    trained, _ = lab.site(lab.clients[0]).train(task, cross_entropy, {})
    lab.site(lab.clients[0]).logits(task, trained)
    assert torch.equal(task.weights.values, values)
    assert torch.equal(task.weights.counters, counters)


# Batches of one image.


@pytest.mark.parametrize("side", [8, 32])
@pytest.mark.parametrize("model", [CNN, Resnet18()], ids=["cnn", "resnet18"])
def test_a_client_of_one_image_trains_without_touching_running_statistics(
    model: Model, side: int
) -> None:
    data = dataset(20, side, 1)
    lab = engine(data, model)
    task = Task("train", 0, start(lab))
    client = Client(9, "small", np.array([4]), data.labels[[4]])
    weights, loss = lab.site(client).train(task, cross_entropy, {}, epochs=2)
    trainable = lab.net.trainable
    assert torch.isfinite(weights.values).all()
    assert torch.isfinite(loss)
    assert torch.equal(weights.values[trainable:], task.weights.values[trainable:])
    assert torch.equal(weights.counters, task.weights.counters)
    assert (weights.values[:trainable] != task.weights.values[:trainable]).float().mean() > 0.9


@pytest.mark.parametrize("model", [CNN, Resnet18()], ids=["cnn", "resnet18"])
def test_one_image_left_over_is_trained_on_with_the_running_statistics(model: Model) -> None:
    data = dataset(20)
    lab = engine(data, model)
    task = Task("train", 0, start(lab))
    client = Client(9, "five", shares(data)[0][:5], data.labels[shares(data)[0][:5]])
    statistics: list[tuple[int, Tensor]] = []

    def loss(step: Step) -> Tensor:
        value = cross_entropy(step)
        statistics.append((len(step.index), lab.net.values[lab.net.trainable :].clone()))
        return value

    weights, _ = lab.site(client).train(task, loss, {}, epochs=2)
    (sizes, (first, alone, second, last)) = zip(*statistics, strict=True)
    assert sizes == (4, 1, 4, 1)
    assert torch.equal(first, alone)
    # batches of more than one image go back to their own statistics
    assert not torch.equal(alone, second)
    assert torch.equal(second, last)
    assert torch.equal(weights.counters, task.weights.counters + 2)


def test_a_batch_size_of_one_works_for_every_image() -> None:
    lab = engine(dataset(), training=Training(batch=1))
    task, recorder = Task("train", 0, start(lab)), Recorder.new()
    weights, _ = lab.site(lab.clients[0]).train(task, recorder, {})
    assert [len(index) for index in recorder.index] == [1] * 10
    assert torch.isfinite(weights.values).all()
    assert torch.equal(weights.counters, task.weights.counters)


# Outputs.


def test_logits_are_those_of_the_network_in_eval_mode_on_plain_images() -> None:
    data = dataset(20)
    lab = engine(data)
    task, client = Task("score", 0, start(lab)), lab.clients[1]
    net = copy.deepcopy(lab.net.net)
    net.load_state_dict(lab.net.state_dict(task.weights))
    pixels = Images(data.images, 3, Augment(), CPU)
    with torch.no_grad():
        expected = torch.cat([net.eval()(pixels.batch(torch.tensor([i]))) for i in client.index])
    for size in (512, 10, 4, 3, 1):
        lab.evaluation_batch = size
        logits = lab.site(client).logits(task, task.weights)
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-6)
    assert not lab.lane.anchor.net.training
    assert same(lab.lane.anchor.weights(), task.weights)


def test_logits_on_augmented_images_differ_but_are_reproducible() -> None:
    data = dataset(20)
    lab, elsewhere = engine(data), engine(data)
    task = Task("score", 3, start(lab))
    later, site = replace(task, round=4), lab.site(lab.clients[1])
    plain, first = site.logits(task, task.weights), site.logits(task, task.weights, augment=True)
    assert not torch.allclose(plain, first, atol=1e-3)
    assert not torch.allclose(site.logits(later, task.weights, augment=True), first, atol=1e-3)
    other = elsewhere.site(elsewhere.clients[1])
    assert torch.equal(other.logits(task, task.weights, augment=True), first)
    lab.evaluation_batch = 3  # each image keeps its own uniforms
    torch.testing.assert_close(
        site.logits(task, task.weights, augment=True), first, rtol=1e-5, atol=1e-6
    )


def test_logits_follow_the_weights_they_are_asked_for_even_after_training() -> None:
    lab = engine(dataset(), training=Training(batch=4, lr=0.05))
    task, site = Task("train", 0, start(lab)), lab.site(lab.clients[0])
    before = site.logits(task, task.weights)
    trained, _ = site.train(task, cross_entropy, {})
    assert not torch.allclose(site.logits(task, trained), before, atol=1e-2)
    assert torch.equal(site.logits(task, task.weights), before)


def test_logits_can_be_the_target_of_a_later_loss() -> None:
    lab = engine(dataset())
    task, site = Task("score", 0, start(lab)), lab.site(lab.clients[0])
    target = site.logits(task, task.weights)
    student = torch.zeros(10, CLASSES, requires_grad=True)
    F.mse_loss(student, target).backward()  # type: ignore[no-untyped-call]
    assert student.grad is not None
    assert student.grad.abs().sum() > 0


# The exchange.


def test_clients_answer_in_their_order_and_a_failing_one_is_reported() -> None:
    class Fails(Method):
        def work(self, task: Task, site: object) -> Reply:
            if getattr(site, "client") == 1:  # noqa: B009
                raise RuntimeError("disk full")
            return super().work(task, site)  # type: ignore[arg-type]

    lab = engine(dataset())
    weights = start(lab)
    answers = list(lab.exchange(Fails(), {k: Task("train", 0, weights) for k in (3, 1, 0)}))
    assert [answer.client for answer in answers] == [0, 1, 3]
    assert isinstance(answers[1], Failure)
    assert answers[1].reason == "RuntimeError: disk full"
    assert isinstance(answers[1].error, RuntimeError)
    for answer in (answers[0], answers[2]):
        assert isinstance(answer, Reply)
        assert answer.weights is not None
        assert answer.size == 10
        alone, loss = lab.site(lab.clients[answer.client]).train(
            Task("train", 0, weights), Method().loss, {}
        )
        assert same(answer.weights, alone)
        assert answer.metrics == {"loss": loss}


def test_a_site_tells_what_it_holds() -> None:
    lab = engine(dataset())
    site = lab.site(lab.clients[2])
    assert (site.client, site.size, site.classes) == (2, 10, CLASSES)
    assert site.labels.tolist() == lab.clients[2].observed.tolist()
    site.memory["seen"] = torch.tensor(1)
    assert lab.site(lab.clients[2]).memory == {"seen": torch.tensor(1)}


# CUDA.


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("model", [CNN, Resnet18()], ids=["cnn", "resnet18"])
def test_training_on_cuda_is_close_to_the_cpu_and_bit_identical_to_itself(model: Model) -> None:
    # As another engine may have left them: TF32 keeps three digits. The engine takes them back.
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
    data, cuda = dataset(20, 32), torch.device("cuda")
    # ResNet-18 takes one step of ten images: with fewer, its last 1×1 maps turn the last digit of a
    # weight into tenths of the result, on the CPU alone as well.
    training = Training(batch=4 if model is CNN else 10, lr=1e-3, augment=AUGMENT)
    on_cpu, on_cuda, again = (
        engine(data, model, training, device=device) for device in (CPU, cuda, cuda)
    )
    here = start(on_cpu)
    there = Weights(here.values.to(cuda), here.counters.to(cuda), here.segments)

    def trained(lab: EagerEngine, weights: Weights, client: int) -> tuple[Weights, Tensor]:
        method, site = FedNoRo(), lab.site(lab.clients[client])
        task = Task("train", 0, weights, {"lam": 0.5})
        return site.train(task, method.loss, method.aux(task, site))

    expected, expected_loss = trained(on_cpu, here, 1)
    received, loss = trained(on_cuda, there, 1)
    trained(again, there, 0)
    repeated, _ = trained(again, there, 1)
    assert received.values.device.type == "cuda"
    assert same(received, repeated)
    assert torch.equal(received.counters.cpu(), expected.counters)
    assert float(loss) == pytest.approx(float(expected_loss), rel=1e-5)
    there_mean, here_mean = (
        torch.cat([m.flatten() for m in lab.lane.adam.means]) for lab in (on_cuda, on_cpu)
    )
    # Of the gradients. A ReLU whose input is 0 but for its last digits opens on one
    # device and not on the other.
    assert distance(there_mean, here_mean) < (1e-4 if model is CNN else 1e-2) * float(
        here_mean.norm()
    )
    assert distance(received.values, expected.values) < 1e-2 * distance(
        expected.values, here.values
    )
    logits = on_cuda.logits(there, np.arange(20)).cpu()
    torch.testing.assert_close(logits, on_cpu.logits(here, np.arange(20)), rtol=1e-4, atol=1e-4)


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.cpu() - b.cpu()).norm())


@pytest.mark.cuda
@needs_cuda
def test_a_packed_network_goes_to_cuda_and_back() -> None:
    on_cpu = Packed(initialise(CNN, 3, CLASSES, 0))
    on_cuda = Packed(initialise(CNN, 3, CLASSES, 1), "cuda")
    on_cuda.load(on_cpu.weights())
    assert on_cuda.values.device.type == "cuda"
    saved = on_cuda.state_dict(on_cuda.weights())
    for name, value in on_cpu.net.state_dict().items():
        assert torch.equal(saved[name], value), name
