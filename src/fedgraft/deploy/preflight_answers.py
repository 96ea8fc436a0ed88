"""The answers of a preflight, as the coordinator keeps them: facts of each site, refusals, images at two sites.

Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedgraft.consortium.site_faults import Finding
from fedgraft.core.errors import FedgraftError

ANSWERS_FILE = "answers.json"
"""The file with the answers of all nodes, in the folder of a preflight."""


def with_node_names(
    answers: Mapping[str, Any], names: Sequence[str]
) -> tuple[list[dict[str, Any]], dict[tuple[str, str], int]]:
    """Return the facts and the numbers of shared images of `collect_preflight` under the names of the nodes."""
    sites = [{**facts, "site": names[int(client)]} for client, facts in answers["facts"].items()]
    shared = {(names[client], names[other]): count for client, other, count in answers["shared"]}
    return sites, shared


def check_answers(answers: Mapping[str, Any]) -> None:
    """Raise if no node answered."""
    if not answers["facts"]:
        reason = next(iter(answers["refused"].values()), "no node is connected")
        raise FedgraftError(
            "E-DEPLOY-NO-PREFLIGHT",
            f"no node answered the preflight: {reason}",
            "ask the owners to allow the action 'preflight'",
            reason=reason,
        )


def missing_answers(answers: Mapping[str, Any], names: Sequence[str]) -> list[Finding]:
    """Return a finding for every node that refused or is not connected; `names` are the nodes', by number."""
    missing = []
    for number, reason in answers["refused"].items():
        missing.append(Finding("silent", names[int(number)], f"it did not answer: {reason}"))
    for number, name in enumerate(names):
        if str(number) not in answers["facts"] and str(number) not in answers["refused"]:
            missing.append(Finding("absent", name, "its node is not connected"))
    return missing
