#!/usr/bin/env bash
# Trains a small model on this machine with its block inputs offloaded; installs what that needs first.
#
#   ./launch/quickstart.sh [flags for TorchTitan, such as --training.steps 10]
#
# On the accelerators there are; on a machine with none, as two FSDP2 ranks on the CPU. The environment is .venv (see
# launch/env.sh to have it elsewhere). The output of rank 0 is shown, that of the others is in outputs/quickstart_logs.
# Ends with the exit code of the training.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/env.sh

config=train_configs/debug_cpu.toml
corpus=data/corpus
venv=${VENV:-.venv}

make_env "$venv"

say "making text and tokenizer in $corpus from Python's standard library"
"$venv/bin/python" scripts/make_corpus.py --out "$corpus"

num_devices=$("$venv/bin/python" -c 'import torch; print(torch.accelerator.device_count())')
if [ "$num_devices" -eq 0 ]; then
    say "no accelerator: training on the CPU with 2 ranks"
    nproc=2
    export OMP_NUM_THREADS=1
else
    say "training on $num_devices accelerator(s)"
    nproc=$num_devices
fi
# All text is local: nothing is to be asked of a hub.
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1

# Each rank logs the same lines; those of the others go to files.
redirects=0:0
for ((rank = 1; rank < nproc; rank++)); do
    redirects+=,$rank:3
done
exec "$venv/bin/torchrun" --standalone --nproc_per_node "$nproc" \
    --log-dir outputs/quickstart_logs --redirects "$redirects" \
    -m titan_offload.titan.train --job.config_file "$config" "$@"
