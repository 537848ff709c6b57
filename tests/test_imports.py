"""Who may import whom: a module knows those below it, never those above it."""

import ast
from pathlib import Path

import pytest

import titan_offload

PACKAGE = Path(titan_offload.__file__).parent
MODULES = sorted(path.relative_to(PACKAGE).with_suffix("").as_posix() for path in PACKAGE.rglob("*.py"))

MAY_IMPORT = {
    "config": set(),
    "machine_files": set(),
    "cgroups": {"machine_files"},
    "host_memory": {"machine_files", "cgroups"},
    "topology": {"machine_files"},
    "need": {"config"},
    "budget": {"config", "host_memory", "topology"},
    "exchange": {"budget"},
    "pinned_memory": set(),
    "runtime": {"config", "pinned_memory"},
    "host_runtime": {"config", "runtime"},
    "pool": {"config", "runtime"},
    "link": {"config", "runtime"},
    "saved_tensor": {"config"},
    "stats": {"config", "runtime", "pool", "forward_watch"},
    "stash": {"runtime", "saved_tensor", "stats", "tape"},
    "cast_inputs": {"saved_tensor"},
    "tape": {"config", "runtime", "pool", "saved_tensor", "cast_inputs"},
    "forward_watch": {"runtime"},
    "engine": {"config", "runtime", "pool", "saved_tensor", "stats", "tape", "tape_order", "forward_watch", "stash"},
    "tape_order": {"tape"},
    "save_registry": set(),
    "save_policy": {"config", "save_registry"},
    "rule_log": {"config", "save_policy"},
    "savable_op": {"save_policy", "saved_tensor"},
    "routing": {"saved_tensor"},
    "saved_output": {"saved_tensor", "tape"},
    "selective": {
        *("config", "saved_tensor", "stats", "tape", "engine"),
        *("save_registry", "save_policy", "saved_output", "rule_log", "routing"),
    },
    "blocks": set(),
    "module_hooks": {"blocks", "cast_inputs", "engine", "saved_tensor", "selective", "tape"},
    "apply": {
        *("config", "runtime", "host_runtime", "pool", "stats", "tape", "blocks", "module_hooks"),
        *("engine", "save_registry", "save_policy", "selective", "link", "planner", "share", "link_limit"),
    },
    "share": {"config", "runtime", "pool", "host_memory", "topology", "need", "budget", "exchange", "link"},
    "link_limit": {"engine", "exchange", "link", "planner", "report", "share", "tape"},
    "report": {"config", "stats", "planner"},
    "host_report": {"config", "stats", "topology", "budget", "link", "report"},
    "run_folder": {"host_memory", "topology", "report", "host_report"},
    "cli": {"host_report", "run_folder", "planner"},
}
PLANNER_MAY_IMPORT = {
    "simulation": set(),
    "link_choice": {"simulation"},
    "shapes": set(),
    "pipeline": {"shapes"},
    "costs": {"shapes"},
    "plan": {"shapes", "simulation"},
    "steps": {"shapes", "pipeline", "costs", "simulation", "link_choice", "plan"},
    "advice": {"costs", "plan", "steps"},
    "planning": {"shapes", "pipeline", "costs", "simulation", "plan", "steps", "advice"},
    "__init__": {"shapes", "plan", "planning"},
    "titan_source": set(),
    "block_layout": set(),
    "saved_activations": {"block_layout"},
    "model_shape": {"block_layout", "saved_activations", "shapes"},
    "titan_job": {"pipeline", "shapes", "titan_source"},
    "plan_input": {"model_shape", "shapes", "titan_job", "titan_source"},
    "plan_machine": {"shapes"},
    "plan_report": {"plan"},
    "plan_plot": {"plan", "simulation"},
    "plan_page": {"costs", "link_choice", "pipeline", "plan", "plan_machine", "planning", "shapes", "simulation"},
    "foretold": set(),
    "probe": {"plan_machine"},
}
BELOW_THE_PLANNER = {"config", "need"}
BELOW_THE_PROBE = {"link", "runtime", "share", "topology"}
EVERYTHING = {*MAY_IMPORT, "planner", "titan", "titan_offload"}
NEITHER_TORCH = (
    *("config", "machine_files", "cgroups", "host_memory", "topology", "need", "budget", "cli"),
    *(f"planner/{name}" for name in PLANNER_MAY_IMPORT if name != "probe"),
)


def imports(module: str) -> set[str]:
    """Full names of the modules that ``module`` imports, anywhere in its source."""
    nodes = list(ast.walk(ast.parse((PACKAGE / f"{module}.py").read_text())))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_every_module_is_in_the_table():
    folders = {"titan": set(), "planner": set(), ".": set()}
    for module in map(Path, MODULES):
        folders[str(module.parent)].add(module.name)
    assert folders["."] - {"__init__"} <= set(MAY_IMPORT)
    assert folders["planner"] == set(PLANNER_MAY_IMPORT)


@pytest.mark.parametrize("module", MODULES)
def test_imports_are_those_of_the_table(module):
    names = [name.split(".") for name in imports(module)]
    ours = {name[1] if name[1] in EVERYTHING else "titan_offload" for name in names if name[0] == "titan_offload"}
    others = {name[0] for name in names}
    folder, _, name = module.rpartition("/")
    if folder == "planner":
        siblings = {name[2] for name in names if name[:2] == ["titan_offload", "planner"] and len(name) > 2}
        assert siblings & set(PLANNER_MAY_IMPORT) <= PLANNER_MAY_IMPORT[name]
        allowed = {"planner"} | BELOW_THE_PLANNER | (BELOW_THE_PROBE if name == "probe" else set())
    elif folder == "titan" or module == "__init__":
        allowed = EVERYTHING if folder else EVERYTHING - {"titan"}
    else:
        allowed = MAY_IMPORT[module]
    assert ours <= allowed
    assert folder == "titan" or "torchtitan" not in others
    assert module not in NEITHER_TORCH or not others & {"torch", "numpy"}
