"""Cut a network of unknown structure into blocks: the blocks are named, the rest is learned by watching a pass.

To stop at a block, a hook takes the block's input and ends the pass. To start at a block, the pass runs on one black
image and a hook replaces the block's input by the activations; nothing before it learns from the black image. This is
right for networks that pass one tensor from block to block, and `foreign.module` checks that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fedgraft.core.errors import FedgraftError


class _BlockReached(Exception):
    """Ends a pass; carries the input of the block at which it ends."""

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
    """Side of the images."""
    head: str = ""
    """Path of the head in the owner's module."""
    inner: bool = False
    attention: str = ""
    square: bool = False

    def blocks_of(self, backbone: nn.Module) -> Sequence[nn.Module]:
        """Return the named blocks."""
        return [backbone.get_submodule(path) for path in self.paths]

    def depth_of(self, backbone: nn.Module) -> int:
        """Return the number of blocks; a backbone in one piece has one."""
        return max(1, len(self.paths))

    def block_of(self, name: str, depth: int) -> int:
        """Return the block of a tensor; one that belongs to no called module counts as lying before block 0."""
        if not self.paths:
            return 0
        for index, path in enumerate(self.paths):
            if name.startswith(f"{path}."):
                return index
        module = name.rpartition(".")[0]
        while module:
            if module in self.owners:
                return self.owners[module]
            module = module.rpartition(".")[0]
        return -1

    def run(self, backbone: nn.Module, inputs: Tensor, entry: int, until: int, whole: bool = True) -> Tensor:
        """Return activations at entry `until` from inputs at an earlier `entry`.

        Every layer between them is run, whatever `whole` says.
        """
        blocks = self.blocks_of(backbone)
        hooks = []
        if until < len(blocks):
            hooks.append(blocks[until].register_forward_pre_hook(_stop))
        images = inputs
        if entry:

            def replace_input(_block: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
                """Return the arguments of the entered block with the activations as the first one (a hook)."""
                return (inputs, *arguments[1:])

            hooks.append(blocks[entry].register_forward_pre_hook(replace_input))
            images = inputs.new_zeros(1, 3, self.size, self.size)
        try:
            with self._evaluating_before(backbone, entry):
                return pooled_output(backbone(images))  # (B, D)
        except _BlockReached as reached:
            return reached.value
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def _evaluating_before(self, backbone: nn.Module, entry: int) -> Iterator[None]:
        """Put modules before the entry in evaluation mode, so that no batch norm learns from the black image."""
        modules = []
        if entry:
            for name, module in backbone.named_modules():
                if module.training and self._is_before(name, entry):
                    modules.append(module)
        for module in modules:
            module.training = False
        try:
            yield
        finally:
            for module in modules:
                module.training = True

    def _is_before(self, module: str, entry: int) -> bool:
        """Return whether a module lies before the entry."""
        return bool(module) and self.block_of(f"{module}.weight", len(self.paths)) < entry


def _stop(_block: nn.Module, arguments: tuple[Tensor, ...]) -> None:
    """End the pass at a block (a hook)."""
    raise _BlockReached(arguments[0])


def pooled_output(output: Any) -> Tensor:
    """Return a backbone's output as one vector per image: a tensor as it is, else its pooled output, else the mean."""
    if isinstance(output, Tensor):
        return output
    for name in ("logits", "pooler_output"):
        if getattr(output, name, None) is not None:
            return getattr(output, name).flatten(1)
    hidden = output.last_hidden_state
    if hidden.ndim == 3:
        return hidden.mean(1)  # (B, D)
    return hidden.mean((2, 3))  # (B, D)


@torch.no_grad()
def block_of_modules(backbone: nn.Module, paths: Sequence[str], images: Tensor) -> dict[str, int]:
    """Return for each module outside the blocks the block that had begun when it was first called.

    `paths` are the blocks in order; `images` go through the backbone once to see it. The value is -1 before the first
    block and the number of blocks after the last. Blocks must run once each, in order.
    """
    owners: dict[str, int] = {}
    current_block = -1

    def begin_hook(name: str) -> Callable[..., None]:
        """Return a hook that notes that the module of this name begins."""

        def begin(*_: Any) -> None:
            """Count a block that begins, or note the block in which another module is called."""
            nonlocal current_block
            if name in paths:
                if paths.index(name) != current_block + 1:
                    raise FedgraftError(
                        "E-MODELS-BLOCK-ORDER",
                        f"the block {name!r} does not run once and in its turn",
                        "name blocks in order",
                        block=name,
                    )
                current_block += 1
            elif not any(name.startswith(f"{path}.") for path in paths):
                owners.setdefault(name, current_block)

        return begin

    def end_last_block(*_: Any) -> None:
        nonlocal current_block
        current_block = len(paths)

    hooks = [module.register_forward_pre_hook(begin_hook(name)) for name, module in backbone.named_modules()]
    hooks.append(backbone.get_submodule(paths[-1]).register_forward_hook(end_last_block))
    try:
        backbone(images)
    finally:
        for hook in hooks:
            hook.remove()
    return owners
