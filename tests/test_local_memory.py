"""Memory that a step has freed serves the next step: counted in page faults, beside a process that gives it back."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

STEPS = """
import resource, torch
from fedgraft.local.memory import keep_freed_memory
from fedgraft.models.backbones import load_network
torch.set_num_threads(1)
{first}
network = load_network("cnn:width=32,size=32", 10)
images, labels = torch.randn(32, 3, 32, 32), torch.arange(32) % 10
def step():
    torch.autograd.grad(torch.nn.functional.cross_entropy(network(images), labels), list(network.parameters()))
for _ in range(5):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(first: str) -> int:
    """Fresh pages that ten steps needed."""
    done = subprocess.run([sys.executable, "-c", STEPS.format(first=first)], check=True, capture_output=True, text=True)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told to keep freed memory")
def test_freed_memory_is_kept_for_the_next_step() -> None:
    assert faults("keep_freed_memory()") < 200 < faults("")


def test_asking_twice_is_asking_once() -> None:
    from fedgraft.local.memory import keep_freed_memory

    keep_freed_memory()
    keep_freed_memory()
    assert keep_freed_memory.cache_info().currsize == 1
