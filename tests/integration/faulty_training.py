"""A TorchTitan training in which something goes wrong, for test_faults_of_runs.

    torchrun --nproc_per_node 2 tests/integration/faulty_training.py POINT RANK ERROR [flags of TorchTitan]

In step 2 the third passing of ``POINT``, one of `fault_injector`'s, fails on rank ``RANK``: as in life if ``ERROR`` is
``error``; else the signal of that name comes, SIGINT to torchrun, as from a terminal. Its time is printed.
"""

import os
import signal
import sys
import time

point, rank, error = sys.argv[1], int(sys.argv[2]), sys.argv[3]
del sys.argv[1:4]  # before TorchTitan is imported, which looks at the rest at once

import torch.distributed as dist  # noqa: E402
from fault_injector import FaultInjector  # noqa: E402

import titan_offload.titan.train  # noqa: E402
from titan_offload.titan.train import OffloadTrainer  # noqa: E402

STEP, PASSING = 2, 3


class FaultyTrainer(OffloadTrainer):
    def train_step(self, data_iterator) -> None:
        if self.step == STEP and dist.get_rank() == rank:
            injector = Injector()
            injector.install(self.model_parts[0])
            injector.fail_at(point, PASSING, None if error == "error" else signal.Signals[error])
        super().train_step(data_iterator)


class Injector(FaultInjector):
    def fail(self, error) -> None:
        print(f"\nFault at {time.time()}", flush=True)
        if error is signal.SIGINT:
            os.kill(os.getppid(), error)
        else:
            super().fail(error)


titan_offload.titan.train.OffloadTrainer = FaultyTrainer
titan_offload.titan.train.main()
