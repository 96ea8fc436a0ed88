"""Validation of responses: every field is checked against what was requested and what the client claimed before.

An offender is dropped and named; nothing it sent reaches the sum, so the round's result equals, bit for bit, the round
without it. A response is never repaired: clipping or replacing values would let an offender steer. `server/expected.py`
says what responses of each kind look like.
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
"""Most metrics that one response may carry."""
MOST_EXAMPLES = 1 << 40
"""Largest number of examples that a client may claim."""
LARGEST = 1e18
"""Largest absolute value of a number in a response: the square of a larger one is no float32."""

Arrival = Response | tuple[int, Response | bytes | str]
"""A response, or (the client it came from, the response, its bytes, or a sentence why there is none)."""


@dataclass(frozen=True)
class Field:
    """Shape, dtype and largest absolute value of one requested tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    limit: float = LARGEST


@dataclass(frozen=True)
class Range:
    """The values that a number may have: from `least` to `most`, with `whole` only integers."""

    least: float = -LARGEST
    most: float = LARGEST
    whole: bool = False

    def __contains__(self, value: float) -> bool:
        return self.least <= value <= self.most and (not self.whole or value == int(value))


@dataclass(frozen=True)
class Expectation:
    """What a well-formed response to the requests of one exchange looks like; `validate_responses` compares with it."""

    run: str
    round: int
    clients: frozenset[int]
    """The clients that were asked."""
    space: str = ""
    length: int = 0
    """Coordinates of the update; the largest number of any client where they differ."""
    rounds: Mapping[int, int] = field(default_factory=dict)
    """Round by client, where clients answer requests of different rounds."""
    lengths: Mapping[int, int] = field(default_factory=dict)
    """Coordinates by client, where clients move different numbers of them."""
    codec: Codec | None = None
    """How the update is encoded; None: no update was requested, and none may come."""
    sums: Mapping[str, Field] = field(default_factory=dict)
    """Exactly these auxiliary vectors."""
    scalars: Collection[str] = ()
    """Exactly these scalars."""
    evidence: Mapping[str, Field] = field(default_factory=dict)
    """Exactly these tensors that a client reports of itself."""
    norm_bound: float | None = None
    """Largest L2 norm of the decoded update."""
    max_examples: int | None = None
    """Most examples a client may claim; 0: their number is private and must be left at 0; None: `MOST_EXAMPLES`."""
    ranges: Mapping[str, Range] = field(default_factory=dict)
    """Ranges of the scalars; any finite number where there is none."""
    metrics: Mapping[str, Range] | None = None
    """Exactly these numbers for the record, within their ranges; None: any, because nothing uses them."""
    example_counts: ExampleCounts | None = None
    """What clients have claimed of themselves so far."""
    claims: Callable[[Response], Mapping[str, float]] = lambda response: {"examples": response.examples}
    """What a response claims of its sender that must stay as it was first claimed."""
    check: Callable[[Response], str] = lambda response: ""
    """Say what else is wrong with a response whose fields are well formed; empty: nothing."""

    @property
    def limit(self) -> int:
        """Most bytes a well-formed response can have; a longer one is refused before it is parsed."""
        limit = HEADER_BYTES
        for tensor_field in (*self.sums.values(), *self.evidence.values()):
            limit += math.prod(tensor_field.shape) * tensor_field.dtype.itemsize
        if self.codec is not None:
            limit += body_bytes(self.codec, self.length)
        return limit


@dataclass(frozen=True)
class Accepted:
    """A response that passed validation, with its update decoded once."""

    response: Response
    update: Tensor | None
    """float32 (length,)."""
    norm: float
    """L2 norm of the update; 0 when there is none."""


@dataclass(frozen=True)
class Rejection:
    """A response that was dropped, or that never came: whose, and why."""

    client: int
    """The sender; -1 when the transport does not know it and the response does not say."""
    reason: str
    silent: bool = False
    """Nothing came at all, which is no offence."""


class InvalidResponse(Exception):
    """The reason why one response is dropped; it does not leave `validate_responses`."""


def validate_responses(arrivals: Iterable[Arrival], expected: Expectation) -> tuple[list[Accepted], list[Rejection]]:
    """Return the well-formed responses in the order of client ids, and who was dropped for what.

    The first well-formed response of a client counts; a further one is dropped and named. What accepted clients claim
    is noted in `expected.example_counts`.
    """
    accepted: dict[int, Accepted] = {}
    rejections: list[Rejection] = []
    for arrival in arrivals:
        sender, response = arrival if isinstance(arrival, tuple) else (None, arrival)
        if isinstance(response, str):
            client = -1 if sender is None else sender
            rejections.append(Rejection(client, response, silent=True))
            continue
        try:
            passed = _validate(sender, response, expected)
            if passed.response.client in accepted:
                raise InvalidResponse("answered more than once")
            accepted[passed.response.client] = passed
            if expected.example_counts is not None:  # only now: what a dropped response claims binds nobody
                expected.example_counts.note(passed.response.client, expected.claims(passed.response))
        except (InvalidResponse, BadPayload, BadMessage) as error:
            rejections.append(Rejection(_client_of(sender, response), str(error)[:200]))
    return [accepted[client] for client in sorted(accepted)], rejections


