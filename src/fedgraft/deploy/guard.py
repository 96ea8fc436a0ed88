"""Runs a command that ends with the process that started it: `python -m fedgraft.deploy.guard COMMAND...`.

Flower's SuperLink outlives a parent that is killed. This process watches its own parent, and ends the command and all
that it has started when the parent is gone, for whatever reason.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import Any

from fedgraft.deploy.process import end_process, end_with_parent, process_id


def main() -> None:
    """Run the command of the arguments, and exit with its code; SIGTERM ends it with all its descendants."""
    end_with_parent()
    child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    identity = process_id(child)

    def end(number: int, frame: Any) -> None:
        """End the command, and this process."""
        end_process(identity)
        sys.exit(0)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(child.wait())


if __name__ == "__main__":
    main()
