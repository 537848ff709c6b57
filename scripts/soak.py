"""Trains the debug model for thousands of steps of all kinds; memory, handles, files and threads must stay flat.

    OMP_NUM_THREADS=1 torchrun --nproc_per_node 2 scripts/soak.py --steps 2000 [--parts inputs saves all off] [-- flags]

needs the corpus (``python scripts/make_corpus.py --out data/corpus``). Each part is a training of its own, by
TorchTitan's Trainer on the CPU, with its garbage collection; flags after ``--`` go to TorchTitan. In each step, at
random but the same in each run:

    lengths    each microbatch is cut to a sequence length of its own, on each rank another
    accumulate 1 to 3 microbatches
    abandoned  in some, a forward whose loss is dropped, before or after the others
    evals      in some, a forward without gradients; in some, one in eval mode; and TorchTitan's validation

The parts:

    inputs     block inputs move
    saves      the outputs of attention and of a linear are saved, and move too
    all        nothing is checkpointed, and all that the blocks save moves
    off        nothing moves: what grows here is TorchTitan's or torch's

Between steps, see `soak_samples`. Ends with exit code 1 if something was not flat.
"""

import argparse
import gc
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench_report import print_json, print_table
from soak_samples import FLAT_FROM, Sample, as_json, find_problems, make_rows, take_sample

from titan_offload import Offloader
from titan_offload.titan.train import OffloadTrainer, repair_for_cpu

repair_for_cpu()  # before anything else of TorchTitan is imported

from torchtitan.config import ConfigManager  # noqa: E402

from titan_offload.titan.metrics import OffloadLogger  # noqa: E402

CONFIG = Path(__file__).parent.parent / "train_configs" / "debug_cpu.toml"
BASE = (
    f"--job.config_file {CONFIG} --training.seq_len 128 --training.local_batch_size 1 --metrics.log_freq 10 "
    "--activation_offload.min_offload_mib 0.001 "
    "--validation.enable --validation.freq 100 --validation.seq_len 64 --validation.local_batch_size 1"
)
PARTS = {
    "inputs": "--activation_offload.mode block_inputs",
    "saves": "--selective_checkpoint.enable --selective_checkpoint.save_modules wo --selective_checkpoint.offload",
    "all": "--activation_checkpoint.mode none --activation_offload.mode all",
    "off": "--activation_offload.mode none",
}
MIN_SEQ_LEN = 16
MAX_MICROBATCHES = 3


class SoakTrainer(OffloadTrainer):
    """TorchTitan's Trainer, whose steps differ; takes a sample every `FLAT_FROM` steps.

    Attributes:
        samples: of this process.
        num: how often each kind of thing was done.
    """

    def __init__(self, job_config: Any) -> None:
        super().__init__(job_config)
        self.samples: list[Sample] = []
        self.num: Counter[str] = Counter()
        self._random = random.Random(0)  # the same on all ranks
        self._lengths = random.Random(1 + dist.get_rank())

    def batch_generator(self, data_iterable: Iterable) -> Iterator:
        for input_dict, labels in super().batch_generator(data_iterable):
            # The longest comes early: what it needs is there from then on.
            longest = self.step <= FLAT_FROM // 2
            length = labels.shape[1] if longest else self._lengths.randint(MIN_SEQ_LEN, labels.shape[1])
            yield {key: value[:, :length].clone() for key, value in input_dict.items()}, labels[:, :length].clone()

    def train_step(self, data_iterator: Iterator) -> None:
        self.gradient_accumulation_steps = self._random.randint(1, MAX_MICROBATCHES)
        extras = [name for name in ("abandoned", "no_grad", "eval", "abandoned") if self._random.random() < 0.25]
        before = self._random.randint(0, len(extras))
        is_sampled = self.step % FLAT_FROM == 0  # TorchTitan has just collected garbage, as it does every 50 steps
        if is_sampled:
            before = len(extras)  # after a forward alone FSDP2 leaves the head's weights gathered
        for name in extras[:before]:
            self._forward_only(name, data_iterator)
        super().train_step(data_iterator)
        for name in extras[before:]:
            self._forward_only(name, data_iterator)
        self.num["microbatches"] += self.gradient_accumulation_steps
        if is_sampled:
            self.samples.append(take_sample(self.step, self.offloader))
            if dist.get_rank() == 0:
                print(self.samples[-1], file=sys.stderr)

    def _forward_only(self, name: str, data_iterator: Iterator) -> None:
        input_dict, _ = next(data_iterator)
        [model] = self.model_parts
        if name == "eval":
            model.eval()
        with torch.set_grad_enabled(name != "no_grad"):
            model(input_dict["input"])
        model.train()
        self.num[name] += 1

    @property
    def offloader(self) -> Offloader | None:
        """None: nothing moves."""
        logger = self.metrics_processor.logger
        return logger._offloader if isinstance(logger, OffloadLogger) else None


