"""The workloads: what is done, on which data, with which numbers; and their arrays, written once for all.

Data, partition and starting weights are those that `fedgraft run` makes of its config, so that everybody works on the
same bytes. Images are synthetic and features are drawn, so that anyone can repeat it.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.shared.protocol import Workload, from_words

TORCH_PEERS = ("torch_loop", "flower", "pfl")
VIT_S = "vit:width=384,depth=12,heads=6,patch=16,size=64"
SHORT = "short"
"""Name of fedgraft's result with as many rounds as the peers do, where its timed runs do more."""
LOCAL = {"lr": 0.01, "momentum": 0.9}


@dataclass(frozen=True)
class Spec:
    """One row of work."""

    name: str
    text: str
    task: str
    model: str
    peers: tuple[str, ...]
    rounds: int
    """Of the whole run."""
    measured: int
    """Rounds the peers really do with --quick; the rest is extrapolated."""
    steps: int
    batch_size: int
    clients: int = 100
    per_round: int = 10
    classes: int = 100
    examples: int = 20_000
    evaluate_every: int = 10
    lr: float = 0.01
    complete: bool = False
    """Whether fedgraft does all rounds even with --quick (its first rounds are unlike the later ones)."""
    each: float = 3.0
    """Rough seconds of a peer's round on two cores, for the estimate."""
    own: tuple[float, float] = (10.0, 3.0)
    """The same for fedgraft: start-up and a round."""
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def group(self) -> str:
        """features (given), cnn, frozen (a backbone) or edit (of one)."""
        return self.name.partition("-")[0]

    def rounds_of(self, peer: str, quick: bool) -> int:
        """Rounds that this peer really does."""
        whole = not quick or (self.complete and peer == "fedgraft")
        return self.rounds if whole else min(self.measured, self.rounds)


def _sparse(task: str, model: str, name: str, peers: tuple[str, ...], **numbers: Any) -> Spec:
    what = {
        "sparse": "10 % of the blocks' weights",
        "qk": "query and key weights only",
        "lora": "LoRA, rank 8, q and v",
    }
    options = {"sparse": {"density": 0.1}, "qk": {}, "lora": {"rank": 8, "alpha": 16.0}}[task]
    lr = {"sparse": 0.5, "qk": 1.0, "lora": 0.5}[task]  # three rounds then change the accuracy, which is compared
    text = f"{what[task]} of {'nano' if name == 'nano' else 'ViT-S/16 shapes at 64 px'}"
    return Spec(
        f"edit-{task}-{name}",
        text,
        task,
        model,
        peers,
        3,
        3,
        evaluate_every=100,
        batch_size=32,
        options=options,
        lr=lr,
        **numbers,
    )


NANO = {"steps": 4, "clients": 20, "per_round": 4, "classes": 20, "examples": 4_000, "each": 1.5, "own": (9.0, 1.5)}
SMALL = {"steps": 2, "clients": 10, "per_round": 2, "classes": 10, "examples": 1_000, "each": 3.5, "own": (11.0, 3.0)}
SPECS = {
    spec.name: spec
    for spec in (
        Spec(
            "features",
            "head 384 -> 100 on given features",
            "head",
            "features",
            (*TORCH_PEERS, "fedjax", "fedlab"),
            50,
            50,
            16,
            64,
            examples=50_000,
            lr=0.05,
            each=0.2,
            own=(4.0, 0.03),
        ),
        Spec(
            "cnn",
            "small CNN on 32x32 images",
            "cnn",
            "cnn:width=32,size=32",
            (*TORCH_PEERS, "fedjax"),
            20,
            3,
            16,
            32,
            options={"width": 32},
            own=(6.0, 2.0),
        ),
        Spec(
            "frozen-nano",
            "head of a frozen nano, from images",
            "frozen",
            "nano",
            TORCH_PEERS,
            100,
            3,
            4,
            64,
            complete=True,
            lr=0.05,
            each=5.0,
            own=(35.0, 0.03),
        ),
        _sparse("sparse", "nano", "nano", ("torch_loop", "pfl"), **NANO),
        Spec(
            "frozen-vits",
            "head of frozen ViT-S/16 shapes at 64 px, from images",
            "frozen",
            VIT_S,
            ("torch_loop",),
            100,
            2,
            4,
            64,
            per_round=2,
            clients=10,
            classes=10,
            examples=2_000,
            complete=True,
            lr=0.05,
            each=5.0,
            own=(25.0, 0.03),
        ),
        _sparse("sparse", VIT_S, "vits", ("torch_loop",), **SMALL),
        *(_sparse(task, "nano", "nano", ("torch_loop",), **NANO) for task in ("qk", "lora")),
        *(_sparse(task, VIT_S, "vits", (), **SMALL) for task in ("qk", "lora")),
    )
}


def smallest(spec: Spec) -> Spec:
    """The same work at a size that shows nothing but whether it runs."""
    return replace(spec, rounds=2, measured=2, steps=2, batch_size=8, clients=4, per_round=2, classes=5, examples=200)


def chosen(overrides: list[str]) -> list[Spec]:
    """The specs that these words mean: edit stands for all of its rows; no words, all rows."""
    if strange := [w for w in overrides if not any(w in (s.name, s.group) for s in SPECS.values())]:
        raise SystemExit(f"there is no workload {strange[0]!r}; choose from frozen, edit, {', '.join(SPECS)}")
    return [spec for spec in SPECS.values() if not overrides or spec.group in overrides or spec.name in overrides]


