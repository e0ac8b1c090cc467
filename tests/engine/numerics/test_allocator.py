"""Memory that is freed and asked for again does not come from the kernel every time."""

import subprocess
import sys

import pytest

PROBE = """
import resource
import torch
from potluck.engine.numerics.allocator import keep_freed_memory

keep_freed_memory()
for _ in range(20):  # the heap has to grow first
    torch.zeros(10_000_000)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    torch.zeros(10_000_000)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
PAGES_OF_TEN = 10 * 4 * 10_000_000 // 4096


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator is asked")
def test_a_tensor_takes_the_place_of_the_last_one():
    found = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True)
    assert int(found.stdout) < PAGES_OF_TEN / 10
