"""One model for all, with weights that look at what clients send."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedgraft.aggregate.merging import aligned_weights, dare_aggregator, fisher_aggregator, ties_aggregator
from fedgraft.aggregate.merging import by_layer as layered
from fedgraft.aggregate.similarity import alignment_weights, counted_examples, null_level, random_weights_like
from fedgraft.aggregate.slots import Answers, Observe, Weighting, mean
from fedgraft.algorithms.algorithm import Algorithm, vary
from fedgraft.algorithms.averaging import fedavg
from fedgraft.core.errors import FedgraftError
from fedgraft.core.ranges import Count, NotNegative, Number, Positive, Probe, Rest, Share, in_range
from fedgraft.core.rng import torch_stream


@in_range
def fedalign(
    align: str = "client",
    gamma: NotNegative = 1.0,
    cap: Positive | None = None,
    null_correction: bool = False,
    layers: tuple[str, ...] = ("early", "middle", "late"),
    keep: Count = 20,
    top: Count = 20,
    probe: Probe = 256,
    by_layer: bool = False,
    freeze: NotNegative | None = None,
    sketch: Number = 0,
    seed: int = 0,
    **slots: Any,
) -> Algorithm:
    """FedAlignAvg: weights n_k·s_k^γ, s_k the SVCCA of a client's hidden layers with the common model's.

    With a `cap` nobody counts as more than so many examples: a limit that a client can keep by itself, so that the
    weights are the same whether the server sees them or only their sum.
    `align`: the client computes its score (one number a layer leaves), the server recomputes it from the change on a
    secret probe, or `random`, the control: the same weights dealt at random.
    `by_layer`: every layer has weights of its own, by its own scores; one that drifts more than `freeze` (1 less the
    mean score) rests for the round. With one layer and no `freeze` it is the same as without.
    `sketch`: bases from random sketches of so many columns more than are kept, for large probes of wide layers.
    """
    if (by_layer and align == "random") or (freeze is not None and not by_layer):
        raise FedgraftError("fedalign: freeze needs by_layer=true, and that has no control (align='random').")
    null = null_level(probe, keep, top) if null_correction else 0.0
    names = tuple(f"alignment:{layer}" for layer in layers)

    def scores(answers: Answers) -> Tensor:
        return torch.tensor([[s[name] for name in names] for s in answers.scalars], dtype=torch.float64)

    def weigh(answers: Answers, scores: Tensor) -> Tensor:
        return alignment_weights(answers.examples, scores, gamma, null, cap).weights

    def weights(answers: Answers) -> Tensor:
        found = weigh(answers, scores(answers))
        return (
            random_weights_like(found, torch_stream(seed, "random_weights", answers.round))
            if align == "random"
            else found
        )

    def own(examples: float, scalars: Mapping[str, float], largest: float) -> float:
        scores = torch.tensor([[scalars[name] for name in names]], dtype=torch.float64)
        return float(counted_examples(torch.tensor([examples]), scores, gamma, null, cap)) / largest

    options = {"layers": layers, "keep": keep, "top": top, "probe": probe, "sketch": sketch}
    observe = Observe("alignment", names, options=options, needs_probe=True)
    wants, server_scored = ((), names) if align == "server" else ((observe,), ())
    mine = own if align == "client" else None
    weighting = Weighting(
        f"alignment:{align}",
        weights,
        wants,
        mine,
        server_scored,
        needs_moving_body=True,
        options=options,
        instead="algorithm.align='client'",
    )
    combined = layered(scores, weigh, freeze) if by_layer else mean()
    return vary(fedavg(**slots), name="fedalign", weighting=weighting, aggregate=combined)


@in_range
def fedawa(steps: Number = 1, rate: NotNegative = 1.0, **slots: Any) -> Algorithm:
    """Shi et al. 2025: weights that make client vectors align with their sum; no steps is FedAvg."""

    def weights(answers: Answers) -> Tensor:
        return aligned_weights(torch.stack(list(answers.updates)), answers.examples, steps, rate)

    return vary(fedavg(**slots), name="fedawa", weighting=Weighting("client_vectors", weights))


@in_range
def fedties(share: Share = 0.2, **slots: Any) -> Algorithm:
    """Yadav et al. 2023 as aggregation: largest entries, one sign by coordinate, mean of those agreeing."""
    return vary(fedavg(**slots), name="fedties", aggregate=ties_aggregator(share))


@in_range
def feddare(drop: Rest = 0.5, seed: int = 0, **slots: Any) -> Algorithm:
    """Yu et al. 2024 as aggregation: entries dropped at random, the rest scaled up; drop 0 is FedAvg."""
    return vary(fedavg(**slots), name="feddare", aggregate=dare_aggregator(drop, seed))


@in_range
def fedfisher(samples: Count = 32, **slots: Any) -> Algorithm:
    """Matena and Raffel 2022 as aggregation: coordinates count by each client's Fisher information."""
    return vary(fedavg(**slots), name="fedfisher", aggregate=fisher_aggregator(samples))
