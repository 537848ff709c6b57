"""A short soak of the debug model: `scripts/soak.py` as it is run by hand, with fewer steps."""

import json
import os
import subprocess
import sys

import pytest
import torch
from runs import REPO, make_corpus

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(torch.accelerator.is_available(), reason="needs a machine with no accelerator"),
]


@pytest.mark.parametrize(("ranks", "parts"), [(1, ["saves", "all"]), (2, ["inputs"])])
def test_everything_is_flat(ranks, parts):
    make_corpus()
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(ranks), "--standalone"]
    command += ["scripts/soak.py", "--steps", "100", "--parts", *parts]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=REPO, env=env, capture_output=True, text=True, timeout=800)
    lines = done.stdout.splitlines()
    assert lines and lines[-1].startswith("{"), done.stderr[-4000:]
    found = json.loads(lines[-1])
    assert found["problems"] == []
    assert done.returncode == 0
    for part in parts:
        for rank in found["parts"][part]:
            assert len(rank["samples"]) == found["parameters"]["steps"] // 50
            assert all(rank["num"][what] > 5 for what in ("abandoned", "no_grad", "eval", "microbatches"))
            assert rank["num"]["offloads in the last step"] > 0
            assert rank["samples"][-1]["pinned"] > 0
