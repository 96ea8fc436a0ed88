"""What replies of each kind look like when nobody lies: counts, evaluations, masks. Training's is in `collect.py`."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedgraft.core.messages import Order, Reply
from fedgraft.server.example_counts import Claims
from fedgraft.server.validate import MOST_EXAMPLES, Expectation, Field, Range, Rejection, validate_replies

log = logging.getLogger("fedgraft")

SHARE, LOSS = Range(0.0, 1.0), Range(0.0)
_NUMBER = Range(0.0, MOST_EXAMPLES, whole=True)


def asked(orders: Sequence[Order], claims: Claims | None = None, **more: Any) -> Expectation:
    """Replies to these orders, which are alike but for the client."""
    first, clients = orders[0], frozenset(order.client for order in orders)
    return Expectation(first.run, first.round, clients, first.space, claims=claims, **more)


def replies_to(
    exchange: Callable[[Sequence[Order]], Iterable[Any]], orders: Sequence[Order], expected: Expectation
) -> list[Reply]:
    """Carry the orders out; the good replies in client order. Who did not answer, or lied, is named in the log."""
    accepted, rejections = validate_replies(exchange(orders), expected)
    name(rejections, orders[0].action)
    return [one.reply for one in accepted]


def name(rejections: Iterable[Rejection], what: str) -> None:
    """Say in the log who is left out of what, and why."""
    for one in rejections:
        log.warning("client %d is left out of %s: %s", one.client, what, one.reason)


def counts(
    orders: Sequence[Order],
    models: int,
    claims: Claims,
    split: str,
    sums: Mapping[str, Field] | None = None,
    lie: Callable[[Reply], str] = lambda reply: "",
) -> Expectation:
    """Counts of so many models, (models, 4): right, among the first five, sum of losses, images; further sums with it.

    The number of images is the same for all models, and in every reply about the same split.
    """

    def told(reply: Reply) -> dict[str, float]:
        return {"examples": reply.examples, f"{split} images": float(reply.sums["counts"][0, 3])}

    def check(reply: Reply) -> str:
        return lie(reply) if plausible(reply.sums["counts"]) else "counted what cannot be"

    fields = {"counts": Field((models, 4), torch.float64), **(sums or {})}
    return asked(orders, claims, sums=fields, told=told, check=check)


def plausible(counts: Tensor) -> bool:
    """Whether counts (n, 4) can be: whole, in order, about the same images; a loss that is not negative."""
    right, near, loss, images = counts.unbind(1)
    ordered = (right >= 0) & (right <= near) & (near <= images) & (loss >= 0) & (images <= MOST_EXAMPLES)
    whole = (counts[:, [0, 1, 3]] % 1 == 0).all()
    return bool(ordered.all() and whole and (images == images[0]).all())


def counted(replies: Sequence[Reply], claims: Claims, split: str) -> dict[int, float]:
    """The weight of each client's counts: 1, or less where it claims far more images than the others have."""
    images = {reply.client: float(reply.sums["counts"][0, 3]) for reply in replies}
    return {k: claims.counted(n, f"{split} images") / n if n else 1.0 for k, n in images.items()}


def evaluation(
    orders: Sequence[Order],
    claims: Claims,
    finetuned: bool,
    sums: Mapping[str, Field] | None = None,
    lie: Callable[[Reply], str] = lambda reply: "",
) -> Expectation:
    """What a client finds on its own test images, before and after fine-tuning."""
    wanted = {"loss": LOSS, "accuracy": SHARE, "count": _NUMBER}
    if finetuned:
        wanted |= {"finetuned_loss": LOSS, "finetuned_accuracy": SHARE}

    def told(reply: Reply) -> dict[str, float]:
        return {"examples": reply.examples, "test images": reply.metrics["count"]}

    return asked(orders, claims, metrics=wanted, told=told, sums=sums or {}, check=lie)


def mask(orders: Sequence[Order], claims: Claims, coordinates: int) -> Expectation:
    """A client's own mask over so many coordinates, eight in a byte; what is beyond the last one is empty."""
    fields = {"mask": Field((-(-coordinates // 8),), torch.uint8)}

    def check(reply: Reply) -> str:
        spare = (1 << (-coordinates % 8)) - 1
        return "marks coordinates that are not there" if int(reply.evidence["mask"][-1]) & spare else ""

    return asked(orders, claims, evidence=fields, check=check)


def same_share(replies: Sequence[Reply]) -> list[Reply]:
    """Of masks those that mark as many coordinates as most do: everybody was asked for the same share."""
    marked = {r.client: int(np.unpackbits(r.evidence["mask"].numpy()).sum()) for r in replies}
    usual = statistics.mode(marked.values()) if marked else 0
    name([Rejection(k, f"marks {n} coordinates and {usual} were asked for") for k, n in marked.items() if n != usual],
         "the masks")  # fmt: skip
    return [reply for reply in replies if marked[reply.client] == usual]
