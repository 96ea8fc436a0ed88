"""ResNet for 32-pixel images: a 3x3 stride-1 stem without max-pool, batch or group norm.

The configuration is `transformers`' own ResNetConfig with two more fields, `stem = "cifar"` and `norm`. This file needs
nothing of fedgraft: `export` puts a copy beside the weights for `from_pretrained(..., trust_remote_code=True)`. It
imports transformers at once, so import it inside functions only.
"""

from __future__ import annotations

import math
from typing import Any

from torch import nn
from transformers import ResNetForImageClassification, ResNetModel


def _adapt_stem(backbone: Any, config: Any) -> None:
    """Replace the stem by one for small images and, if configured, batch norms by group norms, in place."""
    channels = config.embedding_size
    stem = nn.Conv2d(config.num_channels, channels, kernel_size=3, padding=1, bias=False)
    nn.init.kaiming_normal_(stem.weight, mode="fan_out", nonlinearity="relu")
    backbone.embedder.embedder.convolution = stem
    backbone.embedder.pooler = nn.Identity()
    if config.norm == "group":
        _use_group_norm(backbone)


def _use_group_norm(module: nn.Module) -> None:
    """Replace every batch norm below a module by a group norm, in place."""
    for name, child in list(module.named_children()):
        if isinstance(child, nn.BatchNorm2d):
            channels = child.num_features
            groups = math.gcd(channels, max(1, channels // 16))  # sixteen channels share their statistics
            setattr(module, name, nn.GroupNorm(groups, channels))
        else:
            _use_group_norm(child)


class CifarResNetModel(ResNetModel):
    """The ResNet backbone for small images."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        _adapt_stem(self, config)


class CifarResNetForImageClassification(ResNetForImageClassification):
    """The ResNet backbone for small images with its linear head."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        _adapt_stem(self.resnet, config)
