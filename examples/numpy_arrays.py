"""Images and labels as numpy arrays, dealt to eight uneven clients; only the head trains."""

import fedgraft as fg

digits = fg.data.digits().train  # stands in for arrays of your own
images = digits.images[..., 0]  # uint8 (1438, 8, 8); colour would be (N, height, width, 3)
data = fg.data.arrays(images, digits.labels)
clients = fg.partition.dirichlet(data, clients=8, alpha=0.3)

result = fg.run(fg.fedavg(trainable=fg.head()), fg.model("nano"), clients, rounds=3)
print(result)
print(f"{result.accuracy:.2f} of the test images are right; the digit 8: {result.evaluate().metrics['sensitivity:8']}")
