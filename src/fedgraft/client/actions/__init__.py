"""Every action that a client can carry out, one file for each kind.

A file of this folder that defines a list `ACTIONS` is found by itself. A plug-in may add an action of its own:
`fedgraft.client.actions.ACTIONS["mine"] = my_action`.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module

from fedgraft.client.action import Action
from fedgraft.client.request_checks import is_secure_stage, requested_name
from fedgraft.core.errors import FedgraftError
from fedgraft.core.messages import Request


def _discover() -> dict[str, Action]:
    """Import the files of this folder and return their actions by name."""
    actions: dict[str, Action] = {}
    for module_info in pkgutil.iter_modules(__path__):
        module = import_module(f"{__name__}.{module_info.name}")
        for action in getattr(module, "ACTIONS", ()):
            actions[action.name] = action
    return actions


ACTIONS: dict[str, Action] = _discover()


def action_named(name: str) -> Action:
    """Return the action of this name; an unknown one is an error of the program that asks."""
    action = ACTIONS.get(name)
    if action is None:
        raise FedgraftError(
            "E-CLIENT-ACTION",
            f"there is no client action {name!r}",
            f"there are {', '.join(sorted(ACTIONS))}",
            action=name,
        )
    return action


def progress_label(request: Request) -> str:
    """Return what a progress display calls the work of this request: the round, or the action's label.

    A request that is one stage of a secure sum also names the stage.
    """
    name = requested_name(request)
    action = ACTIONS.get(name)
    if action is None:
        label = name
    elif action.in_rounds:
        label = f"round {request.round + 1}"
    else:
        label = action.progress_label
    if is_secure_stage(request):
        stage = request.action.partition(".")[2]
        label = f"{label}, secure sum: {stage}"
    return label
