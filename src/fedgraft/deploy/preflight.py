"""Preflight on nodes: what a node reports of its images before anybody trains, and how the server collects it.

There are two requests, answered only if the owner's policy allows the action `preflight`. The first collects a key of
each node, signed by its identity; the second collects the facts of `consortium.preflight`: sums, with small counts
hidden. An image at two sites is found by digests under a key that only these two nodes can compute (X25519 between
their signed keys). So the server learns how many images a pair of sites shares and can test no image of its own. As in
secure sums, a node trusts a peer's identity on first use unless the owner pinned it.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedgraft.client.ledger import DataLedger, Rows, question_digest
from fedgraft.client.policy import Policy, count_request
from fedgraft.config.federate import federate
from fedgraft.config.load import Config
from fedgraft.consortium.preflight import MINIMUM, shared_images, site_facts
from fedgraft.consortium.site_faults import FAULTS
from fedgraft.core.client_memory import ClientMemory
from fedgraft.core.errors import Refused
from fedgraft.core.messages import Request, as_bytes
from fedgraft.core.store import write_text
from fedgraft.data.pixels.dicom import MODALITIES, WINDOWS
from fedgraft.data.sources import Dataset
from fedgraft.data.sources.class_map import renamed
from fedgraft.deploy.deployed import load_own, parse_config
from fedgraft.deploy.node_state import NodeState
from fedgraft.deploy.preflight_answers import ANSWERS_FILE
from fedgraft.engines.flower.node_link import WorkerRequest
from fedgraft.privacy.secagg.client import as_tensor
from fedgraft.privacy.secagg.keys import Identity, agreement, context, derive_key, public_key, sign, verify_signature

ACTION = "preflight"
_RULE_LENGTH = 200  # characters of a rule's value
_TAG_DIGITS = 16  # hexadecimal digits of a tag
_KEY_DIGITS = 64 + 64 + 128  # hexadecimal digits of a public key, an identity and a signature
_BAD_ANSWER = "its answer is not one that fedgraft gives; its node runs other software"

# ---- a node ----------------------------------------------------------------------------------------------------------


def answer_preflight(worker_request: WorkerRequest, request: Request) -> bytes:
    """Return a node's answer: its signed key, or its facts if the request brings the keys of all nodes.

    Raise `Refused` if the owner's policy does not allow it.
    """
    config = parse_config(worker_request.config)
    state = NodeState.from_environment()
    policies: tuple[Policy, ...] = ()
    permanent: ClientMemory = {}
    identity = Identity.fresh()
    if state is not None:
        policies = state.policies()
        permanent = state.load(worker_request.client)
        identity = Identity.from_bytes(as_bytes(permanent["identity"]))
    ledger = DataLedger.of(permanent)
    days = ledger.days
    for policy in policies or (Policy(),):
        ledger.days = days  # counted once, whatever the number of policies
        _authorize(request, config, policy, ledger)
    private = derive_key(identity.private, context(ACTION, config.digest))
    answer: dict[str, Any]
    if "keys" not in request.settings:
        answer = {"key": ""}
        if state is not None:
            answer["key"] = _signed_key(private, identity, config, worker_request.client)
    else:
        answer = _report_facts(worker_request, str(request.settings["keys"]), config, policies, identity, private)
    if state is not None:
        updated = ledger.write({**permanent, "identity": as_tensor(identity.to_bytes())})
        state.store(worker_request.client, updated, permanent)
        state.record_first_use_trust(request, permanent, updated)
    return json.dumps(answer).encode()


def _authorize(request: Request, config: Config, policy: Policy, ledger: DataLedger) -> None:
    """Write this request into the ledger; raise `Refused` if the owner's rules do not allow it."""
    ledger.require_newest()
    if request.action != ACTION:  # the rules apply to what is reported, not to the name in the request
        raise Refused(f"a preflight was requested under the name {request.action[:40]!r}", "actions")
    if request.run != config.digest or not policy.agrees(config.fingerprint):
        raise Refused("the request belongs to a run that the owner did not agree to", "config")
    policy.check_action(request)
    ledger.days = count_request(policy, request, ledger.days.encode()).decode()
    if "keys" in request.settings:
        settings = {"config": config.fingerprint}  # the keys of peers change nothing of what is reported
        question = question_digest(ACTION, settings, Request(request.run, 0, 0, ACTION))
        rows = Rows("train", "all")
        ledger.check_question(rows, question, "", request.run, policy.queries)
        ledger.record_question(rows, question, "", request.run)


def _signed_key(private: bytes, identity: Identity, config: Config, client: int) -> str:
    """Return the public key of this preflight, the node's identity and its signature, in hexadecimal digits."""
    public = public_key(private)
    signature = sign(identity.private, context(ACTION, config.digest, client, public.hex()))
    return (public + identity.public + signature).hex()


