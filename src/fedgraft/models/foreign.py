"""Any `nn.Module` as a network: the user names its linear head and, optionally, its blocks."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fedgraft.core.arguments import checked_call
from fedgraft.core.errors import FedgraftError
from fedgraft.core.rng import torch_stream
from fedgraft.models.dino_hub import has_dino_names
from fedgraft.models.hooked import Hooked, block_of_modules, pooled_output
from fedgraft.models.network import IMAGENET_MEAN, IMAGENET_STD, Dropout, VisionNetwork, linear_layer
from fedgraft.models.quiet import drawn_from

_USUAL_SIZES = (224, 32, 64, 28, 96, 128, 256, 299, 384, 16, 8)


@checked_call("fg.module(net, head='fc')")
def module(
    net: nn.Module,
    head: str = "fc",
    blocks: str | Sequence[str] | None = None,
    *,
    image_size: int | None = None,
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
) -> VisionNetwork:
    """Return a copy of `net` as a network.

    `head` names its last, linear layer; `blocks` a list of layers or each of them. Without `blocks` it counts as one
    block. Without an image size it is the first of the usual ones that `net` can read, 224 before 32. That the parts
    together give the outputs of `net` is checked on random images.
    """
    backbone = copy.deepcopy(net).float().requires_grad_(True).cpu().eval()
    notes = []
    if image_size is None:
        size, images, expected = _first_readable_size(backbone, _USUAL_SIZES)
        notes.append(f"it is given images of {size} pixels, the first usual size it reads.")
    else:
        size, images, expected = _first_readable_size(backbone, (image_size,))
    notes += _control_randomness(backbone)
    last_layer = _detach_head(backbone, head)
    if last_layer.bias is None:
        notes.append("its head had no bias and was given one of 0.")
        bias = torch.zeros(last_layer.out_features)
    else:
        bias = last_layer.bias.data
    paths = _block_paths(backbone, blocks)
    owners: dict[str, int] = {}
    if paths:
        owners = block_of_modules(backbone, paths, images[:1])
    cut = Hooked(paths, owners, size, head)
    network = VisionNetwork(backbone, linear_layer(last_layer.weight.data, bias), size, cut=cut)
    network.mean = tuple(mean)
    network.std = tuple(std)
    network.notes += tuple(notes)
    network.source = type(net).__name__
    _check_parts(network, images, expected)
    _check_randomness(network, images)
    return network


def original(network: VisionNetwork) -> nn.Module:
    """Return the module that was given to `module`, in its original structure, with the weights of this network."""
    if not isinstance(network.cut, Hooked) or not network.cut.head:
        raise FedgraftError(
            "E-MODELS-NOT-FOREIGN", "this network was not made from a module of your own", "export it instead"
        )
    net = copy.deepcopy(network.backbone)
    _set_layer(net, network.cut.head, copy.deepcopy(network.head))
    return net


def _detach_head(net: nn.Module, path: str) -> nn.Linear:
    """Return the linear layer at a path and put an identity in its place; changes `net`."""
    head = dict(net.named_modules()).get(path)
    if not isinstance(head, nn.Linear):
        if has_dino_names(net.state_dict()):
            raise FedgraftError(
                "E-MODELS-HEADLESS",
                f"this {type(net).__name__} is a DINO backbone, which has no head",
                "give it to fg.model(net), which adds one",
                head=path,
            )
        linear_layers = [name for name, layer in net.named_modules() if isinstance(layer, nn.Linear)]
        hint = "give a module with a linear layer, since it has none"
        if linear_layers:
            hint = f"name its last one, perhaps {linear_layers[-1]!r}"
        raise FedgraftError(
            "E-MODELS-HEAD",
            f"the head {path!r} is not a linear layer of this {type(net).__name__}",
            hint,
            head=path,
        )
    _set_layer(net, path, nn.Identity())
    return head


def _set_layer(net: nn.Module, path: str, layer: nn.Module) -> None:
    """Replace the layer of `net` at a path, in place."""
    parent, _, name = path.rpartition(".")
    setattr(net.get_submodule(parent), name, layer)


def _block_paths(net: nn.Module, blocks: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the paths of `blocks` in the module; a single `ModuleList` or `Sequential` stands for its children."""
    if blocks is None:
        return ()
    paths = list(blocks)
    if isinstance(blocks, str):
        paths = [blocks]
    layers = dict(net.named_modules())
    for path in paths:
        if path not in layers:
            raise FedgraftError(
                "E-MODELS-BLOCK",
                f"{path!r} is not a layer of this {type(net).__name__}",
                "name blocks by their paths",
                block=path,
            )
    if len(paths) == 1 and isinstance(layers[paths[0]], nn.ModuleList | nn.Sequential):
        return tuple(f"{paths[0]}.{name}" for name, _ in layers[paths[0]].named_children())
    return tuple(paths)


