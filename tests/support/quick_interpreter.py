"""Triton's interpreter without what costs most of its time and shows nothing.

The tests of single kernels keep every check of the interpreter, and the cuts of a GPU.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
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
from support.quick_arithmetic import methods, quicken_arithmetic
from support.quick_operands import interpreted, quicken_operands


def quicken(patch: pytest.MonkeyPatch) -> None:
    """The interpreter without work that it does again and again: the results are the same."""
    if not hasattr(interpreter, "_LangPatchScope"):
        return  # another release of Triton: slower, but right
    _work_out_types_once(patch)
    _compare_shapes_as_lists(patch)
    _compute_with_fewer_calls(patch)
    quicken_operands(patch)
    quicken_arithmetic(patch)
    _look_at_signatures_once(patch)
    _prepare_once(patch)
    # Triton works out whether integers overflow, and says so only to those who debug kernels.
    options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    patch.setattr(interpreter.interpreter_builder, "options", options)


def quicken_engines(patch: pytest.MonkeyPatch) -> None:
    """And without cuts that show nothing in a whole engine."""
    quicken(patch)
    if not hasattr(interpreter, "_LangPatchScope"):
        return
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


def _prepare_once(patch: pytest.MonkeyPatch) -> None:
    """Replace the language's functions once for all launches, not in each and at each call."""
    prepared = SimpleNamespace(set_attr=partial(patch.setattr, raising=False), restore=lambda: None)
    own = methods()

    def prepare_builtins(package: Any, builder: Any, scope: Any) -> None:
        quick = own if package is tl.tensor else {}
        for name, member in inspect.getmembers(package):
            if tl.core.is_builtin(member):
                scope.set_attr(package, name, quick.get(name) or interpreted(member))

    patch.setattr(interpreter, "_patch_builtin", prepare_builtins)
    patch.setattr(interpreter, "_LangPatchScope", lambda: prepared)
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    patch.setattr(interpreter, "_patch_lang", lambda fn: prepared)


def _look_at_signatures_once(patch: pytest.MonkeyPatch) -> None:
    """What a kernel's parameters are called does not change from launch to launch."""
    quick = SimpleNamespace(**vars(inspect))
    parameters = quick.getfullargspec = cache(inspect.getfullargspec)
    quick.get_annotations = cache(inspect.get_annotations)

    def getcallargs(function: Any, *given: Any, **named: Any) -> dict[str, Any]:
        found = {**dict(zip(parameters(function).args, given, strict=False)), **named}
        if len(found) == len(given) + len(named) == len(parameters(function).args):
            return found
        return inspect.getcallargs(function, *given, **named)  # some have a value of their own

    quick.getcallargs = getcallargs
    patch.setattr(interpreter, "inspect", quick)


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
            type.fields_of_tensors = self.shape, self.numel, self.dtype
        else:
            self.handle, self.type = handle, type
            self.shape, self.numel, self.dtype = type.fields_of_tensors

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
        left, right = one.shape.values, other.shape.values
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
        if type(dtype) is not tl.dtype:
            return False
        return data.itemsize == 1 or data.itemsize * 8 <= dtype.primitive_bitwidth

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
