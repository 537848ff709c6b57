"""TorchTitan's job config and model sizes, read from its source without running it.

Owns what is known of TorchTitan where it is not imported. Importing it brings torch along, which takes 4 to 7 seconds;
a plan needs only the fields of its dataclasses and the literals that its flavors are built from. Relies on these being
plain: dataclass fields with literal defaults, and ``get_train_spec`` naming a dict of constructor calls. What is not
plain raises, and nothing is guessed.

How it works. A module's syntax tree is parsed once; a name is looked up in it, or followed through its imports; a call
of a dataclass becomes a namespace of its fields. Price: about 20 ms per model.
"""

import ast
import importlib.util
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

PACKAGE = "torchtitan"
_ARITHMETIC = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}


@dataclass(frozen=True)
class TrainSpec:
    """What TorchTitan's ``get_train_spec`` says of a model, as far as a plan needs it.

    Attributes:
        family: the model whose classes it is built of, such as ``"llama3"`` of ``"simple_fsdp.llama3"``.
        flavors: model args by flavor, each a namespace of its fields.
        has_pipeline: whether it can be cut in pipeline stages.
    """

    family: str
    flavors: Mapping[str, SimpleNamespace]
    has_pipeline: bool


def model_names() -> list[str]:
    """All names that ``model.name`` may have.

    Raises:
        ValueError: TorchTitan is not installed.
    """
    models = _load("torchtitan.models").evaluate_name("_supported_models")
    return sorted([*models, *_load("torchtitan.experiments").evaluate_name("_supported_experiments")])


def read_train_spec(name: str) -> TrainSpec:
    """The train spec of a model.

    Args:
        name: one of `model_names`.

    Raises:
        ValueError: TorchTitan is not installed.
        UnreadableSource: the sizes of the model are not literals.
    """
    folder = "models" if name in _load("torchtitan.models").evaluate_name("_supported_models") else "experiments"
    module = _load(f"torchtitan.{folder}.{name}")
    keywords = _keywords_of_return(module.find("get_train_spec")[1])
    source, node = module.follow(keywords["model_args"])
    pipeline = keywords["pipelining_fn"]
    return TrainSpec(
        family=source.name.removeprefix("torchtitan.models."),
        flavors=source.evaluate(node),
        has_pipeline=not (isinstance(pipeline, ast.Constant) and pipeline.value is None),
    )


def read_job_config() -> SimpleNamespace:
    """TorchTitan's JobConfig with all defaults: a namespace per section.

    Raises:
        ValueError: TorchTitan is not installed.
    """
    return _load("torchtitan.config.job_config").evaluate(ast.parse("JobConfig()", mode="eval").body)


class UnreadableSource(Exception):
    """A value is not a literal, nor a dataclass of literals."""


