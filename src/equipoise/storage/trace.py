"""Read the graph of a model from the source of its forward.

Running a forward on symbolic values would freeze every decision that Python takes in that run: by attributes, modes,
types or exceptions. The reader executes nothing. It accepts source that calls modules, torch's functions and tensor
methods one after another and refuses everything else, so that a graph exists only if it computes what the source
computes.
"""

from __future__ import annotations

import ast
import copy
import inspect
import operator
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import itemgetter
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx import Node
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.pooling import _AdaptiveAvgPoolNd, _AvgPoolNd

from equipoise.storage.blocked_norm import BlockedBatchNorm
from equipoise.storage.packed_modules import PackedLayer

# Modules and calls that always return a new tensor, unless they work in place
FRESH_MODULES = (
    PackedLayer, _ConvNd, nn.Linear, nn.Bilinear, nn.Embedding,
    _NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm,
    _AvgPoolNd, _AdaptiveAvgPoolNd, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AdaptiveMaxPool1d,
    nn.AdaptiveMaxPool2d, nn.LPPool1d, nn.LPPool2d,
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Hardtanh,
    nn.Hardswish, nn.Hardsigmoid, nn.Sigmoid, nn.Tanh, nn.Softplus, nn.Softsign, nn.Softmax, nn.LogSoftmax,
)  # fmt: skip
FRESH_CALLS = frozenset({
    "add", "sub", "mul", "truediv", "div", "floordiv", "mod", "pow", "neg", "abs", "square", "sqrt", "rsqrt", "exp",
    "log", "clamp", "clip", "maximum", "minimum", "matmul", "mm", "bmm", "baddbmm", "linear", "conv1d", "conv2d",
    "conv3d", "layer_norm", "group_norm", "max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d",
    "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_max_pool2d", "interpolate", "mean", "sum", "amax", "amin",
    "std", "var", "cat", "concat", "stack", "clone", "relu", "relu6", "leaky_relu", "elu", "celu", "selu", "gelu",
    "silu", "mish", "hardtanh", "hardswish", "hardsigmoid", "sigmoid", "tanh", "softplus", "softmax", "log_softmax",
    "scaled_dot_product_attention",
})  # fmt: skip
# Calls that may return their input, a view of it, or a number
OTHER_CALLS = frozenset({
    "flatten", "unflatten", "view", "reshape", "permute", "transpose", "squeeze", "unsqueeze", "contiguous", "dropout",
    "size",
})  # fmt: skip
METHODS = FRESH_CALLS | OTHER_CALLS | {f"{name}_" for name in FRESH_CALLS}
FUNCTIONS = {id(getattr(source, name)) for source in (torch, F) for name in METHODS if hasattr(source, name)}
OPERATORS: dict[type[ast.operator], str] = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "truediv", ast.FloorDiv: "floordiv", ast.Mod: "mod",
    ast.Pow: "pow", ast.MatMult: "matmul",
}  # fmt: skip
IN_PLACE = {getattr(operator, f"i{name}") for name in OPERATORS.values()}
# Modules that a graph may replace by operations with the same options
REPLACED = (nn.ReLU, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.Flatten, nn.Identity)
CONSTANT = (type(None), bool, int, float, str)
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class _UnreadableError(Exception):
    """The source contains something that the reader does not know."""


class Reading:
    """A graph of a forward, and all that it depends on apart from the source of the model's class.

    The graph takes one tensor. Modules, parameters and buffers are looked up by name at every run.
    """

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.modules: dict[nn.Module, set[str]] = {}  # the modules that take part, and attributes that decided
        self.functions: dict[tuple[type, str], Any] = {}  # forwards and other methods that were read
        self._checks: list[tuple[nn.Module, type, dict[str, Any], Callable[..., Any], tuple[Any, ...]]] = []

    def finish(self) -> None:
        """Remember the state of the modules."""
        for module, names in self.modules.items():
            own, state = vars(module), itemgetter(*HOOKS, *sorted(names))
            self._checks.append((module, type(module), own, state, tuple(map(copy.copy, state(own)))))

    def is_current(self) -> bool:
        """Whether a model that is read again gives the same graph, and no module in it has hooks."""
        try:
            return all(
                getattr(kind, name, None) is function for (kind, name), function in self.functions.items()
            ) and all(
                module.__class__ is kind and _has_usual_forward(own) and state(own) == before
                for module, kind, own, state, before in self._checks
            )
        except KeyError:  # an attribute became a module
            return False

    def has_hooks(self) -> bool:
        """Whether a hook waits for the call of a module inside the model, which a graph may replace.

        Hooks of the model are called before and after its forward, whatever that is.
        """
        _, *inside = self.modules
        return any(any(map(vars(module).__getitem__, HOOKS)) for module in inside)


