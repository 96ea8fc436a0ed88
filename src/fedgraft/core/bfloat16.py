"""Whether this machine's processor can compute products of bfloat16 numbers, as its flags announce.

Some virtual machines announce matrix instructions (AMX) that end the process with an illegal instruction. That cannot
be caught, so it is tried in a process of its own before a run begins.
"""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path

from fedgraft.core.errors import FedgraftError

PROCESSOR = Path("/proc/cpuinfo")
"""Where Linux lists the processor's flags; elsewhere nothing is known to announce what it cannot do."""
TRIAL = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); a @ a"
LIMIT = "ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16"
"""The setting of torch's matrix library under which it does not use AMX."""


@cache
def computes_bfloat16() -> bool:
    """Return whether products of bfloat16 numbers work here; a processor that announces AMX is tried, for seconds."""
    if not PROCESSOR.exists() or "amx_bf16" not in PROCESSOR.read_text():
        return True
    trial = subprocess.run([sys.executable, "-c", TRIAL], capture_output=True, check=False)
    return trial.returncode == 0


def require_bfloat16() -> None:
    """Raise an error if a bfloat16 product would end this process."""
    if not computes_bfloat16():
        raise FedgraftError(
            "E-DEVICE-BFLOAT16",
            "this machine's processor announces instructions for bfloat16 matrices (AMX) and cannot carry them out",
            f"start with {LIMIT} in the environment, or use local.amp='float16' or none",
        )
