"""Checkpoints that are whole or not there: safetensors files whose name carries the digest of every byte.

A file is written beside its place, flushed, renamed and the folder flushed, so a kill or a full disk leaves the
earlier files as they were. `load_latest` proves each candidate against its digest before it uses it and falls back to
the one before; since a run derives its randomness from (seed, round, client), an older start ends in the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from fedgraft.core.errors import FedgraftError
from fedgraft.core.files import write_atomic

log = logging.getLogger(__name__)

_NAME = re.compile(r"round-(\d{8,})-([0-9a-f]{32})\.safetensors")
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.bool: "BOOL",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
}


class BadCheckpoint(FedgraftError):
    """A checkpoint file that is damaged, cut short, or belongs to another config."""


@dataclass(frozen=True)
class Checkpoint:
    """The state after `round`, as `save` was given it."""

    round: int
    tensors: Mapping[str, Tensor]
    meta: Mapping[str, Any]
    best: float | None
    """The validation value it was ranked by, if it had one."""
    path: Path
    skipped: tuple[str, ...] = ()
    """Names of files that were tried first and not good."""


def save(
    folder: Path,
    round: int,
    tensors: Mapping[str, Tensor],
    meta: Mapping[str, Any],
    *,
    best: float | None = None,
    keep_last: int = 5,
    keep_best: int = 3,
) -> Path:
    """Write the state after `round` atomically, then keep the last few and the best few (largest `best`)."""
    chunks = _encode(round, tensors, meta, best)
    digest = hashlib.blake2b(digest_size=16)
    for chunk in chunks:
        digest.update(chunk)
    path = folder / f"round-{round:08d}-{digest.hexdigest()}.safetensors"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(path, chunks, 0o600)  # clients' memories may hold their keys
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise FedgraftError(
            f"the checkpoint of round {round} could not be written to {folder} ({reason}); earlier checkpoints are "
            "intact, so make room there and resume."
        ) from error
    _prune(path, round, keep_last, keep_best)
    return path


def load(path: Path, config_digest: str | None = None) -> Checkpoint:
    """Read one checkpoint, or raise `BadCheckpoint` when any bit of it is not what was written."""
    named = _NAME.fullmatch(path.name)
    if named is None:
        raise BadCheckpoint(f"{path.name} is not named like a checkpoint; choose a file of a run's checkpoints folder.")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BadCheckpoint(f"checkpoint {path.name} cannot be read ({error.strerror}); use an earlier one.") from error
    if hashlib.blake2b(data, digest_size=16).hexdigest() != named[2]:
        raise BadCheckpoint(f"checkpoint {path.name} is damaged: it does not match its digest; use an earlier one.")
    try:
        head = _header(data)
        tensors = safetensors.torch.load(data)
    except (ValueError, KeyError, TypeError, RecursionError, SafetensorError) as error:
        raise BadCheckpoint(f"checkpoint {path.name} is not in this library's format; use an earlier one.") from error
    if head["round"] != int(named[1]):
        raise BadCheckpoint(f"checkpoint {path.name} holds round {head['round']}: it was renamed; use another one.")
    if config_digest is not None and head["meta"].get("config_digest") != config_digest:
        raise BadCheckpoint(f"checkpoint {path.name} belongs to another config; use the run folder it came from.")
    return Checkpoint(head["round"], tensors, head["meta"], head["best"], path)


def load_latest(
    folder: Path, config_digest: str | None = None, check: Callable[[Checkpoint], None] | None = None
) -> Checkpoint | None:
    """The newest good checkpoint of this config, or None; damaged and foreign ones are named in a warning.

    `check` may refuse one with `BadCheckpoint`, for example because a file beside it that it names is damaged.
    """
    skipped: list[str] = []
    for path in sorted(listing(folder), key=_round, reverse=True):
        try:
            found = load(path, config_digest)
            if check is not None:
                check(found)
            return replace(found, skipped=tuple(skipped))
        except BadCheckpoint as error:
            log.warning("skipped: %s", error)
            skipped.append(path.name)
    return None


def listing(folder: Path) -> list[Path]:
    """The files of a folder that are named like checkpoints, oldest round first."""
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if _NAME.fullmatch(path.name)), key=lambda p: (_round(p), p.name))


def _encode(
    round: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any], best: float | None
) -> list[bytes | memoryview]:
    """The file as pieces: length, header, then views of the tensors' own memory, so a large state is not copied."""
    head = json.dumps({"round": round, "best": best, "meta": dict(meta)}, sort_keys=True, separators=(",", ":"))
    entries: dict[str, Any] = {"__metadata__": {"fedgraft": head}}
    pieces: list[bytes | memoryview] = []
    offset = 0
    # Wide types first keeps every tensor aligned to its element size.
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])):
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        end = offset + flat.numel() * flat.element_size()
        entries[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        if flat.numel():
            pieces.append(flat.view(torch.uint8).numpy().data)
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little"), text, *pieces]


def _header(data: bytes) -> dict[str, Any]:
    length = int.from_bytes(data[:8], "little")
    head = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["fedgraft"])
    return {"round": head["round"], "best": head["best"], "meta": dict(head["meta"])}


def _peek(path: Path) -> float | None:
    """The rank of a file from its header alone; a header that cannot be read has none."""
    try:
        with path.open("rb") as file:
            start = file.read(8)
            size = min(int.from_bytes(start, "little"), path.stat().st_size)
            best = _header(start + file.read(size))["best"]
        return None if best is None else float(best)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _round(path: Path) -> int:
    return int(path.name.split("-")[1])


def _ranking(paths: Iterable[Path]) -> list[Path]:
    """Those with a rank, the largest first, the earliest round among equals."""
    ranks = {path: rank for path in paths if (rank := _peek(path)) is not None and rank == rank}
    return sorted(ranks, key=lambda path: (-ranks[path], _round(path)))


def _prune(newest: Path, round: int, keep_last: int, keep_best: int) -> None:
    """Delete what neither list names. Files of later rounds are no part of this run's past and are left alone."""
    past = [path for path in listing(newest.parent) if _round(path) <= round]
    twins = {path for path in past if _round(path) == round and path != newest}
    past = [path for path in past if path not in twins]
    kept = {newest, *past[-keep_last:], *_ranking(past)[:keep_best]}
    leftovers = [path for path in newest.parent.iterdir() if path.name.startswith(".round-")]
    for path in [*leftovers, *twins, *(path for path in past if path not in kept)]:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("old checkpoint %s could not be deleted (%s)", path.name, error.strerror)
