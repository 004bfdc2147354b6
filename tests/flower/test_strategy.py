"""The strategy and the functions for apps of one's own, and the example that uses them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from flower_grid import MemoryGrid
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fednoro.core import losses
from fednoro.core.types import UserError
from fednoro.flower import FedNoRo, log_prior, score, site_loss
from fednoro.flower.own_app.strategy import Form

EXAMPLE = Path(__file__).parents[2] / "examples" / "flower" / "own-app"

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    import importlib

    monkeypatch.syspath_prepend(str(EXAMPLE))
    names = ("own_app.server_app", "own_app.client_app", "own_app.task")
    yield {name.split(".")[1]: importlib.import_module(name) for name in names}
    for name in ("own_app", *names):
        sys.modules.pop(name, None)


class Configured(MemoryGrid):
    """As MemoryGrid, with the run-config that an app of one's own reads."""

    run_config: dict[str, Any]

    def context(self, node: int) -> Context:
        return Context(1, node, self.nodes[node], RecordDict(), self.run_config)


def test_example_app_finds_its_noisy_sites_and_learns(
    example: dict[str, ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    import tomllib

    config = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["tool"]["flwr"]["app"][
        "config"
    ]
    config |= {"num-server-rounds": 8, "warmup": 5}
    sites = 9
    nodes = {100 + k: {"partition-id": k, "num-partitions": sites} for k in range(sites)}
    grid = Configured(example["client_app"].app, nodes)
    grid.run_config = config
    torch.manual_seed(1)
    example["server_app"].app(grid, Context(1, 1, {}, RecordDict(), config))
    assert "noisy nodes: [102, 105, 108]" in capsys.readouterr().out
    asked = [m.metadata.message_type for m in grid.sent]
    assert (
        asked.count("query.score") == sites
        and asked.count("train") == sites * config["num-server-rounds"]
    )
    distilled = [
        m for m in grid.sent if m.metadata.message_type == "train" and "lam" in m.content["config"]
    ]
    assert {m.metadata.dst_node_id for m in distilled} == {102, 105, 108}
    told = [m for m in grid.received if m.metadata.message_type == "evaluate"][-sites:]
    assert np.mean([m.content["metrics"]["accuracy"] for m in told]) > 0.7


# The client's functions


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10**6), st.floats(0, 1))
def test_site_loss_is_the_papers_loss_of_that_site(seed: int, lam: float) -> None:
    rng = torch.Generator().manual_seed(seed)
    logits, teacher = (torch.randn(6, 4, generator=rng, dtype=torch.float64) for _ in range(2))
    labels = torch.randint(0, 4, (6,), generator=rng)
    log_pi = log_prior(torch.cat([labels, labels[:2]]), 4)
    clean = site_loss(logits, labels, log_pi, {"server-round": 3})
    torch.testing.assert_close(clean, losses.logit_adjusted_ce(logits, labels, log_pi))
    noisy = site_loss(logits, labels, log_pi, {"lam": lam, "temperature": 0.5}, teacher)
    torch.testing.assert_close(noisy, losses.distill(logits, labels, teacher, lam, 0.5, log_pi))


def test_site_that_distils_without_a_teacher_is_told_so() -> None:
    with pytest.raises(UserError, match="global model's outputs as teacher"):
        site_loss(torch.zeros(1, 2), torch.tensor([0]), torch.zeros(2), {"lam": 0.5})


def test_score_has_the_mean_loss_and_count_of_each_class_and_leaves_the_mode_as_it_was() -> None:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(5, 3), nn.Dropout(0.5)).train()
    x, y = torch.randn(10, 5), torch.tensor([0, 0, 1, 1, 1, 0, 0, 0, 1, 0])  # nobody holds class 2
    content = score(net, [(x[:4], y[:4]), (x[4:], y[4:])], 3)
    assert net.training
    with torch.no_grad():
        each = torch.nn.functional.cross_entropy(net.eval()(x).double(), y, reduction="none")
    means = content["small"]["losses"].numpy()
    np.testing.assert_allclose(means[:2], [each[y == c].mean() for c in (0, 1)], rtol=1e-6)
    assert np.isnan(means[2]) and content["small"]["counts"].numpy().tolist() == [6, 4, 0]
    assert content["metrics"]["num-examples"] == 10
    with pytest.raises(UserError, match="empty loader"):
        score(net, [], 3)


# The strategy


