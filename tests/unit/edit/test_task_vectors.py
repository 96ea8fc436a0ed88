"""Task arithmetic against brute-force dense arithmetic, and the file of an edit against damage and lies."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.errors import raises
from torch import Tensor, nn

from fedgraft.core.errors import FedgraftError
from fedgraft.core.network_digest import digest
from fedgraft.core.rng import torch_stream
from fedgraft.core.space import EditSpace, Part, masked, select
from fedgraft.edit import edit_file as task_file
from fedgraft.edit.task_vectors import (
    Edit,
    add_edits,
    applied,
    apply_edit,
    capture,
    check_base,
    positions,
    sweep_scale,
    union_space,
)


class Tiny(nn.Module):
    """Two blocks, a norm with statistics and a head, under the names the contract asks for."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.backbone = nn.Module()
        self.backbone.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.backbone.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 3)
        for name, p in self.named_parameters():
            p.data = torch.randn(p.shape, generator=torch_stream(seed, "tiny", name))


def network(seed: int = 0) -> Any:
    with torch.random.fork_rng(devices=[]):
        return Tiny(seed)


def dense(net: Any) -> dict[str, Tensor]:
    return {n: t.detach().clone() for n, t in net.state_dict().items()}


def bits(net: Any) -> dict[str, bytes]:
    return {n: t.detach().numpy().tobytes() for n, t in net.state_dict().items()}


def sparse_space(net: Any, seed: int) -> EditSpace:
    """Some positions of the first layers, and one bias as a whole."""
    names = ["backbone.layers.0.weight", "backbone.layers.1.weight", "backbone.norm.weight"]
    masks = {n: torch.rand(net.get_parameter(n).shape, generator=torch_stream(seed, "mask", n)) < 0.4 for n in names}
    return masked(net, masks, ["backbone.layers.0.bias"] if seed % 2 else [])


def random_edit(net: Any, seed: int, scope: str = "", space: EditSpace | None = None) -> Edit:
    space = space or sparse_space(net, seed)
    step = torch.randn(space.size, generator=torch_stream(seed, "step"))
    return capture(f"task{seed}", net, space, space.gather(net) + step, scope)


def as_dense(edit: Edit, net: Any) -> dict[str, Tensor]:
    """The edit spread over whole tensors in float64, written with loops and no help from the code under test."""
    out = {n: torch.zeros(t.shape, dtype=torch.float64) for n, t in net.state_dict().items()}
    at = 0
    for part in (*edit.space.parts, *edit.space.buffers):
        for context in range(part.numel) if part.index is None else part.index.tolist():
            out[part.name].view(-1)[context] += float(edit.values[at]) * edit.scale
            at += 1
    return out


# --- arithmetic ------------------------------------------------------------------------------------------------


def test_apply_equals_dense_arithmetic_and_leaves_the_rest_alone() -> None:
    net = network()
    edit = random_edit(net, 1).scaled(0.5)
    base, start = dense(net), bits(net)
    apply_edit(net, edit, 3.0)
    for name, update in as_dense(edit, net).items():
        torch.testing.assert_close(net.state_dict()[name].double(), base[name] + 3.0 * update, rtol=1e-6, atol=1e-6)
    untouched = set(start) - {part.name for part in edit.space.parts}
    assert untouched and all(bits(net)[name] == start[name] for name in untouched)
    for part in edit.space.parts:  # inside a touched tensor, too, the other positions keep their bits
        if part.index is not None:
            outside = torch.ones(part.numel, dtype=torch.bool).index_fill_(0, part.index, False)
            after = net.get_parameter(part.name).detach().view(-1)
            assert torch.equal(after[outside], base[part.name].view(-1)[outside])


def test_base_plus_edit_is_the_tuned_network_up_to_one_rounding() -> None:
    net = network()
    space = select(net, lambda name: True)
    tuned = space.gather(net) + torch.randn(space.size, generator=torch_stream(0, "tuned"))
    edit = capture("t", net, space, tuned)
    apply_edit(net, edit)
    error = (space.gather(net).double() - tuned.double()).abs()
    assert (error <= 2.0**-23 * torch.maximum(tuned.abs(), edit.values.abs())).all()


