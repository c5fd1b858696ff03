"""What Triton's interpreter gets wrong, put right; imported before any kernel, in a process of its own.

Without this, float32 to bfloat16 truncates, arithmetic on bfloat16 runs on its bits as integers, `tl.erf` needs scipy,
and what comes of comparing two scalars is spread over a tile as floats. numpy 2.4 also refuses int() of an array of one
element, which run-time loop bounds are.
"""

# pyright: basic
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
