"""What Triton's interpreter gets wrong, put right; imported before any kernel, in a process of its own.

Without this, float32 to bfloat16 truncates, arithmetic on bfloat16 runs on its bits as integers, `tl.erf` needs scipy,
and what comes of comparing two scalars is spread over a tile as floats. numpy 2.4 also refuses int() of an array of one
element, which run-time loop bounds are.
"""

# pyright: basic
import inspect
import os

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton.language as tl
from triton.language.extra import libdevice
from triton.runtime import interpreter

Builder = interpreter.InterpreterBuilder
Handle = interpreter.TensorHandle
ARITHMETIC = {np.add, np.subtract, np.multiply, np.divide, np.minimum, np.maximum, np.fmin, np.fmax, np.fmod}
COMPARISONS = {np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal}


def to_bfloat16(values):
    """float32 to the bits of bfloat16, to nearest, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def from_bfloat16(bits):
    return (np.ascontiguousarray(bits, np.uint16).astype(np.uint32) << 16).view(np.float32)


_cast, _fp_to_fp, _binary, _unary = Builder.cast_impl, Builder.create_fp_to_fp, Builder.binary_op, Builder.unary_op


def cast(self, source, target):
    before, after = source.dtype.scalar, target.scalar
    if after == tl.bfloat16 and before != tl.bfloat16:
        return Handle(to_bfloat16(source.data.astype(np.float32)), after)
    if before == tl.bfloat16 and after != tl.bfloat16:
        return Handle(from_bfloat16(source.data).astype(interpreter._get_np_dtype(after)), after)
    return _cast(self, source, target)


def fp_to_fp(self, source, target, rounding):
    if tl.bfloat16 in (source.dtype.scalar, target.scalar):
        return cast(self, source, target)
    return _fp_to_fp(self, source, target, rounding)


def binary(self, left, right, op):
    if left.dtype.scalar == tl.bfloat16 and op in ARITHMETIC | COMPARISONS:
        out = op(from_bfloat16(left.data), from_bfloat16(right.data))
        return Handle(out, tl.int1) if op in COMPARISONS else Handle(to_bfloat16(out), tl.bfloat16)
    out = _binary(self, left, right, op)
    return Handle(out.data, tl.int1) if op in COMPARISONS else out


def unary(self, value, op):
    if value.dtype.scalar == tl.bfloat16:
        return Handle(to_bfloat16(op(from_bfloat16(value.data))), tl.bfloat16)
    return _unary(self, value, op)


def erf(self, value):
    return Handle(torch.erf(torch.from_numpy(np.ascontiguousarray(value.data))).numpy(), value.dtype.scalar)


Builder.cast_impl, Builder.create_fp_to_fp, Builder.binary_op, Builder.unary_op = cast, fp_to_fp, binary, unary
Builder.create_erf = erf

_patch_tensor = interpreter._patch_lang_tensor


def patch_tensor(tensor, *rest):
    _patch_tensor(tensor, *rest)
    tensor.__index__ = lambda self: int(np.asarray(self.handle.data).reshape(-1)[0])


interpreter._patch_lang_tensor = patch_tensor

_np_dtype = interpreter._get_np_dtype
NP_DTYPES = {}  # by dtype itself, of which Triton makes a table each time that it is asked


def np_dtype(dtype):
    if type(dtype) is not tl.dtype:
        return _np_dtype(dtype)
    if dtype not in NP_DTYPES:
        NP_DTYPES[dtype] = _np_dtype(dtype)
    return NP_DTYPES[dtype]


interpreter._get_np_dtype = np_dtype

# What there is to patch, by package: each call of a function within a kernel would search anew.
PACKAGES = (tl, tl.core, tl.math, tl.tensor, tl.core.tensor_descriptor_base)
BUILTINS = {p: [name for name, member in inspect.getmembers(p) if tl.core.is_builtin(member)] for p in PACKAGES}


def patch_builtin(package, *rest):
    members = BUILTINS[package]
    if tl.core.is_builtin(getattr(package, members[0])):  # else all of them are patched already
        for name in members:
            interpreter._patch_attr(package, name, getattr(package, name), *rest)


interpreter._patch_builtin = patch_builtin


def reduce(self, input):
    """Neighbours, then neighbours of what that made, whole tiles at a time: in a tree, as GPUs do, and in order."""
    given, axis = self.unravel(input, self.axis)
    tiles = [np.moveaxis(x.handle.data, axis, 0) for x in given]
    while (size := len(tiles[0])) > 1:
        assert size % 2 == 0, "tiles are powers of 2"
        both = [self.to_tensor(tile[k::2], x.dtype) for k in (0, 1) for tile, x in zip(tiles, given, strict=True)]
        made = self.combine_fn.fn(*both)
        made = made if isinstance(made, tuple) else (made,)
        tiles = [y.handle.data.astype(tile.dtype, copy=False) for y, tile in zip(made, tiles, strict=True)]
    if not self.keep_dims:
        tiles = [tile[0] for tile in tiles]
    elif self.axis is not None:
        tiles = [np.moveaxis(tile, 0, axis) for tile in tiles]
    return [self.to_tensor(np.asarray(tile, order="C"), x.dtype) for tile, x in zip(tiles, given, strict=True)]


interpreter.ReduceOps.generic_reduce = reduce


def of_libdevice(function):
    """libdevice's functions are but names to the interpreter: torch's, on the tiles' numbers."""

    def call(*args):
        tile = next(x for x in args if isinstance(x, tl.tensor))
        data = [np.asarray(x.handle.data if isinstance(x, tl.tensor) else np.float32(x)) for x in args]
        found = np.asarray(function(*[torch.from_numpy(np.atleast_1d(d).copy()) for d in np.broadcast_arrays(*data)]))
        found = found.reshape(np.broadcast_shapes(*[d.shape for d in data]))
        shape = tile.type if found.shape == tile.handle.data.shape else tl.block_type(tile.dtype, list(found.shape))
        return tl.core.tensor(Handle(found.astype(tile.handle.data.dtype), tile.dtype), shape)

    return call


FUNCTIONS = {
    "pow": torch.pow,
    "erfc": torch.erfc,
    "erfcx": torch.special.erfcx,
    "erfinv": torch.erfinv,
    "normcdfinv": torch.special.ndtri,
    "lgamma": torch.lgamma,
    "cyl_bessel_i0": torch.i0,
    "cyl_bessel_i1": torch.special.i1,
    "nextafter": torch.nextafter,
    "fmod": torch.fmod,
    "div_rn": torch.div,
    "trunc": torch.trunc,
    "rint": torch.round,
    "sinpi": lambda x: torch.sin(torch.pi * x.double()),
    "cospi": lambda x: torch.cos(torch.pi * x.double()),
}
for name, function in FUNCTIONS.items():
    setattr(libdevice, name, of_libdevice(function))
