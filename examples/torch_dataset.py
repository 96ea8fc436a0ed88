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
algorithm = fg.fedprox(mu=0.1, trainable=fg.head(), local=fg.LocalTraining(steps=32, lr=0.03))
result = fg.run(algorithm, fg.model("nano"), clients, rounds=10, head="random")  # it begins at chance
print(result)
