"""A torch `Dataset` of (image, label); images are what they are before any transform of yours."""

import torch

import fedgraft as fg


class Digits(torch.utils.data.Dataset):
    """Handwritten digits; an item may also be a Pillow image, or a table with `image` and `label`."""

    def __init__(self) -> None:
        self.digits = fg.data.digits().train

    def __len__(self) -> int:
        return len(self.digits.labels)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        colours = torch.from_numpy(self.digits.images[row])  # (8, 8, 3)
        return colours.permute(2, 0, 1) / 255, int(self.digits.labels[row])


clients = fg.partition.iid(fg.data.dataset(Digits()), clients=5)
result = fg.run(fg.fedprox(mu=0.1, trainable=fg.head()), fg.model("nano"), clients, rounds=2)
print(result)