def train(flags: str, args: argparse.Namespace) -> dict[str, Any]:
    """One part. Returns what this process saw."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        own = f"--training.steps {args.steps} --job.dump_folder {folder}"
        job_config = ConfigManager().parse_args([*f"{BASE} {own} {flags}".split(), *args.flags])
        trainer = SoakTrainer(job_config)
        trainer.train()
        offloader = trainer.offloader
        num_offloads = offloader.stats().num_offloads if offloader is not None else 0
        result = {
            "samples": trainer.samples,
            "num": dict(trainer.num) | {"offloads in the last step": num_offloads},
            "seconds": time.perf_counter() - start,
        }
        trainer.close()
    del trainer, offloader
    gc.collect()  # TorchTitan switched the collector off, and a trainer is full of cycles
    return result


def run(args: argparse.Namespace) -> list[str]:
    """All parts; rank 0 tells. Returns the problems of all ranks."""
    parts, problems = {}, []
    for name in args.parts:
        gathered: list[Any] = [None] * int(os.environ["WORLD_SIZE"])
        result = train(PARTS[name], args)
        dist.all_gather_object(gathered, result)
        for rank, seen in enumerate(gathered):
            problems += find_problems(seen["samples"], f"{name}, rank {rank}")
        parts[name] = gathered
        if dist.get_rank() == 0:
            print_part(name, gathered, args)
    if dist.get_rank() == 0:
        for problem in problems:
            print(problem)
        results = {
            name: [seen | {"samples": as_json(seen["samples"])} for seen in gathered]
            for name, gathered in parts.items()
        }
        parameters = {"steps": args.steps, "sample_freq": FLAT_FROM, "ranks": dist.get_world_size()}
        print_json("soak", torch.get_default_device().type, parameters, {"parts": results, "problems": problems})
    return problems


def print_part(name: str, gathered: list[dict[str, Any]], args: argparse.Namespace) -> None:
    samples = [seen["samples"] for seen in gathered]
    done = ", ".join(f"{num} {what}" for what, num in gathered[0]["num"].items())
    print_table(
        f"{name}: {args.steps} steps, a sample every {FLAT_FROM}",
        ["rank", "", f"step {samples[0][0].step}", "most", f"step {samples[0][-1].step}"],
        make_rows(samples),
        f"rank 0 in {gathered[0]['seconds']:.0f} s: {done}",
    )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=2000, help="of each part (default: %(default)s)")
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=["inputs", "saves", "all"], help="default: inputs saves all"
    )
    own, flags = sys.argv[1:], []
    if "--" in own:
        own, flags = own[: own.index("--")], own[own.index("--") + 1 :]
    args = parser.parse_args(own)
    if args.steps < 2 * FLAT_FROM:
        parser.error(f"--steps must be at least {2 * FLAT_FROM}: what is flat shows after step {FLAT_FROM}")
    args.flags = flags
    return args


def main() -> None:
    args = parse_args()
    problems = run(args)
    dist.destroy_process_group()
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
