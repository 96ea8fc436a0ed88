"""Pretrain the small embedded ViT on a folder of labelled images, on a few CPU cores.

Images go in as one directory per class; a ``transformers`` ``ViTModel`` folder with a card comes out::

    python recipes/pretrain_nano.py --images tiny/train --val-images tiny/val --work work \\
        --teacher resnet50 --init earlier-nano --minutes 85 --threads 2 --out nano

The student learns the labels and, with ``--teacher``, also the standardised pooled features of a larger
network through a projection that is thrown away.  A teacher says far more per image than a label does,
which matters when only some ten passes fit in the time.  The schedule follows the clock, so a run ends
when it was told to, however busy the machine is.  Everything is float32: CPUs are slow in bfloat16.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from image_store import CHUNK, build_store, fill_features, normalise, open_features, open_store
from optim import Muon
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import ViTConfig, ViTModel

SIDE = 32


def nano_config() -> ViTConfig:
    """The shape of the embedded model: 2,710,080 weights without a pooler."""
    return ViTConfig(
        image_size=SIDE,
        patch_size=8,
        hidden_size=192,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )


class Student(nn.Module):
    """The ViT with two throw-away heads on its class token: class scores and teacher features."""

    def __init__(self, vit: ViTModel, classes: int, teacher_width: int) -> None:
        super().__init__()
        self.vit = vit
        self.head = nn.Linear(vit.config.hidden_size, classes)
        self.projection = nn.Linear(vit.config.hidden_size, teacher_width) if teacher_width else None

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor | None]:
        token = self.vit(pixels).last_hidden_state[:, 0]
        return self.head(token), self.projection(token) if self.projection is not None else None


@dataclass
class Teacher:
    """A teacher's cached features with the figures to standardise them."""

    features: np.ndarray
    done: np.ndarray
    mean: Tensor
    std: Tensor

    @classmethod
    def open(cls, store: Path, side: int) -> Teacher:
        """Take the mean and deviation over a sample of rows, which is plenty for per-column figures."""
        features, done = open_features(store, side)
        ready = np.repeat(done, CHUNK)[: len(features)].nonzero()[0][:20_000]
        sample = torch.from_numpy(features[ready].astype(np.float32))
        return cls(features, done, sample.mean(0), sample.std(0).clamp_min(1e-4))

    def loss(self, guess: Tensor, rows: Tensor) -> Tensor:
        """Mean cosine distance to the standardised features, over the rows that have been computed.

        Extreme activations are clipped: they would rule the cosine.
        """
        ready = torch.from_numpy(self.done[rows.numpy() // CHUNK] > 0)
        if not ready.any():
            return guess.sum() * 0
        values = torch.from_numpy(self.features[rows[ready].numpy()].astype(np.float32))
        values = values.sub_(self.mean).div_(self.std).clamp_(-4, 4)
        return 1 - F.cosine_similarity(guess[ready], values).mean()


def random_crops(images: Tensor, smallest: float, generator: torch.Generator) -> Tensor:
    """Random resized crops and flips of a whole batch in one resampling, already normalised."""
    count = len(images)
    area = torch.empty(count).uniform_(smallest, 1.0, generator=generator)
    ratio = torch.empty(count).uniform_(-math.log(4 / 3), math.log(4 / 3), generator=generator).exp()
    width = (area * ratio).sqrt().clamp(max=1.0)
    height = (area / ratio).sqrt().clamp(max=1.0)
    shift = torch.empty(2, count).uniform_(-1.0, 1.0, generator=generator)
    flip = torch.randint(0, 2, (count,), generator=generator) * 2.0 - 1.0
    theta = torch.zeros(count, 2, 3)
    theta[:, 0, 0] = width * flip
    theta[:, 0, 2] = shift[0] * (1 - width)
    theta[:, 1, 1] = height
    theta[:, 1, 2] = shift[1] * (1 - height)
    grid = F.affine_grid(theta, [count, 3, SIDE, SIDE], align_corners=False)
    return F.grid_sample(normalise(images), grid, mode="bilinear", padding_mode="border", align_corners=False)


def whole_images(images: Tensor) -> Tensor:
    """The evaluation view: the whole image, averaged down to the student's size."""
    return F.interpolate(normalise(images), size=SIDE, mode="area")


def batches(count: int, size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Shuffled row numbers for ever; an incomplete last batch of a pass is skipped."""
    while True:
        order = torch.randperm(count, generator=generator)
        for start in range(0, count - size + 1, size):
            yield order[start : start + size].sort().values


def optimisers(student: Student, args: argparse.Namespace) -> list[torch.optim.Optimizer]:
    """AdamW for everything, or Muon for the blocks' matrices and AdamW for the rest."""
    matrices, decayed, plain = [], [], []
    for name, weight in student.named_parameters():
        if weight.ndim < 2 or ("embeddings" in name and "projection" not in name):
            plain.append(weight)
        elif args.muon and weight.ndim == 2 and name.startswith("vit."):
            matrices.append(weight)
        else:
            decayed.append(weight)
    groups = [{"params": decayed, "weight_decay": args.decay}, {"params": plain, "weight_decay": 0.0}]
    found: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.98), fused=True)]
    if matrices:
        found.append(Muon(matrices, lr=args.lr, weight_decay=args.decay))
    return found


