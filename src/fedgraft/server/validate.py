"""The one way in for replies of every kind: each field is held against what was asked for and what was said before.

An offender is dropped and named; nothing it sent reaches the sum, so the round's result equals, bit for bit, the
round without it. A reply is never repaired: clipping or replacing values would let an offender steer.
`server/expected.py` says what replies of each kind look like.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedgraft.aggregate.codecs import BadPayload, Codec, body_bytes, check_tensor, decode, is_finite
from fedgraft.core.messages import HEADER_BYTES, BadMessage, Payload, Response, unpack
from fedgraft.core.state import Federation, ServerState
from fedgraft.server.example_counts import ExampleCounts

MOST_METRICS = 256
MOST_EXAMPLES = 1 << 40
LARGEST = 1e18
"""Largest absolute value of a number in a reply: the square of a larger one is no float32, so no layer could use it."""

Arrival = Response | tuple[int, Response | bytes | str]
"""A reply, or (the client it was received from, the reply, its bytes, or a sentence why there is none)."""


@dataclass(frozen=True)
class Field:
    """Shape, dtype and largest absolute value of one tensor that was asked for."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    limit: float = LARGEST


@dataclass(frozen=True)
class Range:
    """What a number may be."""

    least: float = -LARGEST
    most: float = LARGEST
    whole: bool = False

    def __contains__(self, value: float) -> bool:
        return self.least <= value <= self.most and (not self.whole or value == int(value))


@dataclass(frozen=True)
class Expectation:
    """What a well-formed reply of this round looks like."""

    run: str
    round: int
    clients: frozenset[int]
    """Who was asked."""
    space: str = ""
    length: int = 0
    """Coordinates of the update; the most of any client where they differ."""
    lengths: Mapping[int, int] = field(default_factory=dict)
    """Coordinates by client, where clients move different numbers of them."""
    codec: Codec | None = None
    """How the update is encoded; None: no update was asked for, and none may come."""
    sums: Mapping[str, Field] = field(default_factory=dict)
    scalars: Collection[str] = ()
    evidence: Mapping[str, Field] = field(default_factory=dict)
    norm_bound: float | None = None
    """Largest L2 norm of the decoded update."""
    max_examples: int | None = None
    """0: the number of examples is secret (it travels inside a secure sum) and must be left at 0."""
    ranges: Mapping[str, Range] = field(default_factory=dict)
    """What the scalars may be; a plain finite number where nothing is said."""
    metrics: Mapping[str, Range] | None = None
    """Exactly these numbers for the record, within their ranges; None: any, because nothing uses them."""
    example_counts: ExampleCounts | None = None
    """What clients have said of themselves so far."""
    told: Callable[[Response], Mapping[str, float]] = lambda response: {"examples": response.examples}
    """What a reply says of its sender that must stay as it was first said."""
    check: Callable[[Response], str] = lambda response: ""
    """What else is wrong with a reply whose fields are well formed; empty: nothing."""

    @property
    def limit(self) -> int:
        """Most bytes a well-formed reply can have; a longer one is refused before it is parsed."""
        tensors = [*self.sums.values(), *self.evidence.values()]
        body = sum(math.prod(f.shape) * f.dtype.itemsize for f in tensors)
        return body + HEADER_BYTES + (body_bytes(self.codec, self.length) if self.codec else 0)


@dataclass(frozen=True)
class Accepted:
    """A reply that passed, with its update decoded once."""

    response: Response
    update: Tensor | None
    """float32 (length,)."""
    norm: float
    """L2 norm of the update; 0 when there is none."""


@dataclass(frozen=True)
class Rejection:
    """A reply that was dropped: whose, and why."""

    client: int
    """The sender; -1 when the transport does not know it and the reply does not say."""
    reason: str
    silent: bool = False
    """Nothing came at all, which is no lie."""


class Refused(Exception):
    """The reason why one reply is dropped; it does not leave `validate_replies`."""


