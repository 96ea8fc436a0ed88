"""A `transformers` model object: low-rank factors train, and leave as a PEFT adapter and as a whole model."""

import tempfile
from pathlib import Path

import torch
from transformers import ViTConfig, ViTForImageClassification

import fedgraft as fg

torch.manual_seed(0)  # yours would be ViTForImageClassification.from_pretrained(...)
config = ViTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=16)
config.patch_size = 8
net = ViTForImageClassification(config)
processor = {"image_processor_type": "ViTImageProcessor", "size": 16, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}

model = fg.model(net, preprocessor=processor)
clients = fg.partition.iid(fg.data.digits(), clients=4)
algorithm = fg.fedavg(trainable=fg.lora(rank=4), local=fg.LocalTraining(steps=8, lr=0.2))
result = fg.run(algorithm, model, clients, rounds=10, head="random")
print(result)
with tempfile.TemporaryDirectory() as place:
    for kind in ("adapter", "merged"):
        print(kind, sorted(p.name for p in result.save_pretrained(Path(place) / kind, kind).iterdir()))
