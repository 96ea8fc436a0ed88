"""The literature as compositions: each algorithm is a few slots that differ from another one.

`ZOO` maps a name to a function of plain numbers; `named` builds one. Read it as a table of papers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fedgraft.aggregate import robust, server_rules
from fedgraft.aggregate.similarity import alignment_weights, crsm, null_corrected, null_level, random_weights_like
from fedgraft.algorithm import (
    Aggregator,
    Algorithm,
    Answers,
    ClientState,
    Mixing,
    Observe,
    Trainable,
    Weighting,
    uniform,
    vary,
)
from fedgraft.errors import FedgraftError
from fedgraft.local.corrections import control_variates, dynamic, proximal
from fedgraft.local.train import LocalRule
from fedgraft.randomness import torch_stream


def fedavg(local: LocalRule | None = None, trainable: Trainable | None = None, **options: Any) -> Algorithm:
    """McMahan et al. 2017: the mean of local changes, weighted by examples."""
    return Algorithm("fedavg", trainable=trainable or Trainable(), local=local or LocalRule())


def fedsgd(**options: Any) -> Algorithm:
    """One full-batch gradient step per client: FedAvg with nothing local about it."""
    base = fedavg(**options)
    return vary(base, name="fedsgd", amount=1, unit="epochs", batch_size=1 << 30)


def fedprox(mu: float = 0.01, **options: Any) -> Algorithm:
    """Li et al. 2020: a squared pull towards the common model; mu=0 is FedAvg."""
    return vary(fedavg(**options), name="fedprox", correction=proximal(mu))


def scaffold(server_lr: float | None = None, **options: Any) -> Algorithm:
    """Karimireddy et al. 2020: control variates; with local momentum the divisor is the true displacement."""
    rule = server_rules.scaffold(server_lr or 1.0)
    return vary(fedavg(**options), name="scaffold", correction=control_variates(), weighting=uniform(), server=rule)


def feddyn(alpha: float = 0.1, **options: Any) -> Algorithm:
    """Acar et al. 2021: each client's loss is bent so that all agree at the optimum."""
    base = fedavg(**options)
    return vary(base, name="feddyn", correction=dynamic(alpha), weighting=uniform(), server=server_rules.feddyn(alpha))


def fednova(server_lr: float | None = None, **options: Any) -> Algorithm:
    """Wang et al. 2020: changes divided by how far each client went; equal steps make it FedAvg."""
    return vary(fedavg(**options), name="fednova", normalised=True, server=server_rules.fednova(server_lr or 1.0))


def fedgma(agreement: float = 0.4, hard: bool = False, server_lr: float | None = None, **options: Any) -> Algorithm:
    """Tenison et al. 2023: coordinates on whose sign clients disagree move less (soft) or not at all (AND)."""
    rule = server_rules.fedgma(agreement, server_lr or 1.0, soft=not hard)
    return vary(fedavg(**options), name="fedgma", server=rule)


def fedavgm(server_lr: float | None = None, beta1: float = 0.9, **options: Any) -> Algorithm:
    """Hsu et al. 2019: momentum on the server."""
    return vary(fedavg(**options), name="fedavgm", server=server_rules.momentum(server_lr or 1.0, beta1))


def fedadam(
    server_lr: float | None = None, beta1: float = 0.9, beta2: float = 0.99, tau: float = 1e-3, **options: Any
) -> Algorithm:
    """Reddi et al. 2021: Adam on the server."""
    rule = server_rules.adam(server_lr or 0.01, (beta1, beta2), tau)
    return vary(fedavg(**options), name="fedadam", server=rule)


def fedyogi(
    server_lr: float | None = None, beta1: float = 0.9, beta2: float = 0.99, tau: float = 1e-3, **options: Any
) -> Algorithm:
    """Reddi et al. 2021: Yogi on the server."""
    rule = server_rules.yogi(server_lr or 0.01, (beta1, beta2), tau)
    return vary(fedavg(**options), name="fedyogi", server=rule)


def fedadagrad(server_lr: float | None = None, beta1: float = 0.0, tau: float = 1e-3, **options: Any) -> Algorithm:
    """Reddi et al. 2021: Adagrad on the server."""
    return vary(fedavg(**options), name="fedadagrad", server=server_rules.adagrad(server_lr or 0.01, beta1, tau))


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
    **options: Any,
) -> Algorithm:
    """FedAlignAvg: weights n_k·s_k^γ, s_k the SVCCA of a client's hidden layers with the common model's.

    `align`: the client computes its score (one number a layer leaves), the server recomputes it from the change on a
    secret probe, or `random`, the control: the same weights dealt at random.
    """
    null = null_level(probe, keep, top) if null_correction else 0.0
    names = tuple(f"alignment:{layer}" for layer in layers)

    def weights(answers: Answers) -> Tensor:
        scores = torch.tensor([[s[name] for name in names] for s in answers.scalars], dtype=torch.float64)
        found = alignment_weights(answers.examples, scores, gamma, None, null, cap).weights
        return (
            random_weights_like(found, torch_stream(seed, "random_weights", answers.round))
            if align == "random"
            else found
        )

    def own(share: float, scalars: Mapping[str, float]) -> float:
        scores = torch.tensor([[scalars[name] for name in names]], dtype=torch.float64)
        score = float(null_corrected(scores.clamp(0, 1), null).mean())
        return share * max(score, 1e-6) ** gamma

    observe = Observe("alignment", names, options={"layers": layers, "keep": keep, "top": top})
    wants, judged = ((), names) if align == "server" else ((observe,), ())
    mine = own if align == "client" else None
    weighting = Weighting(f"alignment:{align}", weights, wants, mine, judged, needs_moving_body=True)
    return vary(fedavg(**options), name="fedalign", weighting=weighting)