def _report_facts(
    worker_request: WorkerRequest,
    keys: str,
    config: Config,
    policies: Sequence[Policy],
    identity: Identity,
    private: bytes,
) -> dict[str, Any]:
    """Return the facts of the node's images, and the tags (keyed hashes) of its images for each peer.

    `keys` are the signed keys of all nodes as JSON, `private` is this node's key of the preflight. `identity` pins new
    peers.
    """
    minimum = max([MINIMUM, *(policy.least_images for policy in policies)])
    dataset, rows = _node_images(config, worker_request)
    facts, digests = site_facts("", dataset, rows, minimum, _reported_rules(policies), config.data.grey_window)
    if facts["images"] < minimum:
        raise Refused(f"the facts would be about fewer than {minimum} images", "least_images")
    agree = agreement(private)
    tags = {}
    for peer, public in _peer_keys(keys, config, worker_request.client, identity).items():
        tags[str(peer)] = _tags(digests, agree(public, context(ACTION, config.digest)), facts["images"])
    return {"facts": facts, "tags": tags}


def _reported_rules(policies: Sequence[Policy]) -> dict[str, str] | None:
    """Return the rules that differ from the defaults, by name, as short text; None without a policy.

    The coordinator sees where owners differ. Which configs and models an owner agreed to stays with the owner.
    """
    if not policies:
        return None
    rules: dict[str, str] = {}
    for policy in policies:
        for name, value in policy.changed_rules().items():
            if name not in ("config", "models"):
                text = value[:_RULE_LENGTH]
                rules[name] = text if rules.get(name, text) == text else f"{rules[name]}; {text}"[:_RULE_LENGTH]
    return rules


def _node_images(config: Config, worker_request: WorkerRequest) -> tuple[Dataset, list[Any]]:
    """Return the node's dataset with its training and test rows: all of its own data, or its part of the config's."""
    client = worker_request.client
    if worker_request.data:
        data = renamed(load_own(worker_request.source, worker_request.data, config), config.data.class_map)
        return data, [range(len(data.train.labels)), range(len(data.test.labels))]
    federated = federate(config)
    return federated.dataset, [federated.rows(client).numpy(), federated.test_rows(client).numpy()]


def _peer_keys(keys: str, config: Config, client: int, identity: Identity) -> dict[int, bytes]:
    """Return the public keys of the peers by client number; each must be signed by the identity known of that peer."""
    peer_keys = {}
    for peer, signed_key in _parse_keys(keys).items():
        if not 0 <= peer < config.partition.clients:
            raise Refused(f"the run has no client {peer}", "most_clients")
        if peer == client:
            continue
        public = signed_key[:32]
        peer_identity = signed_key[32:64]
        signature = signed_key[64:]
        identity.recognise(peer, peer_identity)
        if not verify_signature(peer_identity, signature, context(ACTION, config.digest, peer, public.hex())):
            raise Refused(f"the key of client {peer} is not signed by it", "pinned_peers")
        peer_keys[peer] = public
    return peer_keys


def _parse_keys(keys: str) -> dict[int, bytes]:
    """Return the signed keys of a request by client number."""
    signed_keys = {}
    try:
        for number, digits in json.loads(keys).items():
            signed_keys[int(number)] = bytes.fromhex(digits)
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise Refused("the setting 'keys' does not contain the keys of peers", "request") from None
    return signed_keys


def _tags(digests: Sequence[bytes], key: bytes, images: int) -> list[str]:
    """Return keyed hashes of image digests, as many as images, sorted, so that their order discloses nothing.

    Copies have one digest. Random tags stand in for them, so that their number does not tell how many there are.
    """
    size = _TAG_DIGITS // 2
    tags = [hashlib.blake2b(digest, digest_size=size, key=key).hexdigest() for digest in digests]
    tags += [secrets.token_hex(size) for _ in range(images - len(tags))]
    return sorted(tags)


# ---- the server ------------------------------------------------------------------------------------------------------


class _Collection:
    """The exchanges of one preflight: requests to clients, and who refused or answered nonsense."""

    def __init__(self, config: Config, engine: Any) -> None:
        self.config = config
        self.engine = engine
        self.refused: dict[int, str] = {}

    def exchange(self, clients: Sequence[int], kind: str, **settings: str) -> dict[int, dict[str, Any]]:
        """Return the validated answers of these clients by number; others are added to `refused` with the reason.

        A client answers with its key, or with its facts where the settings carry the keys of the others; `kind` ("key"
        or "facts") is the form that its answer must have.
        """
        requests = [Request(self.config.digest, 0, client, ACTION, settings=settings) for client in clients]
        answers: dict[int, dict[str, Any]] = {}
        for client, answer in self.engine.exchange(requests):
            if isinstance(answer, str):
                self.refused[client] = answer
                continue
            try:
                answers[client] = _validate_answer(answer, kind)
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                self.refused[client] = _BAD_ANSWER
        for client in self.refused:
            answers.pop(client, None)
        return answers


