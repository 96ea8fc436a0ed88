"""Algorithms with one common model and client weights or merges that depend on the updates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, Unpack

import torch
from torch import Tensor

from fedgraft.aggregate.merging import aligned_weights, dare_aggregator, fisher_aggregator, ties_aggregator
from fedgraft.aggregate.merging import by_layer as layered
from fedgraft.aggregate.similarity import (
    alignment_weights,
    counted_examples,
    discrepancy_weights,
    null_level,
    random_weights_like,
)
from fedgraft.aggregate.slots import Answers, Observe, Weighting, mean
from fedgraft.algorithms.algorithm import Algorithm, vary
from fedgraft.algorithms.averaging import fedavg
from fedgraft.algorithms.typed_slots import Slots
from fedgraft.core.capabilities import Capability
from fedgraft.core.errors import FedgraftError
from fedgraft.core.ranges import Count, NotNegative, Number, Positive, Probe, Rest, Share, in_range
from fedgraft.core.rng import torch_stream

USUAL_PROBE = 256
"""Images on which layers are compared, where validation has as many."""


@in_range
def fedalign(
    align: Literal["client", "server", "random"] = "client",
    gamma: NotNegative = 1.0,
    cap: Positive | None = None,
    null_correction: bool = False,
    layers: tuple[str, ...] = ("early", "middle", "late"),
    keep: Count = 20,
    top: Count = 20,
    probe: Probe | None = None,
    by_layer: bool = False,
    freeze: NotNegative | None = None,
    sketch: Number = 0,
    seed: int = 0,
    **slots: Unpack[Slots],
) -> Algorithm:
    """FedAlignAvg: weights n_k·s_k^γ, s_k the SVCCA of a client's hidden layers with the common model's.

    A client can apply `cap` by itself, so the weights are the same whether the server sees them or only their sum. The
    drift of a layer is 1 minus its mean score; with one layer and no `freeze`, `by_layer` makes no difference.

    Args:
        align: who computes the score: the client, the server on a secret probe, or random, the control experiment
        gamma: exponent of the score
        cap: largest number of examples that a client counts as; default: no limit
        null_correction: subtract the score of unrelated data
        layers: hidden layers that are compared
        keep: directions kept of each layer
        top: correlations averaged
        probe: shared probe images, from validation; default: 256, or all validation images where there are fewer
        by_layer: every layer has its own weights
        freeze: by_layer: a layer that drifts more does not move in the round
        sketch: extra columns of random sketches, for large probes of wide layers; 0: exact bases
    """
    if freeze is not None and not by_layer:
        raise FedgraftError("E-ALGORITHM-FREEZE", "fedalign: freeze works layer by layer", "set by_layer=true")
    if by_layer and align == "random":
        raise FedgraftError(
            "E-ALGORITHM-BY-LAYER",
            "fedalign: by_layer=true has no control experiment (align='random')",
            "choose another value of align, or by_layer=false",
        )
    fewest = 2 * keep + 2  # SVCCA has no meaning on fewer
    if probe is not None or null_correction:  # the level of unrelated data is that of one number of images
        fewest = probe or USUAL_PROBE
    probe = probe or USUAL_PROBE
    null = 0.0
    if null_correction:
        null = null_level(probe, keep, top)
    names = tuple(f"alignment:{layer}" for layer in layers)

    def scores(answers: Answers) -> Tensor:
        """Return the clients' alignment scores, (m, layers)."""
        rows = []
        for scalars in answers.scalars:
            rows.append([scalars[name] for name in names])
        return torch.tensor(rows, dtype=torch.float64)

    def weigh(answers: Answers, scores: Tensor) -> Tensor:
        """Return the weights (m,) that follow from these scores, (m, layers) or (m, 1)."""
        return alignment_weights(answers.examples, scores, gamma, null, cap).weights

    def weights(answers: Answers) -> Tensor:
        """Return the clients' weights (m,) from their examples and alignment scores."""
        aligned = weigh(answers, scores(answers))
        if align != "random":
            return aligned
        return random_weights_like(aligned, torch_stream(seed, "random_weights", answers.round))

    def own(examples: float, scalars: Mapping[str, float], largest: float) -> float:
        """Return the weight of one client, which it computes itself under secure aggregation, relative to `largest`."""
        own_scores = torch.tensor([[scalars[name] for name in names]], dtype=torch.float64)
        return float(counted_examples(torch.tensor([examples]), own_scores, gamma, null, cap)) / largest

    options = {
        "layers": layers,
        "keep": keep,
        "top": top,
        "probe": probe,
        "fewest": min(fewest, probe),
        "sketch": sketch,
    }
    weighting = Weighting(
        f"alignment:{align}",
        weights,
        needs=frozenset({Capability.CLIENT_WEIGHTS, Capability.TRAINED_BODY}),
        options=options,
        instead="algorithm.align='client'",
    )
    if align == "server":
        weighting = replace(weighting, server_scored=names)
    else:
        weighting = replace(weighting, wants=(Observe("alignment", names, options=options, needs_probe=True),))
    if align == "client":
        weighting = replace(weighting, own=own)
    aggregator = mean()
    if by_layer:
        aggregator = layered(scores, weigh, freeze)
    return vary(fedavg(**slots), name="fedalign", weighting=weighting, aggregate=aggregator)


