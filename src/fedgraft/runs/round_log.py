"""The log of a run's rounds, from which a consortium can prove which updates made a model: `rounds.log`.

One JSON line per round: the digest of every accepted update, its weight, who was dropped, the protection, the digest of
the server's state after it and of the round's line in metrics.jsonl. Each line holds the hash of the one before and is
signed (Ed25519, where the extra 'secure' is installed) with a key that lies beside the run folder, not in it. `verify`
names lines that were changed, taken out or added, and checkpoints that are not the states the log tells of.
A resumed run repeats its rounds bit for bit, so its lines are the same again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from weakref import ReferenceType, ref

from torch import Tensor

from fedgraft.core.errors import FedgraftError
from fedgraft.core.files import json_ready, read_metrics, repair, without_timing, write_text
from fedgraft.runs import checkpoint
from fedgraft.runs.checkpoint import BadCheckpoint

NAME = "rounds.log"


Known = dict[int, tuple[ReferenceType[Tensor], int, str]]
"""Digests of tensors that are still there, by their id, with the version that was read."""


def state_digest(tensors: Mapping[str, Tensor], known: Known | None = None) -> str:
    """Identity of a server's state: its model, its rule's memory and the clients' models that it keeps."""
    h, known = hashlib.sha256(), {} if known is None else known
    for name in sorted(n for n in tensors if n == "vector" or n.startswith(("rule/", "personal/"))):
        one = tensors[name]
        h.update(f"{name} {one.dtype} {tuple(one.shape)} {_content(one, known)}\n".encode())
    return h.hexdigest()


def _content(tensor: Tensor, known: Known) -> str:
    """Digest of a tensor's bytes; of the many models of a personal run only those that a round made are read."""
    seen = known.get(id(tensor))
    if seen is None or seen[0]() is not tensor or seen[1] != tensor._version:
        found = hashlib.sha256(tensor.detach().cpu().contiguous().numpy().data).hexdigest()
        seen = known[id(tensor)] = ref(tensor), tensor._version, found
    return seen[2]


def line_digest(line: Mapping[str, Any]) -> str:
    """Identity of a line of metrics.jsonl, but for its times."""
    return hashlib.sha256(_text(without_timing([json_ready(line)])[0]).encode()).hexdigest()


def _text(entry: Mapping[str, Any]) -> str:
    return json.dumps(entry, sort_keys=True, separators=(",", ":"))


def _signer(secret: bytes) -> Any:
    """The run's signing key, or None where nothing can sign."""
    try:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    except ImportError:
        return None
    return Ed25519PrivateKey.from_private_bytes(hashlib.sha256(b"fedgraft round log" + secret).digest())


class RoundLog:
    """Writes the log of one run; opening it cuts it back to the round that the run goes on from."""

    def __init__(self, folder: Path, run: str, secret: bytes, after: int | None) -> None:
        self.path, self.signer = folder / NAME, _signer(secret)
        public = "" if self.signer is None else self.signer.public_key().public_bytes_raw().hex()
        repair(self.path)
        kept = [line["entry"] for line in _lines(self.path)[1:]] if after is not None and self.path.is_file() else []
        entries = [{"run": run, "key": public}, *(e for e in kept if e["round"] <= (after or 0))]
        self.hash, texts, self.known = "", [], Known()
        for entry in entries:
            texts.append(self._line(entry))
        write_text(self.path, "".join(texts))

    def _line(self, entry: Mapping[str, Any]) -> str:
        self.hash = hashlib.sha256((self.hash + _text(entry)).encode()).hexdigest()
        signed = "" if self.signer is None else self.signer.sign(self.hash.encode()).hex()
        return _text({"entry": entry, "hash": self.hash, "signature": signed}) + "\n"

    def append(self, line: Mapping[str, Any], state: Mapping[str, Tensor], **more: Any) -> None:
        """Add a round: its line in the metrics, the state after it, and what else is to be proved."""
        told = {"round": line["round"], "state": state_digest(state, self.known), "line": line_digest(line)}
        model = state_digest({"vector": state["vector"]}, self.known)
        self.known = {key: seen for key, seen in self.known.items() if seen[0]() is not None}
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(self._line({**told, "model": model, **json_ready(more)}))
        except OSError as error:
            raise FedgraftError(
                f"{self.path} could not be written ({error.strerror}); make room and resume."
            ) from error