def collect_preflight(config: Config, folder: Path, engine: Any) -> dict[str, Any]:
    """Collect the facts of every connected node; return them, the images that pairs share, and who refused and why."""
    engine.gather()
    clients = sorted(engine.registry.facts)
    collection = _Collection(config, engine)
    keys = {}
    for client, answer in collection.exchange(clients, "key").items():
        if len(answer["key"]) == _KEY_DIGITS:
            keys[str(client)] = answer["key"]
    remaining = [client for client in clients if client not in collection.refused]
    answers = collection.exchange(remaining, "facts", keys=json.dumps(keys))
    result = {
        "facts": {str(client): answer["facts"] for client, answer in answers.items()},
        "shared": _count_shared(answers),
        "refused": {str(client): reason for client, reason in collection.refused.items()},
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / ANSWERS_FILE, json.dumps(result, indent=2) + "\n")
    return result


def _count_shared(answers: Mapping[int, Mapping[str, Any]]) -> list[list[int]]:
    """Return [client, other client, number of images they share] for every pair that shares some."""
    counts = []
    for client, answer in answers.items():
        for other, other_answer in answers.items():
            if client >= other:
                continue
            tags = answer["tags"].get(str(other), ())
            other_tags = other_answer["tags"].get(str(client), ())
            for count in shared_images({"client": tags, "other": other_tags}).values():
                counts.append([client, other, count])
    return counts


_FACT_TYPES: dict[str, Any] = {
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
    "modalities": {str: int},
    "windows": {str: int},
    "intensity": [float],
    "colours": [float],
    "contrast": float,
    "versions": {str: str},
    "disk_gb": float,
    "policy": bool,
    "rules": {str: str},
}
_IMAGE_FACT_LENGTHS = {"width": 3, "height": 3, "intensity": 2, "colours": 3}  # if there are readable images


def _validate_answer(data: bytes, kind: str) -> dict[str, Any]:
    """Return a node's answer if it has the form that fedgraft sends.

    Raise on any other, because a node may send anything. `kind` is the expected form, "key" or "facts".
    """
    answer = json.loads(data)
    if kind == "key":
        bytes.fromhex(answer["key"])
        return {"key": answer["key"]}
    tags = {}
    for client, client_tags in answer["tags"].items():
        _check_type(client_tags, [str])
        tags[str(int(client))] = client_tags
    facts = answer["facts"]
    _check_facts(facts)
    return {"facts": facts, "tags": tags}


def _check_facts(facts: Mapping[str, Any]) -> None:
    """Raise unless the facts of a site have the names, types and lengths that fedgraft sends."""
    if set(facts) != set(_FACT_TYPES):
        raise ValueError("unknown or missing facts")
    for name, expected in _FACT_TYPES.items():
        _check_type(facts[name], expected)
    for number in (*facts["channels"], *facts["bits"]):
        int(number)
    if facts["bits"]:
        for name, length in _IMAGE_FACT_LENGTHS.items():
            if len(facts[name]) != length:
                raise ValueError(f"{name} must have {length} values")
    if 0 in (*facts["width"], *facts["height"]):
        raise ValueError("an image has no pixels")
    if set(facts["modalities"]) - MODALITIES - {"other"} or set(facts["windows"]) - WINDOWS:
        raise ValueError("unknown modalities or windows")
    if set(facts["faults"]) - set(FAULTS):
        raise ValueError("unknown faults")


def _check_type(value: Any, expected: Any) -> None:
    """Raise unless a value has the expected type; a count may be hidden (None), a text is short and printable."""
    if isinstance(expected, dict):
        (item_type,) = expected.values()
        for name, item in value.items():
            _check_type(name, str)
            if item is not None:
                _check_type(item, item_type)
    elif isinstance(expected, list):
        for item in value:
            _check_type(item, expected[0])
    elif expected is float:
        if not isinstance(value, int | float):
            raise ValueError("not a number")
        _check_range(value)
    elif not isinstance(value, expected):
        raise ValueError("another type")
    elif expected is int:
        _check_range(value)
    elif expected is str and not (len(value) <= 200 and value.isprintable()):
        raise ValueError("not a short printable text")


def _check_range(number: float) -> None:
    """Raise unless a number is finite, not negative and small enough to be a count."""
    if not 0 <= number < 2**40:  # also false for NaN
        raise ValueError("out of range")
