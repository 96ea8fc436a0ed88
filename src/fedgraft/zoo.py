"""The literature as compositions: each algorithm is a few slots that differ from another one.

Read it as a table of papers. `ALGORITHMS` maps a name to a function of plain numbers and slots; `named` builds one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedgraft.aggregate import server_rules
from fedgraft.aggregate.similarity import alignment_weights, counted_examples, crsm, null_level, random_weights_like
from fedgraft.aggregate.slots import Answers, Mixing, Observe, Weighting, mean, uniform
from fedgraft.algorithm import Algorithm, ClientState, vary
from fedgraft.edit.dense import body, everything
from fedgraft.edit.trainable import is_head
from fedgraft.errors import FedgraftError
from fedgraft.local.corrections import control_variates, dynamic, proximal
from fedgraft.randomness import torch_stream
from fedgraft.registry import ALGORITHMS
from fedgraft.update.transforms import normalise


def fedavg(**slots: Any) -> Algorithm:
    """McMahan et al. 2017: the mean of local updates, weighted by examples."""
    for name in slots:
        if name not in Algorithm.__dataclass_fields__:
            known = ", ".join(n for n in Algorithm.__dataclass_fields__ if n != "name")
            raise FedgraftError(f"an algorithm has no slot or option {name!r}; its slots are {known}.")
    return Algorithm("fedavg", **{name: value for name, value in slots.items() if value is not None})


def fedsgd(**slots: Any) -> Algorithm:
    """One full-batch gradient step per client: FedAvg with nothing local about it."""
    return vary(fedavg(**slots), name="fedsgd", epochs=1, steps=None, batch_size=1 << 30)


def fedprox(mu: float = 0.01, **slots: Any) -> Algorithm:
    """Li et al. 2020: a squared pull towards the common model; mu=0 is FedAvg."""
    return vary(fedavg(**slots), name="fedprox", correction=proximal(mu))


def scaffold(server_lr: float = 1.0, **slots: Any) -> Algorithm:
    """Karimireddy et al. 2020: control variates; with local momentum the divisor is the true displacement."""
    rule = server_rules.scaffold(server_lr)
    return vary(fedavg(**slots), name="scaffold", correction=control_variates(), weighting=uniform(), server=rule)


def feddyn(alpha: float = 0.1, **slots: Any) -> Algorithm:
    """Acar et al. 2021: each client's loss is bent so that all agree at the optimum."""
    rule = server_rules.feddyn(alpha)
    return vary(fedavg(**slots), name="feddyn", correction=dynamic(alpha), weighting=uniform(), server=rule)


def fednova(server_lr: float = 1.0, **slots: Any) -> Algorithm:
    """Wang et al. 2020: updates divided by how far each client went; equal steps make it FedAvg."""
    return vary(fedavg(**slots), name="fednova", update=(normalise(),), server=server_rules.fednova(server_lr))


def fedgma(agreement: float = 0.4, hard: bool = False, server_lr: float = 1.0, **slots: Any) -> Algorithm:
    """Tenison et al. 2023: coordinates on whose sign clients disagree move less (soft) or not at all (AND)."""
    return vary(fedavg(**slots), name="fedgma", server=server_rules.fedgma(agreement, server_lr, soft=not hard))


def fedavgm(server_lr: float = 1.0, beta1: float = 0.9, **slots: Any) -> Algorithm:
    """Hsu et al. 2019: momentum on the server."""
    return vary(fedavg(**slots), name="fedavgm", server=server_rules.momentum(server_lr, beta1))


def fedadam(
    server_lr: float = 0.01, beta1: float = 0.9, beta2: float = 0.99, tau: float = 1e-3, **slots: Any
) -> Algorithm:
    """Reddi et al. 2021: Adam on the server."""
    return vary(fedavg(**slots), name="fedadam", server=server_rules.adam(server_lr, (beta1, beta2), tau))


def fedyogi(
    server_lr: float = 0.01, beta1: float = 0.9, beta2: float = 0.99, tau: float = 1e-3, **slots: Any
) -> Algorithm:
    """Reddi et al. 2021: Yogi on the server."""
    return vary(fedavg(**slots), name="fedyogi", server=server_rules.yogi(server_lr, (beta1, beta2), tau))


def fedadagrad(server_lr: float = 0.01, beta1: float = 0.0, tau: float = 1e-3, **slots: Any) -> Algorithm:
    """Reddi et al. 2021: Adagrad on the server."""
    return vary(fedavg(**slots), name="fedadagrad", server=server_rules.adagrad(server_lr, beta1, tau))


