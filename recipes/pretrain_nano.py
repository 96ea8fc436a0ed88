"""Pretrain the small embedded ViT on a folder of labelled images, on a few CPU cores.

Images go in as one directory per class; a ``transformers`` ``ViTModel`` folder with a card comes out::

    python recipes/pretrain_nano.py --images tiny/train --val-images tiny/val --work work \\
        --teacher resnet50 --init earlier-nano --minutes 85 --workers 2 --out nano

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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing
import torch.nn.functional as F
from image_store import CHUNK, build_store, fill_features, normalise, open_features, open_store
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

    def forward(self, train_images: Tensor) -> tuple[Tensor, Tensor | None]:
        token = self.vit(train_images).last_hidden_state[:, 0]
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

    def ready(self) -> Tensor:
        """Numbers of the images whose features have been computed by now."""
        return torch.from_numpy(np.repeat(self.done, CHUNK)[: len(self.features)].nonzero()[0])

    def loss(self, guess: Tensor, rows: Tensor) -> Tensor:
        """Mean cosine distance to the standardised features.  Extreme values are clipped: they would rule it."""
        values = torch.from_numpy(self.features[rows.numpy()].astype(np.float32))
        values = values.sub_(self.mean).div_(self.std).clamp_(-4, 4)
        return 1 - F.cosine_similarity(guess, values).mean()


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


def batches(usable: Callable[[], Tensor], size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Shuffled row numbers for ever, asking before each pass which rows are usable by now."""
    while True:
        rows = usable()
        order = rows[torch.randperm(len(rows), generator=generator)]
        for start in range(0, len(order) - size + 1, size):
            yield order[start : start + size].sort().values


def optimiser(student: Student, lr: float, decay: float) -> torch.optim.AdamW:
    """AdamW; biases, norms, the class token and the positions are not decayed."""
    plain = [w for n, w in student.named_parameters() if w.ndim < 2 or n.endswith(("_token", "position_embeddings"))]
    kept = {id(w) for w in plain}
    rest = [w for w in student.parameters() if id(w) not in kept]
    groups = [{"params": rest, "weight_decay": decay}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.98), fused=True)


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


def save_checkpoint(folder: Path, student: Student, ema: Student, opt: torch.optim.Optimizer, state: dict) -> None:
    """Write weights, their average, optimiser state and progress: two files, each replaced at once."""
    tensors = {f"student.{k}": v for k, v in student.state_dict().items()}
    tensors |= {f"ema.{k}": v for k, v in ema.state_dict().items()}
    for key, slots in opt.state_dict()["state"].items():
        tensors |= {f"opt.{key}.{slot}": value for slot, value in slots.items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "new.safetensors", {"state": json.dumps(state)})
    (folder / "new.safetensors").replace(folder / "checkpoint.safetensors")
    (folder / "progress.json").write_text(json.dumps(state, indent=1))


def load_checkpoint(folder: Path, student: Student, ema: Student, opt: torch.optim.Optimizer) -> dict:
    """Restore what :func:`save_checkpoint` wrote and return the progress record."""
    tensors = load_file(folder / "checkpoint.safetensors")
    for prefix, module in (("student.", student), ("ema.", ema)):
        module.load_state_dict({k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)})
    whole = opt.state_dict()
    for name, value in tensors.items():
        if name.startswith("opt."):
            _, key, slot = name.split(".")
            whole["state"].setdefault(int(key), {})[slot] = value
    opt.load_state_dict(whole)
    return json.loads((folder / "progress.json").read_text())


def export(vit: ViTModel, folder: Path) -> None:
    """Write a ``transformers`` folder: half-precision weights, to be loaded as float32."""
    copy.deepcopy(vit).half().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float32"}, indent=2) + "\n")


def agree(student: Student, workers: int, progress: float) -> float:
    """Average gradients and progress over the workers, so that all take the same step and end together."""
    if workers == 1:
        return progress
    grads = [p.grad for p in student.parameters() if p.grad is not None]
    flat = torch.cat([g.flatten() for g in grads] + [torch.tensor([progress])])
    dist.all_reduce(flat)
    flat.div_(workers)
    for grad, mean in zip(grads, flat[:-1].split([g.numel() for g in grads]), strict=True):
        grad.copy_(mean.view_as(grad))
    return float(flat[-1])


def prepare(args: argparse.Namespace) -> None:
    """Everything that is done once: decoding, and the teacher's features."""
    torch.set_num_threads(args.threads)
    build_store(args.images, args.work / "train")
    if args.val_images:
        build_store(args.val_images, args.work / "val")
    if args.teacher and not args.partial_teacher:
        fill_features(args.work / "train", args.teacher, args.teacher_side)


