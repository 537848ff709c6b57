"""Plans for tests of what is made from a plan."""

from titan_offload.config import OffloadConfig
from titan_offload.planner import make_plan
from titan_offload.planner.plan import Plan
from titan_offload.planner.shapes import Job, LayerShape, Machine, ModelShape

PARAMS, DIM, SEQ_LEN = 192_937_984, 4096, 4096


def plan_of_ratio(copy_over_forward: float, num_layers: int, back_over_forward: float | None = None) -> Plan:
    """Of a model whose copies take this many forwards, those back another number of them if one is given."""
    model = ModelShape("Qwen3 8B", DIM, (LayerShape(PARAMS, 4096, 32),) * num_layers)
    forward_s = (2 * SEQ_LEN * PARAMS + 2 * SEQ_LEN**2 * 4096) / 500e12
    rate = SEQ_LEN * DIM * 2 / (copy_over_forward * forward_s) / 1e9
    rate_back = rate * copy_over_forward / (back_over_forward or copy_over_forward)
    return make_plan(model, Job(SEQ_LEN), Machine(rate, rate_back), OffloadConfig())