def config_of(spec: Spec, rounds: int, folder: Path) -> dict[str, Any]:
    """The fedgraft config of a spec, as plain tables."""
    trainable: dict[str, Any] = {
        "kind": {"head": "head", "frozen": "head", "cnn": "everything"}.get(spec.task, "sparse")
    }
    if spec.task == "sparse":
        trainable["mask"] = {"strategy": "random", "sparsity": 1 - spec.options["density"]}
    if spec.task == "qk":
        trainable["mask"] = {"strategy": "random", "sparsity": 0.0, "scope": ["qk"]}
    if spec.task == "lora":
        trainable = {"kind": "lora", "lora": {"rank": spec.options["rank"], "alpha": spec.options["alpha"]}}
    given = spec.model == "features"
    data: dict[str, Any] = {"source": "synthetic", "classes": spec.classes, "count": spec.examples}
    return {
        "name": spec.name,
        "data": {"source": "features", "path": str(folder / "features.npz")} if given else data,
        "partition": {"kind": "iid", "clients": spec.clients},
        "model": {"name": spec.model, "head": "random"},
        "trainable": trainable,
        "local": {"steps": spec.steps, "batch_size": spec.batch_size, **LOCAL, "lr": spec.lr},
        "rounds": {
            "total": rounds,
            "fraction": spec.per_round / spec.clients,
            "evaluate_every": spec.evaluate_every,
            "checkpoint_every": 5,
        },
    }


def draw_features(path: Path, spec: Spec, width: int = 384) -> None:
    """Features of classes that overlap: a mean for each class, and noise."""
    draw = np.random.default_rng(0)
    means = draw.normal(0, 0.17, (spec.classes, width))
    tables: dict[str, np.ndarray] = {}
    for part, count in (("train", spec.examples), ("test", spec.examples // 5)):
        labels = draw.permutation(np.arange(count) % spec.classes)
        tables[f"{part}_x"] = (means[labels] + draw.normal(size=(count, width))).astype(np.float32)
        tables[f"{part}_y"] = labels
    np.savez(path, **tables)  # type: ignore[arg-type]


def prepare(spec: Spec, folder: Path, cores: int) -> Workload:
    """Write the arrays and the trunk of a spec for all peers, unless they are there; returns its words."""
    folder.mkdir(parents=True, exist_ok=True)
    key = hashlib.blake2b(repr(replace(spec, each=0.0, own=(0.0, 0.0))).encode(), digest_size=8).hexdigest()
    overrides = folder / "workload.json"
    if overrides.exists() and (stored := json.loads(overrides.read_text()))["key"] == key:
        return replace(from_words(stored["workload"]), cores=cores)
    os.environ["FEDGRAFT_CACHE"] = str(folder.parent / "cache")
    arrays, made = _arrays(spec, folder)
    np.savez(folder / "data.npz", **arrays)  # type: ignore[arg-type]
    workload = Workload(
        name=spec.name,
        task=spec.task,
        clients=spec.clients,
        per_round=spec.per_round,
        rounds=spec.rounds,
        steps=spec.steps,
        batch_size=spec.batch_size,
        lr=spec.lr,
        momentum=LOCAL["momentum"],
        evaluate_every=spec.evaluate_every,
        classes=spec.classes,
        seed=0,
        cores=cores,
        digest=digest(arrays),
        data=str(folder / "data.npz"),
        options=spec.options,
        **made,
    )
    overrides.write_text(json.dumps({"key": key, "workload": asdict(workload)}))
    return workload


def digest(arrays: dict[str, np.ndarray]) -> str:
    """Of names, shapes and bytes."""
    found = hashlib.blake2b(digest_size=8)
    for name, values in sorted(arrays.items()):
        found.update(f"{name}{values.shape}{values.dtype}".encode())
        found.update(np.ascontiguousarray(values).tobytes())
    return found.hexdigest()


def _arrays(spec: Spec, folder: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Data by split, each client's rows, the starting weights of what is drawn; and the trunk's folder."""
    from fedgraft.config.load import Config
    from fedgraft.local.memory import one_thread
    from fedgraft.runs.engines import Engines
    from fedgraft.runs.head_init import install_head
    from fedgraft.runs.setup import setup_of

    if spec.model == "features":
        draw_features(folder / "features.npz", spec)
    with one_thread():
        job = setup_of(Config.model_validate(config_of(spec, spec.rounds, folder)))
        with closing(Engines(job)) as engines:
            install_head(job, engines)
    network, data = job.task.network, job.task.data
    train, test = data.dataset.train, data.dataset.test
    kind = "features" if spec.task == "head" else "images"
    inputs = {"train": np.asarray(getattr(train, kind)), "test": np.asarray(getattr(test, kind))}
    held = data.validation_rows.numpy()
    rows = [data.rows(k).numpy() for k in range(spec.clients)]
    least = min(map(len, rows))  # equal clients, for frameworks that want a rectangle
    arrays = {
        "train_x": inputs["train"],
        "train_y": train.labels,
        "rows": np.stack([one[:least] for one in rows]),
        "validation_x": inputs["train"][held],
        "validation_y": train.labels[held],
        "test_x": inputs["test"],
        "test_y": test.labels,
    }
    drawn = network.parameters() if spec.task in ("head", "cnn") else network.head.parameters()
    arrays |= {f"start_{i}": p.detach().numpy().copy() for i, p in enumerate(drawn)}
    made: dict[str, Any] = {"mean": (), "std": ()}
    if spec.task != "head":
        made = {"image_size": network.image_size, "mean": tuple(network.mean), "std": tuple(network.std)}
    if spec.task not in ("head", "cnn"):
        backbone: Any = network.backbone
        backbone.save_pretrained(folder / "trunk")
        made["trunk"] = str(folder / "trunk")
    return arrays, made
