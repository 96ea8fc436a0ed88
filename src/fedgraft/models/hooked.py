"""Cutting a network that nobody described: its blocks are named, everything else is found out by watching it run.

To stop at a block, a hook takes what is about to enter it and ends the pass. To start at a block, the pass runs on one
black image and a hook puts the held activations in the block's place; nothing before it sees or changes anything that
counts. This is right for networks that pass one tensor from block to block, and `module` checks that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fedgraft.core.errors import FedgraftError


class _Reached(Exception):
    """Carries what enters the block at which a pass ends."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = value


@dataclass(frozen=True)
class Hooked:
    """A backbone whose blocks are the modules at `paths`; without any it is one piece."""

    paths: tuple[str, ...] = ()
    owners: Mapping[str, int] = field(default_factory=dict)
    """For each module outside the blocks that is called: the block before or in which it runs, -1 before block 0."""
    size: int = 0
    head: str = ""
    """Where its owner keeps the head."""
    inner: bool = False
    square: bool = False

    def blocks_of(self, backbone: nn.Module) -> Sequence[nn.Module]:
        """The named blocks."""
        return [backbone.get_submodule(path) for path in self.paths]

    def depth_of(self, backbone: nn.Module) -> int:
        """The number of blocks; a backbone in one piece has one."""
        return max(1, len(self.paths))

    def block_of(self, name: str, depth: int) -> int:
        """The block of a tensor; one that no layer of its own uses counts as lying before block 0."""
        if not self.paths:
            return 0
        for index, path in enumerate(self.paths):
            if name.startswith(f"{path}."):
                return index
        owner = name.rpartition(".")[0]
        while owner and owner not in self.owners:
            owner = owner.rpartition(".")[0]
        return self.owners.get(owner, -1) if owner else -1

    def run(self, backbone: nn.Module, inputs: Tensor, entry: int, until: int, whole: bool = True) -> Tensor:
        """Activations at entry `until` from inputs at an earlier `entry`; nothing is ever left out."""
        blocks = self.blocks_of(backbone)
        hooks = []
        if until < len(blocks):
            hooks.append(blocks[until].register_forward_pre_hook(_stop))
        if entry:
            hooks.append(blocks[entry].register_forward_pre_hook(lambda _block, given: (inputs, *given[1:])))
        images = inputs if entry == 0 else inputs.new_zeros(1, 3, self.size, self.size)
        try:
            with self._still(backbone, entry):
                return vector(backbone(images))  # (B, D)
        except _Reached as reached:
            return reached.value
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def _still(self, backbone: nn.Module, entry: int) -> Iterator[None]:
        """Nothing before the entry learns from the black image: batch norms there only evaluate."""
        before = [] if not entry else [m for n, m in backbone.named_modules() if m.training and self._before(n, entry)]
        for module in before:
            module.training = False
        try:
            yield
        finally:
            for module in before:
                module.training = True

    def _before(self, module: str, entry: int) -> bool:
        return bool(module) and self.block_of(f"{module}.weight", len(self.paths)) < entry


def _stop(_block: nn.Module, given: tuple[Tensor, ...]) -> None:
    raise _Reached(given[0])


def vector(output: Any) -> Tensor:
    """What a backbone offers as one vector per image: a tensor as it is, else its own pooled output, else the mean."""
    if isinstance(output, Tensor):
        return output
    for name in ("logits", "pooler_output"):
        if getattr(output, name, None) is not None:
            return getattr(output, name).flatten(1)
    hidden = output.last_hidden_state
    return hidden.mean(1) if hidden.ndim == 3 else hidden.mean((2, 3))  # (B, D)


@torch.no_grad()
def watch(backbone: nn.Module, paths: Sequence[str], images: Tensor) -> dict[str, int]:
    """For each module outside the blocks: the block that had begun when it was first called, depth after the last."""
    owners: dict[str, int] = {}
    now = -1

    def begins(name: str) -> Any:
        def hook(*_: Any) -> None:
            nonlocal now
            if name in paths:
                if paths.index(name) != now + 1:
                    raise FedgraftError(f"the block {name!r} does not run once and in its turn; name blocks in order.")
                now += 1
            elif not any(name.startswith(f"{path}.") for path in paths):
                owners.setdefault(name, now)

        return hook

    def ends(*_: Any) -> None:
        nonlocal now
        now = len(paths)

    hooks = [module.register_forward_pre_hook(begins(name)) for name, module in backbone.named_modules()]
    hooks.append(backbone.get_submodule(paths[-1]).register_forward_hook(ends))
    try:
        backbone(images)
    finally:
        for hook in hooks:
            hook.remove()
    return owners