def read(model: nn.Module) -> Reading | None:
    """Return the graph of a model's forward; `None` if its source is not a sequence of known calls.

    The forward takes one tensor. It may assign local names, call modules, its own methods, torch's functions and tensor
    methods, use operators, loop over a `ModuleList`, and decide by `self.training` or by whether an attribute is
    `None`. A change in place must be of a tensor that nothing else reads.

    Args:
        model: The model, in the mode in which it will run.
    """
    reader = _Reader(model)
    try:
        return reader.run()
    except (_UnreadableError, RecursionError):
        return None


class _Reader:
    def __init__(self, model: nn.Module) -> None:
        self.model, self.names = model, {module: name for name, module in model.named_modules()}
        self.reading = Reading()
        self.graph = self.reading.graph

    def run(self) -> Reading:
        given = self.graph.placeholder("x")
        result = self.call(self.model, (given,), {})
        if not isinstance(result, Node) or result is given:
            raise _UnreadableError
        self.graph.output(result)
        _check_writes(self.graph, self.model)
        self.reading.finish()
        return self.reading

    def call(self, module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        kind = type(module)
        if kind.__call__ is not nn.Module.__call__ or not _has_usual_forward(vars(module)):
            raise _UnreadableError
        self.reading.modules.setdefault(module, set())
        self.reading.functions[kind, "forward"] = kind.forward
        if is_leaf(module):
            options = getattr(kind, "__constants__", ()) if kind in REPLACED else ("inplace",)
            self.depend_on(module, *(name for name in options if name in vars(module)))
            return self.graph.call_module(self.names[module], tuple(args), kwargs)
        if kind is not nn.Sequential:
            return self.function(kind.forward, module, args, kwargs)
        if len(args) != 1 or kwargs:
            raise _UnreadableError
        for child in self.children(module):
            args = (self.call(child, args, {}),)
        return args[0]

    def function(self, function: Any, owner: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        definition = _definition(function) if isinstance(function, FunctionType) else None
        if definition is None or kwargs:
            raise _UnreadableError
        names, given = [argument.arg for argument in definition.args.args], (owner, *args)
        by_default = (function.__defaults__ or ())[len(given) - len(names) :] if len(given) < len(names) else ()
        if len(given) + len(by_default) != len(names) or not all(isinstance(value, CONSTANT) for value in by_default):
            raise _UnreadableError
        returned = _Scope(self, function, dict(zip(names, given + by_default, strict=True))).run(definition.body)
        if returned is None:
            raise _UnreadableError
        return returned[0]

    def method(self, owner: nn.Module, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        method = self.reading.functions[type(owner), name] = getattr(type(owner), name)
        if name in vars(owner):
            raise _UnreadableError
        return self.function(method, owner, args, kwargs)

    def children(self, module: Any) -> list[nn.Module]:
        if type(module) not in CONTAINERS:
            raise _UnreadableError
        self.depend_on(module, "_modules")
        return list(module._modules.values())

    def depend_on(self, module: nn.Module, *names: str) -> None:
        self.reading.modules.setdefault(module, set()).update(names)

    def attribute(self, module: nn.Module, name: str) -> Any:
        """A submodule, a parameter or buffer as a node, `None`, or the mode."""
        kind, own = type(module), vars(module)
        if (
            hasattr(kind, name)  # which goes before the attributes of the instance
            or kind.__getattr__ is not nn.Module.__getattr__
            or kind.__getattribute__ is not object.__getattribute__
        ):
            raise _UnreadableError
        if name in own:
            value = own[name]
            self.depend_on(module, name)
        elif name in module._modules:
            value = module._modules[name]
            self.depend_on(module, "_modules")
        elif isinstance(module._parameters.get(name, module._buffers.get(name)), Tensor):
            return self.graph.get_attr(f"{self.names[module]}.{name}".lstrip("."))
        else:
            raise _UnreadableError
        if value is None or isinstance(value, nn.Module) or (name == "training" and isinstance(value, bool)):
            return value
        raise _UnreadableError


class _Scope:
    """The local names of one call of a function."""

    def __init__(self, reader: _Reader, function: FunctionType, names: dict[str, Any]) -> None:
        self.reader, self.graph, self.globals, self.names = reader, reader.graph, function.__globals__, names

    def run(self, statements: Sequence[ast.stmt]) -> tuple[Any] | None:
        """Read statements; the value of the first `return`, if there is one."""
        for statement in statements:
            if (returned := self.statement(statement)) is not None:
                return returned
        return None

    def statement(self, statement: ast.stmt) -> tuple[Any] | None:
        match statement:
            case ast.Expr(value=ast.Constant(value=str())):  # the docstring
                return None
            case ast.Assign(targets=[*targets], value=value):
                result = self.value(value)
                for target in targets:
                    self.assign(target, result)
                return None
            case ast.AugAssign(target=ast.Name(id=name), op=sign, value=value):
                changed, by = self.names.get(name), self.value(value)
                if not isinstance(changed, Node) or type(sign) not in OPERATORS:
                    raise _UnreadableError
                change = getattr(operator, f"i{OPERATORS[type(sign)]}")
                self.names[name] = self.graph.call_function(change, (changed, by))
                return None
            case ast.Return(value=ast.expr() as value):
                return (self.value(value),)
            case ast.If(test=test, body=body, orelse=otherwise):
                return self.run(body if self.truth(test) else otherwise)
            case ast.For(target=target, iter=modules, body=body, orelse=[]):
                for module in self.reader.children(self.value(modules)):
                    self.assign(target, module)
                    if (returned := self.run(body)) is not None:
                        return returned
                return None
        raise _UnreadableError

    def assign(self, target: ast.expr, value: Any) -> None:
        if not isinstance(target, ast.Name):
            raise _UnreadableError
        self.names[target.id] = value

    def truth(self, test: ast.expr) -> bool:
        match test:
            case ast.Compare(left=left, ops=[ast.Is() | ast.IsNot() as sign], comparators=[ast.Constant(value=None)]):
                return (self.value(left) is None) is isinstance(sign, ast.Is)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return not self.truth(operand)
        if not isinstance(decided := self.value(test), bool):
            raise _UnreadableError
        return decided

    def value(self, expression: ast.expr) -> Any:
        match expression:
            case ast.Constant(value=value) if isinstance(value, CONSTANT):
                return value
            case ast.Name(id=name) if name in self.names:
                return self.names[name]
            case ast.Attribute(value=owner, attr=name):
                return self.attribute(self.value(owner), name)
            case ast.Subscript(value=owner, slice=ast.Constant(value=int() | str() as key)):
                return self.item(self.value(owner), key)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return self.negative(self.value(operand))
            case ast.BinOp(left=left, op=sign, right=right) if type(sign) in OPERATORS:
                return self.binary(getattr(operator, OPERATORS[type(sign)]), self.value(left), self.value(right))
            case ast.Tuple(elts=elements) | ast.List(elts=elements):
                return tuple(self.value(element) for element in elements)
            case ast.IfExp(test=test, body=body, orelse=otherwise):
                return self.value(body if self.truth(test) else otherwise)
            case ast.Call(func=function, args=args, keywords=keywords):
                return self.call(function, args, keywords)
        raise _UnreadableError

    def attribute(self, owner: Any, name: str) -> Any:
        if isinstance(owner, nn.Module):
            return self.reader.attribute(owner, name)
        if isinstance(owner, Node) and name == "shape":
            return self.graph.call_function(getattr, (owner, name))
        raise _UnreadableError

    def item(self, owner: Any, key: int | str) -> Any:
        if isinstance(owner, Node):
            return self.graph.call_function(operator.getitem, (owner, key))
        if type(owner) in CONTAINERS and str(key) in owner._modules:
            return self.reader.attribute(owner, str(key))
        raise _UnreadableError

    def negative(self, value: Any) -> Any:
        if isinstance(value, Node):
            return self.graph.call_function(operator.neg, (value,))
        if type(value) not in (int, float):
            raise _UnreadableError
        return -value

    def binary(self, function: Callable[..., Any], left: Any, right: Any) -> Node:
        if not (isinstance(left, Node) or isinstance(right, Node)) or {type(left), type(right)} - {Node, int, float}:
            raise _UnreadableError
        return self.graph.call_function(function, (left, right))

    def call(self, function: ast.expr, arguments: list[ast.expr], keywords: list[ast.keyword]) -> Any:
        callee = self.known_function(function) or self.callee(function)
        args = tuple(self.value(argument) for argument in arguments)
        kwargs = {str(keyword.arg): self.value(keyword.value) for keyword in keywords}
        if any(keyword.arg in (None, "out") for keyword in keywords):
            raise _UnreadableError
        if isinstance(callee, tuple) and isinstance(callee[0], nn.Module):
            return self.reader.method(callee[0], callee[1], args, kwargs)
        if any(isinstance(value, nn.Module) for value in (*args, *kwargs.values())):
            raise _UnreadableError
        if isinstance(callee, tuple):
            return self.graph.call_method(callee[1], (callee[0], *args), kwargs)
        if isinstance(callee, nn.Module):
            return self.reader.call(callee, args, kwargs)
        return self.graph.call_function(callee, args, kwargs)

    def callee(self, function: ast.expr) -> Any:
        """A module, or a tensor or module with the name of its method."""
        owner = self.value(function.value) if isinstance(function, ast.Attribute) else None
        name = function.attr if isinstance(function, ast.Attribute) else ""
        if isinstance(owner, Node) and name in METHODS:
            return owner, name
        if isinstance(owner, nn.Module) and hasattr(type(owner), name):
            return owner, name
        module = self.value(function)
        if not isinstance(module, nn.Module):
            raise _UnreadableError
        return module

    def known_function(self, expression: ast.expr) -> Any:
        """The function of torch that a global name such as `F.relu` stands for."""
        path = []
        while isinstance(expression, ast.Attribute):
            path.append(expression.attr)
            expression = expression.value
        if not isinstance(expression, ast.Name) or expression.id in self.names:
            return None
        value = self.globals.get(expression.id)
        for name in reversed(path):
            value = getattr(value, name, None) if isinstance(value, ModuleType) else None
        if id(value) not in FUNCTIONS:
            raise _UnreadableError
        return value


def is_leaf(module: nn.Module) -> bool:
    """Whether a module stays one call in a graph: those of torch and of packed models, except containers."""
    if isinstance(module, (PackedLayer, BlockedBatchNorm)):
        return True
    defined_in = getattr(type(module).forward, "__module__", None) or ""
    return type(module) not in CONTAINERS and defined_in.startswith("torch.nn.modules.")


def _has_usual_forward(own: dict[str, Any]) -> bool:
    """Whether calling a module with these attributes runs the forward of its class, or one that computes the same."""
    return "forward" not in own or getattr(own["forward"], "computes_the_same", False)


def _definition(function: FunctionType) -> ast.FunctionDef | None:
    """The source of a function; `None` if it is unknown, decorated, or not the source of the code that runs."""
    runs = function.__code__
    try:
        definitions, codes = _parsed("".join(inspect.findsource(function)[0]))
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    at = runs.co_name, runs.co_firstlineno
    definition, code = definitions.get(at), codes.get(at)
    if definition is None or code is None or (code.co_code, code.co_names) != (runs.co_code, runs.co_names):
        return None  # the file was edited, or the function was made in another way
    arguments = definition.args
    plain = not (arguments.posonlyargs or arguments.kwonlyargs or arguments.vararg or arguments.kwarg)
    return definition if plain and not runs.co_freevars else None


@lru_cache(maxsize=32)
def _parsed(source: str) -> tuple[dict[tuple[str, int], ast.FunctionDef], dict[tuple[str, int], CodeType]]:
    """All functions of a file by name and first line, as source and as code."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the user has seen them
        tree, whole = ast.parse(source), compile(source, "<source>", "exec", dont_inherit=True)
    definitions = {(node.name, node.lineno): node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    codes, rest = {}, [whole]
    while rest:
        code = rest.pop()
        codes[code.co_name, code.co_firstlineno] = code
        rest += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return definitions, codes


def _check_writes(graph: fx.Graph, model: nn.Module) -> None:
    """Refuse a change in place of a tensor that something else may read: blocked operations make new tensors."""
    modules = dict(model.named_modules())
    owned: set[Node] = set()  # results that share memory with nothing that is read elsewhere
    for node in graph.nodes:
        alone = [source for source in node.all_input_nodes if source in owned and len(source.users) == 1]
        if _is_in_place(node, modules):
            if not node.args or node.args[0] not in alone:
                raise _UnreadableError
            owned.add(node)
        elif _is_fresh(node, modules) or (node.all_input_nodes and alone == node.all_input_nodes):
            owned.add(node)


def _is_in_place(node: Node, modules: dict[str, nn.Module]) -> bool:
    """Whether a node changes its first input, by torch's conventions."""
    if node.op == "call_module":
        return bool(getattr(modules[str(node.target)], "inplace", False))
    if node.op not in ("call_function", "call_method"):
        return False
    option = getattr(node.target, "__module__", None) == F.__name__ and any(arg is True for arg in node.args)
    return node.target in IN_PLACE or _name(node).endswith("_") or bool(node.kwargs.get("inplace")) or option


def _is_fresh(node: Node, modules: dict[str, nn.Module]) -> bool:
    if node.op == "call_module":
        return isinstance(modules[str(node.target)], FRESH_MODULES)
    return node.op in ("call_function", "call_method") and _name(node) in FRESH_CALLS


def _name(node: Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
