"""Frozen means frozen: whole federated runs, with momentum, decay and evaluation on, and bugs planted to be found.

The check reads the very network that lived through the run, bit by bit, against a base built apart from it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedgraft.config.load import load, to_toml
from fedgraft.core.space import Bound, EditSpace, masked
from fedgraft.edit import lora, sparse
from fedgraft.edit.choose import STRATEGIES
from fedgraft.edit.masks import Mask
from fedgraft.models.network import VisionNetwork
from fedgraft.runs import checkpoint
from fedgraft.runs import loop as running
from fedgraft.runs.adapted import Adapted
from fedgraft.runs.engines import Engines
from fedgraft.runs.folder import RunFolder
from fedgraft.runs.head_init import install_head
from fedgraft.runs.open_run import open_run
from fedgraft.runs.setup import setup_of

OVERRIDES = [
    "model.name=tiny",
    "model.ridge=1.0",
    "data.source=digits",
    "data.image_size=16",
    "data.limit=120",
    "partition.clients=3",
    "rounds.fraction=1.0",
    "rounds.total=3",
    "rounds.evaluate_every=1",
    "local.steps=3",
    "local.batch_size=16",
    "local.lr=0.02",
    "local.momentum=0.9",
    "local.weight_decay=0.01",
    "trainable.kind=sparse",
    "trainable.head_too=false",
    "trainable.sparse.sparsity=0.9",
    "trainable.sparse.samples=48",
    "trainable.sparse.rounds=2",
    "personal.evaluate=always",
    "personal.finetune_epochs=1",
    "workers=1",  # in this process, whose network can be looked at afterwards
]
WITHOUT_PERSONAL = ["personal.evaluate=never"]
OPTIMIZERS = {
    "sgdm": ["local.optimizer=sgdm"],
    "nesterov": ["local.nesterov=true"],
    "adamw": ["local.optimizer=adamw", "local.lr=0.001"],
}


@pytest.fixture(autouse=True)
def quiet_place(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of the session's own; no report, which plays no part here."""
    monkeypatch.setenv("FEDGRAFT_CACHE", str(tmp_path_factory.getbasetemp() / "sparse-cache"))
    monkeypatch.setattr(running, "report_run", lambda *a, **k: None)


def carry_out(folder: Path, *overrides: str) -> Adapted:
    """A whole run; returns its parts, with the network as the run leaves it."""
    config = load(None, [*OVERRIDES, *overrides])
    build = lambda secret: (setup_of(config, secret=secret), None)  # noqa: E731
    _, parts = running.run_setup(build, folder, config.digest, to_toml(config), console=False)
    assert parts is not None
    setup, opened, state = parts
    record = RunFolder.open(folder)
    start, *lines = record.metrics()
    assert record.status == "finished" and start["round"] == 0 and len(lines) == 3
    assert not any(line["dropped"] for line in lines)
    assert torch.equal(bits(state.vector), bits(final_vector(folder)))
    # The best model may be the start, and a pool trains elsewhere: look at the last one, in the network that lived on.
    opened.space.scatter(state.vector, setup.task.network)
    return Adapted(setup, opened, state.vector)


def open_only(*overrides: str) -> Adapted:
    """A run that is ready for its first round: head made, edit space open."""
    setup = setup_of(load(None, [*OVERRIDES, *overrides]))
    engines = Engines(setup)
    install_head(setup, engines)
    opened = open_run(setup, engines)
    return Adapted(setup, opened, opened.space.gather(setup.task.network))


def mask_of(found: Adapted) -> Mask:
    """The coordinates that the run chose."""
    assert found.opened.trainable.mask is not None
    return found.opened.trainable.mask


def final_vector(folder: Path) -> Tensor:
    """The common model after the last round."""
    record = RunFolder.open(folder)
    found = checkpoint.load_latest(record.checkpoints, record.config_digest)
    assert found is not None and found.round == 3
    return found.tensors["vector"]


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().view(torch.int32)