def validate_responses(responses: Iterable[Arrival], expected: Expectation) -> tuple[list[Accepted], list[Rejection]]:
    """Well-formed replies in the order of client ids, and who was dropped for what.

    The first well-formed reply of a client counts; a further one is dropped and named.
    """
    accepted: dict[int, Accepted] = {}
    rejections: list[Rejection] = []
    for arrival in responses:
        sender, response = arrival if isinstance(arrival, tuple) else (None, arrival)
        if isinstance(response, str):
            rejections.append(Rejection(-1 if sender is None else sender, response, silent=True))
            continue
        try:
            passed = _judge(sender, response, expected)
            if passed.response.client in accepted:
                raise Refused("answered more than once")
            accepted[passed.response.client] = passed
            if expected.example_counts is not None:  # only now: what a dropped reply says binds nobody
                expected.example_counts.note(passed.response.client, expected.told(passed.response))
        except (Refused, BadPayload, BadMessage) as error:
            rejections.append(Rejection(_whose(sender, response), str(error)[:200]))
    return [accepted[client] for client in sorted(accepted)], rejections


def _whose(sender: int | None, response: Response | bytes) -> int:
    claimed = response.client if isinstance(response, Response) else -1
    return sender if sender is not None else claimed if type(claimed) is int else -1


def _judge(sender: int | None, response: Response | bytes, expected: Expectation) -> Accepted:
    if not isinstance(response, Response | bytes | bytearray | memoryview):
        raise Refused("is no message at all")
    if not isinstance(response, Response):
        response = unpack(Response, response, limit=expected.limit)
    _check_envelope(sender, response, expected)
    _check_numbers(response, expected)
    _check_fields(response.sums, expected.sums, "sums")
    _check_fields(response.evidence, expected.evidence, "evidence")
    update = _decode_change(response.update, expected, expected.lengths.get(response.client, expected.length))
    norm = 0.0 if update is None else _norm(update)
    if expected.norm_bound is not None and norm > expected.norm_bound:
        raise Refused(f"update has norm {norm:.4g}, over the bound {expected.norm_bound:.4g}")
    if expected.example_counts is not None and (
        lie := expected.example_counts.contradiction(response.client, expected.told(response))
    ):
        raise Refused(lie)
    if wrong := expected.check(response):
        raise Refused(wrong)
    return Accepted(response, update, norm)


def _norm(update: Tensor) -> float:
    """The L2 norm in float64, piece by piece: a long update is never held twice."""
    room = torch.empty(min(len(update), 1 << 20), dtype=torch.float64)  # one for all pieces
    pieces = update.split(1 << 20)
    return math.hypot(*(float(torch.linalg.vector_norm(room[: len(piece)].copy_(piece))) for piece in pieces))


def _check_envelope(sender: int | None, response: Response, expected: Expectation) -> None:
    """Run, round, client and space are those of the order."""
    if type(response.client) is not int or response.client not in expected.clients:
        raise Refused(f"client {str(response.client)[:40]} was not asked")
    if sender is not None and sender != response.client:
        raise Refused(f"came from client {sender} and claims to be client {response.client}")
    if type(response.run) is not str or response.run != expected.run:
        raise Refused("answers another run")
    if type(response.round) is not int or response.round != expected.round:
        raise Refused(f"answers round {str(response.round)[:40]}, not {expected.round}")
    if type(response.space) is not str or response.space != expected.space:
        raise Refused("was made on another edit space (the mask digest differs)")


def _check_numbers(response: Response, expected: Expectation) -> None:
    most = MOST_EXAMPLES if expected.max_examples is None else expected.max_examples
    if type(response.examples) is not int or not min(1, most) <= response.examples <= most:
        raise Refused(f"claims {str(response.examples)[:40]} examples where {min(1, most)} to {most} are allowed")
    for group, numbers in (("scalars", response.scalars), ("metrics", response.metrics)):
        if not isinstance(numbers, Mapping) or not all(type(name) is str for name in numbers):
            raise Refused(f"{group} are not named numbers")
        if not all(_is_number(value) for value in numbers.values()):
            raise Refused(f"{group} hold something that is not a finite number")
    if set(response.scalars) != set(expected.scalars):
        raise Refused(f"scalars are not {sorted(expected.scalars)}")
    if len(response.metrics) > MOST_METRICS:
        raise Refused(f"has {len(response.metrics)} metrics; {MOST_METRICS} are allowed")
    if expected.metrics is not None and set(response.metrics) != set(expected.metrics):
        raise Refused(f"metrics are not {sorted(expected.metrics)}")
    for group, numbers, ranges in (
        ("scalar", response.scalars, expected.ranges),
        ("metric", response.metrics, expected.metrics or {}),
    ):
        for name, allowed in ranges.items():
            if numbers[name] not in allowed:
                raise Refused(f"{group} {name!r} is {numbers[name]:.4g}, which cannot be")


