"""Preflight on machines: what a node tells of its images before anybody trains, and how the server asks for it.

Two questions, answered only if the owner's policy allows the action `preflight`. The first brings a key of each node,
signed by its identity; the second the facts of `runs.preflight`: sums, with small counts hidden. An image at two sites
is found by digests under a key that only these two nodes can compute (X25519 between their signed keys), so the server
learns how many images a pair of sites shares and can test no image of its own. As in secure sums, a node believes a
peer's identity at first use unless the owner pinned it.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedgraft.client.policy import Policy, count_request
from fedgraft.config.federate import federate
from fedgraft.config.load import Config
from fedgraft.consortium.preflight import MINIMUM, shared_images, site_facts
from fedgraft.consortium.site_faults import FAULTS
from fedgraft.core.client_memory import LEDGER
from fedgraft.core.errors import FedgraftError, Refused
from fedgraft.core.messages import Request, as_bytes
from fedgraft.core.store import write_text
from fedgraft.data.sources import Dataset
from fedgraft.data.sources.class_map import renamed
from fedgraft.deploy.deployed import config_of, load_own
from fedgraft.deploy.keep import Keep
from fedgraft.engines.flower.node_link import WorkerRequest
from fedgraft.privacy.secagg.client import as_tensor
from fedgraft.privacy.secagg.keys import Identity, agreement, context, derive_key, public_key, sign, verify

log = logging.getLogger("fedgraft")
ACTION = "preflight"
_TAG = 16  # letters of a tag
_KEY = 64 + 64 + 128  # letters of a public key, an identity and a signature

# ---- a node ----------------------------------------------------------------------------------------------------------


def tell(worker_request: WorkerRequest, request: Request) -> bytes:
    """A node's answer: its key, or with everybody's keys at hand its facts; refused where the owner says no."""
    config, keep = config_of(worker_request.config), Keep.here()
    policy = None if keep is None else keep.policy()
    lasting = {} if keep is None else keep.load(worker_request.client)
    ledger = _admitted(request, config, policy or Policy(), as_bytes(lasting[LEDGER]) if LEDGER in lasting else b"")
    identity = Identity.from_bytes(as_bytes(lasting["identity"])) if lasting else Identity.fresh()
    private = derive_key(identity.private, context(ACTION, config.digest))
    answer: dict[str, Any]
    if "keys" not in request.settings:
        public = public_key(private)
        signed = sign(identity.private, context(ACTION, config.digest, worker_request.client, public.hex()))
        answer = {"key": (public + identity.public + signed).hex() if keep is not None else ""}
    else:
        minimum = max(MINIMUM, 0 if policy is None else policy.least_images)
        facts, digests = site_facts(
            "", *_own(config, worker_request), minimum, policy is not None, config.data.grey_window
        )
        if facts["images"] < minimum:
            raise Refused(f"it would be about fewer than {minimum} images", "least_images")
        keys = _peers(str(request.settings["keys"]), config, worker_request.client, identity)
        agree = agreement(private)
        tags = {str(k): _tags(digests, agree(key, context(ACTION, config.digest))) for k, key in keys.items()}
        answer = {"facts": facts, "tags": tags}
    if keep is not None:
        new = {**lasting, "identity": as_tensor(identity.to_bytes())} | ({LEDGER: as_tensor(ledger)} if ledger else {})
        keep.store(worker_request.client, new, lasting)
        keep.believed(request, lasting, new)
    return json.dumps(answer).encode()


def _admitted(request: Request, config: Config, policy: Policy, ledger: bytes) -> bytes:
    """The ledger with this question in it, if the owner's rules let it be answered."""
    if request.action != ACTION:  # the rules are asked about what is told, not about what the order calls it
        raise Refused(f"a preflight was asked for as {request.action[:40]!r}", "actions")
    if request.run != config.digest or not policy.agrees(config.fingerprint):
        raise Refused("the order belongs to a run that the owner did not agree to", "config")
    policy.check_action(request)
    return count_request(policy, request, ledger)


def _own(config: Config, worker_request: WorkerRequest) -> tuple[Dataset, list[Any]]:
    """The node's images and their rows for training and testing, whatever their names; or its part of the config's."""
    if worker_request.data:
        data = renamed(load_own(worker_request.source, worker_request.data), config.data.class_map)
        return data, [range(len(data.train.labels)), range(len(data.test.labels))]
    dealt = federate(config)
    return dealt.dataset, [dealt.rows(worker_request.client).numpy(), dealt.test_rows(worker_request.client).numpy()]


def _peers(keys: str, config: Config, client: int, identity: Identity) -> dict[int, bytes]:
    """The public keys of the others by number, each signed by the identity under which this node knows it."""
    try:
        told = {int(k): bytes.fromhex(text) for k, text in json.loads(keys).items()}
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise Refused("what came as the keys of the others are no keys", "request") from None
    found = {}
    for k, key in told.items():
        if not 0 <= k < config.partition.clients:
            raise Refused(f"the run has no client {k}", "most_clients")
        if k == client:
            continue
        public, known, signed = key[:32], key[32:64], key[64:]
        identity.recognise(k, known)
        if not verify(known, signed, context(ACTION, config.digest, k, public.hex())):
            raise Refused(f"the key of client {k} is not signed by it", "pinned_peers")
        found[k] = public
    return found


