"""Trains several configs one after the other in the same processes, for `runs.train_rows`.

    torchrun --nproc_per_node 2 tests/integration/trainings.py rows.json out.json

``rows.json`` holds lists of command line flags. A first flag ``count`` counts what autograd saves, ``stock`` takes
TorchTitan's own Trainer, as ``torchtitan.train`` would; ``plain`` trains with no converter, as a config without this
package would; ``room=NUMBER`` gives all ranks together so many bytes of what the host has free when the row starts.
Importing torch and TorchTitan takes longer than a few steps of a debug model, so all rows share one start; they also
share the process group, which TorchTitan leaves alone if it exists. What else a training made is gone before the next
one starts, but for the groups of its meshes: torch caches, by equal meshes, what leads to them.
Rank 0 writes, per row, what every rank saw: each step's loss and gradient norm with all digits, validation losses,
module names, state dict keys, the statistics of offload, and what was compiled.
"""

import dataclasses
import functools
import gc
import json
import math
import sys
import time
import weakref
from datetime import timedelta
from types import SimpleNamespace

import torch
import torch.distributed as dist
from context_parallel_cpu import let_context_parallel_run_on_cpu
from torch.distributed.tensor.experimental._attention import _disable_context_parallel_dispatcher
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention_hop

import titan_offload.titan.train
from titan_offload.saved_tensor import storage_id
from titan_offload.titan.train import OffloadTrainer, repair_for_cpu

repair_for_cpu()  # before anything else of TorchTitan is imported

import torchtitan.train  # noqa: E402
from torch._dynamo.utils import clear_compilation_metrics, counters, get_compilation_metrics  # noqa: E402
from torchtitan.config import ConfigManager  # noqa: E402
from torchtitan.models import attention  # noqa: E402
from torchtitan.models.gpt_oss import gptoss_configs  # noqa: E402
from torchtitan.models.llama3 import llama3_args  # noqa: E402
from torchtitan.models.llama3.infra import parallelize as parallelize_llama3  # noqa: E402
from torchtitan.models.moe import utils as moe_utils  # noqa: E402
from torchtitan.models.moe.moe import TokenChoiceTopKRouter  # noqa: E402
from torchtitan.train import Trainer  # noqa: E402

from titan_offload.host_memory import read_host_memory  # noqa: E402
from titan_offload.titan.need import actions_of  # noqa: E402


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


def let_parameters_be_offloaded_on_cpu() -> None:
    """FSDP2's offload of parameters, which the entry point refuses on a CPU: TorchTitan names two backends for the one
    device (here `main` has made the process group), and torch cannot pin memory where there is no accelerator."""
    titan_offload.titan.train.refuse_what_the_cpu_cannot_do = lambda job_config: None
    policy = functools.partial(parallelize_llama3.CPUOffloadPolicy, pin_memory=False)
    parallelize_llama3.CPUOffloadPolicy = policy


def add_flavors() -> None:
    """A llama3 debug model whose blocks can be divided among four pipeline stages, two each."""
    llama3_args["debugmodel_8_blocks"] = dataclasses.replace(llama3_args["debugmodel"], n_layers=8)


def let_rank_0_not_sleep() -> None:
    """After each training TorchTitan lets rank 0 wait two seconds for the others; here they meet in a collective."""
    torchtitan.train.time = SimpleNamespace(**{**vars(time), "sleep": lambda seconds: None})


def forget_what_was_compiled() -> None:
    torch._dynamo.reset()
    counters.clear()
    clear_compilation_metrics()
    torch._functorch.config.activation_memory_budget = 1.0  # TorchTitan sets it for the process


def compilations() -> dict:
    """All since then: which frame, the how manieth of it, why once more; and graph breaks, by reason. A compilation of
    a backward alone is left out, which inductor finds in its cache the second time."""
    fields = ("compile_id", "co_name", "co_filename", "recompile_reason", "fail_reason")
    graphs = [[str(getattr(entry, name)) for name in fields] for entry in get_compilation_metrics()]
    return {"graphs": [graph for graph in graphs if graph[1] != "None"], "breaks": dict(counters["graph_break"])}


