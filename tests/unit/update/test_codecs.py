"""Codecs: exactness, bounds, unbiasedness, error feedback, and hostile payloads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.errors import raises
from torch import Tensor

from fedgraft.aggregate import codecs
from fedgraft.aggregate.codecs import HALF, INT8, VALUES, BadPayload, Codec, TopK, body_bytes, codec, decode
from fedgraft.core.errors import FedgraftError
from fedgraft.core.messages import Payload, Response, pack, unpack, wire_size

ALL: list[Codec] = [VALUES, HALF, INT8, TopK(0.25), TopK(1.0)]
BY_NAME = pytest.mark.parametrize("kind", ALL, ids=lambda c: c.name)


def stream(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def vector(length: int, seed: int = 0, scale: float = 1e-3) -> Tensor:
    return torch.randn(length, generator=stream(seed)) * scale


@BY_NAME
@pytest.mark.parametrize("length", [0, 1, 7, 1024, 1025, 5000])
def test_roundtrip_has_the_stated_layout_and_crosses_the_wire(kind: Codec, length: int) -> None:
    v = vector(length)
    payload = kind.encode(v, stream(), {})
    assert {n: (a.dtype, a.numel()) for n, a in payload.arrays.items()} == dict(kind.layout(length))
    response = Response("run", 1, 0, update=payload)
    back = unpack(Response, pack(response))
    assert back.update is not None
    assert torch.equal(decode(back.update, kind, length), decode(payload, kind, length))
    # What the message weighs is the codec's arrays and a header that does not grow with the vector.
    assert body_bytes(kind, length) < wire_size(response) < body_bytes(kind, length) + 600


@BY_NAME
def test_same_seed_same_bytes_and_global_generator_untouched(kind: Codec) -> None:
    before = torch.random.get_rng_state()
    one, two = (pack(Response("r", 0, 0, update=kind.encode(vector(3000), stream(5), {}))) for _ in range(2))
    assert one == two
    assert torch.equal(before, torch.random.get_rng_state())


@BY_NAME
def test_the_input_is_not_changed(kind: Codec) -> None:
    v = vector(100)
    kept = v.clone()
    decode(kind.encode(v, stream(), {}), kind, 100)
    assert torch.equal(v, kept)


def test_values_are_exact_and_not_copied() -> None:
    v = vector(50)
    payload = VALUES.encode(v, stream())
    assert payload.arrays["values"].data_ptr() == v.data_ptr()
    assert decode(payload, VALUES, 50).data_ptr() == v.data_ptr()


@pytest.mark.parametrize("scale", [1e-38, 1e-20, 1e-6, 1.0, 1e5, 1e38])
def test_half_is_within_its_stated_error_at_every_magnitude(scale: float) -> None:
    v = vector(10_000).clamp(-3e-3, 3e-3) / 3e-3 * scale
    back = decode(HALF.encode(v, stream()), HALF, len(v))
    bound = torch.maximum(v.abs().double() * 2.0**-11, v.abs().max().double() * 2.0**-39)
    assert bool(((back - v).double().abs() <= bound + 2e-45).all())
    plain = v.half().float()
    if scale in (1e-20, 1e5):  # what the scale is for: plain float16 loses such a vector
        assert not torch.isfinite(plain).all() or not plain.any()


def test_half_of_zeros_and_of_float32_extremes() -> None:
    v = torch.tensor([0.0, -0.0, torch.finfo(torch.float32).max, -torch.finfo(torch.float32).max])
    assert torch.equal(decode(HALF.encode(torch.zeros(3), stream()), HALF, 3), torch.zeros(3))
    back = decode(HALF.encode(v[:2], stream()), HALF, 2)
    assert torch.equal(back, v[:2])
    large = HALF.encode(v / 1.01, stream())
    assert torch.allclose(decode(large, HALF, 4), v / 1.01, rtol=1e-3)


def mean_of_many(encode: Callable[[int], Payload], length: int, draws: int) -> Tensor:
    total = torch.zeros(length, dtype=torch.float64)
    for seed in range(draws):
        total += decode(encode(seed), INT8, length)
    return total / draws


def unbiased(encode: Callable[[int], Payload], v: Tensor, draws: int = 2000) -> bool:
    """Whether the mean over draws lies within five standard errors of v, coordinate by coordinate."""
    step = v.abs().max().item() / 127  # one chunk; a rounding error has variance at most step^2 / 4
    error = mean_of_many(encode, len(v), draws) - v.double()
    return bool((error.abs() <= 5 * step / 2 / draws**0.5).all())


@pytest.mark.slow
def test_int8_is_unbiased_and_the_test_sees_rounding_to_nearest() -> None:
    v = vector(200)
    assert unbiased(lambda seed: INT8.encode(v, stream(seed)), v)
    payload = INT8.encode(v, stream())
    scale = payload.arrays["scales"]
    nearest = replace(payload, arrays={"values": (v / scale).round().to(torch.int8), "scales": scale})
    assert not unbiased(lambda seed: nearest, v)


def test_int8_error_stays_under_one_step_of_its_own_chunk() -> None:
    v = torch.cat([vector(1024, 1, 1e-6), vector(1024, 2, 10.0), vector(5, 3)])
    payload = INT8.encode(v, stream())
    steps = payload.arrays["scales"].repeat_interleave(1024)[: len(v)]
    assert bool(((decode(payload, INT8, len(v)) - v).abs() <= steps * (1 + 1e-5)).all())


def test_int8_of_subnormal_values_is_finite() -> None:
    assert torch.isfinite(decode(INT8.encode(torch.full((10,), 1e-45), stream()), INT8, 10)).all()


def test_top_k_sends_the_largest_exactly() -> None:
    v = vector(1000)
    back = decode(TopK(0.1).encode(v, stream()), TopK(0.1), 1000)
    request = np.argsort(-v.abs().numpy())
    assert torch.equal(back[request[:100]], v[request[:100]])
    assert not back[request[100:]].any()


def test_error_feedback_loses_nothing() -> None:
    kind, memory, sent, asked = TopK(0.1), {}, torch.zeros(500), torch.zeros(500)  # type: ignore[var-annotated]
    forgetful = torch.zeros(500)
    for r in range(30):
        v = vector(500, seed=r)
        asked += v
        sent += decode(kind.encode(v, stream(), memory), kind, 500)
        forgetful += decode(kind.encode(v, stream(), None), kind, 500)
    assert torch.allclose(sent + memory["residual"], asked, atol=1e-7)
    assert not torch.allclose(forgetful + memory["residual"], asked, atol=1e-7)
    assert (sent - asked).norm() < (forgetful - asked).norm()  # what was small for many rounds has arrived


def test_a_diverged_change_leaves_the_memory_as_it_was() -> None:
    kind, memory = TopK(0.1), {}  # type: ignore[var-annotated]
    kind.encode(vector(100), stream(), memory)
    kept = memory["residual"].clone()
    bad = vector(100)
    bad[7:60] = float("nan")
    with raises("E-CODEC-NONFINITE"):
        decode(kind.encode(bad, stream(), memory), kind, 100)
    assert torch.equal(memory["residual"], kept)


def test_a_memory_of_another_space_is_refused() -> None:
    with raises("E-CODEC-RESIDUAL-SIZE"):
        TopK(0.1).encode(vector(100), stream(), {"residual": torch.zeros(99)})


@BY_NAME
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_not_finite_input_is_refused_on_decode_and_never_crashes(kind: Codec, poison: float) -> None:
    v = vector(3000)
    v[1500] = poison
    with pytest.raises(BadPayload):
        decode(kind.encode(v, stream(), {}), kind, 3000)


@BY_NAME
def test_names_give_the_codec_back(kind: Codec) -> None:
    assert codec(kind.name) == kind


@pytest.mark.parametrize("name", ["float8", "top_k", "top_k:", "top_k:x", "top_k:0", "top_k:2", "top_k:nan", ""])
def test_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(FedgraftError):
        codec(name)


def put(payload: Payload, **arrays: Tensor) -> Payload:
    return replace(payload, arrays={**payload.arrays, **arrays})


def hostile() -> dict[str, tuple[Codec, Payload]]:
    """Payloads that are wrong in one way each, for vectors of 2048 coordinates."""
    v = vector(2048)
    good = {c.name: c.encode(v, stream(), {}) for c in ALL}
    top, first = TopK(0.25), good["top_k:0.25"]
    where = first.arrays["indices"]
    high, low, swap, twice = where.clone(), where.clone(), where.clone(), where.clone()
    high[-1], low[0], twice[1] = 2048, -1, where[0]
    swap[[0, 1]] = where[[1, 0]]
    nan = torch.tensor([float("nan"), 1.0])
    return {
        "another codec": (VALUES, good["half"]),
        "another fraction": (top, good["top_k:1.0"]),
        "declared length": (VALUES, replace(good["values"], length=2**60)),
        "length true": (VALUES, replace(good["values"], length=2048.0)),  # type: ignore[arg-type]
        "no arrays": (VALUES, replace(good["values"], arrays={})),
        "arrays none": (VALUES, replace(good["values"], arrays=None)),  # type: ignore[arg-type]
        "extra array": (VALUES, put(good["values"], more=v)),
        "short": (VALUES, put(good["values"], values=v[:-1])),
        "long": (VALUES, put(good["values"], values=torch.zeros(2049))),
        "matrix": (VALUES, put(good["values"], values=v.view(2, -1))),
        "double": (VALUES, put(good["values"], values=v.double())),
        "whole numbers": (VALUES, put(good["values"], values=v.int())),
        "a list": (VALUES, put(good["values"], values=v.tolist())),  # type: ignore[arg-type]
        "sparse tensor": (VALUES, put(good["values"], values=v.to_sparse())),
        "meta tensor": (VALUES, put(good["values"], values=v.to("meta"))),
        "half: overflow": (HALF, put(good["half"], scale=torch.tensor([3e38]))),
        "half: nan scale": (HALF, put(good["half"], scale=nan[:1])),
        "half: inf value": (HALF, put(good["half"], values=torch.full((2048,), float("inf"), dtype=torch.float16))),
        "int8: nan scale": (INT8, put(good["int8"], scales=nan)),
        "int8: negative scale": (INT8, put(good["int8"], scales=-torch.ones(2))),
        "int8: overflow": (
            INT8,
            put(good["int8"], values=torch.full((2048,), 127, dtype=torch.int8), scales=torch.full((2,), 3e38)),
        ),
        "int8: one scale": (INT8, put(good["int8"], scales=torch.ones(1))),
        "int8: wide values": (INT8, put(good["int8"], values=torch.ones(2048, dtype=torch.int16))),
        "top-k: too high": (top, put(first, indices=high)),
        "top-k: negative": (top, put(first, indices=low)),
        "top-k: unordered": (top, put(first, indices=swap)),
        "top-k: twice": (top, put(first, indices=twice)),
        "top-k: int64": (top, put(first, indices=where.long())),
        "top-k: fewer": (top, Payload(first.codec, 2048, {n: a[:-1] for n, a in first.arrays.items()})),
        "top-k: nan": (top, put(first, values=torch.full((512,), float("nan")))),
    }


@pytest.mark.parametrize("case", hostile())
def test_hostile_payloads_are_refused(case: str) -> None:
    kind, payload = hostile()[case]
    with pytest.raises(BadPayload):
        decode(payload, kind, 2048)


def naive(payload: Payload, kind: Codec, length: int) -> Tensor:
    """A decoder without guards, as the planted bug."""
    return kind.expand(payload.arrays, payload.length)


def test_the_hostile_payloads_are_really_hostile() -> None:
    """A decoder that skips the layout and finiteness checks accepts or crashes on many of them."""
    harmed = 0
    for kind, payload in hostile().values():
        if payload.length == 2**60:
            continue
        try:
            naive(payload, kind, 2048)
            harmed += 1
        except BadPayload:
            pass
        except Exception:
            harmed += 1
    assert harmed >= 18


def test_a_huge_declared_length_allocates_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*args: object, **kwargs: object) -> Tensor:
        raise AssertionError("allocated before checking")

    monkeypatch.setattr(codecs.torch, "zeros", forbidden)
    with pytest.raises(BadPayload):
        decode(Payload("top_k:0.25", 1 << 50, {}), TopK(0.25), 10)


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(ALL),
    values=st.lists(st.floats(width=32, allow_nan=True, allow_infinity=True), max_size=40),
)
def test_any_vector_decodes_to_something_finite_or_is_refused(kind: Codec, values: list[float]) -> None:
    v = torch.tensor(values, dtype=torch.float32)
    try:
        back = decode(kind.encode(v, stream(), {}), kind, len(v))
    except BadPayload:
        assert not torch.isfinite(v).all() or kind is HALF or kind is INT8
        return
    assert back.shape == v.shape
    assert torch.isfinite(back).all()
