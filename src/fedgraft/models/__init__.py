"""Networks: load, cut into blocks, export."""

from fedgraft.models.backbones import model
from fedgraft.models.foreign import module, original
from fedgraft.models.network import VisionNetwork

__all__ = ["VisionNetwork", "model", "module", "original"]
