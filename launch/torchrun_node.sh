#!/usr/bin/env bash
# Trains on the devices of this node; run on each of several nodes, on all of them together.
#
#   TRAIN_CONFIG=train_configs/llama3_8b_128k.toml ./launch/torchrun_node.sh [--dry-run] [flags for TorchTitan]
#
# --dry-run shows the command and runs nothing. Paths are relative to where it is started. In the environment:
#
# TRAIN_CONFIG    the train config
# NPROC_PER_NODE  ranks on this node (default: one per device)
# NUMA_BINDING    node, socket, exclusive, core-complex: torchrun keeps each rank on CPUs near its device; none
#                 (default: node, where torchrun can, see launch/node_facts.py)
# NNODES          how many nodes run this (default: 1). For more than one:
# RDZV_ENDPOINT   host:port of one of them, the same on all
# RDZV_ID         any word, the same on all, another one for each start
# LOG_DIR         output of all ranks (default: outputs/logs)
# LOG_RANK        ranks of this node whose output is shown as well, such as 0,1 (default: 0)
# VENV            environment to take if no torchrun is on the PATH (default: .venv, which launch/quickstart.sh makes)
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
source "$here/checks.sh"

dry_run=false
if [ "${1:-}" = --dry-run ]; then
    dry_run=true
    shift
fi
need_config
need_flags "$@"

command -v torchrun >/dev/null || PATH=$(cd "$here/.." && pwd)/${VENV:-.venv}/bin:$PATH
command -v torchrun >/dev/null || fail "no torchrun on the PATH: activate the environment that has this package, or" \
    "make .venv with ./launch/quickstart.sh"

nproc=${NPROC_PER_NODE:-} numa=${NUMA_BINDING:-}
if [ -z "$nproc" ] || [ -z "$numa" ]; then
    facts=$(python "$here/node_facts.py") ||
        fail "python $here/node_facts.py failed: set NPROC_PER_NODE and NUMA_BINDING, which it finds out"
    read -r num_devices binding <<<"$facts"
    [ -n "$nproc" ] || [ "$num_devices" -gt 0 ] || fail "no device on this node: set NPROC_PER_NODE to train on the CPU"
    nproc=${nproc:-$num_devices} numa=${numa:-$binding}
fi
need_number NPROC_PER_NODE "$nproc"
need_number NNODES "${NNODES:-1}"

# One thread per rank, as torchrun would set it with a warning; pinning brings its own.
command=(env "OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}")
# Block inputs come and go between tensors of other sizes, and would leave holes in segments that cannot grow. This is
# the name since torch 2.9; what is set by the old one must not be overruled. No pinned_... keys: this package does not
# pin through torch's allocator, and torch 2.11 refuses keys that it does not know.
if [ -z "${PYTORCH_ALLOC_CONF:-}${PYTORCH_CUDA_ALLOC_CONF:-}" ]; then
    command+=(PYTORCH_ALLOC_CONF=expandable_segments:True)
fi
command+=(torchrun --nproc-per-node "$nproc")
if [ "${NNODES:-1}" -eq 1 ]; then
    command+=(--standalone)
else
    [ -n "${RDZV_ENDPOINT:-}" ] || fail "RDZV_ENDPOINT is not set, and NNODES = $NNODES: set it to host:port of a node"
    [ -n "${RDZV_ID:-}" ] || fail "RDZV_ID is not set, and NNODES = $NNODES: set it to one word on all nodes"
    command+=(--nnodes "$NNODES" --rdzv-backend c10d --rdzv-endpoint "$RDZV_ENDPOINT" --rdzv-id "$RDZV_ID")
fi
[ "$numa" = none ] || command+=(--numa-binding "$numa")
command+=(--log-dir "${LOG_DIR:-outputs/logs}" --local-ranks-filter "${LOG_RANK:-0}" --role rank --tee 3)
command+=(-m titan_offload.titan.train --job.config_file "$TRAIN_CONFIG" "$@")

if $dry_run; then
    show_command "${command[@]}"
    exit
fi
exec "${command[@]}"
