"""Screening: every malformed kind is dropped and named, and the rest of the round keeps its bits."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedgraft.aggregate.codecs import HALF, INT8, VALUES, Codec, TopK
from fedgraft.core.messages import Payload, Response, pack
from fedgraft.server import validate as screening
from fedgraft.server.validate import Accepted, Expectation, Field, Rejection, validate_responses

LENGTH = 300
BEYOND = 1 << 30
EXPECTED = Expectation(
    run="run-a",
    round=7,
    clients=frozenset(range(6)),
    space="mask-a",
    length=LENGTH,
    codec=VALUES,
    sums={"control": Field((LENGTH,))},
    scalars=("loss",),
    evidence={"features": Field((8, 4)), "rows": Field((3,), torch.int64)},
    norm_bound=5.0,
    max_examples=1000,
)
Arrived = Response | bytes
Spoiler = Callable[[Response, np.random.Generator], Arrived]


def benign(client: int, codec: Codec = VALUES) -> Response:
    generator = torch.Generator().manual_seed(client)
    update = torch.randn(LENGTH, generator=generator) * 0.1
    return Response(
        run="run-a",
        round=7,
        client=client,
        space="mask-a",
        examples=10 + client,
        update=codec.encode(update, generator, {}),
        sums={"control": torch.randn(LENGTH, generator=generator)},
        scalars={"loss": 0.5 + client},
        metrics={"seconds": 1},
        evidence={"features": torch.randn(8, 4, generator=generator), "rows": torch.arange(3)},
    )


def put(response: Response, group: str, name: str, value: Any) -> Response:
    return replace(response, **{group: {**getattr(response, group), name: value}})  # type: ignore[arg-type]


def payload(response: Response, **updates: Any) -> Response:
    assert response.update is not None
    return replace(response, update=replace(response.update, **updates))


def values(update: Any) -> Spoiler:
    """Put something else where the values were."""

    def spoil(response: Response, rng: np.random.Generator) -> Response:
        assert response.update is not None
        return payload(response, arrays={"values": update(response.update.arrays["values"].clone(), rng)})

    return spoil


def poke(value: float) -> Callable[[Tensor, np.random.Generator], Tensor]:
    def write(tensor: Tensor, rng: np.random.Generator) -> Tensor:
        tensor[int(rng.integers(len(tensor)))] = value
        return tensor

    return write


def field(**fields: Any) -> Spoiler:
    return lambda response, rng: replace(response, **fields)


def header(edit: Callable[[dict[str, Any]], None], body: bytes | None = None) -> Spoiler:
    """Rewrite the header of the packed reply."""

    def spoil(response: Response, rng: np.random.Generator) -> bytes:
        data = pack(response)
        length = int.from_bytes(data[:8], "little")
        entries = json.loads(data[8 : 8 + length])
        edit(entries)
        text = json.dumps(entries).encode()
        return len(text).to_bytes(8, "little") + text + (data[8 + length :] if body is None else body)

    return spoil


def meta(**fields: Any) -> Spoiler:
    """Rewrite plain fields of the packed reply."""

    def edit(entries: dict[str, Any]) -> None:
        plain = json.loads(entries["__metadata__"]["fedgraft"]) | fields
        entries["__metadata__"]["fedgraft"] = json.dumps(plain)

    return header(edit)


def flip_length(response: Response, rng: np.random.Generator) -> bytes:
    return int(rng.integers(1 << 20, 1 << 62)).to_bytes(8, "little") + pack(response)[8:]


NAN, INF = float("nan"), float("inf")
NOTHING = {"dtype": "F32", "shape": [1 << 40, 1 << 40, 0], "data_offsets": [0, 0]}
MALFORMED: dict[str, Spoiler] = {
    "nan": values(poke(NAN)),
    "infinity": values(poke(INF)),
    "minus infinity": values(poke(-INF)),
    "enormous": values(poke(1e38)),
    "over the norm bound": values(lambda t, rng: t * 100),
    "all nan": values(lambda t, rng: t * NAN),
    "too short": values(lambda t, rng: t[: int(rng.integers(LENGTH))]),
    "too long": values(lambda t, rng: torch.cat([t, t[: 1 + int(rng.integers(LENGTH))]])),
    "transposed": values(lambda t, rng: t.view(3, 100)),
    "float64": values(lambda t, rng: t.double()),
    "float16": values(lambda t, rng: t.half()),
    "whole numbers": values(lambda t, rng: t.int()),
    "boolean": values(lambda t, rng: t > 0),
    "no change": field(update=None),
    "bare tensor": field(update=torch.zeros(LENGTH)),
    "no arrays": lambda response, rng: payload(response, arrays={}),
    "extra array": lambda response, rng: payload(response, arrays={"values": torch.zeros(LENGTH), "b": torch.zeros(1)}),
    "declared length": lambda response, rng: payload(response, length=int(rng.integers(1 << 40, 1 << 60))),
    "negative length": lambda response, rng: payload(response, length=-LENGTH),
    "unknown codec": lambda response, rng: payload(response, codec="pickle"),
    "codec not asked for": lambda response, rng: replace(response, update=HALF.encode(torch.zeros(LENGTH), _stream())),
    "top-k not asked for": lambda response, rng: replace(
        response, update=TopK(0.1).encode(torch.zeros(LENGTH), _stream())
    ),
    "another run": field(run="run-b"),
    "run not a text": field(run=5),
    "last round": field(round=6),
    "next round": field(round=8),
    "round a truth": field(round=True),
    "another mask": field(space="mask-b"),
    "no mask": field(space=""),
    "client not asked": lambda response, rng: replace(response, client=int(rng.integers(6, 1 << 30))),
    "client negative": field(client=-1),
    "client a text": field(client="3"),
    "no examples": field(examples=0),
    "negative examples": field(examples=-5),
    "too many examples": field(examples=1001),
    "endless examples": field(examples=10**400),
    "examples a fraction": field(examples=3.5),
    "examples not a number": field(examples=NAN),
    "examples a truth": field(examples=True),
    "sum missing": field(sums={}),
    "sum unknown": lambda response, rng: put(response, "sums", "more", torch.zeros(2)),
    "sum not finite": lambda response, rng: put(response, "sums", "control", poke(NAN)(torch.zeros(LENGTH), rng)),
    "sum too long": lambda response, rng: put(response, "sums", "control", torch.zeros(LENGTH + 1)),
    "sum float64": lambda response, rng: put(response, "sums", "control", torch.zeros(LENGTH).double()),
    "sums a number": field(sums=5),
    "scalar missing": field(scalars={}),
    "scalar unknown": lambda response, rng: put(response, "scalars", "more", 1.0),
    "scalar nan": lambda response, rng: put(response, "scalars", "loss", NAN),
    "scalar endless": lambda response, rng: put(response, "scalars", "loss", 10**400),
    "scalar a text": lambda response, rng: put(response, "scalars", "loss", "0"),
    "scalar a truth": lambda response, rng: put(response, "scalars", "loss", True),
    "scalars a list": field(scalars=[("loss", 1.0)]),
    "metric infinite": lambda response, rng: put(response, "metrics", "seconds", INF),
    "metrics without end": field(metrics={str(i): 0.0 for i in range(1000)}),
    "evidence missing": field(evidence={}),
    "evidence nan": lambda response, rng: put(response, "evidence", "features", torch.full((8, 4), NAN)),
    "evidence shape": lambda response, rng: put(response, "evidence", "features", torch.zeros(4, 8)),
    "evidence dtype": lambda response, rng: put(response, "evidence", "rows", torch.zeros(3)),
    "evidence a text": field(evidence="abc"),
    "bytes: none": lambda response, rng: b"",
    "bytes: noise": lambda response, rng: rng.bytes(int(rng.integers(1, 4000))),
    "bytes: cut": lambda response, rng: (data := pack(response))[: int(rng.integers(len(data)))],
    "bytes: header length": flip_length,
    "bytes: too many": lambda response, rng: pack(response) + b"\0" * EXPECTED.limit,
    "bytes: other kind": meta(kind="Request"),
    "bytes: unknown field": meta(command="rm"),
    "bytes: nested": lambda response, rng: (8000).to_bytes(8, "little") + b"[" * 8000,
    "bytes: scalars a list": meta(scalars=[["loss", 1.0]]),
    "bytes: evidence a number": lambda response, rng: meta(evidence=5)(replace(response, evidence={}), rng),
    "bytes: nan scalar": meta(scalars={"loss": NAN}),
    "bytes: change a list": meta(update=[1]),
    "bytes: declared shape": header(lambda entries: entries["update/values"].update(shape=[1 << 40])),
    "bytes: negative shape": header(lambda entries: entries["update/values"].update(shape=[-LENGTH])),
    "bytes: offsets": header(
        lambda entries: entries["update/values"].update(data_offsets=[BEYOND, BEYOND + 4 * LENGTH])
    ),
    "bytes: shifted": header(lambda entries: entries["update/values"].update(data_offsets=[8, 4 * LENGTH + 8])),
    "bytes: shared place": header(
        lambda entries: entries.update({f"sums/{i}": entries["update/values"] for i in "ab"})
    ),
    "bytes: endless nothing": header(lambda entries: entries.update({"sums/b": NOTHING})),
    "bytes: left over": lambda response, rng: pack(response) + rng.bytes(8),
    "bytes: dtype unknown": header(lambda entries: entries["update/values"].update(dtype="PY")),
    "bytes: dtype other": header(lambda entries: entries["update/values"].update(dtype="I32")),
    "bytes: no body": header(lambda entries: None, b""),
}


def _stream() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def digest(accepted: list[Accepted]) -> list[bytes]:
    """Everything that was let through, as bytes."""
    updates = [a.update.numpy().tobytes() for a in accepted if a.update is not None]
    return [pack(a.response) for a in accepted] + updates


def spoiled_round(kind: str, seed: int) -> tuple[list[Accepted], list[Rejection], list[Accepted], int]:
    """One of six is malformed, all arrive in random order: (accepted, offences, the round without it, who)."""
    rng = np.random.default_rng(seed)
    attacker = int(rng.integers(6))
    arrivals: list[Any] = [(c, benign(c)) for c in range(6) if c != attacker]
    without, none = validate_responses(arrivals, EXPECTED)
    assert not none
    arrivals.insert(int(rng.integers(6)), (attacker, MALFORMED[kind](benign(attacker), rng)))
    accepted, rejections = validate_responses(arrivals, EXPECTED)
    return accepted, rejections, without, attacker


def assert_only_the_offender_goes(kind: str, seed: int) -> None:
    accepted, rejections, without, attacker = spoiled_round(kind, seed)
    assert [o.client for o in rejections] == [attacker]
    assert rejections[0].reason and len(rejections[0].reason) <= 200
    assert digest(accepted) == digest(without)


def fuzz_cases(count: int, first: int = 0) -> int:
    """Every malformed kind `count` times; `make reliability` runs 1,000 of each."""
    for kind in MALFORMED:
        for seed in range(first, first + count):
            assert_only_the_offender_goes(kind, seed)
    return count * len(MALFORMED)


@pytest.mark.parametrize("kind", MALFORMED)
def test_only_the_offender_is_dropped_and_the_rest_keeps_its_bits(kind: str) -> None:
    for seed in range(5):
        assert_only_the_offender_goes(kind, seed)


def test_there_are_enough_kinds() -> None:
    assert len(MALFORMED) >= 60


def test_bytes_with_random_damage_are_dropped_or_change_nothing_that_was_checked() -> None:
    """Flip one byte anywhere: screening never crashes, and what passes has the schema that was asked for."""
    data, rng = pack(benign(2)), np.random.default_rng(3)
    for _ in range(400):
        damaged = bytearray(data)
        damaged[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
        accepted, rejections = validate_responses([(2, bytes(damaged))], EXPECTED)
        assert len(accepted) + len(rejections) == 1
        for a in accepted:
            assert a.update is not None and torch.isfinite(a.update).all() and a.norm <= 5.0


def test_honest_replies_come_back_in_client_order_whatever_the_arrival() -> None:
    arrivals: list[Any] = [benign(4), (1, benign(1)), (3, pack(benign(3))), benign(0)]
    accepted, rejections = validate_responses(arrivals, EXPECTED)
    assert not rejections
    assert [a.response.client for a in accepted] == [0, 1, 3, 4]
    for a in accepted:
        sent = benign(a.response.client).update
        assert sent is not None and a.update is not None
        assert torch.equal(a.update, sent.arrays["values"])
        assert a.norm == pytest.approx(np.linalg.norm(a.update.double().numpy()))


def test_the_first_well_formed_answer_counts() -> None:
    bad = MALFORMED["nan"](benign(2), np.random.default_rng(0))
    second = replace(benign(2), examples=999)
    accepted, rejections = validate_responses([bad, benign(2), second, benign(1)], EXPECTED)  # type: ignore[list-item]
    assert [a.response.client for a in accepted] == [1, 2]
    assert accepted[1].response.examples == 12
    assert [(o.client, o.reason) for o in rejections] == [(2, "values are not finite"), (2, "answered more than once")]


def test_a_client_cannot_answer_for_another() -> None:
    """The transport's word counts: otherwise a liar that answers first silences the client it names."""
    accepted, rejections = validate_responses([(5, benign(2)), (2, benign(2))], EXPECTED)
    assert [a.response.client for a in accepted] == [2]
    assert rejections == [Rejection(5, "came from client 5 and claims to be client 2")]


