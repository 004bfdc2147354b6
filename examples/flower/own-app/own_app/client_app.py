"""The client's side: a plain training loop with FedNoRo's loss, and the answer to its question."""

from __future__ import annotations

import copy

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fednoro.flower import log_prior, score, site_loss
from own_app.task import CLASSES, data, network

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Trains for a round."""
    config = message.content["config"]
    loader, _, labels = data(
        int(context.node_config["partition-id"]), int(context.node_config["num-partitions"])
    )
    net = network()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    received = copy.deepcopy(net).eval()
    log_pi = log_prior(labels, CLASSES)
    optimizer = torch.optim.Adam(net.parameters(), lr=float(context.run_config["lr"]))
    net.train()
    total = 0.0
    for _ in range(int(context.run_config["local-epochs"])):
        for x, y in loader:
            with torch.no_grad():
                teacher = received(x) if "lam" in config else None
            loss = site_loss(net(x), y, log_pi, config, teacher)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
    metrics = MetricRecord({"num-examples": len(labels), "train_loss": total / len(loader)})
    content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics})
    return Message(content, reply_to=message)


@app.query("score")
def say_scores(message: Message, context: Context) -> Message:
    """Mean loss and count per class, with the global model: what noisy sites are found by."""
    loader, _, _ = data(
        int(context.node_config["partition-id"]), int(context.node_config["num-partitions"])
    )
    net = network()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    return Message(score(net, loader, CLASSES), reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Accuracy on this site's own test images."""
    _, loader, _ = data(
        int(context.node_config["partition-id"]), int(context.node_config["num-partitions"])
    )
    net = network()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    net.eval()
    right = count = 0
    with torch.no_grad():
        for x, y in loader:
            right += int((net(x).argmax(1) == y).sum())
            count += len(y)
    metrics = MetricRecord({"num-examples": count, "accuracy": right / count})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)
