"""A Hugging Face dataset with columns of any names; one client per hospital, and no patient on two sides of a split."""

import datasets
from PIL import Image

import fedgraft as fg

digits = fg.data.digits().train
table = {
    "scan": [Image.fromarray(image) for image in digits.images[:600]],
    "finding": [f"digit {label}" for label in digits.labels[:600]],
    "hospital": [("north", "south", "east")[row % 3] for row in range(600)],
    "patient": [f"p{row // 4}" for row in range(600)],
}
scans = datasets.Dataset.from_dict(table).cast_column("scan", datasets.Image())
data = fg.data.dataset(scans, image="scan", label="finding", group="patient")  # or a folder of save_to_disk
clients = fg.partition.by_site(data, "hospital")

algorithm = fg.fedavg(trainable=fg.head(), local=fg.LocalTraining(steps=32, lr=0.03))
result = fg.run(algorithm, fg.model("nano"), clients, rounds=6, head="random", personal={"evaluate": "end"})
print(clients.client_names, result.summary["personal"]["mean"])
print(result)