@in_range
def fedawa(steps: Number = 1, rate: NotNegative = 1.0, **slots: Unpack[Slots]) -> Algorithm:
    """Shi et al. 2025: weights that align the client updates with their sum; no steps is FedAvg.

    Args:
        steps: gradient steps on the weights
        rate: step size on the weights
    """

    def weights(answers: Answers) -> Tensor:
        return aligned_weights(torch.stack(list(answers.updates)), answers.examples, steps, rate)

    return vary(fedavg(**slots), name="fedawa", weighting=Weighting("client_vectors", weights))


@in_range
def fedties(share: Share = 0.2, **slots: Unpack[Slots]) -> Algorithm:
    """Yadav et al. 2023 as aggregation: largest entries, one sign per coordinate, mean of the entries that agree.

    Args:
        share: share of the largest entries that is kept
    """
    return vary(fedavg(**slots), name="fedties", aggregate=ties_aggregator(share))


@in_range
def feddare(drop: Rest = 0.5, seed: int = 0, **slots: Unpack[Slots]) -> Algorithm:
    """Yu et al. 2024 as aggregation: entries dropped at random, the rest scaled up; drop 0 is FedAvg.

    Args:
        drop: share of the entries that is dropped
    """
    return vary(fedavg(**slots), name="feddare", aggregate=dare_aggregator(drop, seed))


@in_range
def fedfisher(samples: Count = 32, **slots: Unpack[Slots]) -> Algorithm:
    """Matena and Raffel 2022 as aggregation: coordinates are weighted by each client's Fisher information.

    Args:
        samples: images of a client's Fisher information
    """
    return vary(fedavg(**slots), name="fedfisher", aggregate=fisher_aggregator(samples))


@in_range
def feddisco(a: NotNegative = 0.5, b: NotNegative = 0.1, **slots: Unpack[Slots]) -> Algorithm:
    """Ye et al. 2023: a client whose classes are far from evenly spread counts less; a=0, b=0 is FedAvg.

    The weight is max(0, p_k - a d_k + b): p_k the share of the examples, d_k the distance between the client's class
    frequencies and equal ones. If no client has any weight left, all count by their examples.

    Args:
        a: how much the distance of the class frequencies takes off
        b: added to every client's share
    """

    def weights(answers: Answers) -> Tensor:
        """Return the clients' weights (m,) from their examples and the distances they report."""
        distances = torch.tensor([scalars["discrepancy"] for scalars in answers.scalars], dtype=torch.float64)
        return discrepancy_weights(answers.examples, distances, a, b)

    observation = Observe("discrepancy", ("discrepancy",))
    weighting = Weighting("discrepancy", weights, wants=(observation,))
    return vary(fedavg(**slots), name="feddisco", weighting=weighting)
