"""Triton's interpreter without what costs most of its time and shows nothing.

The tests of single kernels keep every check of the interpreter, and the cuts of a GPU.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import triton.language as tl
from torch import Tensor
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from headstart.backends.cuda import attending, forward, latent, recurrent_prompts, warm_up
from headstart.backends.cuda.kernels.attention_cuts import Cut
from headstart.backends.cuda.kernels.delta_chunks import ChunkTile
from headstart.backends.cuda.kernels.delta_prompts import WalkTile
from headstart.backends.cuda.recurrent_prompts import PromptTiles
from support.quick_operands import interpreted, quicken_operands


def quicken(patch: pytest.MonkeyPatch) -> None:
    """The interpreter without work that it does again and again: the results are the same."""
    if not hasattr(interpreter, "_LangPatchScope"):
        return  # another release of Triton: slower, but right
    _prepare_once_per_launch(patch)
    _work_out_types_once(patch)
    _compare_shapes_as_lists(patch)
    _compute_with_fewer_calls(patch)
    quicken_operands(patch)


def quicken_engines(patch: pytest.MonkeyPatch) -> None:
    """And without checks and cuts that show nothing in a whole engine."""
    quicken(patch)
    if not hasattr(interpreter, "_LangPatchScope"):
        return
    # Offsets into tensors of some kilobytes do not overflow; checking that takes a fourth.
    options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    patch.setattr(interpreter.interpreter_builder, "options", options)
    # 64 pieces keep a GPU busy. Here all but the first are empty programs; two have work to do.
    patch.setattr(attending, "cut_for", lambda requests, rows: Cut(pieces=2, least=1, step=16))
    patch.setattr(latent, "cut_for", lambda *sizes: Cut(pieces=2, least=1, step=16))
    # Two heads to a program keep a GPU busy as well; here all heads of a row are one program.
    patch.setattr(forward, "place_qkv", partial(_of_all_heads, forward.place_qkv))
    quicken_delta_prompts(patch)
    # Blank prompts of several sizes are for what libraries load on a GPU.
    patch.setattr(warm_up, "captured_sizes", lambda device: [16])
    patch.setattr(warm_up, "_LONG_PROMPTS", ())


def quicken_delta_prompts(patch: pytest.MonkeyPatch) -> None:
    """All rows of a chunk are one program of the convolution, all values of a head one that walks.

    Small programs keep a GPU busy; here each takes milliseconds, however small it is.
    """
    tiles = PromptTiles(ChunkTile(conv_rows=64), WalkTile(values=64))
    patch.setattr(recurrent_prompts, "tiles_for", lambda *sizes: tiles)


def _of_all_heads(place: Callable[..., Tensor], *operands: Any, **options: Any) -> Tensor:
    return place(*operands, **{**options, "each": options["each"] or 16})


def _prepare_once_per_launch(patch: pytest.MonkeyPatch) -> None:
    """Replace the language's functions once per launch, not at every call inside of it, too."""
    prepare = interpreter._patch_lang
    builtins: dict[Any, list[tuple[str, Any]]] = {}
    whole_language = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    is_prepared = False

    def prepare_builtins(package: Any, builder: Any, scope: Any) -> None:
        if package not in builtins:
            found = inspect.getmembers(package)
            builtins[package] = [(n, interpreted(m)) for n, m in found if tl.core.is_builtin(m)]
        for name, member in builtins[package]:
            scope.set_attr(package, name, member)

    def prepare_once(fn: Any) -> Any:
        nonlocal is_prepared
        if is_prepared:
            return None  # a call inside a launch, which does not look at the result
        scope = prepare(whole_language)
        restore = scope.restore

        def end() -> None:
            nonlocal is_prepared
            is_prepared = False
            restore()

        scope.restore, is_prepared = end, True
        return scope

    patch.setattr(interpreter, "_patch_builtin", prepare_builtins)
    patch.setattr(interpreter, "_patch_lang", prepare_once)


