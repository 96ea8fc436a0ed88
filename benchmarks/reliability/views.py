"""What the server sees of one client in a secure sum: uniform words, whatever the input, and declared fields only."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import numpy as np
import torch
from scipy import stats
from tests.unit.privacy.test_secure_sum import Local, everything, make

from benchmarks.reliability.outcome import Outcome, share
from fedgraft.privacy.secagg import client as secure_client
from fedgraft.privacy.secagg import keys as secure_keys
from fedgraft.privacy.secagg.client import SecureClient
from fedgraft.privacy.secagg.secure_sum import Plan, SecureServer, Segment, drive

LENGTH = 50_000
DECLARED = {
    "keys": {"advert", "drawn"},
    "shares": {"boxes", "commitment"},
    "masked": {"masked"},
    "consistency": {"signature"},
    "unmask": {"shares"},
}
ALPHA = 1e-3
"""Chance that a perfect generator misses the bar, over all p-values of the check together."""


def masked_words(value: float) -> np.ndarray:
    """The masked words of one of three clients; all its inputs have this value."""
    plan = Plan("run", 1, (0, 1, 2), (Segment("x", LENGTH, 1.0),))
    local = Local(plan, {u: {"x": torch.full((LENGTH,), value)} for u in plan.clients})
    drive(SecureServer(plan), local)
    return next(data["masked"].numpy() for stage, u, data in local.seen if stage == "masked" and u == 1)


def p_values(words: np.ndarray) -> list[float]:
    """Chi-square of each of the four bytes, of pairs of neighbours (serial test), and serial correlation."""
    octets = words.view(np.uint8).reshape(-1, 4)
    found = [float(stats.chisquare(np.bincount(octets[:, i], minlength=256)).pvalue) for i in range(4)]
    high = words >> 28
    for lag in (1, 2):
        pairs = np.bincount(high[: -lag : lag + 1] * 16 + high[lag :: lag + 1][: len(high[: -lag : lag + 1])])
        found.append(float(stats.chisquare(np.pad(pairs, (0, 256 - len(pairs)))).pvalue))
    x = words / 2.0**32 - 0.5
    # A constant vector has no correlation; it counts as perfectly correlated.
    serial = float(np.corrcoef(x[:-1], x[1:])[0, 1]) * len(x) ** 0.5 if x.std() > 0 else len(x) ** 0.5
    return [*found, float(2 * stats.norm.sf(abs(serial)))]


def advantage(zero: list[np.ndarray], most: list[np.ndarray]) -> float:
    """p-value of a two-sample test of the words, and of the best of several summaries, between the two inputs."""
    words = float(stats.ks_2samp(np.concatenate(zero)[:200_000], np.concatenate(most)[:200_000]).pvalue)
    summaries: list[Callable[[np.ndarray], float]] = [
        lambda w: float(w.mean()),
        lambda w: float((w & 1).mean()),
        lambda w: float((w >> 31).mean()),
        lambda w: float(w.std()),
        lambda w: float(w[:100].mean()),
    ]
    each = [float(stats.ks_2samp([f(w) for w in zero], [f(w) for w in most]).pvalue) for f in summaries]
    return min([words, *each]) * (1 + len(each))  # Bonferroni


def in_the_clear(seed: int) -> int:
    """Pieces of a client's input, words or secrets in any message it sent, and fields nobody declared."""
    plan, inputs = make(6, length=40, seed=seed)
    lost = 10 + seed % 6
    local, server = Local(plan, inputs, drop={"masked": {lost}}), SecureServer(plan)
    drive(server, local)
    sent = b"|".join(piece for _, _, data in local.seen for piece in everything(data))
    held = sent + b"|".join(everything(server))
    found = 0
    for u in plan.clients:
        words, progress = local.words(u), local.clients[u].progress
        pieces = [words[i : i + 3].tobytes() for i in range(0, 38, 3)]
        pieces += [inputs[u]["update"][:4].to(kind).numpy().tobytes() for kind in (torch.float32, torch.float64)]
        pieces += [bytes.fromhex(progress.box_key), bytes.fromhex(progress.mask_key), bytes.fromhex(progress.seed)]
        found += sum(piece in held for piece in pieces)
    return found + sum(len(set(data) - DECLARED[stage]) for stage, _, data in local.seen)


def verdict(views: int, cases: int) -> dict[str, Any]:
    """All three questions at once."""
    zero, most = [masked_words(0.0) for _ in range(views)], [masked_words(1.0) for _ in range(views)]
    values = [p for words in (*zero, *most) for p in p_values(words)]
    repeats = len({words.tobytes() for words in (*zero, *most)}) < 2 * views
    clear = sum(in_the_clear(seed) for seed in range(cases))
    uniform, apart = min(values) * len(values), advantage(zero, most)
    return {
        "holds": uniform > ALPHA and apart > ALPHA and not repeats and clear == 0,
        "text": f"smallest of {len(values)} p-values {min(values):.1e} (bar {ALPHA / len(values):.1e}), "
        f"0 against max p = {min(1.0, apart):.2g}, {clear} undeclared or readable pieces in {cases} sums",
    }


def _leaky(self: SecureClient, data: Any, real: Any = SecureClient.keys) -> Any:
    return {**real(self, data), "examples": torch.tensor([3])}


def broken() -> dict[str, AbstractContextManager[Any]]:
    """Clients that give something away."""
    short = lambda words, key, sign=1: np.add(words, np.uint32(int.from_bytes(key[:4], "little") >> 4), out=words)  # noqa: E731
    return {
        "no masks": mock.patch.object(secure_keys, "add_keystream", lambda *args: None),
        "one word as mask": mock.patch.object(secure_keys, "add_keystream", short),
        "keys that repeat": mock.patch.object(secure_client.SecureClient, "keys", _fixed_keys),
        "number of examples beside the sum": mock.patch.object(SecureClient, "keys", _leaky),
    }


def _fixed_keys(self: SecureClient, data: Any, real: Any = SecureClient.keys) -> Any:
    self.entropy = lambda n: bytes([self.client + 1]) * n
    return real(self, data)


def view_check(views: int, cases: int, guard: AbstractContextManager[Any] | None = None) -> dict[str, Any]:
    """`verdict` with the library as it is or with a planted bug."""
    with guard or nullcontext():
        try:
            return verdict(views, cases)
        except Exception as error:  # a planted field can also be refused by the server, which is as good
            return {"holds": False, "text": f"refused: {str(error)[:80]}"}


def view(scale: float) -> Outcome:
    """The library and four leaky variants of it."""
    views, cases = share(100, scale, 4), share(200, scale, 3)
    ours = view_check(views, cases)
    bad = {name: view_check(4, 2, guard) for name, guard in broken().items()}
    return Outcome(
        ours["holds"],
        f"{2 * views} views of {LENGTH:,} words: {ours['text']}",
        {name: "missed the bar" if not one["holds"] else "PASSED" for name, one in bad.items()},
        not any(one["holds"] for one in bad.values()),
        {"views": 2 * views, "cases": cases},
    )