@pytest.mark.parametrize("codec", [VALUES, HALF, INT8, TopK(0.1)], ids=lambda c: c.name)
def test_every_codec_passes_within_the_limit(codec: Codec) -> None:
    expected = replace(EXPECTED, codec=codec)
    data = pack(benign(1, codec))
    assert len(data) <= expected.limit
    accepted, rejections = validate_responses([(1, data)], expected)
    assert not rejections and accepted[0].update is not None


def test_rounds_without_a_change_and_secret_examples() -> None:
    expected = Expectation("r", 1, frozenset([0]), evidence={"score": Field((2,), torch.float64)}, max_examples=0)
    good = Response("r", 1, 0, evidence={"score": torch.zeros(2, dtype=torch.float64)})
    assert validate_responses([good], expected)[0][0].update is None
    assert validate_responses([replace(good, update=Payload("values", 0, {}))], expected)[1]
    assert validate_responses([replace(good, examples=3)], expected)[1]


GUARDS = {
    "_check_envelope": ["another run", "last round", "another mask", "client not asked"],
    "_check_numbers": ["no examples", "endless examples", "scalar nan", "scalar unknown", "metrics without end"],
    "_check_fields": ["sum missing", "sum not finite", "evidence nan", "evidence shape"],
    "decode": ["nan", "too short", "float64", "codec not asked for"],
}