def gradients(network: VisionNetwork, found: Adapted) -> dict[str, Tensor]:
    """The gradient of the clients' mean loss by plain autograd."""
    network.eval().requires_grad_(True)
    task = found.setup.task
    rows = task.data.train_rows
    loss = cross_entropy(network(task.eval_images.batch(rows)), task.train_images.labels[rows])
    names, parameters = zip(*network.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


def faults(run: Adapted) -> list[str]:
    """What is wrong after a run: tensors with a frozen coordinate that changed, and `unmoved` if too few moved."""
    base, mask = run.base(), mask_of(run)
    start, slope = dict(base.named_parameters()), gradients(base, run)
    found, moved, live = [], 0, 0
    for name, tensor in run.network.named_parameters():
        active = mask[name] if name in mask else torch.zeros(tensor.shape, dtype=torch.bool)
        same = bits(tensor) == bits(start[name])
        if not bool(same[~active].all()):
            found.append(name)
        live += int((active & (slope[name] != 0)).sum())
        moved += int((active & (slope[name] != 0) & ~same).sum())
    assert live > 0
    return found if moved >= 0.99 * live else [*found, "unmoved"]


def same_output(found: Adapted) -> bool:
    """Whether the opened and bound network computes, bit for bit, what the dense base does."""
    task, space = found.setup.task, found.opened.space
    base, images = found.base().eval(), task.eval_images.batch(task.data.train_rows[:32])
    bound = space.bind(found.network)
    bound.load(space.gather(found.network))
    found.network.eval()
    with torch.no_grad():
        return torch.equal(found.network(images), base(images))


PAIRS = list(zip(STRATEGIES, itertools.cycle(OPTIMIZERS), strict=False))
"""Every strategy and every optimizer at the gate; a step sees only that there is a mask, not who chose it."""
OTHERS = [
    pytest.param(*pair, marks=pytest.mark.deploy)
    for pair in itertools.product(STRATEGIES, OPTIMIZERS)
    if pair not in PAIRS
]


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "optimizer"), [*PAIRS, *OTHERS])
def test_frozen_coordinates_keep_their_bits(strategy: str, optimizer: str, tmp_path: Path) -> None:
    overrides = [f"trainable.sparse.strategy={strategy}", *OPTIMIZERS[optimizer]]
    alone = carry_out(tmp_path / "alone", *overrides)
    assert mask_of(alone).count == round(0.1 * mask_of(alone).total)
    assert faults(alone) == []
    if (strategy, optimizer) not in PAIRS[: len(OPTIMIZERS)]:  # workers meet every optimizer once
        return
    pool = carry_out(tmp_path / "pool", *overrides, "workers=2")
    assert mask_of(pool) == mask_of(alone) and faults(pool) == []
    # A leak inside a worker's own network would show here: clients would have trained something else.
    assert torch.equal(bits(final_vector(tmp_path / "pool")), bits(final_vector(tmp_path / "alone")))


@pytest.mark.slow
@pytest.mark.parametrize("head_too", [False, True])
@pytest.mark.parametrize("kind", ["per_client=true", "adaptive_start=0.5", "merge=vote", "merge=union"])
def test_other_masks_keep_the_law(kind: str, head_too: bool, tmp_path: Path) -> None:
    overrides = [f"trainable.sparse.{kind}", f"trainable.head_too={str(head_too).lower()}"]
    alone = carry_out(tmp_path / "alone", *overrides)
    assert faults(alone) == []
    if head_too and "merge" not in kind:  # how a mask is agreed on is over before workers begin
        carry_out(tmp_path / "pool", *overrides, "workers=2")
        assert torch.equal(bits(final_vector(tmp_path / "pool")), bits(final_vector(tmp_path / "alone")))
    assert ("head.weight" in mask_of(alone)) == head_too


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ["trainable.freeze_blocks=1"],
        ["local.clip=0.1"],
        ["algorithm.name=fedadam"],
        ["trainable.head_too=true"],
        WITHOUT_PERSONAL,  # bugs are planted below into this one
    ],
)
def test_options_keep_the_law(overrides: list[str], tmp_path: Path) -> None:
    assert faults(carry_out(tmp_path, *overrides)) == []


@pytest.mark.slow
def test_low_rank_factors_respect_frozen_blocks(tmp_path: Path) -> None:
    overrides = [
        "trainable.kind=lora",
        "trainable.lora.rank=2",
        "trainable.freeze_blocks=1",
        "personal.finetune_epochs=0",
    ]
    found = carry_out(tmp_path, *overrides, "local.lr=0.001")
    assert len(lora.adapter_layers(found.network)) == 2  # Q and V of the second block
    assert found.opened.context.examples.entry == 1


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["mean", "frozen_a", "alternate", "stack", "residual"])
def test_low_rank_runs_leave_the_base_alone(mode: str, tmp_path: Path) -> None:
    overrides = ["trainable.kind=lora", "trainable.lora.rank=2", f"trainable.lora.aggregate={mode}", "local.lr=0.001"]
    alone = carry_out(tmp_path / "alone", *overrides)
    carry_out(tmp_path / "pool", *overrides, "workers=2")
    assert torch.equal(bits(final_vector(tmp_path / "pool")), bits(final_vector(tmp_path / "alone")))
    start = {name: bits(p) for name, p in alone.base().named_parameters()}
    targets = {f"{name}.weight" for name in lora.adapter_layers(alone.network)}
    assert len(targets) == 4  # Q and V of two blocks
    moved = set()
    for name, tensor in alone.network.named_parameters():
        if ".lora_" not in name:
            plain = name.replace(".base_layer.", ".")
            if not torch.equal(bits(tensor), start[plain]):
                moved.add(plain)
    assert moved == (targets if mode in ("stack", "residual") else set())
    factors = [p for n, p in alone.network.named_parameters() if ".lora_B." in n]
    assert mode == "stack" or all(bool((p != 0).all()) for p in factors)  # stacking starts them anew
    if mode == "frozen_a":
        first = dict(open_only(*overrides).network.named_parameters())
        assert all(torch.equal(p, first[n]) for n, p in alone.network.named_parameters() if ".lora_A." in n)