def _is_number(value: object) -> bool:
    return (type(value) is float and math.isfinite(value)) or (type(value) is int and abs(value) < 1 << 63)


def _check_fields(tensors: Mapping[str, Tensor], fields: Mapping[str, Field], group: str) -> None:
    """Exactly the named tensors, each of its dtype and shape, all finite."""
    if not isinstance(tensors, Mapping) or set(tensors) != set(fields):
        raise Refused(f"{group} are not {sorted(fields)}")
    for name, wanted in fields.items():
        check_tensor(tensors[name], wanted.dtype, wanted.shape, f"{group}/{name}")
        if not is_finite(tensors[name]):
            raise Refused(f"{group}/{name} is not finite")
        if largest(tensors[name]) > wanted.limit:
            raise Refused(f"{group}/{name} has numbers over {wanted.limit:g}")


def largest(tensor: Tensor) -> float:
    """The largest absolute value of a tensor, 0 of an empty one; without a copy of it."""
    if not tensor.numel():
        return 0.0
    low, high = tensor.aminmax()
    return max(-float(low), float(high))


def _decode_change(update: Payload | None, expected: Expectation, length: int) -> Tensor | None:
    if expected.codec is None:
        if update is not None:
            raise Refused("carries an update that was not asked for")
        return None
    if not isinstance(update, Payload):
        raise Refused("carries no update")
    decoded = decode(update, expected.codec, length)
    if largest(decoded) > LARGEST:
        raise Refused(f"update has numbers over {LARGEST:g}, which no network can use")
    return decoded


HARMLESS = 1e-3
"""No update shorter than this share of the model is refused: where most have converged, the usual is nothing."""


def far_off(norms: Mapping[int, float], factor: float, usual: float = 0.0, least: float = 0.0) -> dict[int, float]:
    """Of these norms by client those over `factor` times the usual one, or the median here if that is larger.

    With fewer than three here nobody is the middle, and only what was usual before counts. Nothing usual: no bound.
    """
    middle = statistics.median(norms.values()) if len(norms) > 2 else 0.0
    bound = factor * max(usual, middle)
    return {client: norm for client, norm in norms.items() if bound > 0 and norm > max(bound, least)}


def without_outliers(
    accepted: Sequence[Accepted],
    federation: Federation,
    state: ServerState,
    learning_rate: float,
    steps: Callable[[Response], int] = lambda response: 1,
) -> tuple[list[Accepted], list[Rejection]]:
    """The replies whose update, and whose auxiliary vectors, are not far longer than is usual.

    Usual is the median of the past rounds in units of the learning rate, or this round's median if that is larger.
    Who takes more steps than most, because it has more images, may come further by as much.
    """
    factor = federation.norm_factor
    if not factor:
        return list(accepted), []
    usual = learning_rate * statistics.median(state.norms) if state.norms else 0.0
    least = HARMLESS * _norm(state.vector)
    taken = {a.response.client: steps(a.response) for a in accepted}
    middle = statistics.median(taken.values()) if taken else 1
    norms = {a.response.client: a.norm / max(1.0, taken[a.response.client] / middle) for a in accepted}
    far = far_off(norms, factor, usual, least)
    reasons = {k: f"update has norm {norm:.4g}, over {factor:g} times the usual" for k, norm in far.items()}
    for name in accepted[0].response.sums if accepted else ():
        norms = {a.response.client: float(torch.linalg.vector_norm(a.response.sums[name].double())) for a in accepted}
        for k, norm in far_off(norms, factor, least=least).items():
            reasons.setdefault(k, f"sums/{name} has norm {norm:.4g}, over {factor:g} times the others'")
    kept = [a for a in accepted if a.response.client not in reasons]
    return kept, [Rejection(client, reason) for client, reason in sorted(reasons.items())]
