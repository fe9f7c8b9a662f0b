"""What torch would run while it reads a `.pt2` file, found before torch reads it.

torch unpickles sample inputs, weights and constants without limits where they are no plain tensors, evaluates the sizes
of dynamic dims as Python, calls any function below `torch` that a node names, imports modules that a structure names,
and loads compiled libraries (`torch.export.pt2_archive`, `torch._export.serde`). A file with any of these is refused;
what is left is tensors, ATen's operators and arithmetic.
"""

from __future__ import annotations

import ast
import io
import json
import re
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

OPERATORS = re.compile(
    r"torch\.ops\.(aten|higher_order|prims|quantized_decomposed|torchvision)(\.(?!__)\w+){1,2}"
    r"|torch\.(sym_\w+|_check|_check_is_size)"
    r"|_operator\.(add|sub|mul|floordiv|truediv|mod|neg|pos|pow|abs|getitem|eq|ne|lt|le|gt|ge|and_|or_|not_|xor"
    r"|lshift|rshift|index)"
    r"|math\.(ceil|floor|trunc|sqrt|log2)"
)
"""Functions that a node may name."""

OPENS_FILES = re.compile(r"torch\.ops\.aten\.(from_file|save|_?load\w*)\b")

FUNCTIONS = frozenset(
    [
        "Symbol",
        "Integer",
        "Float",
        "Rational",
        "Add",
        "Mul",
        "Pow",
        "Max",
        "Min",
        "Abs",
        "Mod",
        "Eq",
        "Ne",
        "Lt",
        "Le",
        "Gt",
        "Ge",
        "Equality",
        "Unequality",
        "StrictLessThan",
        "LessThan",
        "StrictGreaterThan",
        "GreaterThan",
        "And",
        "Or",
        "Not",
        "ceiling",
        "floor",
        "FloorDiv",
        "ModularIndexing",
        "Where",
        "PythonMod",
        "CleanDiv",
        "CeilToInt",
        "FloorToInt",
        "CeilDiv",
        "LShift",
        "RShift",
        "PowByNatural",
        "FloatPow",
        "FloatTrueDiv",
        "IntTrueDiv",
        "IsNonOverlappingAndDenseIndicator",
        "TruncToFloat",
        "TruncToInt",
        "RoundToInt",
        "RoundDecimal",
        "ToFloat",
        "Identity",
    ]
)
"""Functions of sympy, and torch's own, that a size may be made with."""

LONGEST, LARGEST_POWER = 10_000, 64
"""Characters of an expression, and the largest number that another is raised to."""

STRUCTURES = ("builtins.tuple", "builtins.list", "builtins.dict", "collections.OrderedDict", None)
"""Containers of inputs and outputs, which torch makes without importing anything."""


def what_it_runs(file: Path) -> str | None:
    """What torch would run, import or unpickle while it reads a program, or None.

    Args:
        file: a `.pt2` file that nothing has read yet.

    Raises:
        zipfile.BadZipFile: it is no archive.
        ValueError: a document in it is no JSON.
    """
    with zipfile.ZipFile(file) as archive:
        return next(_of_archive(archive), None)


def _of_archive(archive: zipfile.ZipFile) -> Iterator[str]:
    names = archive.namelist()
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        yield f"two members {twice[0]!r}, of which torch may read the other"
    inner = {name: name.partition("/")[2] for name in names}
    if "archive_version" not in inner.values():
        yield "pickles of an older format; export it again with this torch"
    for name, member in inner.items():
        if member.startswith(("data/aotinductor/", "data/executorch/")):
            yield f"a compiled library ({member})"
        if member.startswith(("data/", "models/")) and member.endswith(".pt"):
            yield from _of_pickle(member, archive.read(name))
        if member.startswith(("data/", "models/")) and member.endswith(".json"):
            yield from _of_document(json.loads(archive.read(name)))


def _of_pickle(member: str, data: bytes) -> Iterator[str]:
    try:
        torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except Exception:  # of whatever kind: torch would go on and unpickle it without limits
        if data:
            yield f"a pickle of more than tensors ({member})"


