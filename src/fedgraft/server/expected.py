"""What replies of each kind look like when nobody lies: counts, evaluations, masks. Training's is in `collect.py`."""

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

SHARE, LOSS = Range(0.0, 1.0), Range(0.0)
_NUMBER = Range(0.0, MOST_EXAMPLES, whole=True)


def asked(requests: Sequence[Request], example_counts: ExampleCounts | None = None, **more: Any) -> Expectation:
    """Replies to these orders, which are alike but for the client."""
    first, clients = requests[0], frozenset(request.client for request in requests)
    return Expectation(first.run, first.round, clients, first.space, example_counts=example_counts, **more)


def replies_to(
    exchange: Callable[[Sequence[Request]], Iterable[Any]], requests: Sequence[Request], expected: Expectation
) -> list[Response]:
    """Carry the orders out; the good replies in client order. Who did not answer, or lied, is named in the log."""
    accepted, rejections = validate_responses(exchange(requests), expected)
    name(rejections, requests[0].action)
    return [one.response for one in accepted]


def name(rejections: Iterable[Rejection], what: str) -> None:
    """Say in the log who is left out of what, and why."""
    for one in rejections:
        log.warning("client %d is left out of %s: %s", one.client, what, one.reason)


def counts(
    requests: Sequence[Request],
    models: int,
    example_counts: ExampleCounts,
    split: str,
    sums: Mapping[str, Field] | None = None,
    lie: Callable[[Response], str] = lambda response: "",
) -> Expectation:
    """Counts of so many models, (models, 4): right, among the first five, sum of losses, images; further sums with it.

    The number of images is the same for all models, and in every reply about the same split.
    """

    def claims(response: Response) -> dict[str, float]:
        return {"examples": response.examples, f"{split} images": float(response.sums["counts"][0, 3])}

    def check(response: Response) -> str:
        return lie(response) if plausible(response.sums["counts"]) else "counted what cannot be"

    fields = {"counts": Field((models, 4), torch.float64), **(sums or {})}
    return asked(requests, example_counts, sums=fields, claims=claims, check=check)


def plausible(counts: Tensor) -> bool:
    """Whether counts (n, 4) can be: whole, in order, about the same images; a loss that is not negative."""
    right, near, loss, images = counts.unbind(1)
    ordered = (right >= 0) & (right <= near) & (near <= images) & (loss >= 0) & (images <= MOST_EXAMPLES)
    whole = (counts[:, [0, 1, 3]] % 1 == 0).all()
    return bool(ordered.all() and whole and (images == images[0]).all())


def counted(responses: Sequence[Response], example_counts: ExampleCounts, split: str) -> dict[int, float]:
    """The weight of each client's counts: 1, or less where it claims far more images than the others have."""
    images = {response.client: float(response.sums["counts"][0, 3]) for response in responses}
    return {k: example_counts.counted(n, f"{split} images") / n if n else 1.0 for k, n in images.items()}


def evaluation(
    requests: Sequence[Request],
    example_counts: ExampleCounts,
    finetuned: bool,
    sums: Mapping[str, Field] | None = None,
    lie: Callable[[Response], str] = lambda response: "",
) -> Expectation:
    """What a client finds on its own test images, before and after fine-tuning."""
    wanted = {"loss": LOSS, "accuracy": SHARE, "count": _NUMBER}
    if finetuned:
        wanted |= {"finetuned_loss": LOSS, "finetuned_accuracy": SHARE}

    def claims(response: Response) -> dict[str, float]:
        return {"examples": response.examples, "test images": response.metrics["count"]}

    return asked(requests, example_counts, metrics=wanted, claims=claims, sums=sums or {}, check=lie)


def mask(requests: Sequence[Request], example_counts: ExampleCounts, coordinates: int) -> Expectation:
    """A client's own mask over so many coordinates, eight in a byte; what is beyond the last one is empty."""
    fields = {"mask": Field((-(-coordinates // 8),), torch.uint8)}

    def check(response: Response) -> str:
        spare = (1 << (-coordinates % 8)) - 1
        return "marks coordinates that are not there" if int(response.evidence["mask"][-1]) & spare else ""

    return asked(requests, example_counts, evidence=fields, check=check)


def same_share(responses: Sequence[Response]) -> list[Response]:
    """Of masks those that mark as many coordinates as most do: everybody was asked for the same share."""
    marked = {r.client: int(np.unpackbits(r.evidence["mask"].numpy()).sum()) for r in responses}
    usual = statistics.mode(marked.values()) if marked else 0
    name(
        [Rejection(k, f"marks {n} coordinates and {usual} were asked for") for k, n in marked.items() if n != usual],
        "the masks",
    )
    return [response for response in responses if marked[response.client] == usual]