@pytest.mark.parametrize("guard", GUARDS)
def test_without_a_guard_its_offenders_get_in(guard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bug: with one guard taken out, the cases it is there for are accepted - so the tests above see it."""

    def absent(*args: Any) -> Tensor | None:
        return args[0].arrays["values"] if guard == "decode" else None

    monkeypatch.setattr(screening, guard, absent)
    for kind in GUARDS[guard]:
        response = MALFORMED[kind](benign(1), np.random.default_rng(0))
        accepted, rejections = validate_responses([response], EXPECTED)  # type: ignore[list-item]
        assert len(accepted) == 1 and not rejections, kind


def test_without_the_norm_bound_a_large_change_gets_in() -> None:
    response = MALFORMED["over the norm bound"](benign(1), np.random.default_rng(0))
    assert validate_responses([response], EXPECTED)[1]  # type: ignore[list-item]
    assert not validate_responses([response], replace(EXPECTED, norm_bound=None))[1]  # type: ignore[list-item]


def test_the_norm_bound_is_the_largest_norm_that_passes() -> None:
    along = torch.zeros(LENGTH)
    for norm, refused in ((4.999, False), (5.001, True)):
        along[0] = norm
        response = replace(benign(1), update=VALUES.encode(along, torch.Generator()))
        assert bool(validate_responses([response], EXPECTED)[1]) == refused


def test_an_oversized_message_is_refused_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[object] = []
    monkeypatch.setattr(json, "loads", lambda text: read.append(text))
    _, rejections = validate_responses([(1, pack(benign(1)) + b"\0" * EXPECTED.limit)], EXPECTED)
    assert "over the limit" in rejections[0].reason
    assert not read
