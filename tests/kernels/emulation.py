"""Triton's interpreter made to compute as tensor cores do. Importing this patches it; needs TRITON_INTERPRET=1.

The stock interpreter (3.6.0 and 3.9.0) multiplies the bit patterns of bf16 numbers as integers, and truncates where the
hardware rounds to nearest even. Here bf16 is decoded before a product, encoded with rounding, and products are summed
in fp32. So rounding errors of kernels show on a machine without a GPU.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as interpreter

_convert_stock = interpreter._convert_float


def decode(bits: np.ndarray) -> np.ndarray:
    """bf16 bit patterns as fp32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def encode(x: np.ndarray) -> np.ndarray:
    """fp32 as bf16 bit patterns, rounded to nearest even."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded.astype(np.uint16)).reshape(x.shape)


def _convert(x: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
    if source == tl.float32 and target == tl.bfloat16:
        return encode(x)
    if source == tl.bfloat16 and target == tl.float32:
        return decode(np.ascontiguousarray(x).view(np.uint16)).reshape(x.shape)
    return _convert_stock(x, source, target, rounding)


def _numbers(x: Any) -> np.ndarray:
    return decode(x.data) if x.dtype.scalar == tl.bfloat16 else x.data.astype(np.float32)


def _dot(self: Any, a: Any, b: Any, acc: Any, precision: Any, imprecise: Any) -> Any:
    product = np.matmul(_numbers(a), _numbers(b)) + acc.data
    return interpreter.TensorHandle(product.astype(acc.data.dtype), acc.dtype.scalar)


def _load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
    return _load_stock(self, pointers, _as_mask(mask), *rest)


def _store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
    return _store_stock(self, pointers, value, _as_mask(mask), *rest)


def _as_mask(mask: Any) -> Any:
    """A mask that was combined with a scalar condition is an array of integers here."""
    return interpreter.TensorHandle(mask.data.astype(bool), tl.int1)


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    """A function called by a kernel. The stock one patches the language again at each call, most of the time of a test;
    once a module and launch is enough."""
    module = id(self.fn.__globals__)
    if module not in _patched:
        _patched.add(module)
        interpreter._patch_lang(self.fn)
    return self.rewrite()(*args, **kwargs)


def _launch(self: Any, *args: Any, **kwargs: Any) -> Any:
    _patched.clear()
    return _launch_stock(self, *args, **kwargs)


def _squeeze_index() -> None:
    """3.6.0 with numpy >= 2.4: int() of an array of one element raises."""
    source = inspect.getsource(interpreter._patch_lang_tensor)
    if "int(self.handle.data))" in source:
        names = dict(vars(interpreter))
        exec(source.replace("int(self.handle.data))", "int(self.handle.data.squeeze()))"), names)
        interpreter._patch_lang_tensor = names["_patch_lang_tensor"]


_load_stock = interpreter.InterpreterBuilder.create_masked_load
_store_stock = interpreter.InterpreterBuilder.create_masked_store
interpreter._convert_float = _convert
interpreter.InterpreterBuilder.create_masked_load = _load
interpreter.InterpreterBuilder.create_masked_store = _store
interpreter.InterpreterBuilder.create_dot = _dot
_patched: set[int] = set()
_launch_stock = interpreter.GridExecutor.__call__
interpreter.GridExecutor.__call__ = _launch
interpreter.InterpretedFunction.__call__ = _call
_squeeze_index()
