"""All tests run as TorchTitan does: with the garbage collector off, so that a cycle shows as a leak."""

import gc

import pytest
import torch

torch.set_num_threads(1)  # tiny tensors: more threads only wait for each other


@pytest.fixture(autouse=True)
def no_garbage_collector():
    gc.disable()
    yield
    gc.enable()
