"""A vision tower (CLIP, SigLIP, DINOv3) with a linear head on the one vector that it gives for an image.

`transformers` has no classification model that reads this vector. This file needs nothing of fedgraft: `export` puts a
copy beside the weights for `from_pretrained(..., trust_remote_code=True)`. It imports transformers at once, so import
it inside functions only.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AutoModel, CLIPVisionConfig, DINOv3ViTConfig, PreTrainedModel, SiglipVisionConfig
from transformers.modeling_outputs import ImageClassifierOutput


class VisionTowerForImageClassification(PreTrainedModel):
    """The tower as `tower`, the head as `classifier`; each family has a class of its own below."""

    base_model_prefix = "tower"
    main_input_name = "pixel_values"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.tower = AutoModel.from_config(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None, **kwargs: Any) -> ImageClassifierOutput:
        """Return the logits of images (B, 3, H, W), and with `labels` (B,) the cross-entropy."""
        features = self.tower(pixel_values).pooler_output  # (B, hidden_size)
        logits = self.classifier(features)  # (B, num_labels)
        loss = None
        if labels is not None:
            loss = nn.functional.cross_entropy(logits, labels)
        return ImageClassifierOutput(loss=loss, logits=logits)


class ClipTowerForImageClassification(VisionTowerForImageClassification):
    """CLIP's tower with a linear head."""

    config_class = CLIPVisionConfig


class SiglipTowerForImageClassification(VisionTowerForImageClassification):
    """SigLIP's tower with a linear head."""

    config_class = SiglipVisionConfig


class DinoV3TowerForImageClassification(VisionTowerForImageClassification):
    """DINOv3 with a linear head."""

    config_class = DINOv3ViTConfig


CLASSIFIERS: dict[str, type[VisionTowerForImageClassification]] = {
    "clip_vision_model": ClipTowerForImageClassification,
    "siglip_vision_model": SiglipTowerForImageClassification,
    "dinov3_vit": DinoV3TowerForImageClassification,
}
"""The class of each family, by the type of its configuration."""
