"""A network of your own: any `nn.Module` whose last linear layer you can name; all of it trains."""

import torch
from torch import nn

import fedgraft as fg


class Net(nn.Module):
    """Two convolutions; the head may have any number of outputs, a run makes the one its data needs."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Conv2d(8, 16, 3, 2), nn.ReLU())
        self.fc = nn.Linear(16, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.fc(self.body(images).mean((2, 3)))


torch.manual_seed(0)
model = fg.module(Net(), head="fc", image_size=16)
clients = fg.partition.iid(fg.data.digits(), clients=4)
algorithm = fg.fedavg(trainable=fg.everything(), local=fg.LocalTraining(steps=16, lr=0.1))
result = fg.run(algorithm, model, clients, rounds=10, head="random")  # from weights that were drawn to two thirds
print(result)
print(type(result.module()).__name__, "is yours again, with the adapted weights")