def _client_of(sender: int | None, response: Response | bytes) -> int:
    """Return whose response it is: the transport's word, else the response's own, else -1."""
    if sender is not None:
        return sender
    if isinstance(response, Response) and type(response.client) is int:
        return response.client
    return -1


def _validate(sender: int | None, response: Response | bytes, expected: Expectation) -> Accepted:
    """Return the response with its update decoded.

    Raise `InvalidResponse`, `BadMessage` or `BadPayload` if it is wrong. `sender` is the client the response came from
    by the word of the transport; None: unknown.
    """
    if not isinstance(response, Response | bytes | bytearray | memoryview):
        raise InvalidResponse("is no message at all")
    if not isinstance(response, Response):
        response = unpack(Response, response, limit=expected.limit)
    _check_envelope(sender, response, expected)
    _check_numbers(response, expected)
    _check_fields(response.sums, expected.sums, "sums")
    _check_fields(response.evidence, expected.evidence, "evidence")
    length = expected.lengths.get(response.client, expected.length)
    update = _decode_update(response.update, expected, length)
    norm = 0.0 if update is None else _norm(update)
    if expected.norm_bound is not None and norm > expected.norm_bound:
        raise InvalidResponse(f"update has norm {norm:.4g}, over the bound {expected.norm_bound:.4g}")
    if expected.example_counts is not None:
        contradiction = expected.example_counts.contradiction(response.client, expected.claims(response))
        if contradiction:
            raise InvalidResponse(contradiction)
    implausible = expected.check(response)
    if implausible:
        raise InvalidResponse(implausible)
    return Accepted(response, update, norm)


def _norm(update: Tensor) -> float:
    """Return the L2 norm in float64, piece by piece: a long update is never held twice."""
    buffer = torch.empty(min(len(update), 1 << 20), dtype=torch.float64)  # one for all pieces
    norms = []
    for piece in update.split(1 << 20):
        norms.append(float(torch.linalg.vector_norm(buffer[: len(piece)].copy_(piece))))
    return math.hypot(*norms)


def _check_envelope(sender: int | None, response: Response, expected: Expectation) -> None:
    """Raise unless run, round, client and space of the response are those of the request.

    `sender` is the client by the word of the transport; None: unknown.
    """
    if type(response.client) is not int or response.client not in expected.clients:
        raise InvalidResponse(f"client {str(response.client)[:40]} was not asked")
    if sender is not None and sender != response.client:
        raise InvalidResponse(f"came from client {sender} and claims to be client {response.client}")
    if type(response.run) is not str or response.run != expected.run:
        raise InvalidResponse("answers another run")
    expected_round = expected.rounds.get(response.client, expected.round)
    if type(response.round) is not int or response.round != expected_round:
        raise InvalidResponse(f"answers round {str(response.round)[:40]}, not {expected_round}")
    if type(response.space) is not str or response.space != expected.space:
        raise InvalidResponse("was made on another edit space (the mask digest differs)")


def _check_numbers(response: Response, expected: Expectation) -> None:
    """Raise unless the number of examples is possible and exactly the expected scalars and metrics are in range."""
    largest_count = MOST_EXAMPLES if expected.max_examples is None else expected.max_examples
    smallest_count = min(1, largest_count)
    if type(response.examples) is not int or not smallest_count <= response.examples <= largest_count:
        claimed = str(response.examples)[:40]
        raise InvalidResponse(f"claims {claimed} examples where {smallest_count} to {largest_count} are allowed")
    for group, numbers in (("scalars", response.scalars), ("metrics", response.metrics)):
        if not isinstance(numbers, Mapping) or not all(type(name) is str for name in numbers):
            raise InvalidResponse(f"{group} are not named numbers")
        if not all(_is_number(value) for value in numbers.values()):
            raise InvalidResponse(f"{group} hold something that is not a finite number")
    if set(response.scalars) != set(expected.scalars):
        raise InvalidResponse(f"scalars are not {sorted(expected.scalars)}")
    if len(response.metrics) > MOST_METRICS:
        raise InvalidResponse(f"has {len(response.metrics)} metrics; {MOST_METRICS} are allowed")
    if expected.metrics is not None and set(response.metrics) != set(expected.metrics):
        raise InvalidResponse(f"metrics are not {sorted(expected.metrics)}")
    _check_ranges("scalar", response.scalars, expected.ranges)
    _check_ranges("metric", response.metrics, expected.metrics or {})