def rate(progress: float, warmup: float) -> float:
    """Linear warm-up, then a cosine to zero, as a function of the spent share of the budget."""
    if progress < warmup:
        return max(progress / warmup, 0.01)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - warmup) / (1 - warmup))))


@torch.no_grad()
def accuracy(student: Student, store: Path, limit: int | None = None) -> float:
    """Top-1 on the validation store (all of it, or its first rows, which are in shuffled order)."""
    images, labels, _ = open_store(store)
    total = min(limit or len(labels), len(labels))
    right = 0
    for start in range(0, total, 500):
        stop = min(start + 500, total)
        right += int((student(whole_images(images[start:stop]))[0].argmax(1) == labels[start:stop]).sum())
    return right / total


def save_checkpoint(folder: Path, student: Student, ema: Student, opts: list, state: dict) -> None:
    """Write weights, their average, optimiser state and progress: two files, each replaced at once."""
    tensors = {f"student.{k}": v for k, v in student.state_dict().items()}
    tensors |= {f"ema.{k}": v for k, v in ema.state_dict().items()}
    for number, opt in enumerate(opts):
        for key, slots in opt.state_dict()["state"].items():
            tensors |= {f"opt.{number}.{key}.{slot}": value for slot, value in slots.items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "new.safetensors", {"state": json.dumps(state)})
    (folder / "new.safetensors").replace(folder / "checkpoint.safetensors")
    (folder / "progress.json").write_text(json.dumps(state, indent=1))


def load_checkpoint(folder: Path, student: Student, ema: Student, opts: list) -> dict:
    """Restore what :func:`save_checkpoint` wrote and return the progress record."""
    tensors = load_file(folder / "checkpoint.safetensors")
    for prefix, module in (("student.", student), ("ema.", ema)):
        module.load_state_dict({k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)})
    for number, opt in enumerate(opts):
        whole = opt.state_dict()
        for name, value in tensors.items():
            if name.startswith(f"opt.{number}."):
                _, _, key, slot = name.split(".", 3)
                whole["state"].setdefault(int(key), {})[slot] = value
        opt.load_state_dict(whole)
    return json.loads((folder / "progress.json").read_text())


def export(vit: ViTModel, folder: Path) -> None:
    """Write a ``transformers`` folder: half-precision weights, to be loaded as float32."""
    copy.deepcopy(vit).half().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float32"}, indent=2) + "\n")


