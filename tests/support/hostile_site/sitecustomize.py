"""On the path of a test federation's processes: makes its server, a node or its port hostile, as told."""

import os
import sys

words = sys.orig_argv
if os.environ.get("HOSTILE") == "server" and any(word.endswith("flwr-serverapp") for word in words):
    from tests.support import deployed_lies

    deployed_lies.take_server()
if os.environ.get("HOSTILE") == "server" and "fedgraft.deploy.node" in words:
    from tests.support import deployed_lies

    deployed_lies.take_victim()
if os.environ.get("HOSTILE") == "node" and "fedgraft.deploy.node" in words:
    from tests.support import deployed_lies

    deployed_lies.take_node()
if os.environ.get("ECHO") and "fedgraft.deploy.node" in words:
    from tests.support import echo

    echo.take_node()
if os.environ.get("STOPS") and "fedgraft.deploy.node" in words:
    from tests.support import deployed_stops

    deployed_stops.take_node()
if os.environ.get("UNBOUNDED") and "fedgraft.deploy.door" in words:
    from tests.support import lost_answers

    lost_answers.unbound_door()
if os.environ.get("LOSES") and "fedgraft.deploy.node_loop" in words:
    from tests.support import lost_answers

    lost_answers.take_node()
if os.environ.get("ONCE") and "fedgraft.deploy.door" in words:
    from tests.support import lost_answers

    lost_answers.deliver_once()
if os.environ.get("SLOW") and "fedgraft.deploy.node" in words:
    from tests.support import slow_node

    slow_node.take_node()
