"""Runs a test's body in gloo processes."""

import os
import tempfile
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp


def _enter(rank: int, world_size: int, folder: str, body: Callable[[int], None]) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    store, timeout = f"file://{folder}/store", timedelta(seconds=60)  # a rank that does not come fails the test
    dist.init_process_group("gloo", init_method=store, timeout=timeout, rank=rank, world_size=world_size)
    try:
        body(rank)
    finally:
        dist.destroy_process_group()


@pytest.fixture
def on_gloo():
    """``on_gloo(body, 2)`` runs ``body(rank)`` on 2 processes; an error in any of them fails the test."""

    def run(body: Callable[[int], None], world_size: int = 2) -> None:
        with tempfile.TemporaryDirectory() as folder:
            mp.start_processes(_enter, (world_size, folder, body), nprocs=world_size, start_method="fork")

    return run
