"""Authorization of requests: the policies in force, the ledger of how often, and whether the request fits this client.

A request comes from a server that may lie. It is refused by name before anything is computed: one that breaks a rule
of the policies, one too many for today, one whose model or numbers are not those of this client's network.
"""

from __future__ import annotations

from collections.abc import Sequence

from fedgraft.algorithms.algorithm import Algorithm
from fedgraft.client.action import Action, RunPhase
from fedgraft.client.actions import ACTIONS
from fedgraft.client.context import ClientContext, model_vector, with_full_model
from fedgraft.client.ledger import DataLedger, Rows, question_digest
from fedgraft.client.policy import Policy, count_request
from fedgraft.client.request_checks import is_secure_stage, requested_name, require_settings, require_tensor
from fedgraft.core.client_memory import ClientMemory
from fedgraft.core.errors import Refused
from fedgraft.core.messages import Request


def authorize(request: Request, algorithm: Algorithm, context: ClientContext, memory: ClientMemory) -> ClientMemory:
    """Refuse the request, or return the client's memory with the request written in its ledger.

    Requests a day are counted where a policy limits them; answers outside the rounds are written on a node, and where
    updates are hidden (stages of a secure sum: `client/secure.py`). Raises `Refused`; no image or label is looked at,
    only how many there are.
    """
    ledger = DataLedger.of(memory)
    ledger.require_newest()
    policies = policies_in_force(algorithm, context)
    action = ACTIONS.get(request.action)
    for policy in policies:
        policy.check(request, algorithm)
        if action is not None and action.images is not None:
            policy.check_images(action.images(request, context))
    validate_request(request, algorithm, context)
    days_before = ledger.days.encode()
    days = {count_request(policy, request, days_before) for policy in policies}
    days.discard(days_before)
    if days:
        ledger.days = days.pop().decode()
    if requested_name(request) == "train":
        _spend_epsilon(request, context, policies, ledger)
    elif action is not None and (context.replays or algorithm.privacy.collects_sum):
        question = check_question(request, action, algorithm, context, ledger, "")
        ledger.record_question(rows_of(request, action, context), question, "", request.run)
    return ledger.write(memory)


def _spend_epsilon(request: Request, context: ClientContext, policies: Sequence[Policy], ledger: DataLedger) -> None:
    """Charge the run's epsilon when it begins; a run without one is refused where a policy has a budget for life."""
    budgets = [policy.lifetime_epsilon for policy in policies if policy.lifetime_epsilon is not None]
    if context.account is None:
        if budgets:
            raise Refused(
                "the run has no epsilon that the budget for all runs could be charged with", "lifetime_epsilon"
            )
        return
    epsilon, delta = context.account
    ledger.spend(request.run, epsilon, delta, min(budgets, default=None))


def rows_of(request: Request, action: Action, context: ClientContext) -> Rows:
    """Return which rows of the client's data the answer to a request is about."""
    return Rows(action.split(request), context.division)


def allows_other_sets(algorithm: Algorithm, context: ClientContext) -> bool:
    """Return whether all policies in force allow sums over other clients than earlier sums about the same rows."""
    return all(policy.other_sets for policy in policies_in_force(algorithm, context))


def check_question(
    request: Request, action: Action, algorithm: Algorithm, context: ClientContext, ledger: DataLedger, plan: str
) -> str:
    """Return the digest of what a request outside the rounds asks; refuse one that the ledger does not allow.

    `plan` is the digest of the plan of a hidden sum, "" for an answer in the clear.
    """
    limits = [policy.queries for policy in policies_in_force(algorithm, context) if policy.queries is not None]
    question = question_digest(action.name, action.canonical(request, context), request)
    repeatable = action.phase is RunPhase.EVALUATION  # over the same clients the same model scores the same
    rows = rows_of(request, action, context)
    ledger.check_question(rows, question, plan, request.run, min(limits, default=None), repeatable)
    return question


def policies_in_force(algorithm: Algorithm, context: ClientContext) -> tuple[Policy, ...]:
    """Return the policies of the context, or the one that the algorithm implies where the context has none."""
    return context.policies or (implied_policy(algorithm),)


def implied_policy(algorithm: Algorithm) -> Policy:
    """Return the policy that an algorithm implies: with secure aggregation, sums wherever an answer can be one."""
    shown_alone = tuple(sorted(action.name for action in ACTIONS.values() if action.shown_alone))
    # Under differential privacy nothing is answered that no noise covers.
    allowed = ("train",) if algorithm.privacy.answers_only_accounted else ()
    return Policy(secure=algorithm.privacy.collects_sum, in_the_clear=shown_alone, actions=allowed)


def validate_request(request: Request, algorithm: Algorithm, context: ClientContext) -> None:
    """Refuse a request that this client could not carry out, or that is meant for another network."""
    name = requested_name(request)
    action = ACTIONS.get(name)
    if is_secure_stage(request):
        if action is None or action.layout is None:
            raise Refused(f"{name[:40]!r} is not a secure sum", "sums")
        if not action.in_rounds:
            forbid_extra_fields(request, action, context)
        if request.action != "secure.masked":
            return  # the stages before `secure.masked` use neither the model nor the numbers
    if action is None:
        return  # there is no such action; `handle` refuses it
    request = with_full_model(request, context)
    if action.model != "none":
        require_tensor("the model", model_vector(request), (_model_size(action, context),))
    require_settings(request, action.settings)
    for tensor_name, shape in action.tensors(context.network).items():
        require_tensor(f"the {tensor_name}", request.auxiliary.get(tensor_name), shape)
    action.validate(request, algorithm, context)


def _model_size(action: Action, context: ClientContext) -> int:
    """Return the number of coordinates of the vector that a request for this action carries."""
    if action.model == "edit_space":
        return context.space.size
    return sum(p.numel() for _, p in context.network.named_parameters())


def forbid_extra_fields(request: Request, action: Action, context: ClientContext) -> None:
    """Refuse a stage of a secure sum outside the rounds that carries a field that its action does not read.

    A field without effect would give the same sum another digest, so that a server could have it twice over different
    clients and learn from the difference.
    """
    at_work = request.action == "secure.masked"
    expected_tensors: set[str] = set()
    if at_work:
        expected_tensors = {*action.tensors(context.network), *action.tensor_names}
    tensors = {name for name in request.auxiliary if name != "plan" and not name.startswith("data:")}
    settings = {name for name in request.settings if name != "sums"}
    carries_model = request.vector is not None
    needs_model = at_work and action.model != "none"
    if (
        tensors != expected_tensors
        or carries_model != needs_model
        or request.space != action.name
        or settings != set(action.settings)
    ):
        raise Refused(f"a secure sum of {action.name} carries other fields than it reads", "request")
    if request.settings.get("split", "test") not in action.splits:
        raise Refused(f"a secure sum of {action.name} names a split that does not exist", "request")
