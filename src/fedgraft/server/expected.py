"""Expectations of valid responses by kind: counts, evaluations, masks. That of training is in `collect.py`."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedgraft.core.messages import Request, Response
from fedgraft.server.example_counts import ExampleCounts
from fedgraft.server.validate import MOST_EXAMPLES, Expectation, Field, Range, Rejection, validate_responses

log = logging.getLogger("fedgraft")

SHARE = Range(0.0, 1.0)
LOSS = Range(0.0)
_WHOLE_NUMBER = Range(0.0, MOST_EXAMPLES, whole=True)


def _nothing_implausible(response: Response) -> str:
    return ""


def expect_responses(
    requests: Sequence[Request], example_counts: ExampleCounts | None = None, **fields: Any
) -> Expectation:
    """Return the expectation of responses to these requests, which are alike but for the client.

    `fields` are further fields of `Expectation`.
    """
    first = requests[0]
    clients = frozenset(request.client for request in requests)
    return Expectation(first.run, first.round, clients, first.space, example_counts=example_counts, **fields)


def valid_responses(
    exchange: Callable[[Sequence[Request]], Iterable[Any]], requests: Sequence[Request], expected: Expectation
) -> list[Response]:
    """Exchange the requests and return the valid responses in client order; log who was silent or invalid."""
    accepted, rejections = validate_responses(exchange(requests), expected)
    log_rejections(rejections, requests[0].action)
    return [item.response for item in accepted]


def log_rejections(rejections: Iterable[Rejection], purpose: str) -> None:
    """Log which clients are left out of `purpose`, and why."""
    for rejection in rejections:
        log.warning("client %d is left out of %s: %s", rejection.client, purpose, rejection.reason)


def expected_counts(
    requests: Sequence[Request],
    models: int,
    example_counts: ExampleCounts,
    split: str,
    sums: Mapping[str, Field] | None = None,
    implausible: Callable[[Response], str] = _nothing_implausible,
) -> Expectation:
    """Return the expectation of counts (models, 4): right, among the first five, sum of losses, images.

    Args:
        models: number of models that the requests carry.
        split: the images counted on, "validation" or "test"; their number must be the same for all models and in every
            response of a client about this split.
        sums: further sums that come with the counts.
        implausible: returns what cannot be true of a response, or "".
    """

    def claims(response: Response) -> dict[str, float]:
        """Return the numbers of images that a response claims, by the names under which they must stay the same."""
        images = float(response.sums["counts"][0, 3])
        return {"examples": response.examples, f"{split} images": images}

    def check(response: Response) -> str:
        """Return what is wrong with the counts or the further sums, or ""."""
        if not are_plausible_counts(response.sums["counts"]):
            return "inconsistent counts"
        return implausible(response)

    fields = {"counts": Field((models, 4), torch.float64), **(sums or {})}
    return expect_responses(requests, example_counts, sums=fields, claims=claims, check=check)


def are_plausible_counts(counts: Tensor) -> bool:
    """Return whether counts (n, 4) are possible: whole, ordered, about the same images, with losses from 0."""
    right, among_five, loss, images = counts.unbind(1)
    ordered = (right >= 0) & (right <= among_five) & (among_five <= images) & (loss >= 0) & (images <= MOST_EXAMPLES)
    whole = (counts[:, [0, 1, 3]] % 1 == 0).all()
    return bool(ordered.all() and whole and (images == images[0]).all())


def count_weights(responses: Sequence[Response], example_counts: ExampleCounts, split: str) -> dict[int, float]:
    """Return the weight of each client's counts: 1, or less where it claims far more images than the others have.

    `split` names the images that were counted.
    """
    weights = {}
    for response in responses:
        images = float(response.sums["counts"][0, 3])
        weights[response.client] = 1.0
        if images:
            weights[response.client] = example_counts.counted(images, f"{split} images") / images
    return weights


def expected_evaluation(
    requests: Sequence[Request],
    example_counts: ExampleCounts,
    finetuned: bool,
    sums: Mapping[str, Field] | None = None,
    implausible: Callable[[Response], str] = _nothing_implausible,
    with_loss: bool = True,
) -> Expectation:
    """Return the expectation of an evaluation on a client's own test images.

    With `finetuned` the metrics after fine-tuning must come too. `sums` are the sums of `metrics.scores` that come with
    the metrics; `implausible` returns what cannot be true of a response, or "". Without `with_loss` (under secure
    aggregation) clients show right answers only.
    """
    metrics = {"accuracy": SHARE, "count": _WHOLE_NUMBER}
    if with_loss:
        metrics["loss"] = LOSS
    if finetuned:
        metrics["finetuned_accuracy"] = SHARE
        if with_loss:
            metrics["finetuned_loss"] = LOSS

    def claims(response: Response) -> dict[str, float]:
        """Return the numbers of images that a response claims, by the names under which they must stay the same."""
        return {"examples": response.examples, "test images": response.metrics["count"]}

    return expect_responses(
        requests, example_counts, metrics=metrics, claims=claims, sums=sums or {}, check=implausible
    )


def expected_mask(requests: Sequence[Request], example_counts: ExampleCounts, coordinates: int) -> Expectation:
    """Return the expectation of a client's own mask: one bit per coordinate, packed into bytes; spare bits are 0."""
    mask_bytes = -(-coordinates // 8)
    spare_bits = (1 << (-coordinates % 8)) - 1

    def check(response: Response) -> str:
        """Return a sentence if a bit beyond the last coordinate is set, else ""."""
        if int(response.evidence["mask"][-1]) & spare_bits:
            return "marks coordinates that are not there"
        return ""

    fields = {"mask": Field((mask_bytes,), torch.uint8)}
    return expect_responses(requests, example_counts, evidence=fields, check=check)


def masks_of_usual_share(responses: Sequence[Response]) -> list[Response]:
    """Return the responses whose mask marks as many coordinates as most do; log the others.

    All clients were asked for the same density, so another number of bits is wrong.
    """
    marked: dict[int, int] = {}
    for response in responses:
        marked[response.client] = int(np.unpackbits(response.evidence["mask"].numpy()).sum())
    if not marked:
        return []
    usual = statistics.mode(marked.values())
    rejections = []
    for client, count in marked.items():
        if count != usual:
            rejections.append(Rejection(client, f"marks {count} coordinates and {usual} were asked for"))
    log_rejections(rejections, "the masks")
    return [response for response in responses if marked[response.client] == usual]
