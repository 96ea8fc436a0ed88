"""Images and labels as numpy arrays, dealt to eight uneven clients; only the head trains."""

import fedgraft as fg

digits = fg.data.digits().train  # stands in for arrays of your own
images = digits.images[..., 0]  # uint8 (1438, 8, 8); colour would be (N, height, width, 3)
data = fg.data.arrays(images, digits.labels)
clients = fg.partition.dirichlet(data, clients=8, alpha=0.3)

algorithm = fg.fedavg(trainable=fg.head(), local=fg.LocalTraining(steps=32, lr=0.03))
result = fg.run(algorithm, fg.model("nano"), clients, rounds=10, head="random")  # it begins at chance
print(result)
print(f"{result.accuracy:.2f} of the test images are right; the digit 8: {result.evaluate().metrics['sensitivity:8']}")
