"""Trains several configs one after the other in the same processes, for test_trainings.

    torchrun --nproc_per_node 2 tests/integration/trainings.py rows.json out.json

``rows.json`` holds lists of command line flags; a first flag ``stock`` takes TorchTitan's own Trainer, as
``torchtitan.train`` would. Importing torch and TorchTitan takes longer than a few steps of a debug
model, so all rows share one start; they also share the process group, which TorchTitan leaves alone if it exists.
Rank 0 writes, per row, what every rank saw: each step's loss and gradient norm with all digits, validation losses,
module names, state dict keys, and the statistics of offload.
"""

import gc
import json
import sys
from dataclasses import asdict

import torch.distributed as dist

from titan_offload.titan.train import OffloadTrainer, repair_for_cpu

repair_for_cpu()  # before anything else of TorchTitan is imported

from torchtitan.config import ConfigManager  # noqa: E402
from torchtitan.train import Trainer  # noqa: E402


def train(flags: list[str]) -> dict:
    trainer_class = OffloadTrainer
    if flags[0] == "stock":
        trainer_class, flags = Trainer, flags[1:]
    trainer = trainer_class(ConfigManager().parse_args(flags))
    metrics = trainer.metrics_processor
    log, seen = metrics.logger.log, []

    def spy(values, step):
        names = ("loss_metrics/global_avg_loss", "grad_norm", "validation_metrics/loss")
        seen.append([step, *(repr(values.get(name)) for name in names)])
        log(values, step)

    metrics.logger.log = spy
    trainer.train()
    row = {
        "metrics": seen,
        "modules": [name for part in trainer.model_parts for name, _ in part.named_modules()],
        "classes": [type(part).__name__ for part in trainer.model_parts],
        "keys": [key for part in trainer.model_parts for key in part.state_dict()],
        "report": asdict(metrics.logger._own) if hasattr(metrics.logger, "_own") else None,
    }
    trainer.close()
    del trainer, metrics
    gc.collect()  # TorchTitan switched the collector off, and a trainer is full of cycles
    return row


def main() -> None:
    rows_path, out_path = sys.argv[1:]
    with open(rows_path) as file:
        rows = json.load(file)
    results = []
    for flags in rows:
        row = train(flags)
        gathered = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, row)
        results.append(gathered)
        if dist.get_rank() == 0:
            with open(out_path, "w") as file:
                json.dump(results, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
