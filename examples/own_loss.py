"""A loss of your own: focal loss (Lin et al. 2017), which cares less about images that are right already."""

import torch
from torch.nn.functional import cross_entropy

import fedgraft as fg


def focal(gamma: float) -> fg.Loss:
    """`begin` looks at the client once a round (its labels, its counts) and gives what each step minimises."""

    def value(network, inputs, labels, entry):
        loss = cross_entropy(network(inputs, entry), labels, reduction="none")
        return ((1 - torch.exp(-loss)) ** gamma * loss).mean()

    return fg.Loss("focal", lambda context: value)


clients = fg.partition.dirichlet(fg.data.digits(), clients=6, alpha=0.3)
for loss in (fg.cross_entropy(), focal(gamma=2.0)):
    algorithm = fg.fedavg(trainable=fg.head(), loss=loss, local=fg.LocalTraining(steps=32, lr=0.03))
    result = fg.run(algorithm, fg.model("nano"), clients, rounds=10, head="random")
    print(f"{loss.name}: {result.accuracy:.3f} of the test images right, {result.curve()[0][1]:.3f} before round 1")