def count_saved(model: torch.nn.Module, min_bytes: int) -> list[int]:
    """Makes the forward of ``model`` append to a list the bytes that autograd saves before the last block: storages of
    at least ``min_bytes``, each once, without those of parameters and buffers."""
    blocks, forward, result, saved = list(model.layers.values()), model.forward, [], {}
    has_begun_last = False

    def begin(*_: object) -> None:
        nonlocal has_begun_last
        has_begun_last = True

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        state = {storage_id(state) for state in (*model.parameters(), *model.buffers())}
        if not has_begun_last and storage.nbytes() >= min_bytes and storage_id(tensor) not in state:
            saved[storage_id(tensor)] = storage
        return tensor.detach()

    def counted(*args: object, **kwargs: object) -> torch.Tensor:
        nonlocal has_begun_last
        has_begun_last = False
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = forward(*args, **kwargs)
        result.append(sum(storage.nbytes() for storage in saved.values()))
        saved.clear()
        return output

    blocks[-1].register_forward_pre_hook(begin)
    model.forward = counted
    return result


def train(flags: list[str]) -> dict:
    forget_what_was_compiled()
    row, trainer = run(flags)
    gc.collect()  # TorchTitan switched the collector off, and a trainer is full of cycles
    _disable_context_parallel_dispatcher()  # TorchTitan leaves it on
    return row | {"is_freed": trainer() is None}


def run(flags: list[str]) -> tuple[dict, "weakref.ref[Trainer]"]:
    counts, flags = flags[0] == "count", flags[flags[0] == "count" :]
    trainer_class = OffloadTrainer
    if flags[0] == "stock":
        trainer_class, flags = Trainer, flags[1:]
    is_plain = flags[0] == "plain"
    if flags[0].startswith("room="):
        fraction = room_as_fraction(int(flags[0].removeprefix("room=")))
        flags = [*flags[1:], "--activation_offload.host_memory_fraction", fraction]
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
    saved = count_saved(trainer.model_parts[0], job_config.activation_offload.min_offload_bytes) if counts else None
    trainer.train()
    row = {
        "metrics": seen,
        "modules": [name for part in trainer.model_parts for name, _ in part.named_modules()],
        "classes": [type(part).__name__ for part in trainer.model_parts],
        "keys": [key for part in trainer.model_parts for key in part.state_dict()],
        "report": dataclasses.asdict(metrics.logger._own) if hasattr(metrics.logger, "_own") else None,
        "saved_bytes": saved,
        **compilations(),
        "plan": (getattr(metrics.logger, "_record", None) or {}).get("plan"),
        "num_weight_backwards": count_weight_backwards(trainer),
    }
    trainer.close()
    return row, weakref.ref(trainer)


def room_as_fraction(num_bytes: int) -> str:
    """The share of the host's memory, as it is now, that is ``num_bytes``; the same on all ranks."""
    fraction = [num_bytes / read_host_memory().free_bytes]
    dist.broadcast_object_list(fraction)
    return repr(fraction[0])


def count_weight_backwards(trainer: Trainer) -> int:
    """How often in a step the rank's pipeline schedule comes back to a stage for its weights alone. The first stage has
    no backward of inputs before."""
    if not trainer.parallel_dims.pp_enabled:
        return 0
    rank = trainer.parallel_dims.get_mesh("pp").get_local_rank()
    return sum(kind == "W" and stage > 0 for stage, kind, _ in actions_of(trainer.pp_schedule.pipeline_order[rank]))


def main() -> None:
    rows_path, out_path = sys.argv[1:]
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    let_gpt_oss_train_on_cpu()
    let_experts_be_parallel_on_cpu()
    let_parameters_be_offloaded_on_cpu()
    let_context_parallel_run_on_cpu()
    let_rank_0_not_sleep()
    add_flavors()
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
