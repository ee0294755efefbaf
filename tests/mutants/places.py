"""Places in Python code where a small change should change what it does."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

_COMPARISONS: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
_OPERATORS: Final[dict[type[ast.operator], type[ast.operator]]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}


@dataclass(frozen=True)
class Change:
    """A change of one expression or statement.

    Attributes:
        line: Line of the place, from 1.
        span: Offsets of the text that is replaced, in UTF-8.
        before: That text.
        after: What stands there instead.
    """

    line: int
    span: tuple[int, int]
    before: str
    after: str

    def apply(self, source: str) -> str:
        data = source.encode()
        return (data[: self.span[0]] + self.after.encode() + data[self.span[1] :]).decode()


def list_changes(source: str) -> list[Change]:
    """List all changes of a module, in the order of its text."""
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    for node in _walk_code(ast.parse(source)):
        for after in _change(node):
            begin = starts[node.lineno - 1] + node.col_offset
            end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
            before = source.encode()[begin:end].decode()
            found.append(Change(node.lineno, (begin, end), before, after))
    return sorted(found, key=lambda change: (change.span, change.after))


def _walk_code(tree: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """Walk what runs: no annotations, no decorators, no `if TYPE_CHECKING`, no assertions and no f-strings, whose
    parts have no places of their own before Python 3.12."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "decorator_list", "type_params", "bases"):
            continue
        for node in value if isinstance(value, list) else [value]:
            match node:
                case ast.JoinedStr() | ast.Assert():
                    continue
                case ast.If(test=test) if "TYPE_CHECKING" in ast.unparse(test):
                    continue
                case ast.expr() | ast.stmt():
                    yield node
            if isinstance(node, ast.AST):
                yield from _walk_code(node)


def _change(node: ast.expr | ast.stmt) -> Iterator[str]:
    """The texts that may stand in place of a node. Parentheses keep what they bind."""
    match node:
        case ast.Compare(left=left, ops=[operator], comparators=[right]) if type(operator) in _COMPARISONS:
            yield f"({ast.unparse(ast.Compare(left, [_COMPARISONS[type(operator)]()], [right]))})"
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _OPERATORS:
            if not any(isinstance(side, ast.JoinedStr) or _is_text(side) for side in (left, right)):
                yield f"({ast.unparse(ast.BinOp(left, _OPERATORS[type(operator)](), right))})"
        case ast.BoolOp(op=ast.And(), values=values):
            yield f"({ast.unparse(ast.BoolOp(ast.Or(), values))})"
        case ast.BoolOp(op=ast.Or(), values=values):
            yield f"({ast.unparse(ast.BoolOp(ast.And(), values))})"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield f"bool({ast.unparse(operand)})"
        case ast.Constant(value=bool(value)):
            yield str(not value)
        case ast.Constant(value=int(value)):
            yield str(value + 1)
        case ast.Continue():
            yield "break"
        case ast.Break():
            yield "continue"
        case ast.Return(value=ast.expr() as value) if not (isinstance(value, ast.Constant) and value.value is None):
            yield "return None"
        case ast.Expr(value=ast.Call()):
            yield "pass"


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
