"""What a secure sum costs: bytes a client sends, and time beside flwr 1.41's SecAgg+ on the same vectors.

Timed on either side, in one process and one thread, clients one after the other: all stages of all clients (keys,
shares, boxes, fixed-point encoding, masks), the masked vectors as bytes and back, and the server's sum, rebuilding of
secrets and unmasking down to floats. Not timed: training, network, orders. flwr's client stages are its own functions
of `secaggplus_mod`; its server is the arithmetic of its `SecAggPlusWorkflow`, with its defaults and all ten clients
as neighbours. Two of ten send keys and shares and then no vector.
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.reliability.outcome import Outcome, share
from fedgraft.core.messages import Response, pack, unpack
from fedgraft.privacy.secagg.keys import Identity
from fedgraft.privacy.secagg.secure_sum import (
    Plan,
    SecureClient,
    SecureServer,
    drive,
    mean_of_sum,
    rounding_generator,
    weighted_input,
    weighted_segments,
)

CLIENTS, LOST, NEEDED = 10, (3, 8), 7
WEIGHTS = [100 + 50 * u for u in range(CLIENTS)]
LIMIT = 8.0


def vectors(length: int) -> np.ndarray:
    """The clients' changes, (clients, length) float32."""
    return np.random.default_rng(0).normal(0, 0.01, (CLIENTS, length)).astype(np.float32)


def expected(updates: np.ndarray) -> np.ndarray:
    """The weighted mean of those who stay."""
    kept = [u for u in range(CLIENTS) if u not in LOST]
    weights = np.array([WEIGHTS[u] for u in kept], dtype=np.float64)
    return weights @ updates[kept] / weights.sum()


def ours(updates: np.ndarray, round_: int = 0, wider: bool = False) -> tuple[np.ndarray, float]:
    """One secure sum as messages: (mean, most bytes per coordinate that a client sent)."""
    length = updates.shape[1]
    plan = Plan("cost", round_, tuple(range(CLIENTS)), weighted_segments(length, LIMIT), threshold=NEEDED)
    clients = {u: SecureClient(plan, u, Identity.fresh()) for u in plan.clients}
    sent = dict.fromkeys(plan.clients, 0)

    def words(u: int) -> np.ndarray:
        values = weighted_input(torch.from_numpy(updates[u]), WEIGHTS[u] / 1000)
        return plan.ring.encode(values, rounding_generator(0, plan, u))

    def ask(stage: str, outbox: Any) -> Any:
        answers = {}
        for u, data in outbox.items():
            if stage == "masked" and u in LOST:
                continue
            response = Response("cost", round_, u, evidence=clients[u].answer(stage, data, partial(words, u)))
            if wider and stage == "masked":  # the planted bug: 64-bit words on the wire
                response = replace(response, evidence={n: t.to(torch.int64) for n, t in response.evidence.items()})
            data_up = pack(response)
            sent[u] += len(data_up)
            back = unpack(Response, data_up).evidence
            answers[u] = {n: t.to(torch.uint32) for n, t in back.items()} if wider and stage == "masked" else back
        return answers

    mean, _, _ = mean_of_sum(drive(SecureServer(plan), ask))
    return mean.numpy(), max(sent.values()) / length


