"""Trains several configs one after the other in the same processes, for test_trainings.

    torchrun --nproc_per_node 2 tests/integration/trainings.py rows.json out.json

``rows.json`` holds lists of command line flags. A first flag ``stock`` takes TorchTitan's own Trainer, as
``torchtitan.train`` would; ``plain`` trains with no converter, as a config without this package would. Importing torch
and TorchTitan takes longer than a few steps of a debug model, so all rows share one start; they also share the process
group, which TorchTitan leaves alone if it exists.
Rank 0 writes, per row, what every rank saw: each step's loss and gradient norm with all digits, validation losses,
module names, state dict keys, and the statistics of offload.
"""

import dataclasses
import functools
import gc
import json
import math
import sys
import time
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention_hop

from titan_offload.titan.train import OffloadTrainer, repair_for_cpu

repair_for_cpu()  # before anything else of TorchTitan is imported

import torchtitan.train  # noqa: E402
from torchtitan.config import ConfigManager  # noqa: E402
from torchtitan.models import attention  # noqa: E402
from torchtitan.models.gpt_oss import gptoss_configs  # noqa: E402
from torchtitan.models.moe import utils as moe_utils  # noqa: E402
from torchtitan.models.moe.moe import TokenChoiceTopKRouter  # noqa: E402
from torchtitan.train import Trainer  # noqa: E402


def flex_attention(
    self: attention.FlexAttentionWrapper,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    block_mask: BlockMask,
    scale: float,
    return_lse: bool,
    enable_gqa: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """torch's ``flex_attention`` refuses tensors on the CPU that need gradients; the op below it takes them."""
    out, lse, _ = flex_attention_hop(q, k, v, lambda score, *place: score, block_mask.as_tuple(), scale, {})
    return out, lse * math.log(2)  # of the op, it has base 2


def let_gpt_oss_train_on_cpu() -> None:
    """Nothing of attention is compiled, and the router's bias is initialized, which TorchTitan 0.2.2 forgets. The debug
    model gets the vocabulary of the debug tokenizer, a size as the other debug models have, and a window that is
    shorter than a sequence."""
    init_weights = TokenChoiceTopKRouter.init_weights

    def init_weights_and_bias(self: TokenChoiceTopKRouter, init_std: float) -> None:
        init_weights(self, init_std)
        if self.gate.bias is not None:
            torch.nn.init.zeros_(self.gate.bias)

    TokenChoiceTopKRouter.init_weights = init_weights_and_bias
    attention.FlexAttentionWrapper.forward = flex_attention
    attention._compiled_create_block_mask = functools.partial(create_block_mask, device="cpu")  # else CUDA in 2.11
    gptoss_configs["debugmodel"] = dataclasses.replace(
        gptoss_configs["debugmodel"],
        vocab_size=2048,
        moe_inter_dim=256,
        n_heads=8,
        n_kv_heads=2,
        sliding_window_size=16,
    )


def let_experts_be_parallel_on_cpu() -> None:
    """TorchTitan has the padding of an expert's tokens twice, and takes the Triton one."""
    moe_utils.generate_permute_indices = functools.partial(moe_utils.generate_permute_indices, use_cpu=True)


def let_rank_0_not_sleep() -> None:
    """After each training TorchTitan lets rank 0 wait two seconds for the others; here they meet in a collective."""
    torchtitan.train.time = SimpleNamespace(**{**vars(time), "sleep": lambda seconds: None})


def train(flags: list[str]) -> dict:
    trainer_class = OffloadTrainer
    if flags[0] == "stock":
        trainer_class, flags = Trainer, flags[1:]
    is_plain = flags[0] == "plain"
    job_config = ConfigManager().parse_args(flags[is_plain:])
    if is_plain:  # the command line cannot say so: an empty list is no value there
        job_config.model.converters = []
    trainer = trainer_class(job_config)
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
        "report": dataclasses.asdict(metrics.logger._own) if hasattr(metrics.logger, "_own") else None,
        "plan": (getattr(metrics.logger, "_record", None) or {}).get("plan"),
    }
    trainer.close()
    del trainer, metrics
    gc.collect()  # TorchTitan switched the collector off, and a trainer is full of cycles
    return row


def main() -> None:
    rows_path, out_path = sys.argv[1:]
    let_gpt_oss_train_on_cpu()
    let_experts_be_parallel_on_cpu()
    let_rank_0_not_sleep()
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