def _of_document(document: Any) -> Iterator[str]:
    """What stands anywhere in a JSON document; without recursion, because documents may be nested deep."""
    todo = [document]
    while todo:
        part = todo.pop()
        if isinstance(part, list):
            todo += part
        if not isinstance(part, dict):
            continue
        todo += part.values()
        if part.get("use_pickle"):
            yield f"a pickle ({part.get('path_name')})"
        if str(part.get("path_name", "")).startswith(("custom_obj_", "opaque_obj_")):
            yield f"a pickled object ({part['path_name']})"
        for operator in (part.get("target"), part.get("as_operator")):
            if isinstance(operator, str) and not _is_operator(operator):
                yield f"a call of {operator[:80]!r}"
        if "expr_str" in part and not is_arithmetic(part["expr_str"]):
            yield f"the expression {str(part['expr_str'])[:80]!r}, which torch evaluates"
        for spec in (part.get("in_spec"), part.get("out_spec")):
            if isinstance(spec, str) and spec and not _is_plain_structure(spec):
                yield "a structure of inputs or outputs that names a module to import"


def _is_operator(name: str) -> bool:
    """Whether a target is an operator, or no function at all: torch takes other texts for names of values."""
    if not name.startswith(("torch", "_operator", "math", "#")):
        return True
    return OPERATORS.fullmatch(name) is not None and OPENS_FILES.match(name) is None


def is_arithmetic(text: object) -> bool:
    """Whether an expression is numbers, symbols and the :data:`FUNCTIONS` alone, and cheap to evaluate."""
    if not isinstance(text, str) or len(text) > LONGEST:
        return False
    try:
        return _is_safe(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def _is_safe(node: ast.expr) -> bool:
    match node:
        case ast.Constant(value=bool() | int() | float()):
            return True
        case ast.Name(id=name):
            return not name.startswith("_")
        case ast.UnaryOp(operand=operand):
            return _is_safe(operand)
        case ast.BinOp(left=left, op=ast.Pow(), right=ast.Constant(value=int(power))):
            return power <= LARGEST_POWER and _is_safe(left)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div() | ast.FloorDiv() | ast.Mod()):
            return _is_safe(left) and _is_safe(node.right)
        case ast.BoolOp(values=values):
            return all(map(_is_safe, values))
        case ast.Compare(left=left, comparators=others):
            return all(map(_is_safe, [left, *others]))
        case ast.Call(func=ast.Name(id="Symbol" | "Float" | "Integer" as kind), args=[ast.Constant(value=str(text))]):
            plain = r"\w+" if kind == "Symbol" else r"[-+.\de]+"
            return re.fullmatch(plain, text) is not None and all(_is_safe(word.value) for word in node.keywords)
        case ast.Call(func=ast.Name(id="Pow" | "PowByNatural" | "FloatPow"), args=[base, power]):
            raised = power.args[0] if isinstance(power, ast.Call) and len(power.args) == 1 else power
            is_small = isinstance(raised, ast.Constant) and isinstance(raised.value, int)
            return is_small and int(raised.value) <= LARGEST_POWER and _is_safe(base) and _is_safe(power)  # type: ignore[attr-defined]
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=words):
            return name in FUNCTIONS and all(map(_is_safe, [*arguments, *(word.value for word in words)]))
    return False


def _is_plain_structure(text: str) -> bool:
    """Whether a structure (`torch.utils._pytree.TreeSpec` as JSON) is of :data:`STRUCTURES` alone."""
    todo: list[Any] = [json.loads(text)]
    while todo:
        part = todo.pop()
        if isinstance(part, list):
            todo += part
        elif isinstance(part, dict):
            if part.get("type") not in STRUCTURES or part.keys() & {"__enum__", "default_factory_module"}:
                return False
            todo += part.values()
            if isinstance(part.get("context"), str):
                todo.append(json.loads(part["context"]))
    return True
