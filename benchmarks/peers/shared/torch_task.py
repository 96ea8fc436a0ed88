"""What a user of any PyTorch framework writes once: the network, the data, J local steps, the evaluation.

The runners of the torch peers differ only in how they carry this. Batches come from an index into tensors in memory,
which is faster here than a DataLoader.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from protocol import Workload
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate


class Cnn(nn.Module):
    """Two 3x3 convolutions with pooling and a linear head."""

    def __init__(self, width: int, image_size: int, classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.head = nn.Linear(2 * width * (image_size // 4) ** 2, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.max_pool2d(torch.relu(self.conv1(x)), 2)
        x = nn.functional.max_pool2d(torch.relu(self.conv2(x)), 2)
        return self.head(x.flatten(1))


class Vit(nn.Module):
    """A `transformers` ViT with a linear head on the class token."""

    def __init__(self, folder: str, classes: int, frozen: bool) -> None:
        super().__init__()
        from transformers import ViTModel

        self.backbone = ViTModel.from_pretrained(folder, add_pooling_layer=False, dtype=torch.float32)
        self.head = nn.Linear(self.backbone.config.hidden_size, classes)
        self.frozen = frozen

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
            features = self.backbone(pixel_values=x).last_hidden_state[:, 0]
        return self.head(features)


def build(workload: Workload, arrays: dict[str, np.ndarray]) -> nn.Module:
    """The network with the common starting weights; only what may move asks for gradients."""
    model: nn.Module
    if workload.task == "head":
        model = nn.Linear(arrays["train_x"].shape[1], workload.classes)
    elif workload.task == "cnn":
        model = Cnn(workload.options["width"], workload.image_size, workload.classes)
    else:
        assert workload.backbone is not None
        model = Vit(workload.backbone, workload.classes, frozen=workload.task == "frozen")
    begin(model, arrays)
    if isinstance(model, Vit):
        restrict(model, workload)
    return model


def begin(model: nn.Module, arrays: dict[str, np.ndarray]) -> None:
    """Start the drawn part of the network (all of it, or the head) where everybody starts."""
    drawn = list((model.head if isinstance(model, Vit) else model).parameters())
    with torch.no_grad():
        for context, parameter in enumerate(drawn):
            parameter.copy_(torch.from_numpy(arrays[f"start_{context}"]))


def restrict(model: Vit, workload: Workload) -> None:
    """Choose what may move: the head, the blocks (under a mask), the query and key weights, or low-rank factors."""
    if workload.task != "frozen":  # a given head, which is not part of the edit
        model.head.requires_grad_(False)
    if workload.task == "lora":
        from peft import LoraConfig, get_peft_model

        rank, alpha = workload.options["rank"], workload.options["alpha"]
        model.backbone = get_peft_model(
            model.backbone, LoraConfig(r=rank, lora_alpha=alpha, target_modules=["q_proj", "v_proj"])
        )
        return
    for name, parameter in model.backbone.named_parameters():
        in_block = name.startswith("layers.")
        asked = {"frozen": False, "sparse": in_block, "qk": in_block and (".q_proj." in name or ".k_proj." in name)}
        parameter.requires_grad = asked[workload.task]


def moving(model: nn.Module) -> dict[str, nn.Parameter]:
    """What travels: the parameters that train."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def masks(model: nn.Module, workload: Workload) -> dict[str, Tensor]:
    """A random mask over the blocks' weights for the task `sparse`, the same for every client; else none."""
    if workload.task != "sparse":
        return {}
    draw = torch.Generator().manual_seed(workload.seed)
    share = workload.options["density"]
    return {name: torch.rand(p.shape, generator=draw) < share for name, p in moving(model).items() if "trunk." in name}


class Task:
    """The data of all clients in memory, and what is done with a network."""

    def __init__(self, workload: Workload, arrays: dict[str, np.ndarray]) -> None:
        self.workload = workload
        self.x, self.y = torch.from_numpy(arrays["train_x"]), torch.from_numpy(arrays["train_y"])
        self.rows = torch.from_numpy(arrays["rows"])
        self.held = {
            part: (torch.from_numpy(arrays[f"{part}_x"]), torch.from_numpy(arrays[f"{part}_y"]))
            for part in ("validation", "test")
        }
        self.masks: dict[str, Tensor] = {}

    def inputs(self, stored: Tensor) -> Tensor:
        """What the network sees: features as they are; images scaled, resized and normalised."""
        if stored.dtype != torch.uint8:
            return stored
        w = self.workload
        x = stored.permute(0, 3, 1, 2).float().div(255)
        if x.shape[-1] != w.image_size:
            size = (w.image_size, w.image_size)
            x = interpolate(x, size, mode="bicubic", antialias=True, align_corners=False).clamp(0, 1)
        return (x - torch.tensor(w.mean).view(3, 1, 1)) / torch.tensor(w.std).view(3, 1, 1)

    def batches(self, client: int, round: int) -> Iterator[tuple[Tensor, Tensor]]:
        """J batches of a client from an endless reshuffled stream."""
        w, rows = self.workload, self.rows[client]
        draw = torch.Generator().manual_seed(w.seed + 100_003 * round + client)
        passes = math.ceil(w.steps * w.batch_size / len(rows))
        stream = torch.cat([rows[torch.randperm(len(rows), generator=draw)] for _ in range(passes)])
        for picked in stream[: w.steps * w.batch_size].split(w.batch_size):
            yield self.inputs(self.x[picked]), self.y[picked]

    def train(self, model: nn.Module, client: int, round: int) -> int:
        """J steps of SGD with momentum; returns how many were taken."""
        model.train()
        w, steps = self.workload, 0
        chosen = moving(model)
        optimizer = torch.optim.SGD(chosen.values(), lr=w.lr, momentum=w.momentum)
        for x, y in self.batches(client, round):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            for name, mask in self.masks.items():
                grad = chosen[name].grad
                assert grad is not None
                grad.mul_(mask)
            optimizer.step()
            steps += 1
        return steps

    @torch.no_grad()
    def accuracy(self, model: nn.Module, part: str) -> float:
        """Accuracy on the validation or the test examples."""
        model.eval()
        x, y = self.held[part]
        right = sum(
            int((model(self.inputs(a)).argmax(1) == b).sum()) for a, b in zip(x.split(512), y.split(512), strict=True)
        )
        return right / len(y)
