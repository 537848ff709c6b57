"""Prints the host memory that each node of a run needs, in whole GiB: for a pod's limit, or sbatch's ``--mem``.

    python launch/node_memory.py train_configs/llama3_70b_1m.toml --nodes 8        prints 475: memory: 475Gi, --mem 475G

How it is reckoned. Offload pins what ``titan-offload plan`` says. Staging of asynchronous checkpoints and data loader
workers come beside it (`titan_offload.need`). Both together may be ``activation_offload.host_memory_fraction`` of what
is free when the run starts, so that much more must be free; and before that, each rank has taken `RANK_GIB`. Files in
/dev/shm count as memory of the pod: `SHM_GIB` is the size that launch/kubernetes_job.yaml gives it. The parts go to
stderr.
"""

import argparse
import contextlib
import io
import json
import math
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from titan_offload.cli import main as titan_offload
from titan_offload.config import GIB
from titan_offload.need import data_loader_bytes, staging_bytes

RANK_GIB = 8
"""Memory of a rank when training starts: Python, torch's libraries, the CUDA context, NCCL's buffers, compilers.
Assumed, with room to spare; ``process_shmem`` and VmRSS in a run's report tell what it was."""

SHM_GIB = 16

USER_ERROR_EXIT_CODE = 2


def node_gib(plan: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[int, dict[str, float]]:
    """Memory of one node, and its parts, in GiB.

    Args:
        plan: what ``titan-offload plan --json`` says.
        config: the same train config, as parsed from its TOML.

    Raises:
        ValueError: the config keeps in host memory what cannot be reckoned here.
    """
    ranks = plan["machine"]["devices_per_node"]
    parts = {"pinned for offload": plan["memory"]["pinned_node_bytes"] / GIB}
    parts |= {name: ranks * num_bytes / GIB for name, num_bytes in _other_bytes(plan, config).items()}
    fraction = plan["offload"]["host_memory_fraction"]
    parts[f"left free (host_memory_fraction {fraction:g})"] = sum(parts.values()) * (1 / fraction - 1)
    parts |= {f"{ranks} ranks of {RANK_GIB} GiB": float(ranks * RANK_GIB), "/dev/shm": float(SHM_GIB)}
    return math.ceil(round(sum(parts.values()), 6)), parts


def _other_bytes(plan: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, int]:
    """What else each rank takes of the host, as `titan_offload.titan.need` counts it at start."""
    training, checkpoint = config.get("training", {}), config.get("checkpoint", {})
    if training.get("enable_cpu_offload"):
        raise ValueError(
            "training.enable_cpu_offload = true: what FSDP2 then keeps in host memory is not reckoned here; start the "
            "run once, its table of host memory names the bytes"
        )
    other = {}
    if checkpoint.get("enable") and checkpoint.get("async_mode", "disabled") != "disabled":
        shards = plan["job"]["num_devices"] // plan["job"]["data_parallel_replicate"]
        itemsize = 2 if training.get("dtype") == "bfloat16" else 4
        shard_bytes = math.ceil(plan["model"]["num_params"] * itemsize / shards)
        other["staging of asynchronous checkpoints"] = staging_bytes(shard_bytes)
    loader = training.get("dataloader", {})
    if workers := loader.get("num_workers", 0):
        batch_bytes = 2 * training.get("local_batch_size", 8) * plan["job"]["seq_len"] * 8  # tokens and labels, int64
        other["data loader workers"] = data_loader_bytes(workers, batch_bytes, loader.get("prefetch_factor"))
    return other


def ask_plan(train_config: str, nodes: int, gpus_per_node: int) -> tuple[int, dict[str, Any]]:
    """Exit code of ``titan-offload plan``, and what it says; the link does not matter here."""
    out = io.StringIO()
    flags = ["--nodes", str(nodes), "--gpus-per-node", str(gpus_per_node), "--link", "pcie5", "--json"]
    with contextlib.redirect_stdout(out):
        code = titan_offload(["plan", train_config, *flags])
    return code, json.loads(out.getvalue()) if code == 0 else {}


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 2 after a mistake of the user's."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("train_config")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--gpus-per-node", type=int, default=8)
    args = parser.parse_args(argv)
    code, plan = ask_plan(args.train_config, args.nodes, args.gpus_per_node)
    if code:
        return code  # said on stderr already
    try:
        gib, parts = node_gib(plan, tomllib.loads(Path(args.train_config).read_text()))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return USER_ERROR_EXIT_CODE
    for name, part in parts.items():
        print(f"{part:8.1f} GiB  {name}", file=sys.stderr)
    print(gib)
    return 0


if __name__ == "__main__":
    sys.exit(main())
