"""A torch `Dataset` of (image, label); images are what they are before any transform of yours."""

import numpy as np
import torch
from sklearn.datasets import load_digits

import fedgraft as fg


class Digits(torch.utils.data.Dataset):
    """Handwritten digits; an item may also be a Pillow image, or a table with `image` and `label`."""

    def __init__(self) -> None:
        self.digits = load_digits()

    def __len__(self) -> int:
        return len(self.digits.target)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        grey = (self.digits.images[row] * (255 / 16)).astype(np.uint8)
        return torch.from_numpy(grey)[None].repeat(3, 1, 1) / 255, int(self.digits.target[row])


clients = fg.partition.iid(fg.data.dataset(Digits()), clients=5)
result = fg.run(fg.fedprox(mu=0.1, trainable=fg.head()), fg.model("nano"), clients, rounds=2)
print(result)