def train(rank: int, args: argparse.Namespace) -> None:
    """Train as one of ``--workers`` equal processes; the first one also reports, saves and writes the card.

    Processes of one thread that meet once per step keep their speed on a busy machine.  Threads inside one
    process meet in every operation and there wait for whichever was interrupted.
    """
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    folder, store = args.work / args.run, args.work / "train"
    if args.workers > 1:
        dist.init_process_group("gloo", f"file://{(folder / 'meet').resolve()}", world_size=args.workers, rank=rank)
    images, labels, classes = open_store(store)
    teacher = Teacher.open(store, args.teacher_side) if args.teacher else None
    usable = teacher.ready if teacher else lambda: torch.arange(len(images))
    if args.init:
        vit = ViTModel.from_pretrained(args.init, dtype=torch.float32, add_pooling_layer=False)
    else:
        vit = ViTModel(nano_config(), add_pooling_layer=False)
    student = Student(vit, classes, 0 if teacher is None else teacher.features.shape[1]).train()
    ema = copy.deepcopy(student).eval().requires_grad_(False)
    opt = optimiser(student, args.lr, args.decay)
    state: dict = {"seconds": 0.0, "step": 0, "log": []}
    if args.resume and (folder / "progress.json").exists():
        state = load_checkpoint(folder, student, ema, opt)
    averaged, current = list(ema.parameters()), list(student.parameters())
    generator = torch.Generator().manual_seed(args.seed + 1000 * state["step"] + rank)
    last = time.monotonic()
    begin = last - state["seconds"]
    losses: list[Tensor] = []
    for rows in batches(usable, args.batch // args.workers, generator):
        scores, guess = student(random_crops(images[rows], args.smallest_crop, generator))
        loss_label = F.cross_entropy(scores, labels[rows], label_smoothing=0.1)
        loss_teacher = torch.zeros(()) if teacher is None else teacher.loss(guess, rows)
        (args.label_weight * loss_label + args.teacher_weight * loss_teacher).backward()
        progress = (time.monotonic() - begin) / (args.minutes * 60)
        progress = agree(student, args.workers, max(progress, state["step"] / args.steps if args.steps else 0.0))
        nn.utils.clip_grad_norm_(current, args.clip)
        for group in opt.param_groups:
            group["lr"] = args.lr * rate(progress, args.warmup)
        opt.step()
        opt.zero_grad()
        state["step"] += 1
        decay = min(args.ema, (1 + state["step"]) / (10 + state["step"]))
        with torch.no_grad():
            torch._foreach_lerp_(averaged, current, 1 - decay)
        losses.append(torch.stack([loss_label.detach(), loss_teacher.detach()]))
        if rank == 0 and (progress >= 1 or time.monotonic() - last > args.checkpoint_minutes * 60):
            last = time.monotonic()
            state["seconds"] = last - begin
            report(state, torch.stack(losses).mean(0), progress, ema, args)
            losses = []
            save_checkpoint(folder, student, ema, opt, state)
            export(ema.vit, folder / "latest")
        if progress >= 1:
            break
    if rank == 0:
        export(ema.vit, args.out)
        state["images"] = len(usable())
        state["passes"] = state["step"] * args.batch / state["images"]
        state["val"] = accuracy(ema, args.work / "val") if args.val_images else None
        write_card(args, state)
        print(json.dumps({k: v for k, v in state.items() if k != "log"}), flush=True)
    if args.workers > 1:
        dist.destroy_process_group()


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
        teacher = f" and pooled features of {args.teacher.name} at {args.teacher_side} px"
    start = f"an earlier version ({args.init.name})" if args.init else "scratch"
    val = "" if state["val"] is None else f"Top-1 on the held-out validation images: {state['val']:.1%}.\n"
    numbers = {k: v for k, v in vars(args).items() if type(v) in (int, float)}
    flags = " ".join(f"--{k.replace('_', '-')} {v}" for k, v in numbers.items())
    (args.out / "CARD.md").write_text(
        f"# {args.out.name}\n\nA plain `ViTModel`: {SIDE} px, patch 8, {vit:,} weights, stored in half precision "
        f"(load with `dtype=torch.float32`).\nInput: RGB scaled to [0, 1], ImageNet mean and deviation.\n\n"
        f"Data: {args.data_name}. Images used: {state['images']:,}. Targets: labels{teacher}. Started from {start}.\n"
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
    add("--partial-teacher", action="store_true", help="only use images whose features are there by now")
    add("--init", type=Path, help="folder of an earlier ViTModel to start from")
    add("--minutes", type=float, default=85.0, help="wall-clock budget; the schedule follows it")
    add("--steps", type=int, default=0, help="end after this many steps if that comes first (0: only the clock)")
    add("--batch", type=int, default=192, help="images per step, over all workers")
    add("--lr", type=float, default=1e-3)
    add("--decay", type=float, default=0.05)
    add("--warmup", type=float, default=0.03, help="share of the budget")
    add("--label-weight", type=float, default=1.0)
    add("--teacher-weight", type=float, default=10.0)
    add("--smallest-crop", type=float, default=0.4, help="smallest share of the area in a crop")
    add("--ema", type=float, default=0.998)
    add("--clip", type=float, default=1.0)
    add("--seed", type=int, default=0)
    add("--workers", type=int, default=2, help="equal processes that share a batch")
    add("--threads", type=int, default=1, help="threads of each process")
    add("--checkpoint-minutes", type=float, default=4.0)
    add("--resume", action="store_true", help="continue from the run's last checkpoint")
    add("--data-name", default="the image folder", help="for the card")
    add("--data-terms", default="see the terms of the images.", help="for the card")
    return parser.parse_args(argv)


def main() -> None:
    """Prepare the arrays, then train in one process or several."""
    args = parse()
    prepare(args)
    if args.workers == 1:
        train(0, args)
        return
    (args.work / args.run).mkdir(parents=True, exist_ok=True)
    (args.work / args.run / "meet").unlink(missing_ok=True)
    torch.multiprocessing.spawn(train, args=(args,), nprocs=args.workers)


if __name__ == "__main__":
    main()