def _work_out_types_once(patch: pytest.MonkeyPatch) -> None:
    """Shape, size and name of a value follow from its type, and there are few types."""
    make_block, make_tensor = tl.block_type.__init__, tl.tensor.__init__
    find_format = interpreter._get_np_dtype
    blocks: dict[Any, dict[str, Any]] = {}
    formats: dict[str, Any] = {}

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        if type(element_ty) is not tl.dtype:  # pointers of one name may differ
            return make_block(self, element_ty, shape)
        key = (element_ty.name, *shape)
        if key not in blocks:
            make_block(self, element_ty, shape)
            blocks[key] = self.__dict__
        self.__dict__.update(blocks[key])

    def tensor(self: Any, handle: Any, type: Any) -> None:
        if not hasattr(type, "fields_of_tensors"):
            make_tensor(self, handle, type)
            own = {name: value for name, value in self.__dict__.items() if name != "handle"}
            del own["type"]  # or the type would hold itself
            type.fields_of_tensors = own
        self.__dict__.update(type.fields_of_tensors, handle=handle, type=type)

    def format_of(kind: Any) -> Any:
        if kind.name not in formats:
            formats[kind.name] = find_format(kind)
        return formats[kind.name]

    patch.setattr(tl.block_type, "__init__", block)
    patch.setattr(tl.tensor, "__init__", tensor)
    patch.setattr(interpreter, "_get_np_dtype", format_of)


def _compare_shapes_as_lists(patch: pytest.MonkeyPatch) -> None:
    """Most operands have one shape already; Triton's own tuples take long to say so."""
    broadcast = TritonSemantic.broadcast_impl_value

    def filled(self: Any, value: Any, wanted: Any) -> Any:
        is_same = type(value.type) is tl.dtype and value.type is wanted.scalar
        kind = wanted if is_same else tl.block_type(value.type, wanted.shape)
        return self.make_tensor(self.builder.create_splat(kind, value.handle), kind)

    def to_one_shape(self: Any, lhs: Any, rhs: Any) -> Any:
        one, other = lhs.type, rhs.type
        if not one.is_block() and not other.is_block():
            return lhs, rhs
        if not one.is_block():
            return filled(self, lhs, other), rhs
        if not other.is_block():
            return lhs, filled(self, rhs, one)
        left, right = list(one.shape), list(other.shape)
        if left == right:
            return lhs, rhs
        if len(left) != len(right):
            return broadcast(self, lhs, rhs)
        pairs = list(zip(left, right, strict=True))
        if any(a != b and 1 not in (a, b) for a, b in pairs):
            return broadcast(self, lhs, rhs)  # which refuses them
        shape = [max(pair) for pair in pairs]

        def spread(value: Any, own: list[int]) -> Any:
            if own == shape:
                return value
            wide = self.builder.create_broadcast(value.handle, shape)
            return self.make_tensor(wide, tl.block_type(value.type.scalar, shape))

        return spread(lhs, left), spread(rhs, right)

    patch.setattr(TritonSemantic, "broadcast_impl_value", to_one_shape)


def _compute_with_fewer_calls(patch: pytest.MonkeyPatch) -> None:
    """Every result is checked against the size of its type: here without a call for each."""
    handle, builder = interpreter.TensorHandle, interpreter.InterpreterBuilder
    check, compute = handle.__post_init__, builder.binary_op

    def fits(data: Any, dtype: Any) -> bool:
        return type(dtype) is tl.dtype and data.itemsize * 8 <= max(8, dtype.primitive_bitwidth)

    def make(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        if not fits(data, dtype):
            check(self)

    def binary(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        if lhs.data.dtype.char == "?":
            return compute(self, lhs, rhs, op)
        output, kind = op(lhs.data, rhs.data), lhs.dtype.scalar
        if not fits(output, kind):
            return compute(self, lhs, rhs, op)
        return handle(output, kind)

    patch.setattr(handle, "__init__", make)
    patch.setattr(builder, "binary_op", binary)
