#!/usr/bin/env bash
# Lint, and the tests that need no accelerator; installs what they need first.
#
#   ./scripts/test.sh [flags for pytest, such as -k corpus]
#
# Tests marked slow are left out, unless a flag -m asks for them: -m slow for these alone, -m "" for all.
# The environment is .venv (see launch/env.sh to have it elsewhere). With CI=true it is one of its own, made anew and
# removed at the end, so that nothing left by an earlier run can make a test pass.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/env.sh

venv=${VENV:-.venv}
if [ "${CI:-}" = true ]; then
    venv=$(mktemp -d .ci-venv.XXXXXX)
    trap 'rm -rf "$venv"' EXIT
fi
make_env "$venv" dev

say "lint"
"$venv/bin/ruff" check .
"$venv/bin/ruff" format --check .

say "tests"
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1
"$venv/bin/python" -m pytest -m "not slow" "$@"  # the last -m counts
