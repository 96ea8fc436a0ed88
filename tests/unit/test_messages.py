"""The wire: exact sizes, exact round trips, and nothing but `BadMessage` for bytes that are not a message."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tracemalloc
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.errors import raises

from fedgraft.core.messages import BadMessage, Payload, Request, Response, message_digest, pack, unpack, wire_size

DTYPES = [
    torch.float32,
    torch.float16,
    torch.float64,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint32,
    torch.bool,
]


def request(**updates: Any) -> Request:
    fields: dict[str, Any] = {
        "run": "r",
        "round": 3,
        "client": 7,
        "action": "train",
        "space": "ab",
        "vector": torch.arange(5.0),
        "auxiliary": {"control": torch.ones(2)},
        "settings": {"lr": 0.1, "part": "head", "on": True, "n": 3},
    }
    return Request(**fields | updates)


def response(**updates: Any) -> Response:
    fields: dict[str, Any] = {
        "run": "r",
        "round": 3,
        "client": 7,
        "space": "ab",
        "examples": 12,
        "update": Payload("int8", 5, {"q": torch.tensor([1, -2, 3, 4, 5], dtype=torch.int8), "scale": torch.ones(1)}),
        "sums": {"control": torch.arange(3.0)},
        "scalars": {"tau": 2.5},
        "evidence": {"z": torch.zeros(2, 3)},
        "metrics": {"loss": 0.25},
    }
    return Response(**fields | updates)


def same(a: Any, b: Any) -> bool:
    """Equal in every field, tensors bit for bit with their dtype and shape."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape and pack_of(a) == pack_of(b)
    if dataclasses.is_dataclass(a):
        return type(a) is type(b) and all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return type(a) is type(b) and a == b


def pack_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(
    "message", [request(), response(), request(vector=None, auxiliary={}), response(update=None, sums={})]
)
def test_round_trip_and_size_are_exact(message: Request | Response) -> None:
    data = pack(message)
    assert len(data) == wire_size(message)
    assert same(unpack(type(message), data), message)  # type: ignore[type-var]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (2, 3)])
def test_every_dtype_and_shape_survives(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    message = request(vector=torch.ones(shape).to(dtype), auxiliary={"b": torch.zeros(3, dtype=torch.bool)})
    assert len(pack(message)) == wire_size(message)
    assert same(unpack(Request, pack(message)), message)


def test_special_floats_and_slices_keep_their_bits() -> None:
    values = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45, 3.0, 4.0])[::2]
    assert not values.is_contiguous()
    assert same(unpack(Request, pack(request(vector=values))).vector, values.contiguous())


def test_the_digest_is_that_of_the_bytes() -> None:
    for message in (
        request(),
        response(),
        response(evidence={"none": torch.empty(0, 3), "cut": torch.arange(9.0)[::2]}),
    ):
        assert message_digest(message) == hashlib.sha256(pack(message)).hexdigest()[:32]


def test_size_needs_no_memory() -> None:
    meta = request(vector=torch.empty(10**9, device="meta"))
    assert wire_size(meta) > 4 * 10**9


def test_a_message_of_the_other_kind_is_refused() -> None:
    with raises("E-MESSAGE-KIND"):
        unpack(Response, pack(request()))


def test_the_limit_is_the_longest_message_that_passes() -> None:
    data = pack(request())
    unpack(Request, data, limit=len(data))
    with raises("E-MESSAGE-SIZE"):
        unpack(Request, data, limit=len(data) - 1)


@pytest.mark.parametrize("cut", [0, 4, 8, 20, -1])
def test_a_message_cut_short_is_refused(cut: int) -> None:
    with pytest.raises(BadMessage):
        unpack(Request, pack(request())[:cut])


def forged(plain: dict[str, Any], tensors: dict[str, Any], body: bytes = b"") -> bytes:
    """Bytes with a header of one's own making."""
    header = json.dumps({"__metadata__": {"fedgraft": json.dumps(plain)}, **tensors}).encode()
    return len(header).to_bytes(8, "little") + header + body


PLAIN = {"kind": "Request", "run": "r", "round": 0, "client": 0, "action": "train"}
ANSWER = {"kind": "Response", "run": "r", "round": 0, "client": 0}