def train(args: argparse.Namespace) -> dict:
    """Run the whole recipe and return the record that goes to the card."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    build_store(args.images, args.work / "train")
    if args.val_images:
        build_store(args.val_images, args.work / "val")
    images, labels, classes = open_store(args.work / "train")
    teacher: Teacher | None = None
    if args.teacher:
        if not args.partial_teacher:
            fill_features(args.work / "train", args.teacher, args.teacher_side)
        teacher = Teacher.open(args.work / "train", args.teacher_side)
    make = (lambda: ViTModel(nano_config(), add_pooling_layer=False)) if args.init is None else (
        lambda: ViTModel.from_pretrained(args.init, dtype=torch.float32, add_pooling_layer=False)
    )
    width = 0 if teacher is None else teacher.features.shape[1]
    student, ema = Student(make(), classes, width).train(), Student(make(), classes, width).eval()
    ema.load_state_dict(student.state_dict())
    ema.requires_grad_(False)
    opts = optimisers(student, args)
    state: dict = {"seconds": 0.0, "step": 0, "log": []}
    if args.resume and (args.work / args.run / "progress.json").exists():
        state = load_checkpoint(args.work / args.run, student, ema, opts)
    pairs = list(zip(ema.parameters(), student.parameters(), strict=True))
    generator = torch.Generator().manual_seed(args.seed + state["step"])
    last = time.monotonic()
    begin = last - state["seconds"]
    sums = torch.zeros(2)
    since = 0
    for rows in batches(len(images), args.batch, generator):
        progress = (time.monotonic() - begin) / (args.minutes * 60)
        if args.steps:
            progress = max(progress, state["step"] / args.steps)
        if progress >= 1:
            break
        for opt in opts:
            for group in opt.param_groups:
                group["lr"] = args.lr * rate(progress, args.warmup)
        scores, guess = student(random_crops(images[rows], args.smallest_crop, generator))
        loss_label = F.cross_entropy(scores, labels[rows], label_smoothing=0.1)
        loss_teacher = torch.zeros(()) if teacher is None else teacher.loss(guess, rows)
        (args.label_weight * loss_label + args.teacher_weight * loss_teacher).backward()
        nn.utils.clip_grad_norm_(student.parameters(), args.clip)
        for opt in opts:
            opt.step()
            opt.zero_grad()
        state["step"] += 1
        decay = min(args.ema, (1 + state["step"]) / (10 + state["step"]))
        with torch.no_grad():
            torch._foreach_lerp_([a for a, _ in pairs], [b for _, b in pairs], 1 - decay)
        sums += torch.stack([loss_label.detach(), loss_teacher.detach()])
        since += 1
        if time.monotonic() - last > args.checkpoint_minutes * 60:
            last = time.monotonic()
            state["seconds"] = last - begin
            report(state, sums / since, progress, ema, args)
            sums, since = torch.zeros(2), 0
            save_checkpoint(args.work / args.run, student, ema, opts, state)
            export(ema.vit, args.work / args.run / "latest")
    state["seconds"] = time.monotonic() - begin
    if since:
        report(state, sums / since, 1.0, ema, args)
    save_checkpoint(args.work / args.run, student, ema, opts, state)
    export(ema.vit, args.out)
    state["passes"] = state["step"] * args.batch / len(images)
    state["val"] = accuracy(ema, args.work / "val") if args.val_images else None
    return state


def report(state: dict, losses: Tensor, progress: float, ema: Student, args: argparse.Namespace) -> None:
    """Print one line of progress and keep it in the record."""
    line = {"progress": round(progress, 4), "step": state["step"], "minutes": round(state["seconds"] / 60, 1)}
    line |= {"label_loss": round(float(losses[0]), 4), "teacher_loss": round(float(losses[1]), 4)}
    if args.val_images:
        line["val"] = accuracy(ema, args.work / "val", 2000)
    state["log"].append(line)
    print(json.dumps(line), flush=True)


def write_card(args: argparse.Namespace, state: dict) -> None:
    """A short card next to the weights: what they saw, for how long, and under which terms."""
    vit = sum(v.numel() for v in load_file(args.out / "model.safetensors").values())
    teacher = ""
    if args.teacher:
        covered = float(open_features(args.work / "train", args.teacher_side)[1].mean())
        teacher = f", pooled features of {args.teacher.name} at {args.teacher_side} px for {covered:.0%} of them"
    start = f"an earlier version ({args.init.name})" if args.init else "scratch"
    val = "" if state["val"] is None else f"Top-1 on the held-out validation images: {state['val']:.1%}.\n"
    flags = " ".join(f"--{k.replace('_', '-')} {v}" for k, v in vars(args).items() if isinstance(v, int | float))
    (args.out / "CARD.md").write_text(
        f"# {args.out.name}\n\nA plain `ViTModel`: {SIDE} px, patch 8, {vit:,} weights, stored in half precision "
        f"(load with `dtype=torch.float32`).\nInput: RGB scaled to [0, 1], ImageNet mean and deviation.\n\n"
        f"Data: {args.data_name}. Targets: labels of all images{teacher}. Started from {start}.\n"
        f"{state['step']:,} steps, {state['passes']:.1f} passes, {state['seconds'] / 60:.0f} minutes.\n{val}"
        f"Options: `{flags}`\n\nTerms: {args.data_terms}\n"
    )


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line.  The defaults are those of the embedded weights."""
    parser = argparse.ArgumentParser(description="Pretrain the embedded nano ViT.")
    add = parser.add_argument
    add("--images", type=Path, required=True, help="training folder, one directory per class")
    add("--val-images", type=Path, help="validation folder with the same class directories")
    add("--work", type=Path, required=True, help="folder for arrays, features and checkpoints")
    add("--run", default="run", help="name of this run's checkpoint folder inside --work")
    add("--out", type=Path, required=True, help="folder for the finished model")
    add("--teacher", type=Path, help="folder of a transformers ResNet")
    add("--teacher-side", type=int, default=128, help="side in pixels the teacher sees")
    add("--partial-teacher", action="store_true", help="use the feature cache as far as it is filled by now")
    add("--init", type=Path, help="folder of an earlier ViTModel to start from")
    add("--minutes", type=float, default=85.0, help="wall-clock budget; the schedule follows it")
    add("--steps", type=int, default=0, help="end after this many steps if that comes first (0: only the clock)")
    add("--batch", type=int, default=256)
    add("--lr", type=float, default=2e-3)
    add("--decay", type=float, default=0.05)
    add("--muon", type=int, choices=(0, 1), default=1, help="Muon for the blocks' matrices instead of AdamW")
    add("--warmup", type=float, default=0.03, help="share of the budget")
    add("--label-weight", type=float, default=1.0)
    add("--teacher-weight", type=float, default=10.0)
    add("--smallest-crop", type=float, default=0.4, help="smallest share of the area in a crop")
    add("--ema", type=float, default=0.998)
    add("--clip", type=float, default=1.0)
    add("--seed", type=int, default=0)
    add("--threads", type=int, default=2)
    add("--checkpoint-minutes", type=float, default=4.0)
    add("--resume", action="store_true", help="continue from the run's last checkpoint")
    add("--data-name", default="the image folder", help="for the card")
    add("--data-terms", default="see the terms of the images.", help="for the card")
    return parser.parse_args(argv)


if __name__ == "__main__":
    options = parse()
    record = train(options)
    write_card(options, record)
    print(json.dumps({k: v for k, v in record.items() if k != "log"}))