@dataclass(frozen=True)
class _Module:
    """The syntax tree of a module.

    Attributes:
        name: full name.
        package: of its relative imports.
        body: by name, what its statements bind: classes, functions, assigned values.
        imported: by name, the module that it is imported from, and its name there.
    """

    name: str
    package: str
    body: Mapping[str, ast.AST]
    imported: Mapping[str, tuple[str, str]]

    def find(self, name: str) -> tuple["_Module", ast.AST]:
        """Where ``name`` is defined, through any number of imports, and its definition."""
        if name in self.body:
            return self, self.body[name]
        if name not in self.imported:
            raise UnreadableSource(f"{name} is not defined in {self.name}")
        module, there = self.imported[name]
        return _load(module).find(there)

    def follow(self, node: ast.AST) -> tuple["_Module", ast.AST]:
        """``node``, or if it is a name its definition."""
        return self.find(node.id) if isinstance(node, ast.Name) else (self, node)

    def evaluate_name(self, name: str) -> Any:
        source, node = self.find(name)
        return source.evaluate(node)

    def evaluate(self, node: ast.AST) -> Any:
        """The value of an expression of literals and dataclasses."""
        match node:
            case ast.Constant(value=value):
                return value
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self.evaluate(operand)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                return _ARITHMETIC[type(op)](self.evaluate(left), self.evaluate(right))
            case ast.List(elts=entries):
                return [self.evaluate(entry) for entry in entries]
            case ast.Tuple(elts=entries):
                return tuple(self.evaluate(entry) for entry in entries)
            case ast.Dict(keys=keys, values=values):
                return {self.evaluate(k): self.evaluate(v) for k, v in zip(keys, values, strict=True)}
            case ast.Name(id=name):
                return self.evaluate_name(name)
            case ast.Call(func=ast.Name(id="frozenset"), args=[entries]):
                return frozenset(self.evaluate(entries))
            case ast.Call(func=ast.Name(id=name), args=[], keywords=keywords):
                given = {keyword.arg: self.evaluate(keyword.value) for keyword in keywords}
                return self._construct(name, given)
        raise UnreadableSource(f"line {node.lineno} of {self.name} is not a literal: {ast.unparse(node)[:60]}")

    def _construct(self, name: str, given: Mapping[str, Any]) -> SimpleNamespace:
        """A dataclass's fields. Those of its base classes are left out: TorchTitan's are empty."""
        source, node = self.find(name)
        if not isinstance(node, ast.ClassDef):
            raise UnreadableSource(f"{name} of {self.name} is not a class")
        defaults = {
            statement.target.id: statement.value
            for statement in node.body
            if isinstance(statement, ast.AnnAssign) and statement.value is not None
        }
        if unknown := set(given) - set(defaults):
            raise UnreadableSource(f"{name} of {source.name} has no field {sorted(unknown)[0]}")
        missing = {key: source._default(value) for key, value in defaults.items() if key not in given}
        return SimpleNamespace(**{key: given.get(key, missing.get(key)) for key in defaults})

    def _default(self, node: ast.AST) -> Any:
        """Of a field: a value, or what ``field(default_factory=...)`` makes."""
        match node:
            case ast.Call(func=ast.Name(id="field"), keywords=[ast.keyword(arg="default_factory", value=factory)]):
                match factory:
                    case ast.Name(id="list"):
                        return []
                    case ast.Name(id=name):
                        return self._construct(name, {})
                    case ast.Lambda(body=body):
                        return self.evaluate(body)
        return self.evaluate(node)


@cache
def _load(name: str) -> _Module:
    path, is_package = _path(name)
    body: dict[str, ast.AST] = {}
    imported: dict[str, tuple[str, str]] = {}
    package = name if is_package else name.rpartition(".")[0]
    for statement in ast.parse(path.read_text()).body:
        match statement:
            case ast.ClassDef(name=bound) | ast.FunctionDef(name=bound):
                body[bound] = statement
            case ast.Assign(targets=[ast.Name(id=bound)], value=value):
                body[bound] = value
            case ast.ImportFrom(module=module, names=names, level=level):
                above = package.split(".")[: len(package.split(".")) + 1 - level] if level else []
                origin = ".".join([*above, *([module] if module else [])])
                imported |= {alias.asname or alias.name: (origin, alias.name) for alias in names}
    return _Module(name, package, body, imported)


def _path(name: str) -> tuple[Path, bool]:
    """The file of a module of TorchTitan, and whether it is a package."""
    first, *rest = name.split(".")
    spec = importlib.util.find_spec(first) if first == PACKAGE else None
    if spec is None or not spec.submodule_search_locations:
        if first == PACKAGE:
            raise ValueError(
                "TorchTitan is not installed here, and the sizes of models are read from it: pip install "
                "torchtitan==0.2.2"
            )
        raise UnreadableSource(f"{name} is not part of {PACKAGE}")
    folder = Path(spec.submodule_search_locations[0]).joinpath(*rest)
    is_package = (folder / "__init__.py").is_file()
    return (folder / "__init__.py", True) if is_package else (folder.with_suffix(".py"), False)


def _keywords_of_return(function: ast.AST) -> dict[str, ast.AST]:
    """The keyword arguments of the call that ``function`` returns."""
    for statement in ast.walk(function):
        if isinstance(statement, ast.Return) and isinstance(statement.value, ast.Call):
            return {keyword.arg: keyword.value for keyword in statement.value.keywords if keyword.arg}
    raise UnreadableSource("get_train_spec returns no call")
