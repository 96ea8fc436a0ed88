"""Image files in a folder per owner and class, to a model that `transformers` loads and to labels for new images."""

import tempfile
from pathlib import Path

from PIL import Image

import fedgraft as fg

with tempfile.TemporaryDirectory() as place:
    root, digits = Path(place), fg.data.digits().train
    for row in range(400):  # anna/3/12.png, ben/7/31.png, ...
        path = root / "owners" / ("anna", "ben")[row % 2] / str(digits.labels[row]) / f"{row}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(digits.images[row]).save(path)

    clients = fg.partition.by_site(fg.data.owners(root / "owners"))
    algorithm = fg.fedavg(trainable=fg.head(), local=fg.LocalTraining(steps=32, lr=0.03))
    result = fg.run(algorithm, fg.model("nano"), clients, rounds=6, head="random")
    print(result)
    for found in result.predict(root / "owners" / "anna" / "3")[:3]:
        print(f"{Path(found.image).name} is taken for {found.label} ({found.score:.2f})")
    folder = result.save_pretrained(root / "adapted")
    print(sorted(path.name for path in folder.iterdir()))
