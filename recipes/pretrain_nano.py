"""Pretrain the small embedded ViT on a folder of labelled images by distillation, on one CPU core or a few.

Images go in as one directory per class; a ``transformers`` ``ViTModel`` folder with a card comes out::

    python recipes/pretrain_nano.py --images tiny/train --val-images tiny/val --work work \\
        --teacher vit-tiny --init earlier-nano --minutes 92 --out nano

The same command with ``--resume`` continues after an interruption.  The teacher is a larger ViT classifier.  It
sees every whole image once, and what it saw is kept (``image_store.py``).  The student sees crops and learns:

- the teacher's class token, standardised, by cosine through a projection;
- the teacher's patch tokens where the crop lies, in the same way: sixteen more targets for each image;
- the teacher's class scores, by cross-entropy with its softened probabilities (Hinton et al. 2015,
  arXiv:1503.02531);
- the labels.

Only these outputs of the teacher are used; none of its weights enter the student.  A teacher says far more per
image than a label does, which matters when only some ten passes fit in the time.  The projections and heads are
thrown away.  The schedule follows the clock, so a run ends when it was told to, however busy the machine is.
Everything is float32: CPUs are slow in bfloat16.
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

import torch
from distil import LOSSES, SIDE, Student, Teacher, cut, losses, nano_config, random_crops, whole_images
from image_store import build_store, fill_tokens, open_store
from muon import optimisers
from safetensors.torch import load_file, safe_open, save_file
from torch import Tensor, nn
from transformers import ViTModel


def batches(teacher: Teacher, size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Shuffled row numbers for ever, asking before each pass which rows the teacher has seen by now."""
    while True:
        rows = teacher.ready()
        order = rows[torch.randperm(len(rows), generator=generator)]
        for start in range(0, len(order) - size + 1, size):
            yield order[start : start + size].sort().values


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
        guess = student.label(student(whole_images(images[start:stop]))[0]).argmax(1)
        right += int((guess == labels[start:stop]).sum())
    return right / total


def save_checkpoint(folder: Path, run: Run) -> None:
    """Write weights, their average, optimiser state and progress as one file that is replaced at once."""
    tensors = {f"student.{k}": v for k, v in run.student.state_dict().items()}
    tensors |= {f"ema.{k}": v for k, v in run.ema.state_dict().items()}
    for number, opt in enumerate(run.opts):
        for key, slots in opt.state_dict()["state"].items():
            tensors |= {f"opt.{number}.{key}.{slot}": value for slot, value in slots.items()}
    folder.mkdir(parents=True, exist_ok=True)
    progress = {"state": json.dumps(run.state)}
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "new.safetensors", progress)
    (folder / "new.safetensors").replace(folder / "checkpoint.safetensors")
    export(run.ema.vit, folder / "latest")


def load_checkpoint(folder: Path, run: Run) -> None:
    """Restore what :func:`save_checkpoint` wrote."""
    tensors = load_file(folder / "checkpoint.safetensors")
    for prefix, module in (("student.", run.student), ("ema.", run.ema)):
        module.load_state_dict({k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)})
    for number, opt in enumerate(run.opts):
        whole = opt.state_dict()
        for name in (n for n in tensors if n.startswith(f"opt.{number}.")):
            key, slot = name.split(".")[2:]
            whole["state"].setdefault(int(key), {})[slot] = tensors[name]
        opt.load_state_dict(whole)
    with safe_open(folder / "checkpoint.safetensors", "pt") as file:
        run.state.update(json.loads(file.metadata()["state"]))


def export(vit: ViTModel, folder: Path) -> None:
    """Write a ``transformers`` folder: half-precision weights, to be loaded as float32."""
    copy.deepcopy(vit).half().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float32"}, indent=2) + "\n")


@dataclass(frozen=True)
class Run:
    """What a checkpoint holds: the student, the average of its weights, optimisers and the progress record."""

    student: Student
    ema: Student
    opts: list[torch.optim.Optimizer]
    state: dict

    @classmethod
    def start(cls, args: argparse.Namespace, classes: int, teacher: Teacher) -> Run:
        """A fresh or earlier ViT, or with ``--resume`` the run's last checkpoint."""
        torch.manual_seed(args.seed)
        vit = ViTModel(nano_config(), add_pooling_layer=False)
        if args.init:
            vit = ViTModel.from_pretrained(args.init, dtype=torch.float32, add_pooling_layer=False)
        student = Student(vit, classes, *teacher.classifier[0].shape).train()
        ema = copy.deepcopy(student).eval().requires_grad_(False)
        run = cls(student, ema, optimisers(student, args.lr, args.decay), {"seconds": 0.0, "step": 0, "log": []})
        if args.resume and (args.work / args.run / "checkpoint.safetensors").exists():
            load_checkpoint(args.work / args.run, run)
        return run

    def step(self, lr: float, clip: float, ema: float) -> None:
        """Apply the gradients and follow the weights with their average, faster in the beginning."""
        weights = list(self.student.parameters())
        nn.utils.clip_grad_norm_(weights, clip)
        for opt in self.opts:
            for group in opt.param_groups:
                group["lr"] = lr
            opt.step()
            opt.zero_grad()
        self.state["step"] += 1
        ema = min(ema, (1 + self.state["step"]) / (10 + self.state["step"]))
        with torch.no_grad():
            torch._foreach_lerp_(list(self.ema.parameters()), weights, 1 - ema)