def _check_ranges(group: str, numbers: Mapping[str, float], ranges: Mapping[str, Range]) -> None:
    """Raise unless every number that has a range lies in it; `group` names the numbers in the error."""
    for name, allowed in ranges.items():
        if numbers[name] not in allowed:
            raise InvalidResponse(f"{group} {name!r} is {numbers[name]:.4g}, which cannot be")


def _is_number(value: object) -> bool:
    """Return whether a value is a finite float or an integer of at most 63 bits."""
    if type(value) is float:
        return math.isfinite(value)
    return type(value) is int and abs(value) < 1 << 63


def _check_fields(tensors: Mapping[str, Tensor], fields: Mapping[str, Field], group: str) -> None:
    """Raise unless exactly the expected tensors are there, each of its dtype and shape, finite and within its limit.

    `group` names the tensors in the error.
    """
    if not isinstance(tensors, Mapping) or set(tensors) != set(fields):
        raise InvalidResponse(f"{group} are not {sorted(fields)}")
    for name, expected in fields.items():
        check_tensor(tensors[name], expected.dtype, expected.shape, f"{group}/{name}")
        if not is_finite(tensors[name]):
            raise InvalidResponse(f"{group}/{name} is not finite")
        if largest(tensors[name]) > expected.limit:
            raise InvalidResponse(f"{group}/{name} has numbers over {expected.limit:g}")


def largest(tensor: Tensor) -> float:
    """Return the largest absolute value of a tensor; 0 if it is empty, NaN if it holds one. Makes no copy."""
    if not tensor.numel():
        return 0.0
    low, high = tensor.aminmax()
    return max(-float(low), float(high))


def _decode_update(update: Payload | None, expected: Expectation, length: int) -> Tensor | None:
    """Return the decoded update (length,), its numbers finite and at most `LARGEST`; None where none was requested.

    Raise `InvalidResponse` or `BadPayload` for any other.
    """
    if expected.codec is None:
        if update is not None:
            raise InvalidResponse("carries an update that was not asked for")
        return None
    if not isinstance(update, Payload):
        raise InvalidResponse("carries no update")
    decoded = decode(update, expected.codec, length)
    if largest(decoded) > LARGEST:
        raise InvalidResponse(f"update has numbers over {LARGEST:g}, which no network can use")
    return decoded


# ---- outliers

HARMLESS = 1e-3
"""No update shorter than this share of the model is refused: where most have converged, the usual length is nothing."""


def far_off(norms: Mapping[int, float], factor: float, usual: float = 0.0, least: float = 0.0) -> dict[int, float]:
    """Return the norms by client that exceed `factor` times the usual norm.

    Args:
        norms: norm of each client's vector in this round.
        usual: the usual norm of earlier rounds; 0: unknown. This round's median counts instead if it is larger, from
            three clients on.
        least: the bound is never smaller than this. Without any usual norm there is no bound.
    """
    median = statistics.median(norms.values()) if len(norms) > 2 else 0.0
    bound = factor * max(usual, median)
    if bound <= 0:
        return {}
    bound = max(bound, least)
    return {client: norm for client, norm in norms.items() if norm > bound}


def without_outliers(
    accepted: Sequence[Accepted],
    federation: Federation,
    state: ServerState,
    learning_rate: float,
    steps: Callable[[Response], int] = lambda response: 1,
) -> tuple[list[Accepted], list[Rejection]]:
    """Return the responses whose update and auxiliary vectors are not far longer than usual, and who was dropped.

    Usual is the median of the past rounds in units of the learning rate, or this round's median if that is larger; far
    longer is `federation.norm_factor` times that, and without the factor nobody is dropped. `steps` returns the local
    steps of a client: one that takes more steps than most, because it has more images, may come further by as much.
    """
    factor = federation.norm_factor
    if not factor:
        return list(accepted), []
    usual = learning_rate * statistics.median(state.norms) if state.norms else 0.0
    least = HARMLESS * _norm(state.vector)
    steps_by_client = {item.response.client: steps(item.response) for item in accepted}
    median_steps = statistics.median(steps_by_client.values()) if steps_by_client else 1
    norms = {}
    for item in accepted:
        relative_steps = steps_by_client[item.response.client] / median_steps
        norms[item.response.client] = item.norm / max(1.0, relative_steps)
    reasons = {}
    for client, norm in far_off(norms, factor, usual, least).items():
        reasons[client] = f"update has norm {norm:.4g}, over {factor:g} times the usual"
    sum_names = list(accepted[0].response.sums) if accepted else []
    for name in sum_names:
        norms = {}
        for item in accepted:
            norms[item.response.client] = float(torch.linalg.vector_norm(item.response.sums[name].double()))
        for client, norm in far_off(norms, factor, least=least).items():
            reasons.setdefault(client, f"sums/{name} has norm {norm:.4g}, over {factor:g} times the others'")
    remaining = [item for item in accepted if item.response.client not in reasons]
    rejections = [Rejection(client, reason) for client, reason in sorted(reasons.items())]
    return remaining, rejections
