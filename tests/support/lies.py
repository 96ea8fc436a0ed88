"""What a hostile or broken node may answer, by kind of order: each lie takes a true reply and gives what is sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from fedgraft.core.messages import Request, Response, pack

Lie = Callable[[Response], Any]
HUGE, INF, NAN = 3e38, float("inf"), float("nan")


def put(group: str, name: str, change: Callable[[Any], Any]) -> Lie:
    """One entry of a group changed."""
    return lambda r: replace(r, **{group: {**getattr(r, group), name: change(getattr(r, group)[name])}})  # type: ignore[arg-type]


def values(change: Callable[[Any], Any]) -> Lie:
    """The update's numbers changed."""

    def lie(r: Response) -> Response:
        assert r.update is not None
        return replace(r, update=replace(r.update, arrays={"values": change(r.update.arrays["values"].clone())}))

    return lie


def at(value: float, *index: int) -> Callable[[Any], Any]:
    """One number of a tensor replaced."""

    def change(tensor: Any) -> Any:
        tensor = tensor.clone()
        tensor[index or 0] = value
        return tensor

    return change


ANY: Mapping[str, Lie] = {
    "nothing": lambda r: b"",
    "noise": lambda r: bytes(range(256)) * 40,
    "cut short": lambda r: pack(r)[:-5],
    "too long": lambda r: pack(r) + bytes(5_000_000),
    "not even bytes": lambda r: 7,
    "an order": lambda r: pack(Request(r.run, r.round, r.client, "train")),
    "another's name": lambda r: replace(r, client=0),
    "another run": lambda r: replace(r, run="other"),
    "another round": lambda r: replace(r, round=r.round + 1),
    "another space": lambda r: replace(r, space="other"),
    "a text for examples": lambda r: replace(r, examples="many"),
    "no examples": lambda r: replace(r, examples=0),
    "2^39 examples": lambda r: replace(r, examples=1 << 39),
    "one example more": lambda r: replace(r, examples=r.examples + 1),
    "sums not asked for": lambda r: replace(r, sums={**r.sums, "more": torch.ones(3)}),
    "evidence not asked for": lambda r: replace(r, evidence={**r.evidence, "more": torch.ones(3)}),
    "scalars not asked for": lambda r: replace(r, scalars={**r.scalars, "more": 1.0}),
    "endless metrics": lambda r: replace(r, metrics={str(i): 1.0 for i in range(300)}),
}
LIES: Mapping[str, Mapping[str, Lie]] = {
    "train": {
        "no update": lambda r: replace(r, update=None),
        "one NaN": values(at(NAN)),
        "one infinity": values(at(INF)),
        "one 3e38": values(at(HUGE)),
        "all 3e38": values(lambda v: v * 0 + HUGE),
        "all -1e30": values(lambda v: v * 0 - 1e30),
        "a thousand times too long": values(lambda v: v * 1000),
        "doubles": values(lambda v: v.double()),
        "a shorter one": values(lambda v: v[:-1]),
    },
    "scaffold": {
        "a huge variate": put("sums", "control", at(HUGE)),
        "a long variate": put("sums", "control", lambda v: v * 1e6 + 1e3),
        "no variate": lambda r: replace(r, sums={}),
    },
    "fednova": {
        "endless steps": put("scalars", "tau", lambda v: 1e300),
        "too many steps": put("scalars", "tau", lambda v: v * 2),
        "no steps": put("scalars", "tau", lambda v: 0.0),
        "negative steps": put("scalars", "tau", lambda v: -v),
    },
    "clip": {
        "an indicator of 1e9": put("scalars", "within", lambda v: 1e9),
        "one of -1": put("scalars", "within", lambda v: -1.0),
        "one of a half": put("scalars", "within", lambda v: 0.5),
        "one of NaN": put("scalars", "within", lambda v: NAN),
    },
    "representation": {
        "huge features": put("evidence", "representation", lambda v: v * 0 + 1e17),
        "NaN features": put("evidence", "representation", at(NAN)),
    },
    "count": {
        "more right than images": put("sums", "counts", at(1e6, 0, 0)),
        "a negative loss": put("sums", "counts", at(-1.0, 0, 2)),
        "2^39 images": put("sums", "counts", lambda v: v * 0 + torch.tensor([0.0, 0.0, 0.0, 2.0**39]).double()),
        "half an image": put("sums", "counts", at(0.5, 0, 0)),
        "two models": put("sums", "counts", lambda v: v.expand(2, 4)),
        "floats": put("sums", "counts", lambda v: v.float()),
    },
    "evaluate": {
        "an accuracy of 2": put("metrics", "accuracy", lambda v: 2.0),
        "a negative loss": put("metrics", "loss", lambda v: -1.0),
        "no accuracy": lambda r: replace(r, metrics={"loss": 1.0, "count": 10.0}),
        "2^39 images": put("metrics", "count", lambda v: 2.0**39),
        "a NaN": put("metrics", "loss", lambda v: NAN),
    },
    "statistics": {
        "another count": put("sums", "gram", at(1e6, -1, -1)),
        "negative energy": put("sums", "gram", at(-1.0, 0, 0)),
        "no symmetry": put("sums", "gram", at(1e3, 0, 1)),
        "huge": put("sums", "gram", lambda v: v * 1e30),
        "other labels": put("sums", "cross", at(-5.0, -1, 0)),
    },
    "head_gradient": {
        "another count": put("sums", "count", lambda v: v * 9),
        "a negative loss": put("sums", "loss", lambda v: -v - 1),
        "huge": put("sums", "gradient", lambda v: v * 0 + 1e30),
    },
    "fisher_scores": {
        "negative": put("sums", "scores", at(-1.0)),
        "more samples than examples": put("sums", "scores", at(1e6, -1)),
        "huge": put("sums", "scores", lambda v: v * 0 + HUGE),
    },
    "own_mask": {
        "everything": put("evidence", "mask", lambda v: v * 0 + 255),
        "nothing marked": put("evidence", "mask", lambda v: v * 0),
        "too short": put("evidence", "mask", lambda v: v[:-1]),
        "no bits": put("evidence", "mask", lambda v: v.float()),
    },
}
"""By kind of reply; `ANY` fits them all. Over 40 without those, over 100 with them."""


class Lying:
    """An engine whose one client lies, or with no lie never answers; orders of other actions it answers truly."""

    def __init__(self, engine: Any, client: int, lie: Lie | None, after: int = 0) -> None:
        self.engine, self.client, self.lie, self.left = engine, client, lie, after

    @property
    def memory(self) -> Any:
        """What clients keep."""
        return self.engine.memory

    def exchange(self, requests: Sequence[Request]) -> Iterator[Any]:
        """What comes back; the liar is honest `after` times first."""
        self.left -= 1
        for response in self.engine.exchange(requests):
            if (response[0] if isinstance(response, tuple) else response.client) != self.client or self.left >= 0:
                yield response
            elif self.lie is None:
                yield self.client, "it is silent"
            else:
                yield self.client, self.lie(response)