@settings(deadline=None, max_examples=30)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([np.float32, np.float64, np.int64]),
            st.lists(st.integers(0, 3), max_size=3),
        ),
        min_size=1,
    ).filter(lambda arrays: any(issubclass(dtype, np.floating) for dtype, _ in arrays))
)
def test_record_that_becomes_a_vector_comes_back_as_it_was(
    arrays: list[tuple[type, list[int]]],
) -> None:
    rng = np.random.default_rng(0)
    named = {
        f"a{i}": rng.integers(0, 99, shape).astype(dtype) for i, (dtype, shape) in enumerate(arrays)
    }
    record = ArrayRecord({name: Array(array) for name, array in named.items()})
    form = Form(record)
    weights = form.weights(record)
    assert sum(form.segments) == len(weights.values)
    back = {name: array.numpy() for name, array in form.record(weights).items()}
    assert list(back) == list(named)
    for name, array in named.items():
        assert back[name].dtype == array.dtype and np.array_equal(back[name], array)


def sending(vectors: dict[int, Tensor], scores: dict[int, list[float]] | None = None) -> ClientApp:
    """An app whose node k trains to `vectors[k]` and has these losses per class."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        metrics = MetricRecord({"num-examples": context.node_id, "train_loss": 1.0})
        arrays = ArrayRecord({"w": Array(vectors[context.node_id].numpy())})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    @app.query("score")
    def say(message: Message, context: Context) -> Message:
        losses = np.array([1.0, 1.0] if scores is None else scores[context.node_id])
        small = ArrayRecord({"losses": Array(losses), "counts": Array(np.full(len(losses), 5.0))})
        content = {"small": small, "metrics": MetricRecord({"num-examples": 10})}
        return Message(RecordDict(content), reply_to=message)

    return app


def started(
    app: ClientApp, nodes: list[int], rounds: int, **options: Any
) -> tuple[FedNoRo, dict[str, np.ndarray]]:
    strategy = FedNoRo(classes=2, fraction_evaluate=0.0, **options)
    start = ArrayRecord({"w": Array(np.zeros(3, np.float32))})
    result = strategy.start(MemoryGrid(app, {node: {} for node in nodes}), start, num_rounds=rounds)
    return strategy, {name: array.numpy() for name, array in result.arrays.items()}


def test_warm_up_averages_by_size() -> None:
    vectors = {node: torch.full((3,), float(node)) for node in (1, 2, 5)}
    _, arrays = started(sending(vectors), [1, 2, 5], rounds=2, warmup=1, lam_max=0.8)
    np.testing.assert_allclose(arrays["w"], (1 + 4 + 25) / 8, rtol=1e-6)


def test_after_the_warm_up_noisy_sites_weigh_less_the_farther_they_are() -> None:
    vectors = {1: torch.zeros(3), 2: torch.zeros(3), 3: torch.ones(3), 4: torch.full((3,), 9.0)}
    scores = {1: [0.1, 0.1], 2: [0.12, 0.09], 3: [2.0, 2.1], 4: [2.2, 1.9]}
    strategy, arrays = started(sending(vectors, scores), [4, 2, 3, 1], rounds=2, warmup=1)
    assert strategy.noisy == {1: False, 2: False, 3: True, 4: True}
    shares = np.array([1.0, 2.0, 3 * np.exp(-1 / 9), 4 * np.exp(-1.0)])
    expected = (shares[2] * 1 + shares[3] * 9) / shares.sum()
    np.testing.assert_allclose(arrays["w"], expected, rtol=1e-5)


@pytest.mark.parametrize("fault", ["nan", "shape", "size", "error", "silence"])
def test_node_with_an_unusable_answer_is_left_out(fault: str) -> None:
    vectors = {node: torch.full((3,), float(node)) for node in (1, 2, 5)}
    if fault in ("nan", "shape"):
        vectors[5] = torch.full((3 if fault == "nan" else 4,), float("nan"))

    def tamper(_: Message, reply: Message) -> Message | None:
        if reply.metadata.src_node_id == 5 and fault == "size":
            reply.content["metrics"]["num-examples"] = 0
        if reply.metadata.src_node_id == 5 and fault == "silence":
            return None
        return reply

    app = sending(vectors)
    if fault == "error":
        del vectors[5]
        app = _answering_errors(app)
    grid = MemoryGrid(app, {1: {}, 2: {}, 5: {}}, tamper)
    strategy = FedNoRo(classes=2, warmup=1, fraction_evaluate=0.0)
    start = ArrayRecord({"w": Array(np.zeros(3, np.float32))})
    result = strategy.start(grid, start, num_rounds=2, timeout=1)
    np.testing.assert_allclose(result.arrays["w"].numpy(), 5 / 3, rtol=1e-6)


def _answering_errors(app: ClientApp) -> Any:
    from flwr.app import Error

    def call(message: Message, context: Context) -> Message:
        try:
            return app(message, context)
        except KeyError:
            return Message(Error(2, "KeyError"), reply_to=message)

    return call


def test_strategy_that_was_not_started_says_so() -> None:
    with pytest.raises(UserError, match="has not been started"):
        FedNoRo(classes=2).aggregate_train(1, [])
