"""What Triton refuses in kernels, by their sources: the interpreter takes it, and of the variants
of a kernel only some are compiled in tests.

- A float is no truth value: `if LIMIT:` has to be `if LIMIT > 0:`. So no constant that is a number
  somewhere is taken as one, but for those that are always whole.
- A function returns no None: not by its name, and not by a name that was given what may be None,
  which is a parameter that the function compares with it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

WHOLE = {"GROUP", "REST", "WINDOW"}  # inputs of a group, rows, tokens: never floats
_FLAGS = ("IS_", "HAS_")


def functions(source: str) -> list[ast.FunctionDef]:
    """Those that Triton compiles."""
    found = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef))
    return [function for function in found if any(map(_is_jit, function.decorator_list))]


def truths_of_numbers(kernels: Iterable[ast.FunctionDef]) -> list[str]:
    """Constants taken as true or false that are numbers in any of these functions."""
    known = list(kernels)
    numbers = {name for function in known for name in _numbers(function)} - WHOLE
    return [
        f"{function.name}, line {test.lineno}: {test.id}"
        for function in known
        for test in _truths(function)
        if test.id in numbers and test.id.isupper() and not test.id.startswith(_FLAGS)
    ]


def returned_nones(function: ast.FunctionDef) -> list[str]:
    """What a function returns that may be None."""
    parameters = {argument.arg for argument in function.args.args}
    compared = {name for node in ast.walk(function) for name in _compared(node, ast.Is, ast.IsNot)}
    empty = parameters & compared
    _follow(function.body, empty, there=set())
    returned = [
        part
        for node in ast.walk(function)
        if isinstance(node, ast.Return) and node.value is not None
        for part in (node.value.elts if isinstance(node.value, ast.Tuple) else [node.value])
    ]
    return [
        f"{function.name}, line {part.lineno}: {ast.unparse(part)}"
        for part in returned
        if (isinstance(part, ast.Name) and part.id in empty) or _is_none(part)
    ]


def _follow(statements: Iterable[ast.stmt], empty: set[str], there: set[str]) -> None:
    """Add names that are given what may be None; `there`: what is known not to be."""
    for statement in statements:
        if isinstance(statement, ast.Assign):
            value = statement.value
            if _is_none(value) or (isinstance(value, ast.Name) and value.id in empty - there):
                empty |= {name.id for name in statement.targets if isinstance(name, ast.Name)}
        elif isinstance(statement, ast.If):
            _follow(statement.body, empty, there | set(_compared(statement.test, ast.IsNot)))
            _follow(statement.orelse, empty, there | set(_compared(statement.test, ast.Is)))
        elif isinstance(statement, ast.For | ast.While):
            _follow(statement.body, empty, there)


def _compared(node: ast.AST, *kinds: type[ast.cmpop]) -> Iterator[str]:
    """The name that is compared with None."""
    is_test = isinstance(node, ast.Compare) and isinstance(node.ops[0], kinds)
    if is_test and isinstance(node.left, ast.Name) and _is_none(node.comparators[0]):
        yield node.left.id


def _truths(function: ast.FunctionDef) -> Iterator[ast.Name]:
    """Names that decide by themselves."""
    tests: list[ast.expr] = [
        node.test for node in ast.walk(function) if isinstance(node, ast.If | ast.IfExp | ast.While)
    ]
    while tests:
        test = tests.pop()
        if isinstance(test, ast.BoolOp):
            tests += test.values
        elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            tests.append(test.operand)
        elif isinstance(test, ast.Name):
            yield test


def _numbers(function: ast.FunctionDef) -> Iterator[str]:
    """Names that are calculated with, compared, or given to functions of Triton."""
    for node in ast.walk(function):
        parts: list[ast.expr] = []
        if isinstance(node, ast.BinOp):
            parts = [node.left, node.right]
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            parts = [node.operand]
        elif isinstance(node, ast.Compare) and not any(map(_is_none, node.comparators)):
            parts = [node.left, *node.comparators]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            parts = node.args
        yield from (part.id for part in parts if isinstance(part, ast.Name))


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _is_jit(decorator: ast.expr) -> bool:
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return isinstance(called, ast.Name) and called.id == "jit"