def flower(updates: np.ndarray) -> tuple[np.ndarray, float]:
    """The same by flwr's SecAgg+ primitives: (mean, most bytes per coordinate of a masked vector)."""
    from flwr.app import ConfigRecord
    from flwr.common import bytes_to_ndarray, ndarrays_to_parameters
    from flwr.common.secure_aggregation.crypto.shamir import combine_shares
    from flwr.common.secure_aggregation.crypto.symmetric_encryption import generate_shared_key
    from flwr.common.secure_aggregation.ndarrays_arithmetic import (
        factor_extract,
        get_parameters_shape,
        parameters_addition,
        parameters_mod,
        parameters_subtraction,
    )
    from flwr.common.secure_aggregation.quantization import dequantize
    from flwr.common.secure_aggregation.secaggplus_constants import Key
    from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen
    from flwr.supercore.primitives.asymmetric import bytes_to_private_key, bytes_to_public_key

    mod = importlib.import_module("flwr.client.mod.secure_aggregation.secaggplus_mod")  # a function has its name too
    levels, modulus, ids = 1 << 22, 1 << 32, list(range(1, CLIENTS + 1))
    setup: Any = {
        Key.SAMPLE_NUMBER: CLIENTS,
        Key.SHARE_NUMBER: CLIENTS,
        Key.THRESHOLD: NEEDED,
        Key.CLIPPING_RANGE: LIMIT,
        Key.TARGET_RANGE: levels,
        Key.MOD_RANGE: modulus,
        Key.MAX_WEIGHT: 1000.0,
    }
    states = {u: mod.SecAggPlusState() for u in ids}
    for u in ids:
        states[u].nid = u
    publics = {u: mod._setup(states[u], ConfigRecord(setup)) for u in ids}
    keys: Any = {str(u): [publics[u][Key.PUBLIC_KEY_1], publics[u][Key.PUBLIC_KEY_2]] for u in ids}
    boxes: dict[int, list[tuple[int, bytes]]] = {u: [] for u in ids}
    for u in ids:
        shared = mod._share_keys(states[u], ConfigRecord(keys))
        for to, box in zip(shared[Key.DESTINATION_LIST], shared[Key.CIPHERTEXT_LIST], strict=True):
            boxes[to].append((u, box))
    alive, dead = [u for u in ids if u - 1 not in LOST], [u for u in ids if u - 1 in LOST]
    total: Any = None
    most = 0
    for u in alive:
        routed: Any = {Key.SOURCE_LIST: [v for v, _ in boxes[u]], Key.CIPHERTEXT_LIST: [box for _, box in boxes[u]]}
        given = ndarrays_to_parameters([updates[u - 1]])
        answer = mod._collect_masked_vectors(states[u], ConfigRecord(routed), WEIGHTS[u - 1], given)
        most = max(most, sum(map(len, answer[Key.MASKED_PARAMETERS])))
        arrays = [bytes_to_ndarray(b) for b in answer[Key.MASKED_PARAMETERS]]
        total = arrays if total is None else parameters_addition(total, arrays)
    total = parameters_mod(total, modulus)
    shares: dict[int, list[bytes]] = {u: [] for u in ids}
    for u in alive:
        lists: Any = {Key.ACTIVE_NODE_ID_LIST: alive, Key.DEAD_NODE_ID_LIST: dead}
        answer = mod._unmask(states[u], ConfigRecord(lists))
        for owner, piece in zip(answer[Key.NODE_ID_LIST], answer[Key.SHARE_LIST], strict=True):
            shares[owner].append(piece)
    for u, pieces in shares.items():
        secret, shape = combine_shares(pieces), get_parameters_shape(total)
        if u in alive:
            total = parameters_subtraction(total, pseudo_rand_gen(secret, modulus, shape))
            continue
        for v in [v for v in ids if v != u]:
            public = bytes_to_public_key(keys[str(v)][0])
            mask = pseudo_rand_gen(generate_shared_key(bytes_to_private_key(secret), public), modulus, shape)
            total = (parameters_addition if u > v else parameters_subtraction)(total, mask)
    ratio, rest = factor_extract(parameters_mod(total, modulus))
    mean = dequantize(rest, LIMIT, levels)[0]
    return (mean - (len(alive) - 1) * LIMIT) * (levels / ratio), most / updates.shape[1]


def seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds of this process (others share the machine), and what came out."""
    began = time.process_time()
    found = work()
    return time.process_time() - began, found


def cost(scale: float) -> Outcome:
    """Interleaved repeats; the median ratio counts."""
    length, repeats = share(1_000_000, scale, 100_000), 3 if scale < 1 else 5
    updates = vectors(length)
    wanted = expected(updates)
    ours(updates[:, :1000]), flower(updates[:, :1000])  # imports and caches
    times: dict[str, list[float]] = {"ours": [], "flwr": []}
    for number in range(repeats):
        spent, (mean, up) = seconds(partial(ours, updates, number))
        times["ours"].append(spent)
        spent, (other, other_up) = seconds(partial(flower, updates))
        times["flwr"].append(spent)
    errors = [float(np.abs(found - wanted).max()) for found in (mean, other)]
    ratio = statistics.median(a / b for a, b in zip(times["ours"], times["flwr"], strict=True))
    wide = ours(updates, repeats, wider=True)[1]
    # The time bar has no broken variant. Its control is the measurement itself: flwr's repeats against each other.
    same = statistics.median(b / a for a, b in zip(times["flwr"], times["flwr"][1:], strict=False))
    medians = {name: statistics.median(found) for name, found in times.items()}
    return Outcome(
        up <= 4.1 and ratio <= 0.5 and errors[0] < 1e-4 and errors[1] < 1e-3,
        f"{up:.3f} bytes per coordinate up (flwr {other_up:.2f}); {medians['ours']:.2f} s of CPU against flwr's "
        f"{medians['flwr']:.2f} s, ratio {ratio:.2f} (median of {repeats} interleaved repeats, {length:,} values); "
        f"largest error of the mean {errors[0]:.1e} against {errors[1]:.1e}",
        {
            "64-bit words on the wire": f"{wide:.2f} bytes per coordinate",
            "time, control: flwr in our place": f"ratio {same:.2f} (one repeat against the one before)",
        },
        wide > 4.1 and same > 0.5,
        {"length": length, "seconds": times, "bytes": [up, other_up], "errors": errors},
    )
