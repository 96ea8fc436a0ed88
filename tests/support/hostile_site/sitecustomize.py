"""On the path of a test federation's processes: makes its server, a node or its port hostile, as told."""

import os
import sys

words = sys.orig_argv
if os.environ.get("HOSTILE") == "server" and {"flwr-serverapp", "superexec"} & set(words):
    from tests.support import deployed_lies

    deployed_lies.take_server()
if os.environ.get("HOSTILE") == "node" and "fedgraft.deploy.node" in words:
    from tests.support import deployed_lies

    deployed_lies.take_node()
if os.environ.get("STOPS") and "fedgraft.deploy.node" in words:
    from tests.support import deployed_stops

    deployed_stops.take_node()
if os.environ.get("UNBOUNDED") and "superlink" in words:
    from fedgraft.deploy import limits

    limits.too_large = lambda tree, limit: False
if os.environ.get("LOSES") and "superexec" in words:
    from tests.support import lost_answers

    lost_answers.take_helper()
if os.environ.get("WAITS") and "supernode" in words:
    from tests.support import lost_answers

    lost_answers.take_guard()