def test_buffers_of_the_space_are_part_of_an_edit() -> None:
    net = network()
    space = select(net, lambda name: "norm" in name)
    assert space.buffers
    edit = random_edit(net, 2, space=space)
    apply_edit(net, edit)
    wanted = torch.zeros(4) + edit.values[edit.space.slices()["backbone.norm.running_mean"]]
    torch.testing.assert_close(net.backbone.norm.running_mean, wanted)


def test_undo_and_leaving_the_block_return_the_base_bit_for_bit() -> None:
    net = network()
    net.backbone.norm.weight.data[0] = -0.0
    start, edit = bits(net), random_edit(net, 1).scaled(1e6)  # so strong that (x + t) - t would not give x back
    handle = apply_edit(net, edit)
    changed = bits(net)
    assert changed != start
    handle.undo()
    assert bits(net) == start
    with pytest.raises(ZeroDivisionError), applied(net, edit) as inside:
        assert bits(inside) == changed
        raise ZeroDivisionError
    assert bits(net) == start
    # What is not promised: taking the change off again by arithmetic. It is off here, which is why undo remembers.
    values = edit.space.gather(net)
    assert not torch.equal((values + edit.update()) - edit.update(), values)


def test_zero_strength_and_zero_change_keep_every_bit_even_of_negative_zero() -> None:
    net = network()
    net.backbone.layers[0].weight.data.fill_(-0.0)
    space = select(net, lambda name: name == "backbone.layers.0.weight")
    still = capture("still", net, space, space.gather(net))
    start = bits(net)
    apply_edit(net, still)
    assert bits(net) == start
    apply_edit(net, random_edit(net, 1), 0.0)
    assert bits(net) == start
    assert (space.gather(net) + 0.0).signbit().sum() == 0  # the plain sum would have flipped the sign bits


def test_negate_and_scale() -> None:
    net = network()
    edit = random_edit(net, 1)
    assert torch.equal(edit.negate().update(), -edit.update())
    assert torch.equal(edit.negate().negate().update(), edit.update())
    assert torch.equal(edit.scaled(0.25).scaled(4.0).update(), edit.update())
    base = edit.space.gather(net)
    apply_edit(net, edit.negate(), 0.5)
    torch.testing.assert_close(edit.space.gather(net), base - 0.5 * edit.values)


def test_add_on_different_spaces_is_the_dense_sum_on_the_union() -> None:
    net = network()
    edits = [random_edit(net, 1), random_edit(net, 2).negate(), random_edit(net, 3).scaled(0.3)]
    edits.append(random_edit(net, 4, space=select(net, lambda n: n == "backbone.layers.0.weight")))
    scales = [1.0, 0.5, -2.0, 0.7]
    total = add_edits(edits, scales, "all")
    wanted = {n: torch.zeros(t.shape, dtype=torch.float64) for n, t in net.state_dict().items()}
    for edit, scale in zip(edits, scales, strict=True):
        for name, update in as_dense(edit, net).items():
            wanted[name] += scale * update
    for name, update in as_dense(total, net).items():
        torch.testing.assert_close(update, wanted[name], rtol=1e-6, atol=1e-6)
    assert next(p for p in total.space.parts if p.name == "backbone.layers.0.weight").index is None
    check_base(net, total)
    assert torch.equal(add_edits([edits[0]]).update(), edits[0].update())
    assert add_edits([edits[0], edits[0].negate()]).values.eq(0).all()
    one, other = add_edits(edits[:2]), add_edits(edits[1::-1])
    assert torch.equal(one.values, other.values[positions(one.space, other.space)])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sets(st.integers(0, 11)), min_size=1, max_size=4))
def test_union_holds_exactly_the_coordinates_of_its_members(choices: list[set[int]]) -> None:
    spaces = [EditSpace((Part("w", (3, 4), torch.tensor(sorted(c), dtype=torch.int64)),)) for c in choices]
    joined = union_space(spaces)
    (part,) = joined.parts
    everything = sorted(set().union(*choices))
    assert (list(range(12)) if part.index is None else part.index.tolist()) == everything
    for space, choice in zip(spaces, choices, strict=True):
        assert [everything[i] for i in positions(space, joined).tolist()] == sorted(choice)


