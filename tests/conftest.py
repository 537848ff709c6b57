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


@pytest.fixture(scope="module")
def titan_on_cpu():
    """TorchTitan's repairs for a machine with no accelerator."""
    from titan_offload.titan.train import repair_for_cpu

    histc = torch.histc
    repair_for_cpu()
    yield
    torch.histc = histc


@pytest.fixture
def in_repo(monkeypatch, request):
    """Paths in train configs are relative to the repository."""
    monkeypatch.chdir(request.config.rootpath)