def _lines(path: Path) -> list[dict[str, Any]]:
    try:
        found = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
        return [
            {"entry": dict(one["entry"]), "hash": str(one["hash"]), "signature": str(one["signature"])} for one in found
        ]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        why = getattr(error, "strerror", None) or error
        raise FedgraftError(f"{path} cannot be read as a log of rounds ({why}); restore the run folder.") from error


def verify(folder: Path, key: str | None = None) -> tuple[str, list[str]]:
    """What the log tells in one line, and every way in which it, the metrics and the checkpoints do not fit."""
    lines = _lines(folder / NAME)
    if not lines:
        raise FedgraftError(f"{folder / NAME} is empty; restore the run folder.")
    public, wrong = str(lines[0]["entry"].get("key", "")), list[str]()
    if key is not None and key not in (public, fingerprint(public)):
        wrong.append(f"the log is signed with another key: {fingerprint(public)}")
    wrong += _chain(lines, public)
    entries = {one["entry"]["round"]: one["entry"] for one in lines[1:] if type(one["entry"].get("round")) is int}
    wrong += [f"round {r} is missing from the log" for r in range(max(entries, default=0) + 1) if r not in entries]
    told = {line.get("round"): line_digest(line) for line in read_metrics(folder)}
    wrong += [f"round {r} is in the log and not in metrics.jsonl" for r in entries if r not in told]
    wrong += [f"round {r} is in metrics.jsonl and not in the log" for r in told if r not in entries]
    wrong += [
        f"the line of round {r} in metrics.jsonl was changed"
        for r in entries
        if told.get(r, e := entries[r]["line"]) != e
    ]
    for path in checkpoint.listing(folder / "checkpoints"):
        wrong += _foreign(path, entries)
    signed = f"signed by {fingerprint(public)}" if public else "not signed (the extra 'secure' was not installed)"
    return f"{max(entries, default=0)} rounds, {signed}", wrong


def fingerprint(public: str) -> str:
    """A short name of a key, to be compared by people."""
    return hashlib.sha256(public.encode()).hexdigest()[:32] if public else "nobody"


def _chain(lines: list[dict[str, Any]], public: str) -> list[str]:
    """Lines whose hash or signature is not what they and those before them give."""
    wrong, before = list[str](), ""
    for number, line in enumerate(lines, 1):
        expected = hashlib.sha256((before + _text(line["entry"])).encode()).hexdigest()
        if line["hash"] != expected:
            wrong.append(f"line {number} of {NAME} was changed, or one before it was taken out")
        elif public and not _signed(public, line):
            wrong.append(f"line {number} of {NAME} is not signed by the run's key")
        before = line["hash"]
    return wrong


def _signed(public: str, line: Mapping[str, str]) -> bool:
    try:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    except ImportError as error:
        from fedgraft.core.errors import MissingExtra

        raise MissingExtra("cryptography", "secure", "checking signatures") from error
    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(public))
        key.verify(bytes.fromhex(line["signature"]), line["hash"].encode())
    except (InvalidSignature, ValueError):
        return False
    return True


def _foreign(path: Path, entries: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """What in a checkpoint is not a state that the log tells of."""
    try:
        found = checkpoint.load(path)
    except BadCheckpoint as error:
        return [str(error)]
    wrong = []
    if found.round not in entries or entries[found.round]["state"] != state_digest(found.tensors):
        wrong.append(f"checkpoint {path.name} is not the state that the log tells of")
    best = found.meta.get("best", {}).get("round", -1)
    if "best/vector" in found.tensors and entries.get(best, {}).get("model") != state_digest(
        {"vector": found.tensors["best/vector"]}
    ):
        wrong.append(f"the best model in checkpoint {path.name} is not that of round {best}")
    return wrong