def _tags(digests: Sequence[bytes], key: bytes) -> list[str]:
    return sorted(hashlib.blake2b(one, digest_size=_TAG // 2, key=key).hexdigest() for one in digests)


# ---- the server ------------------------------------------------------------------------------------------------------


def look(config: Config, folder: Path, engine: Any) -> dict[str, Any]:
    """Ask every node that is there; what they told, whom two of them share images with, and who refused and why."""
    engine.gather()
    clients = sorted(engine.registry.facts)
    refused: dict[int, str] = {}

    def asked(who: Sequence[int], wanted: str, **settings: str) -> dict[int, dict[str, Any]]:
        found: dict[int, dict[str, Any]] = {}
        for k, said in engine.exchange([Request(config.digest, 0, k, ACTION, settings=settings) for k in who]):
            try:
                found[k] = _checked(said, wanted) if isinstance(said, bytes) else {}
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                said = "it told what no fedgraft tells; its node runs other software"
            if isinstance(said, str):
                refused[k] = said
        return {k: told for k, told in found.items() if k not in refused}

    keys = {str(k): told["key"] for k, told in asked(clients, "key").items() if len(told["key"]) == _KEY}
    answers = asked([k for k in clients if k not in refused], "facts", keys=json.dumps(keys))
    pairs = [
        (a, b, shared_images({"a": answers[a]["tags"].get(str(b), ()), "b": answers[b]["tags"].get(str(a), ())}))
        for a in answers
        for b in answers
        if a < b
    ]
    told = {
        "facts": {str(k): one["facts"] for k, one in answers.items()},
        "shared": [[a, b, n] for a, b, both in pairs for n in both.values()],
        "refused": {str(k): why for k, why in refused.items()},
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "told.json", json.dumps(told, indent=2) + "\n")
    return told


_SHAPE: dict[str, Any] = {
    "site": str,
    "images": int,
    "test_images": int,
    "classes": {str: int},
    "minimum": int,
    "faults": {str: int},
    "unreadable": {str: int},
    "width": [int],
    "height": [int],
    "channels": {str: int},
    "bits": {str: int},
    "intensity": [float],
    "colours": [float],
    "contrast": float,
    "versions": {str: str},
    "disk_gb": float,
    "policy": bool,
}


def _checked(data: bytes, wanted: str) -> dict[str, Any]:
    """An answer of the shape that fedgraft tells; anything else is an error, because a node may say what it likes."""
    told = json.loads(data)
    if wanted == "key":
        bytes.fromhex(told["key"])
        return {"key": told["key"]}
    facts, tags = told["facts"], {str(int(k)): _fits(v, [str]) for k, v in told["tags"].items()}
    if set(facts) != set(_SHAPE):
        raise ValueError("other facts")
    for name, shape in _SHAPE.items():
        _fits(facts[name], shape)
    for n in (*facts["channels"], *facts["bits"]):
        int(n)
    of_images = {"width": 3, "height": 3, "intensity": 2, "colours": 3} if facts["bits"] else {}
    if any(len(facts[name]) != count for name, count in of_images.items()) or 0 in (*facts["width"], *facts["height"]):
        raise ValueError("other numbers")
    if set(facts["faults"]) - set(FAULTS):
        raise ValueError("other faults")
    return {"facts": facts, "tags": tags}


def _fits(value: Any, shape: Any) -> Any:
    """The value if it has this shape; a count may be hidden (None), a text has at most 200 printable letters."""
    if isinstance(shape, dict):
        for key, one in value.items():
            _fits(key, str)
            _fits(one, next(iter(shape.values()))) if one is not None else None
    elif isinstance(shape, list):
        [_fits(one, shape[0]) for one in value]
    elif not isinstance(value, (int, float) if shape is float else shape):
        raise ValueError("another kind")
    elif isinstance(value, str) and not (len(value) <= 200 and value.isprintable()):
        raise ValueError("no name")
    elif shape in (int, float) and not 0 <= value < 2**40:  # also what is not a number
        raise ValueError("no count")
    return value


def named(told: Mapping[str, Any], names: Sequence[str]) -> tuple[list[dict[str, Any]], dict[tuple[str, str], int]]:
    """What `look` was told, under the names of the nodes."""
    sites = [{**facts, "site": names[int(k)]} for k, facts in told["facts"].items()]
    return sites, {(names[a], names[b]): n for a, b, n in told["shared"]}


def check_told(told: Mapping[str, Any]) -> None:
    """Refuse to judge where nobody answered."""
    if not told["facts"]:
        why = next(iter(told["refused"].values()), "no node is there")
        raise FedgraftError(f"no node told anything: {why}; ask the owners to allow the action 'preflight'.")
