"""Tests that need a device. Without one each is skipped, unless TITAN_OFFLOAD_EMULATE=1 asks for a CPU in its place."""

import os

import pytest
import torch
from gpu_machine import Machine, the_machine

# cuBLAS reads it when it starts. Without it a product need not come out the same while another stream is busy.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(scope="session", autouse=True)
def machine() -> Machine:
    found = the_machine()
    if found is None:
        pytest.skip("needs an accelerator (a CUDA device); TITAN_OFFLOAD_EMULATE=1 runs it on a CPU")
    return found


@pytest.fixture(autouse=True)
def deterministic(machine):
    """References must come out the same each time. torch does not fill memory then: that would hide what a runtime
    forgets to write."""
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = before


@pytest.fixture(autouse=True)
def nothing_under_way(machine):
    """What a test leaves on the device's streams must not disturb the next one."""
    yield
    machine.synchronize()
