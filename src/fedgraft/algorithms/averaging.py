"""Algorithms with one common model: FedAvg, corrections of its local training, other steps of the server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, Unpack

from fedgraft.aggregate import server_rules
from fedgraft.aggregate.slots import mean, uniform
from fedgraft.algorithms.algorithm import Algorithm, ClientState, vary
from fedgraft.algorithms.typed_slots import TYPED, Slots, typed_loss
from fedgraft.core.arguments import OTHER_NAMES
from fedgraft.core.capabilities import Capability
from fedgraft.core.errors import FedgraftError
from fedgraft.core.ranges import NotNegative, Positive, Rest, Unit, in_range
from fedgraft.local.corrections import control_variates, dynamic, proximal
from fedgraft.local.losses import calibrated, contrastive, cross_entropy, one_vs_all
from fedgraft.local.train import LocalTraining
from fedgraft.local.update_links import normalise


def fedavg(**slots: Unpack[Slots]) -> Algorithm:
    """McMahan et al. 2017: the mean of local updates, weighted by examples."""
    known = [name for name in Algorithm.__dataclass_fields__ if name != "name"]
    for name in slots:
        if name not in Algorithm.__dataclass_fields__:
            hint = f"use one of its slots {', '.join(known)}"
            local = OTHER_NAMES.get(name, name)
            if local in LocalTraining.__dataclass_fields__:
                hint = f"it belongs to local training: local=fg.LocalTraining({local}=...)"
            raise FedgraftError(
                "E-ALGORITHM-SLOT",
                f"an algorithm has no slot or option {name!r}",
                hint,
                name=name,
            )
    return Algorithm("fedavg", **specified(slots))


def fedsgd(**slots: Unpack[Slots]) -> Algorithm:
    """FedAvg with one full-batch gradient step per client (McMahan et al. 2017)."""
    return vary(fedavg(**slots), name="fedsgd", epochs=1, steps=None, batch_size=1 << 30)


@in_range
def fedprox(mu: NotNegative = 0.01, **slots: Unpack[Slots]) -> Algorithm:
    """Li et al. 2020: a squared pull towards the common model; mu=0 is FedAvg.

    Args:
        mu: weight of the proximal term
    """
    return vary(fedavg(**slots), name="fedprox", correction=proximal(mu))


@in_range
def fedlc(tau: NotNegative = 1.0, **slots: Unpack[Slots]) -> Algorithm:
    """Zhang et al. 2022: logits calibrated by the client's class counts; equal counts make it FedAvg.

    Args:
        tau: size of the margins
    """
    return vary(fedavg(**slots), name="fedlc", loss=calibrated(tau, requested_smoothing(slots)))


@in_range
def fedova(positives: Literal["own", "federation"] | None = None, **slots: Unpack[Slots]) -> Algorithm:
    """Park et al. 2025 (OvA-LP): every class against all others by its own sigmoid, made for a frozen encoder.

    Args:
        positives: images of a class weigh as much as all others together, by own counts or by those of all clients
    """
    return vary(fedavg(**slots), name="fedova", loss=one_vs_all(requested_smoothing(slots), positives))


@in_range
def moon(weight: NotNegative = 1.0, temperature: Positive = 0.5, **slots: Unpack[Slots]) -> Algorithm:
    """Li et al. 2021: features move towards the common model's, away from the client's last; weight 0 is FedAvg.

    Args:
        weight: weight of the contrastive term
        temperature: temperature of the cosine similarities
    """
    return vary(fedavg(**slots), name="moon", loss=contrastive(weight, temperature, requested_smoothing(slots)))


@in_range
def scaffold(server_lr: Positive = 1.0, **slots: Unpack[Slots]) -> Algorithm:
    """Karimireddy et al. 2020: control variates; with local momentum the divisor is the true displacement.

    Args:
        server_lr: learning rate of the server
    """
    rule = server_rules.scaffold_rule(server_lr)
    return vary(fedavg(**slots), name="scaffold", correction=control_variates(), weighting=uniform(), server=rule)


@in_range
def feddyn(alpha: NotNegative = 0.1, **slots: Unpack[Slots]) -> Algorithm:
    """Acar et al. 2021: each client's loss is regularized so that all have the same optimum.

    Args:
        alpha: strength of the regularization
    """
    rule = server_rules.feddyn_rule(alpha)
    return vary(fedavg(**slots), name="feddyn", correction=dynamic(alpha), weighting=uniform(), server=rule)


@in_range
def fednova(server_lr: Positive = 1.0, **slots: Unpack[Slots]) -> Algorithm:
    """Wang et al. 2020: updates divided by each client's effective steps; equal steps make it FedAvg.

    Args:
        server_lr: learning rate of the server
    """
    return vary(fedavg(**slots), name="fednova", update=(normalise(),), server=server_rules.fednova_rule(server_lr))


@in_range
def fedgma(agreement: Unit = 0.4, hard: bool = False, server_lr: Positive = 1.0, **slots: Unpack[Slots]) -> Algorithm:
    """Tenison et al. 2023: coordinates on whose sign clients disagree move less (soft) or not at all (AND).

    Args:
        agreement: share of the clients that must agree on the sign
        hard: coordinates without agreement do not move at all (AND mask)
        server_lr: learning rate of the server
    """
    return vary(fedavg(**slots), name="fedgma", server=server_rules.fedgma_rule(agreement, server_lr, soft=not hard))


@in_range
def fedavgm(server_lr: Positive = 1.0, beta1: Rest = 0.9, **slots: Unpack[Slots]) -> Algorithm:
    """Hsu et al. 2019: momentum on the server.

    Args:
        server_lr: learning rate of the server
        beta1: server momentum, or decay of the first moment
    """
    return vary(fedavg(**slots), name="fedavgm", server=server_rules.momentum(server_lr, beta1))


@in_range
def fedadam(
    server_lr: Positive = 0.01, beta1: Rest = 0.9, beta2: Rest = 0.99, tau: Positive = 1e-3, **slots: Unpack[Slots]
) -> Algorithm:
    """Reddi et al. 2021: Adam on the server.

    Args:
        server_lr: learning rate of the server
        beta1: server momentum, or decay of the first moment
        beta2: decay of the second moment
        tau: degree of adaptivity
    """
    return vary(fedavg(**slots), name="fedadam", server=server_rules.adam(server_lr, (beta1, beta2), tau))


@in_range
def fedyogi(
    server_lr: Positive = 0.01, beta1: Rest = 0.9, beta2: Rest = 0.99, tau: Positive = 1e-3, **slots: Unpack[Slots]
) -> Algorithm:
    """Reddi et al. 2021: Yogi on the server.

    Args:
        server_lr: learning rate of the server
        beta1: server momentum, or decay of the first moment
        beta2: decay of the second moment
        tau: degree of adaptivity
    """
    return vary(fedavg(**slots), name="fedyogi", server=server_rules.yogi(server_lr, (beta1, beta2), tau))


@in_range
def fedadagrad(
    server_lr: Positive = 0.01, beta1: Rest = 0.0, tau: Positive = 1e-3, **slots: Unpack[Slots]
) -> Algorithm:
    """Reddi et al. 2021: Adagrad on the server.

    Args:
        server_lr: learning rate of the server
        beta1: server momentum, or decay of the first moment
        tau: degree of adaptivity
    """
    return vary(fedavg(**slots), name="fedadagrad", server=server_rules.adagrad(server_lr, beta1, tau))


def central(**slots: Unpack[Slots]) -> Algorithm:
    """Centralized training as a federation of one client, which keeps the optimizer's state between rounds."""
    return vary(
        fedavg(**slots),
        name="central",
        client_state=ClientState(optimizer=True),
        aggregate=replace(mean(), provides=mean().provides - {Capability.EXCHANGE}),
    )


def specified(slots: Mapping[str, Any]) -> dict[str, Any]:
    """Return the slots that are set, those that are not None; names and tables as the objects they stand for."""
    typed = {}
    for name, value in slots.items():
        if value is not None:
            typed[name] = TYPED[name](value) if name in TYPED else value
    return typed


def requested_smoothing(slots: Mapping[str, Any]) -> float:
    """Return the label smoothing of the cross-entropy in `slots`, for an algorithm that brings a loss of its own.

    Raises for any other loss, which the algorithm's own would silently replace.
    """
    loss = cross_entropy()
    if slots.get("loss") is not None:
        loss = typed_loss(slots["loss"])
    if loss.smoothing is None:
        raise FedgraftError(
            "E-ALGORITHM-LOSS",
            f"this algorithm has its own loss, and loss.name={loss.name!r} is another",
            "leave loss.name out",
            loss=loss.name,
        )
    return float(loss.smoothing)