def _control_randomness(net: nn.Module) -> list[str]:
    """Replace dropout by one with a generator of its own, in place; turn other random layers off and return notes."""
    notes = []
    for name, layer in list(net.named_modules()):
        if type(layer) is nn.Dropout:
            _set_layer(net, name, Dropout(layer.p).train(layer.training))
        elif isinstance(layer, nn.modules.dropout._DropoutNd):
            layer.p = 0.0
            notes.append(
                f"its layer {name!r} ({type(layer).__name__}) is off: it cannot draw from a stream of its own."
            )
    return notes


@torch.no_grad()
def _first_readable_size(net: nn.Module, sizes: Sequence[int]) -> tuple[int, Tensor, Tensor]:
    """Return the first of these image sides that the module reads, random images of it, and the module's outputs."""
    last_error: Exception | None = None
    for size in sizes:
        images = torch.randn(2, 3, size, size, generator=torch_stream(0, "module"))
        try:
            return size, images, pooled_output(net(images))
        except Exception as error:
            last_error = error
    raise FedgraftError(
        "E-MODELS-FOREIGN-SIZE",
        f"this {type(net).__name__} cannot read images (2, 3, {sizes[-1]}, {sizes[-1]}): {type(last_error).__name__}",
        "give the image_size it was made for",
        size=sizes[-1],
    ) from last_error


@torch.no_grad()
def _check_parts(network: VisionNetwork, images: Tensor, expected: Tensor) -> None:
    """Raise unless the parts of a network together give the outputs `expected` of the module on these images."""
    features = network.features(images)
    if features.shape != (2, network.width) or not torch.allclose(network.head(features), expected, atol=1e-5):
        raise FedgraftError(
            "E-MODELS-AFTER-HEAD",
            f"this {network.source} does more after its head, such as a softmax",
            "let it return what that layer gives",
        )
    for entry in range(1, network.depth):
        try:
            entered = network.features(network.features(images, 0, entry), entry)
            same = torch.allclose(entered, features, atol=1e-5)
        except Exception:
            same = False
        if not same:
            raise FedgraftError(
                "E-MODELS-BLOCK-ENTRY",
                f"this {network.source} cannot be entered at block {entry}: its blocks do not pass one tensor from "
                "one to the next",
                "leave `blocks` out",
                block=entry,
            )


def _check_randomness(network: VisionNetwork, images: Tensor) -> None:
    """Raise for a network that draws from the shared generator in training: its runs could not be repeated.

    A copy is tried on these images.
    """
    trial = copy.deepcopy(network).train()  # batch norms learn from this pass
    for layer in trial.modules():
        if isinstance(layer, Dropout):
            layer.generator = torch_stream(0, "trial")
    with drawn_from(0), torch.no_grad():
        before = torch.default_generator.get_state()
        trial(images)
        if not torch.equal(before, torch.default_generator.get_state()):
            raise FedgraftError(
                "E-MODELS-RANDOM",
                f"this {network.source} draws random numbers by itself in training, so no run could be repeated",
                "use nn.Dropout layers instead of functions",
            )
