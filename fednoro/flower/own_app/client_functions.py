"""The client's side of FedNoRo for a ClientApp of your own, with any torch network and any loader.

@app.train()          teacher = global_net(x) if "lam" in config else None
                      loss = site_loss(net(x), y, log_pi, config, teacher)
@app.query("score")   return Message(score(net, loader, classes), reply_to=message)

`log_pi` is `log_prior(labels, classes)` of the site's own training labels, and `config`
the message's "config" record.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict
from torch import Tensor, nn

from fednoro.core import losses
from fednoro.core.types import UserError
from fednoro.flower.records import SIZE

SCORE = "query.score"  # the message type that asks for scores
LAM, TEMPERATURE = "lam", "temperature"  # in the config of a site that was judged noisy


def log_prior(labels: Tensor, classes: int) -> Tensor:
    """A site's log π from its labels; −inf for the classes that it does not hold."""
    return losses.log_prior(torch.bincount(labels.flatten(), minlength=classes).to(labels.device))


def site_loss(
    logits: Tensor,
    labels: Tensor,
    log_pi: Tensor,
    config: Mapping[str, Any],
    teacher: Tensor | None = None,
) -> Tensor:
    """One batch's loss as the server's strategy wants it from this site in this round.

    Args:
        logits: the local network's outputs, B×C.
        labels: the given labels, B.
        log_pi: `log_prior` of the site's labels.
        config: the "config" record of the message; with "lam" in it, the site
            was judged noisy and distils.
        teacher: the received global model's outputs for the same images, in
            eval mode; needed with "lam".
    """
    if LAM not in config:
        return losses.logit_adjusted_ce(logits, labels, log_pi)
    if teacher is None:
        raise UserError(
            'config has "lam", so this site distils: give site_loss the global model\'s outputs '
            "as teacher"
        )
    return losses.distill(
        logits, labels, teacher, float(config[LAM]), float(config.get(TEMPERATURE, 0.8)), log_pi
    )


def score(net: nn.Module, loader: Iterable[tuple[Tensor, Tensor]], classes: int) -> RecordDict:
    """The answer to the strategy's question:
    mean loss and count of each class, with the global model in eval mode.
    """
    device = next(net.parameters()).device
    was_training = net.training
    outputs, labels = [], []
    with torch.inference_mode():
        net.eval()
        for x, y in loader:
            outputs.append(net(x.to(device)).float().cpu())
            labels.append(y.cpu())
    net.train(was_training)
    if not labels:
        raise UserError("score got an empty loader: it needs the site's own images")
    means, counts = losses.per_class_losses(torch.cat(outputs), torch.cat(labels).long(), classes)
    small = ArrayRecord({"losses": Array(means.numpy()), "counts": Array(counts.numpy())})
    return RecordDict({"small": small, "metrics": MetricRecord({SIZE: int(counts.sum())})})