def test_the_forger_can_make_a_good_message() -> None:
    assert unpack(Request, forged(PLAIN, {})).client == 0
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    assert len(unpack(Request, forged(PLAIN, {"vector": entry}, b"\0" * 8)).vector) == 2  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]},
        {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]},
        {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]},
        {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [True, 2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [1] * 9, "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [0, 2**62, 2**62], "data_offsets": [0, 0]},
        {"dtype": "F32", "shape": [0, 10**30], "data_offsets": [0, 0]},
        {"dtype": "PICKLE", "shape": [2], "data_offsets": [0, 8]},
        {"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]},
        {"shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0]},
        [],
        None,
        7,
    ],
)
def test_a_tensor_that_does_not_fit_its_bytes_is_refused(entry: Any) -> None:
    with pytest.raises(BadMessage):
        unpack(Request, forged(PLAIN, {"vector": entry}, b"\0" * 8))


@pytest.mark.parametrize(
    ("kind", "plain"),
    [
        (Request, {**PLAIN, "round": "0"}),
        (Request, {**PLAIN, "round": True}),
        (Request, {**PLAIN, "extra": 1}),
        (Request, {"kind": "Request", "run": "r"}),
        (Request, {**PLAIN, "vector": 5}),
        (Request, {**PLAIN, "auxiliary": {"control": 5}}),
        (Request, {**PLAIN, "auxiliary": "abc"}),
        (Request, {**PLAIN, "settings": [1]}),
        (Request, {**PLAIN, "settings": {"lr": [1]}}),
        (Response, {**ANSWER, "examples": 1.5}),
        (Response, {**ANSWER, "scalars": {"tau": "1"}}),
        (Response, {**ANSWER, "metrics": [1]}),
        (Response, {**ANSWER, "update": 3}),
        (Response, {**ANSWER, "update": {"codec": "values", "length": -1}}),
        (Response, {**ANSWER, "update": {"codec": 1, "length": 1}}),
        (Response, {**ANSWER, "sums": {"control": 1}}),
        (Response, {**ANSWER, "evidence": 1}),
    ],
)
def test_fields_of_another_type_are_refused(kind: Any, plain: dict[str, Any]) -> None:
    with pytest.raises(BadMessage):
        unpack(kind, forged(plain, {}))


def test_a_tensor_cannot_take_the_place_of_a_plain_field() -> None:
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    for name in ("run", "action", "settings/lr", "update/x", "nothing"):
        with pytest.raises(BadMessage):
            unpack(Request, forged(PLAIN, {name: entry}, b"\0" * 8))
    with pytest.raises(BadMessage):
        unpack(Response, forged(ANSWER, {"update/x": entry}, b"\0" * 8))


def test_hostile_sizes_allocate_nothing() -> None:
    """A short message must not cost more memory than a few times its own length."""
    huge = {"dtype": "F64", "shape": [2**20, 2**20], "data_offsets": [0, 2**43]}
    data = forged(PLAIN, {"vector": huge})
    tracemalloc.start()
    with pytest.raises(BadMessage):
        unpack(Request, data)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


def test_bytes_are_used_once() -> None:
    """Many names for the same bytes would turn a short message into a huge one."""
    entry = {"dtype": "U8", "shape": [2**16], "data_offsets": [0, 2**16]}
    data = forged(PLAIN, {f"auxiliary/{i}": entry for i in range(500)}, b"\0" * 2**16)
    assert len(data) < 2**18
    tracemalloc.start()
    with pytest.raises(BadMessage):
        unpack(Request, data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20


def test_bytes_after_the_last_tensor_are_refused() -> None:
    with pytest.raises(BadMessage):
        unpack(Request, pack(request()) + b"smuggled")


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=200))
def test_arbitrary_bytes_raise_nothing_but_bad_message(data: bytes) -> None:
    for kind in (Request, Response):
        with pytest.raises(BadMessage):
            unpack(kind, data)  # type: ignore[type-var]


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 255), st.integers(0, 3))
def test_a_changed_byte_gives_a_message_or_bad_message(context: int, value: int, wide: int) -> None:
    data = bytearray(pack(response()))
    for shift in range(wide + 1):
        data[(context + shift) % len(data)] = value
    try:
        message = unpack(Response, bytes(data))
    except BadMessage:
        return
    assert type(message.round) is int and type(message.client) is int


SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-5, 5), st.floats(), st.text(max_size=3))
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)
NAMES = st.sampled_from([f.name for f in (*dataclasses.fields(Request), *dataclasses.fields(Response))])


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.dictionaries(NAMES, VALUES, max_size=3), st.dictionaries(st.text(max_size=12), VALUES, max_size=2))
def test_hostile_headers_raise_nothing_but_bad_message(plain: dict[str, Any], tensors: dict[str, Any]) -> None:
    for kind, good in ((Request, PLAIN), (Response, ANSWER)):
        try:
            message = unpack(kind, forged({**good, **plain}, tensors))  # type: ignore[type-var]
        except BadMessage:
            continue
        assert isinstance(message, kind)
        assert pack(message)  # whatever passed can be handled like an honest one


def test_a_deep_header_is_refused() -> None:
    deep = b"[" * 100_000
    with pytest.raises(BadMessage):
        unpack(Request, len(deep).to_bytes(8, "little") + deep)
