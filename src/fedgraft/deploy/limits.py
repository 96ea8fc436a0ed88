"""Size limits: what is too large is refused before it is received, by the server's door and by the node.

The door's limit for responses is stated by the run, which knows its network; the node's limit for requests is in the
owner's policy (`request_megabytes`). In place of a message that is too large the receiver gets the reason, and the run
continues.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

from fedgraft.core.errors import FedgraftError
from fedgraft.deploy.mailbox import LEAST_RESPONSE_LIMIT

DEFAULT_REQUEST_MEGABYTES = 1024


def response_limit(parameters: int, width: int, classes: int) -> int:
    """Return the most bytes that an honest response can have with this network: three vectors, and sums for a head."""
    head_sums = 16 * (width + 1) * (width + 1 + classes)
    return max(LEAST_RESPONSE_LIMIT, 12 * parameters + head_sums + (16 << 20))


def request_limit(policy: Path) -> int:
    """Return the most bytes of a request, from the owner's policy, without the imports that its other rules need."""
    if not policy.is_file():
        return DEFAULT_REQUEST_MEGABYTES << 20
    try:
        table = tomllib.loads(policy.read_text())
        return int(table.get("request_megabytes", DEFAULT_REQUEST_MEGABYTES)) << 20
    except (ValueError, TypeError) as error:  # TOMLDecodeError is a ValueError
        raise FedgraftError(
            "E-DEPLOY-POLICY",
            f"the policy {policy} cannot be read: {error}",
            "correct it, or write it again with: fedgraft deploy policy",
            path=str(policy),
        ) from None


def request_too_large(limit: int) -> str:
    """Return the reason that the server gets in place of the response to a request over the limit."""
    return f"the request is larger than the {limit >> 20} MB that its owner's policy allows"
