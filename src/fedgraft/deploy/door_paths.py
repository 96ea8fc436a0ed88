"""What the front door and the nodes agree on: paths, headers, bounds."""

from __future__ import annotations

FLEET_PATHS = ("/v1/fleet/activate-node", "/v1/fleet/deactivate-node", "/v1/fleet/send-node-heartbeat")
"""The paths that are passed on to the SuperLink."""
FLEET_BODY = 1 << 16
"""Most bytes of a request to one of them, and of its response."""
SETTINGS_BODY = 16 << 20
"""Most bytes of the settings of a message or an answer: the names of 50,000 classes fit."""
POLL_SECONDS = 25.0
"""How long a poll is held when there is no message."""
SESSION_HEADER = "fedgraft-session"
OFFSET_HEADER = "fedgraft-offset"
RECEIVED_HEADER = "fedgraft-received"
"""With a heartbeat: the bytes of its present message that a node has received."""
VERSION_HEADER = "fedgraft-version"
KEY_IN_USE = "an earlier process with this key still counts as connected"
"""What a node is told whose key is registered and cannot be activated."""