@pytest.mark.parametrize(
    "overrides", [[], ["trainable.sparse.strategy=random"], ["trainable.kind=lora"], ["trainable.sparse.soft=0.0"]]
)
def test_round_zero_is_the_dense_model(overrides: list[str]) -> None:
    assert same_output(open_only(*overrides))


# Bugs that really happened elsewhere, each planted into the running code. The check must find every one of them.
Plant = Callable[[pytest.MonkeyPatch], None]


def space_from(make: Callable[[VisionNetwork, Mapping[str, Tensor]], EditSpace]) -> Plant:
    return lambda patch: patch.setattr(sparse, "masked", make)


def pruned(network: VisionNetwork, mask: Mapping[str, Tensor]) -> EditSpace:
    """The mask multiplies weights instead of restricting the update."""
    with torch.no_grad():
        for name, chosen in mask.items():
            network.get_parameter(name).mul_(chosen)
    return masked(network, mask)


def by_tensor(network: VisionNetwork, mask: Mapping[str, Tensor]) -> EditSpace:
    """A tensor with one active coordinate is trained whole."""
    return masked(network, {name: torch.full_like(chosen, bool(chosen.any())) for name, chosen in mask.items()})


def by_position(network: VisionNetwork, mask: Mapping[str, Tensor]) -> EditSpace:
    """Masks are paired with parameters by a running number, which is off by one among equal shapes."""
    turned: dict[str, Tensor] = {}
    for shape in {chosen.shape for chosen in mask.values()}:
        names = [name for name in mask if mask[name].shape == shape]
        turned |= {name: mask[names[i - 1]] for i, name in enumerate(names)}
    return masked(network, turned)


def decay_outside(patch: pytest.MonkeyPatch) -> None:
    """Weight decay shrinks every weight of a tensor, active or not."""
    push = Bound.push

    def broken(self: Bound) -> None:
        with torch.no_grad():
            for parameter in self.network.parameters():
                parameter.mul_(1 - 0.02 * 0.01)
        push(self)

    patch.setattr(Bound, "push", broken)


def momentum_leak(patch: pytest.MonkeyPatch) -> None:
    """A dense optimizer whose buffers were filled before the mask came: zeroed gradients do not stop them."""
    gradient, push = Bound.gradient, Bound.push
    velocity: dict[str, Tensor] = {}

    def filled(self: Bound) -> Tensor:
        for part in self.space.parts:
            grad = self._tensors[part.name].grad
            if grad is not None:
                velocity.setdefault(part.name, grad.clone())
        return gradient(self)

    def broken(self: Bound) -> None:
        with torch.no_grad():
            for name, buffer in velocity.items():
                self._tensors[name].data.sub_(buffer, alpha=0.02)
                buffer.mul_(0.9)
        push(self)

    patch.setattr(Bound, "gradient", filled)
    patch.setattr(Bound, "push", broken)


def averaged_weights(patch: pytest.MonkeyPatch) -> None:
    """The server averages whole weights: equal numbers, yet their weighted sum rounds."""
    step = running.run_round

    def broken(algorithm: Any, federation: Any, state: Any, engine: Any, server_context: Any) -> Any:
        result = step(algorithm, federation, state, engine, server_context)
        with torch.no_grad():
            for parameter in engine.context.network.parameters():
                parameter.copy_(sum(share * parameter for share in (0.35, 0.33, 0.32)))
        return result

    patch.setattr(running, "run_round", broken)


def nothing_trained(patch: pytest.MonkeyPatch) -> None:
    """The vector is stepped and never written into the network."""
    patch.setattr(Bound, "push", lambda self: None)
    patch.setattr("fedgraft.core.space.EditSpace.scatter", lambda self, vector, network: None)


BUGS: dict[str, tuple[Plant, str]] = {
    "mask on weights": (space_from(pruned), "backbone"),
    "mask per tensor": (space_from(by_tensor), "backbone"),
    "mask by position": (space_from(by_position), "backbone"),
    "decay outside": (decay_outside, "backbone"),
    "momentum leak": (momentum_leak, "backbone"),
    "averaging weights": (averaged_weights, "backbone"),
    "nothing trained": (nothing_trained, "unmoved"),
}


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_found(bug: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, sign = BUGS[bug]
    plant(monkeypatch)
    assert any(fault.startswith(sign) for fault in faults(carry_out(tmp_path, *WITHOUT_PERSONAL)))


def test_pruning_is_found_by_the_first_output(monkeypatch: pytest.MonkeyPatch) -> None:
    space_from(pruned)(monkeypatch)
    assert not same_output(open_only())


@pytest.mark.slow
def test_base_is_built_apart_from_the_run(tmp_path: Path) -> None:
    """The check would see nothing if its base shared memory with the network that was trained."""
    found = carry_out(tmp_path)
    theirs = {p.data_ptr() for p in found.network.parameters()} | {found.opened.head.data_ptr()}
    assert not theirs & {p.data_ptr() for p in found.base().parameters()}
    assert found.opened.head.data_ptr() not in {p.data_ptr() for p in found.network.parameters()}
