"""Who may import whom: a module knows those below it, never those above it."""

import ast
from pathlib import Path

import pytest

import titan_offload

PACKAGE = Path(titan_offload.__file__).parent
MODULES = sorted(path.relative_to(PACKAGE).with_suffix("").as_posix() for path in PACKAGE.rglob("*.py"))

MAY_IMPORT = {
    "config": set(),
    "topology": set(),
    "budget": {"config", "topology"},
    "planner": {"config", "budget"},
    "runtime": {"config"},
    "host_runtime": {"runtime"},
    "pool": {"config", "runtime"},
    "saved_tensor": {"config"},
    "stats": {"config", "runtime", "pool"},
    "tape": {"config", "runtime", "pool", "saved_tensor"},
    "engine": {"config", "runtime", "pool", "saved_tensor", "stats", "tape"},
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
    "apply": {
        *("config", "runtime", "host_runtime", "pool", "saved_tensor", "stats", "tape"),
        *("engine", "save_registry", "save_policy", "selective", "budget"),
    },
    "report": {"config", "stats", "budget", "topology", "planner"},
    "cli": {"config", "topology", "budget", "planner", "report", "titan"},
}
EVERYTHING = {*MAY_IMPORT, "titan", "titan_offload"}
NEITHER_TORCH = ("config", "topology", "planner")


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
    assert {module for module in MODULES if "/" not in module and module != "__init__"} <= set(MAY_IMPORT)
    assert {module.split("/")[0] for module in MODULES if "/" in module} <= {"titan"}


@pytest.mark.parametrize("module", MODULES)
def test_imports_are_those_of_the_table(module):
    names = [name.split(".") for name in imports(module)]
    ours = {name[1] if name[1] in EVERYTHING else "titan_offload" for name in names if name[0] == "titan_offload"}
    others = {name[0] for name in names}
    is_titan = module.startswith("titan/")
    allowed = EVERYTHING if is_titan else EVERYTHING - {"titan"} if module == "__init__" else MAY_IMPORT[module]
    assert ours <= allowed
    assert is_titan or "torchtitan" not in others
    assert module not in NEITHER_TORCH or not others & {"torch", "numpy"}
