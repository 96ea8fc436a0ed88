"""Any `nn.Module` as a network: its linear head is named, its blocks may be."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fedgraft.core.errors import FedgraftError
from fedgraft.core.rng import torch_stream
from fedgraft.models.hooked import Hooked, vector, watch
from fedgraft.models.network import IMAGENET_MEAN, IMAGENET_STD, Dropout, VisionNetwork, linear
from fedgraft.models.quiet import drawn_from

_USUAL = (224, 32, 64, 28, 96, 128, 256, 299, 384, 16, 8)


def module(
    net: nn.Module,
    head: str = "fc",
    blocks: str | Sequence[str] | None = None,
    *,
    image_size: int | None = None,
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
) -> VisionNetwork:
    """A copy of `net` as a network: `head` names its last, linear layer, `blocks` a list of layers or each of them.

    Without `blocks` it counts as one block. Without an image size it is the first of the usual ones that `net` can
    read, 224 before 32. That the parts give together what `net` gives is checked on random images.
    """
    backbone = copy.deepcopy(net).float().requires_grad_(True).cpu().eval()
    size, images, expected = _tried(backbone, _USUAL if image_size is None else (image_size,))
    notes = [] if image_size is not None else [f"it is given images of {size} pixels, the first usual size it reads."]
    notes += _own_randomness(backbone)
    last = _take_head(backbone, head)
    if last.bias is None:
        notes.append("its head had no bias and was given one of 0.")
    bias = torch.zeros(last.out_features) if last.bias is None else last.bias.data
    paths = _paths(backbone, blocks)
    owners = watch(backbone, paths, images[:1]) if paths else {}
    cut = Hooked(paths, owners, size, head)
    network = VisionNetwork(backbone, linear(last.weight.data, bias), size, cut=cut)
    network.mean, network.std = tuple(mean), tuple(std)
    network.notes += tuple(notes)
    network.source = type(net).__name__
    _check_parts(network, images, expected)
    _check_randomness(network, images)
    return network


def original(network: VisionNetwork) -> nn.Module:
    """The module that was given to `module`, as it was built, with the weights of this network."""
    if not isinstance(network.cut, Hooked) or not network.cut.head:
        raise FedgraftError("this network was not made from a module of your own; export it instead.")
    net = copy.deepcopy(network.backbone)
    _set(net, network.cut.head, copy.deepcopy(network.head))
    return net


def _take_head(net: nn.Module, path: str) -> nn.Linear:
    found = dict(net.named_modules()).get(path)
    if not isinstance(found, nn.Linear):
        linear = [name for name, layer in net.named_modules() if isinstance(layer, nn.Linear)]
        raise FedgraftError(
            f"the head {path!r} is not a linear layer of this {type(net).__name__}; name its last one, "
            f"{f'perhaps {linear[-1]!r}' if linear else 'but it has none'}."
        )
    _set(net, path, nn.Identity())
    return found


def _set(net: nn.Module, path: str, layer: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(net.get_submodule(parent), name, layer)


def _paths(net: nn.Module, blocks: str | Sequence[str] | None) -> tuple[str, ...]:
    if blocks is None:
        return ()
    known = dict(net.named_modules())
    listed = [blocks] if isinstance(blocks, str) else list(blocks)
    for path in listed:
        if path not in known:
            raise FedgraftError(f"{path!r} is not a layer of this {type(net).__name__}; name blocks by their paths.")
    if len(listed) == 1 and isinstance(known[listed[0]], nn.ModuleList | nn.Sequential):
        return tuple(f"{listed[0]}.{name}" for name, _ in known[listed[0]].named_children())
    return tuple(listed)


def _own_randomness(net: nn.Module) -> list[str]:
    """Let dropout draw from a given stream; other random layers, which cannot, are turned off and named."""
    off = []
    for name, layer in list(net.named_modules()):
        if type(layer) is nn.Dropout:
            _set(net, name, Dropout(layer.p).train(layer.training))
        elif isinstance(layer, nn.modules.dropout._DropoutNd):
            layer.p = 0.0
            off.append(f"its layer {name!r} ({type(layer).__name__}) is off: it cannot draw from a stream of its own.")
    return off


@torch.no_grad()
def _tried(net: nn.Module, sizes: Sequence[int]) -> tuple[int, Tensor, Tensor]:
    """The first of these sizes that the module reads, random images of it, and what it makes of them."""
    failed: Exception | None = None
    for size in sizes:
        images = torch.randn(2, 3, size, size, generator=torch_stream(0, "module"))
        try:
            return size, images, vector(net(images))
        except Exception as error:
            failed = error
    raise FedgraftError(
        f"this {type(net).__name__} cannot read images (2, 3, {sizes[-1]}, {sizes[-1]}): {type(failed).__name__}; "
        "give the image_size it was made for."
    ) from failed


@torch.no_grad()
def _check_parts(network: VisionNetwork, images: Tensor, expected: Tensor) -> None:
    features = network.features(images)
    if features.shape != (2, network.width) or not torch.allclose(network.head(features), expected, atol=1e-5):
        raise FedgraftError(
            f"this {network.source} does more after its head, such as a softmax; let it return what that layer gives."
        )
    for entry in range(1, network.depth):
        try:
            same = torch.allclose(network.features(network.features(images, 0, entry), entry), features, atol=1e-5)
        except Exception:
            same = False
        if not same:
            raise FedgraftError(
                f"this {network.source} cannot be entered at block {entry}: its blocks do not pass one tensor from "
                "one to the next; leave `blocks` out."
            )


def _check_randomness(network: VisionNetwork, images: Tensor) -> None:
    """A network that draws numbers by itself would make runs that cannot be repeated."""
    trial = copy.deepcopy(network).train()  # batch norms learn from this pass
    for layer in trial.modules():
        if isinstance(layer, Dropout):
            layer.generator = torch_stream(0, "trial")
    with drawn_from(0), torch.no_grad():
        before = torch.default_generator.get_state()
        trial(images)
        if not torch.equal(before, torch.default_generator.get_state()):
            raise FedgraftError(
                f"this {network.source} draws random numbers by itself in training, so no run could be repeated; "
                "use nn.Dropout layers instead of functions."
            )