def test_sweep_starts_each_strength_from_the_base() -> None:
    net = network()
    edit, start = random_edit(net, 1), bits(net)
    base = edit.space.gather(net)
    found = sweep_scale(net, edit, [0.0, 0.5, 1e6, 0.5, 1.0], edit.space.gather)
    assert bits(net) == start and [strength for strength, _ in found] == [0.0, 0.5, 1e6, 0.5, 1.0]
    assert torch.equal(found[0][1], base) and torch.equal(found[1][1], found[3][1])  # no drift over the sweep
    torch.testing.assert_close(found[4][1], base + edit.values)

    def fails(net: Any) -> float:
        raise RuntimeError("evaluation stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        sweep_scale(net, edit, [1.0], fails)
    assert bits(net) == start


# --- the base --------------------------------------------------------------------------------------------------


def _other_value(net: Any) -> None:
    net.head.bias.data[0] += 2.0**-20


def _sign_of_zero(net: Any) -> None:
    net.backbone.norm.running_mean[0] = -0.0


def _swapped(net: Any) -> None:
    a, b = net.backbone.layers[0].weight, net.backbone.layers[1].weight
    a.data, b.data = b.data, a.data


def _reshaped(net: Any) -> None:
    net.head.weight.data = net.head.weight.data.reshape(4, 3)


def _already_edited(net: Any) -> None:
    apply_edit(net, random_edit(net, 5))


@pytest.mark.parametrize("update", [_other_value, _sign_of_zero, _swapped, _reshaped, _already_edited])
def test_a_base_that_does_not_fit_is_refused_untouched(update: Callable[[Any], None]) -> None:
    edit, net = random_edit(network(), 1), network()
    check_base(net, edit)
    update(net)
    start = bits(net)
    with raises("E-EDIT-BASE"):
        apply_edit(net, edit)
    with raises("E-EDIT-BASE"):
        sweep_scale(net, edit, [1.0], lambda n: 0)
    assert bits(net) == start


def test_the_digest_depends_on_values_and_not_on_gradients_modes_or_the_process() -> None:
    net = network()
    assert digest(net) == digest(network()) != digest(network(1))
    net.eval()
    net.head.weight.requires_grad_(False)
    assert digest(net) == digest(network())
    half: Any = network().half()
    assert digest(half) != digest(half.float())


def test_a_scope_lets_the_head_differ_and_nothing_else() -> None:
    net, other = network(), network()
    edit = random_edit(net, 1, scope="backbone.")
    other.head = nn.Linear(4, 7)
    apply_edit(other, edit)
    assert torch.equal(edit.space.gather(other), edit.space.gather(net) + edit.values)
    third = network()
    third.backbone.norm.bias.data[0] += 1
    with raises("E-EDIT-BASE"):
        apply_edit(third, edit)
    with raises("E-EDIT-OUTSIDE-SCOPE"):
        random_edit(network(), 1, scope="backbone.", space=select(net, lambda n: n.startswith("head")))
    with raises("E-EDIT-ADD-BASES"):
        add_edits([edit, random_edit(network(), 1)])


def test_impossible_edits_and_sums_are_refused() -> None:
    net = network()
    edit = random_edit(net, 1)
    with raises("E-EDIT-ADD-NONE"):
        add_edits([])
    with raises("E-EDIT-ADD-SCALES"):
        add_edits([edit], [1.0, 2.0])
    with raises("E-EDIT-ADD-BASES"):
        add_edits([edit, random_edit(network(1), 1)])
    with raises("E-EDIT-NONFINITE"):
        edit.scaled(float("nan"))
    with raises("E-EDIT-NONFINITE"):
        capture("broken", net, edit.space, edit.space.gather(net) * float("inf"))
    start = bits(net)
    with raises("E-EDIT-SCALE"):
        apply_edit(net, edit, 1e39)
    assert bits(net) == start
    with raises("E-EDIT-VALUES"):
        Edit("short", edit.base, edit.space, edit.values[1:])
    with raises("E-EDIT-ADD-SHAPES"):
        union_space([EditSpace((Part("w", (2, 3)),)), EditSpace((Part("w", (3, 2)),))])
    stray = Edit("stray", edit.base, EditSpace((Part("backbone.other", (2,)),)), torch.ones(2))
    with raises("E-EDIT-TENSOR"):
        apply_edit(net, stray)


def test_a_merged_lora_run_becomes_an_edit_of_the_plain_base() -> None:
    pytest.importorskip("peft")
    from fedgraft.edit.lora import adapter_layers, attach, merge_lora, target_layers

    net, tuned = network(), attach(network(), 2, 8, ["backbone.layers.*"], seed=0)
    for layer in adapter_layers(tuned).values():
        layer.lora_B["default"].weight.data.fill_(0.3)
    with raises("E-EDIT-BASE"):
        apply_edit(tuned, random_edit(net, 1))  # an adapted network is not the base
    merge_lora(tuned)
    names = {f"{name}.weight" for name in target_layers(net, ["backbone.layers.*"])}
    space = select(net, lambda n: n in names)
    edit = capture("lora", net, space, space.gather(tuned))
    apply_edit(net, edit)
    torch.testing.assert_close(space.gather(net), space.gather(tuned))


# --- the file --------------------------------------------------------------------------------------------------


def same(one: Edit, other: Edit) -> bool:
    fields = ("name", "base", "scale", "scope")
    return (
        all(getattr(one, f) == getattr(other, f) for f in fields)
        and one.space.digest == other.space.digest
        and [p.name for p in one.space.buffers] == [p.name for p in other.space.buffers]
        and torch.equal(one.values, other.values)
    )


@pytest.mark.parametrize("space", ["sparse", "whole", "buffers"])
def test_a_file_gives_the_edit_back_and_the_same_edit_the_same_bytes(space: str, tmp_path: Path) -> None:
    net = network()
    chosen = {"sparse": sparse_space(net, 1), "whole": select(net, lambda n: "head" in n)}.get(space)
    edit = random_edit(net, 1, space=chosen or select(net, lambda n: "norm" in n)).scaled(-0.1)
    path = tmp_path / "a.edit"
    size = task_file.save_edit(edit, path)
    assert same(task_file.load_edit(path), edit) and [p.name for p in tmp_path.iterdir()] == ["a.edit"]
    assert size == path.stat().st_size == task_file.inspect_edit(edit).bytes
    assert task_file.dumps(task_file.load_edit(path)) == path.read_bytes() == task_file.dumps(edit)
    from safetensors import safe_open  # any safetensors reader can open it

    with safe_open(path, "pt") as file:
        assert torch.equal(file.get_tensor("values"), edit.values)


def test_a_sparse_file_costs_its_values_and_one_bit_per_element() -> None:
    mask = torch.rand(300, 301, generator=torch_stream(0, "mask")) < 0.1
    part = Part("w", (300, 301), mask.view(-1).nonzero().view(-1))
    edit = Edit("e", "0", EditSpace((part,)), torch.randn(part.size, generator=torch_stream(0, "v")))
    for half, width in ((False, 4), (True, 2)):
        assert 0 <= len(task_file.dumps(edit, half)) - width * part.size - (300 * 301 + 7) // 8 < 600


@settings(max_examples=30, deadline=None)
@given(st.integers(-120, 120), st.integers(0, 2**31))
def test_half_values_keep_eleven_bits_at_any_magnitude(power: int, seed: int) -> None:
    values = torch.randn(50, generator=torch_stream(seed, "half")) * 2.0**power
    edit = Edit("h", "0", EditSpace((Part("w", (50,)),)), values)
    found = task_file.loads(task_file.dumps(edit, half=True)).values
    # 2^-11 of the value, or of 2^-14 of half's range for those far below the largest.
    floor = float(values.abs().max()) * 2.0**-38
    assert ((found.double() - values.double()).abs() <= 2.0**-11 * values.abs().double() + floor + 1e-45).all()
    if power == -20:  # plain half would lose most of such small values
        assert not torch.equal(values.half().float(), found)


def test_every_flipped_bit_is_refused() -> None:
    net = network()
    data = task_file.dumps(random_edit(net, 1))
    for context in range(len(data)):
        for bit in range(8):
            broken = bytearray(data)
            broken[context] ^= 1 << bit
            with pytest.raises(FedgraftError):
                task_file.loads(bytes(broken))


def test_the_digest_is_what_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the digest switched off a flipped bit of a value passes unseen: the test above is not vacuous."""
    data = bytearray(task_file.dumps(random_edit(network(), 1)))
    data[-9] ^= 1  # the last value; five bytes of masks follow it
    monkeypatch.setattr(task_file, "_seal", lambda blank: task_file._SEAL.search(bytes(data)).group(1).decode())  # type: ignore[union-attr]
    task_file.loads(bytes(data))


@pytest.mark.parametrize("cut", [0, 7, 8, 60, -1])
def test_cut_files_and_other_files_are_refused(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "cut.edit"
    path.write_bytes(task_file.dumps(random_edit(network(), 1))[:cut])
    with pytest.raises(FedgraftError, match=r"cut\.edit"):
        task_file.load_edit(path)
    with raises("E-EDIT-FILE-READ"):
        task_file.load_edit(tmp_path / "absent.edit")


def forge(edit: Edit, update: Callable[[dict[str, Any]], None], tensors: dict[str, Tensor] | None = None) -> bytes:
    """A file whose digest is right and whose description lies."""
    from safetensors.torch import load, save

    data = task_file.dumps(edit)
    (length,) = struct.unpack("<Q", data[:8])
    about = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["fedgraft"])
    about["seal"] = "0" * 64
    update(about)
    blank = save({**load(data), **(tensors or {})}, {"fedgraft": json.dumps(about, separators=(",", ":"))})
    begin, end = task_file._seal_at(blank)
    return blank[:begin] + task_file._seal(blank).encode() + blank[end:]


def put(*path: Any) -> Callable[[dict[str, Any]], None]:
    """Set a place in the description to a value."""
    *keys, last, value = path

    def update(about: Any) -> None:
        for key in keys:
            about = about[key]
        about[last] = value

    return update


@pytest.mark.parametrize(
    "update",
    [
        put("format", "fedgraft-edit-9"),
        put("space", "0" * 32),
        put("name", 3),
        put("scale", "1"),
        put("scale", True),
        put("scale", float("inf")),
        put("scope", "head."),
        put("exponent", 5),
        put("exponent", 10**9),
        put("parts", []),
        put("parts", 7),
        put("parts", 0, "x"),
        put("parts", 0, 0, "other"),
        put("parts", 0, 1, [4, 5]),
        put("parts", 0, 1, [-4, -4]),
        put("parts", 0, 1, [10**30, 10**30]),
        put("parts", 0, 1, [2**40]),
        put("parts", 0, 2, None),
        put("parts", 0, 2, 1),
        put("buffers", [["backbone.layers.0.weight", [4], None]]),
        lambda about: about.pop("base"),
        lambda about: about["parts"].append(about["parts"][0]),
    ],
)
def test_lies_with_a_right_digest_are_refused(update: Callable[[dict[str, Any]], None]) -> None:
    edit = random_edit(network(), 2)
    assert same(task_file.loads(forge(edit, lambda about: None)), edit)
    with pytest.raises(FedgraftError):
        task_file.loads(forge(edit, update))


@pytest.mark.parametrize(
    "tensors",
    [
        {"values": torch.zeros(2)},
        {"values": torch.zeros(3, dtype=torch.int64)},
        {"masks": torch.zeros(0, dtype=torch.uint8)},
        {"masks": torch.full((5,), 255, dtype=torch.uint8)},
        {"masks": torch.zeros(5)},
        {"more": torch.zeros(1)},
    ],
)
def test_arrays_that_do_not_add_up_are_refused(tensors: dict[str, Tensor]) -> None:
    with pytest.raises(FedgraftError):
        task_file.loads(forge(random_edit(network(), 2), lambda about: None, tensors))


def test_inspect_gives_counts_densities_and_norms_by_block() -> None:
    net = network()
    edit = random_edit(net, 1).scaled(-2.0)
    facts = task_file.inspect_edit(edit)
    spread = as_dense(edit, net)
    touched = {part.name for part in edit.space.parts}
    everything = torch.cat([spread[name].view(-1) for name in touched])
    assert facts.total.coordinates == edit.space.size
    assert facts.total.density == pytest.approx(edit.space.size / everything.numel())
    assert facts.total.norm == pytest.approx(float(everything.norm()))
    assert facts.largest == pytest.approx(float(everything.abs().max()))
    first = torch.cat([spread[f"backbone.layers.0.{n}"].view(-1) for n in ("weight", "bias")])
    assert facts.blocks["backbone.layers.0"].norm == pytest.approx(float(first.norm()))
    assert list(facts.blocks) == ["backbone.layers.0", "backbone.layers.1", "backbone.norm"]
    assert f"{facts.total.coordinates} coordinates" in str(facts) and "backbone.layers.1: " in str(facts)
    assert task_file.block_name("head.bias") == "head" and task_file.block_name("w") == "w"
