"""The planner: will a job fit, what will it cost, what should be set. No torch: it runs on a laptop.

shapes        what is asked: model, job, machine        plan_input    ... from a train config:
costs         formulas, with their sources                titan_source  TorchTitan's tables, read and not imported
pipeline      stages, and passes in flight                model_shape   layers of its models
simulation    a step on a virtual clock                   titan_job     parallel degrees, batches, stages
link_choice   what hides behind compute                 plan_machine  ... from flags and link.json
steps         one way to run a step                     probe         measures the links of a node
advice        what to set                               plan_report   tables
planning      the plan: `make_plan`                     plan_plot     picture
plan          what a plan says                          plan_page     page with sliders
                                                        foretold      a plan beside what a run measured
"""

from titan_offload.planner.plan import VARIANTS, Plan
from titan_offload.planner.planning import make_plan, planned_variant
from titan_offload.planner.shapes import Job, LayerShape, Machine, ModelShape

__all__ = ["Job", "LayerShape", "Machine", "ModelShape", "Plan", "VARIANTS", "make_plan", "planned_variant"]