def fedalign(
    align: str = "client",
    gamma: float = 1.0,
    cap: float | None = None,
    null_correction: bool = False,
    layers: tuple[str, ...] = ("early", "middle", "late"),
    keep: int = 20,
    top: int = 20,
    probe: int = 256,
    seed: int = 0,
    **slots: Any,
) -> Algorithm:
    """FedAlignAvg: weights n_k·s_k^γ, s_k the SVCCA of a client's hidden layers with the common model's.

    With a `cap` nobody counts as more than so many examples: a limit that a client can keep by itself, so that the
    weights are the same whether the server sees them or only their sum.
    `align`: the client computes its score (one number a layer leaves), the server recomputes it from the change on a
    secret probe, or `random`, the control: the same weights dealt at random.
    """
    null = null_level(probe, keep, top) if null_correction else 0.0
    names = tuple(f"alignment:{layer}" for layer in layers)

    def weights(answers: Answers) -> Tensor:
        scores = torch.tensor([[s[name] for name in names] for s in answers.scalars], dtype=torch.float64)
        found = alignment_weights(answers.examples, scores, gamma, null, cap).weights
        return (
            random_weights_like(found, torch_stream(seed, "random_weights", answers.round))
            if align == "random"
            else found
        )

    def own(examples: float, scalars: Mapping[str, float], largest: float) -> float:
        scores = torch.tensor([[scalars[name] for name in names]], dtype=torch.float64)
        return float(counted_examples(torch.tensor([examples]), scores, gamma, null, cap)) / largest

    options = {"layers": layers, "keep": keep, "top": top, "probe": probe}
    observe = Observe("alignment", names, options=options, needs_probe=True)
    wants, judged = ((), names) if align == "server" else ((observe,), ())
    mine = own if align == "client" else None
    weighting = Weighting(f"alignment:{align}", weights, wants, mine, judged, needs_moving_body=True, options=options)
    return vary(fedavg(**slots), name="fedalign", weighting=weighting)


def fedbabu(**slots: Any) -> Algorithm:
    """Oh et al. 2022: the body is trained and averaged, the head stays at its start; fine-tuned at evaluation."""
    return vary(fedavg(**{"trainable": body(), **_given(slots)}), name="fedbabu", fixed_head=True)


def _given(slots: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in slots.items() if value is not None}


def _mixing(similarity: str, constant: float, samples: int, absent: str, probe: int) -> Mixing:
    options = {"c": constant} if similarity == "constant" else {}
    sources: dict[str, tuple[str, tuple[Observe, ...]]] = {
        "constant": ("", ()),
        "label_histogram": ("labels", (Observe("labels", (), {"labels": ("classes",)}),)),
        "groups": ("labels", (Observe("labels", (), {"labels": ("classes",)}),)),
        "probe_cka": (
            "probe_representation",
            (Observe("probe_representation", (), {"probe_representation": (probe, "width")}, {"probe": probe}, True),),
        ),
    }
    own = Observe("representation", (), {"representation": (samples, "width")}, {"samples": samples})
    field, wants = sources.get(similarity, ("representation", (own,)))

    def matrix(answers: Answers) -> Tensor:
        shown = [e[field] for e in answers.evidence] if field else [torch.zeros(1)] * len(answers.clients)
        return crsm(shown, similarity, **options)

    return Mixing(f"mixture:{similarity}", matrix, wants, absent_keep=absent == "keep")


def fedshibu(
    similarity: str = "cka_linear", constant: float = 1.0, samples: int = 64, absent: str = "keep", probe: int = 256,
    **slots: Any,
) -> Algorithm:  # fmt: skip
    """One body per client, mixed by representation similarity; the head stays at its start. Constant 1 is FedBABU."""
    return vary(fedbabu(**slots), name="fedshibu", aggregate=_mixing(similarity, constant, samples, absent, probe))


def fedavg_crsm(
    similarity: str = "cka_linear", constant: float = 1.0, samples: int = 64, absent: str = "keep", probe: int = 256,
    **slots: Any,
) -> Algorithm:  # fmt: skip
    """The same mixing on whatever trains, head included. Constant 1 is FedAvg."""
    return vary(fedavg(**slots), name="fedavg_crsm", aggregate=_mixing(similarity, constant, samples, absent, probe))


def local_only(**slots: Any) -> Algorithm:
    """Nobody shares anything: every client trains alone. The floor that sharing has to beat."""
    alone = Mixing("alone", lambda answers: torch.eye(len(answers.clients), dtype=torch.float64), shares=False)
    return vary(fedavg(**slots), name="local_only", aggregate=alone)


def fedper(**slots: Any) -> Algorithm:
    """Arivazhagan et al. 2019: a common body, a private head, trained together."""
    return vary(
        fedavg(**{"trainable": everything(), **_given(slots)}), name="fedper", client_state=ClientState(is_head)
    )


def fedrep(**slots: Any) -> Algorithm:
    """Collins et al. 2021: a private head trained first, then the common body."""
    return vary(fedper(**slots), name="fedrep", client_state=ClientState(is_head, alternate=True))


def ditto(pull: float = 0.1, **slots: Any) -> Algorithm:
    """Li et al. 2021: beside the common model each client trains its own, pulled towards it."""
    return vary(fedavg(**slots), name="ditto", client_state=ClientState(second_model=pull))


def central(**slots: Any) -> Algorithm:
    """Plain training in one place, as a federation of one: its client keeps the optimizer's state between rounds."""
    return vary(
        fedavg(**slots),
        name="central",
        client_state=ClientState(optimizer=True),
        aggregate=replace(mean(), shares=False),
    )


ALGORITHMS |= {
    f.__name__: f
    for f in (
        fedavg, fedsgd, fedprox, scaffold, feddyn, fednova, fedgma, fedavgm, fedadam, fedyogi, fedadagrad, fedalign,
        fedbabu, fedshibu, fedavg_crsm, local_only, fedper, fedrep, ditto,
        central,
    )
}  # fmt: skip


def named(name: str, **options: Any) -> Algorithm:
    """Build an algorithm by its name; options and slots it does not have are refused."""
    slots = {key: options.pop(key) for key in list(options) if key in Algorithm.__dataclass_fields__}
    made: Algorithm = ALGORITHMS.build(name, options, **slots)
    return made