def train(args: argparse.Namespace, teacher: Teacher) -> Run:
    """Train until the clock or the steps are used up; report and save every few minutes."""
    images, labels, classes = open_store(args.work / "train")
    run = Run.start(args, classes, teacher)
    state, weights = run.state, torch.tensor(args.weights)
    generator = torch.Generator().manual_seed(args.seed + 1000 * state["step"])
    last = time.monotonic()
    begin = last - state["seconds"]
    recent: list[Tensor] = []
    for rows in batches(teacher, args.batch, generator):
        theta = random_crops(len(rows), args.smallest_crop, generator)
        batch = cut(images[rows], theta), labels[rows], rows, theta
        parts = losses(run.student, teacher, batch, args.temperature)
        (weights @ parts).backward()
        recent.append(parts.detach())
        progress = (time.monotonic() - begin) / (args.minutes * 60)
        progress = max(progress, (state["step"] + 1) / args.steps if args.steps else 0.0)
        run.step(args.lr * rate(progress, args.warmup), args.clip, args.ema)
        if progress >= 1 or time.monotonic() - last > args.checkpoint_minutes * 60:
            last = time.monotonic()
            state["seconds"] = last - begin
            report(run, torch.stack(recent).mean(0), progress, args)
            recent = []
            save_checkpoint(args.work / args.run, run)
        if progress >= 1:
            return run
    raise AssertionError("batches never end")


def report(run: Run, parts: Tensor, progress: float, args: argparse.Namespace) -> None:
    """Print one line of progress and keep it in the record."""
    line = {"progress": round(progress, 4), "step": run.state["step"], "minutes": round(run.state["seconds"] / 60, 1)}
    line |= {name: round(float(value), 4) for name, value in zip(LOSSES, parts, strict=True)}
    if args.val_images:
        line["val"] = accuracy(run.ema, args.work / "val", 2000)
    run.state["log"].append(line)
    print(json.dumps(line), flush=True)


def write_card(args: argparse.Namespace, run: Run, images: int) -> None:
    """A short card next to the weights: what they saw, for how long, and under which terms."""
    weights, state = sum(w.numel() for w in run.ema.vit.parameters()), run.state
    start = f"an earlier version ({args.init.name})" if args.init else "scratch"
    val = ""
    if args.val_images:
        val = f"Top-1 on the held-out validation images: {accuracy(run.ema, args.work / 'val'):.1%}.\n"
    numbers = {k: v for k, v in vars(args).items() if type(v) in (int, float)}
    flags = " ".join(f"--{k.replace('_', '-')} {v}" for k, v in numbers.items())
    flags += " --weights " + " ".join(map(str, args.weights))
    (args.out / "CARD.md").write_text(
        f"# {args.out.name}\n\nA plain `ViTModel`: {SIDE} px, patch 8, {weights:,} weights, stored in half precision "
        f"(load with `dtype=torch.float32`).\nInput: RGB scaled to [0, 1], ImageNet mean and deviation.\n\n"
        f"Data: {args.data_name}. Images used: {images:,}. Targets: labels, and class token, patch tokens and class "
        f"scores of {args.teacher.name} at {args.teacher_side} px. Started from {start}.\n{state['step']:,} steps, "
        f"{state['step'] * args.batch / images:.1f} passes, {state['seconds'] / 60:.0f} minutes.\n{val}"
        f"Options: `{flags}`\n\nTerms: {args.data_terms}\n"
    )


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line.  The defaults are those of the embedded weights."""
    parser = argparse.ArgumentParser(description="Pretrain the embedded nano ViT.")
    add = parser.add_argument
    add("--images", type=Path, required=True, help="training folder, one directory per class")
    add("--val-images", type=Path, help="validation folder with the same class directories")
    add("--work", type=Path, required=True, help="folder for arrays, tokens and checkpoints")
    add("--run", default="run", help="name of this run's checkpoint folder inside --work")
    add("--out", type=Path, required=True, help="folder for the finished model")
    add("--teacher", type=Path, required=True, help="folder of a transformers ViTForImageClassification")
    add("--teacher-side", type=int, default=160, help="side in pixels the teacher sees")
    add("--partial-teacher", action="store_true", help="only use images whose tokens are there by now")
    add("--init", type=Path, help="folder of an earlier ViTModel to start from")
    add("--minutes", type=float, default=92.0, help="wall-clock budget; the schedule follows it")
    add("--steps", type=int, default=0, help="end after this many steps if that comes first (0: only the clock)")
    add("--batch", type=int, default=256, help="images per step")
    add("--lr", type=float, default=3e-3)
    add("--decay", type=float, default=0.05)
    add("--warmup", type=float, default=0.03, help="share of the budget")
    add("--weights", type=float, nargs=4, default=[0.2, 1.0, 5.0, 5.0], help=f"of the losses: {', '.join(LOSSES)}")
    add("--temperature", type=float, default=1.0, help="softens the teacher's class scores")
    add("--smallest-crop", type=float, default=0.5, help="smallest share of the area in a crop")
    add("--ema", type=float, default=0.998)
    add("--clip", type=float, default=1.0)
    add("--seed", type=int, default=0)
    add("--threads", type=int, default=1)
    add("--checkpoint-minutes", type=float, default=4.0)
    add("--resume", action="store_true", help="continue from the run's last checkpoint")
    add("--data-name", default="the image folder", help="for the card")
    add("--data-terms", default="see the terms of the images.", help="for the card")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Decode the images and ask the teacher, each only once, then train and write the model."""
    args = parse(argv)
    torch.set_num_threads(args.threads)
    build_store(args.images, args.work / "train")
    if args.val_images:
        build_store(args.val_images, args.work / "val")
    if not args.partial_teacher:
        fill_tokens(args.work / "train", args.teacher, args.teacher_side)
    teacher = Teacher.open(args.work / "train", args.teacher, args.teacher_side)
    run = train(args, teacher)
    export(run.ema.vit, args.out)
    write_card(args, run, len(teacher.ready()))


if __name__ == "__main__":
    main()