def fedbabu(**options: Any) -> Algorithm:
    """Oh et al. 2022: the body is trained and averaged, the head stays at its start; fine-tuned at evaluation."""
    trainable = options.pop("trainable", None)
    return vary(
        fedavg(**options),
        name="fedbabu",
        trainable=trainable if trainable and trainable.kind != "everything" else Trainable("body"),
    )


def _mixture(similarity: str, constant: float, samples: int, absent: str, probe: int) -> Mixing:
    options = {"c": constant} if similarity == "constant" else {}
    sources: dict[str, tuple[str, tuple[Observe, ...]]] = {
        "constant": ("", ()),
        "label_histogram": ("labels", (Observe("labels", (), {"labels": ("classes",)}),)),
        "groups": ("labels", (Observe("labels", (), {"labels": ("classes",)}),)),
        "probe_cka": (
            "probe_representation",
            (Observe("probe_representation", (), {"probe_representation": (probe, "width")}),),
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
    **options: Any,
) -> Algorithm:  # fmt: skip
    """One body per client, mixed by representation similarity; the head stays at its start. Constant 1 is FedBABU."""
    mixing = _mixture(similarity, constant, samples, absent, probe)
    return vary(fedbabu(**options), name="fedshibu", aggregate=mixing)


def fedavg_crsm(
    similarity: str = "cka_linear", constant: float = 1.0, samples: int = 64, absent: str = "keep", probe: int = 256,
    **options: Any,
) -> Algorithm:  # fmt: skip
    """The same mixing on whatever moves, head included. Constant 1 is FedAvg."""
    mixing = _mixture(similarity, constant, samples, absent, probe)
    return vary(fedavg(**options), name="fedavg_crsm", aggregate=mixing)


def local_only(**options: Any) -> Algorithm:
    """Nobody shares anything: every client trains alone. The floor that sharing has to beat."""
    alone = Mixing("alone", lambda answers: torch.eye(len(answers.clients), dtype=torch.float64), exchanges=False)
    return vary(fedavg(**options), name="local_only", aggregate=alone)


def fedper(**options: Any) -> Algorithm:
    """Arivazhagan et al. 2019: a common body, a private head, trained together."""
    return vary(fedbabu(**options), name="fedper", client_state=ClientState("head"))


def fedrep(**options: Any) -> Algorithm:
    """Collins et al. 2021: a private head trained first, then the common body."""
    return vary(fedbabu(**options), name="fedrep", client_state=ClientState("head", alternate=True))


def ditto(pull: float = 0.1, **options: Any) -> Algorithm:
    """Li et al. 2021: beside the common model each client trains its own, pulled towards it."""
    return vary(fedavg(**options), name="ditto", client_state=ClientState("model", pull=pull))


ZOO: dict[str, Callable[..., Algorithm]] = {
    f.__name__: f
    for f in (
        fedavg, fedsgd, fedprox, scaffold, feddyn, fednova, fedgma, fedavgm, fedadam, fedyogi, fedadagrad, fedalign,
        fedbabu, fedshibu, fedavg_crsm, local_only, fedper, fedrep, ditto,
    )
}  # fmt: skip


def robust_aggregator(name: str, attackers: int = 0, neighbours: bool = False, clip: float | None = None) -> Aggregator:
    """A rule that withstands liars, with optional clipping and nearest-neighbour mixing before it."""
    clips = clip is not None or name == "norm_clip"
    _robust_rule(
        name, attackers, 2 * attackers + 1
    )  # a name that does not exist is refused now, not in the first round

    def update(answers: Answers, weights: Tensor) -> Tensor:
        stack = torch.stack(list(answers.updates))
        # Screening has caught some already: that many fewer are left among the replies.
        left = max(0, attackers - answers.dropped)
        steps = [*([robust.clip_norms(clip)] if clips else []), *([robust.nearest_mixing(left)] if neighbours else [])]
        return robust.prepared(_robust_rule(name, left, len(stack)), *steps)(stack, weights)

    label = "+".join([*(["clip"] if clips else []), *(["nnm"] if neighbours else []), name])
    return Aggregator(label, update, linear=False)


def _robust_rule(name: str, attackers: int, replies: int) -> robust.Aggregator:
    """The rule against so many liars among so many replies."""
    if name == "trimmed_mean":  # cut as many on each side as there may be liars
        robust.need(replies, 2 * attackers + 1, "the trimmed mean", attackers)
        return robust.trimmed_mean(attackers / replies)
    takes_attackers = name in {"krum", "multi_krum", "bulyan"}
    return robust.aggregator(
        "mean" if name == "norm_clip" else name, **({"attackers": attackers} if takes_attackers else {})
    )


def named(name: str, **options: Any) -> Algorithm:
    """Build an algorithm of the zoo."""
    if name not in ZOO:
        import difflib

        close = difflib.get_close_matches(name, ZOO, n=1, cutoff=0.0)
        raise FedgraftError(f"there is no algorithm {name!r}; the nearest one is {close[0]!r} (all: {', '.join(ZOO)}).")
    return ZOO[name](**options)
