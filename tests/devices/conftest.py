"""Tests on the pretend device run in a process of their own, which `tests/laws/test_devices.py` starts.

Once autograd has run beside a device, no fork of that process can compute gradients, and other tests fork.
"""

from __future__ import annotations

import os

ALONE = "FEDGRAFT_TEST_DEVICES"
"""Set in the process that runs these tests."""
collect_ignore_glob = [] if os.environ.get(ALONE) else ["test_*.py"]
