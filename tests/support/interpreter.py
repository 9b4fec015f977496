"""Triton's interpreter: what it gets wrong in some versions is mended, and what it does for nothing is left out. The
kernels themselves run unchanged.

A kernel calls hundreds of small functions, and each call looks through all of `triton.language` again; sums and
products of integers are computed twice to look for an overflow that is then not reported; a reduction with a function
of ours goes through its tensor number by number. Without these three a kernel runs in a third of the time.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from triton.runtime import interpreter

tl = interpreter.tl


def mend() -> None:
    patch_tensor = interpreter._patch_lang_tensor
    splat = interpreter.InterpreterBuilder.create_splat

    def patched(tensor: type, *scope: Any) -> None:
        """3.5 (without a scope) and 3.6 take loop bounds from one-element arrays; NumPy 2.4 converts none."""
        patch_tensor(tensor, *scope)
        set_attribute = scope[0].set_attr if scope else setattr
        set_attribute(tensor, "__index__", lambda self: self.handle.data.item())

    def create_splat(self: object, shape: object, handle: Any) -> Any:
        """A scalar comparison is of dtype int32 (of what was compared): broadcast, it is a mask that 3.9 refuses."""
        if handle.data.dtype == np.bool_:
            handle = interpreter.TensorHandle(handle.data, tl.int1)
        return splat(self, shape, handle)

    def create_clampf(self: object, x: Any, low: Any, high: Any, propagate_nan: Any) -> Any:
        """NaN is one of the bounds unless it is to be kept, as in a GPU's min and max; NumPy's clip always keeps it."""
        data = np.fmin(np.fmax(x.data, low.data), high.data)
        if propagate_nan == tl.PropagateNan.ALL:
            data = np.where(np.isnan(x.data), x.data, data)
        return interpreter.TensorHandle(data, x.dtype.scalar)

    interpreter._patch_lang_tensor = patched
    interpreter.InterpreterBuilder.create_splat = create_splat
    interpreter.InterpreterBuilder.create_clampf = create_clampf


def hasten() -> None:
    patch_lang, patched = interpreter._patch_lang, set[int]()
    dtype_of, dtypes = interpreter._get_np_dtype, dict[str, Any]()
    make_type, types = tl.block_type.__init__, dict[tuple[Any, ...], Any]()
    make_tensor, shapes = tl.tensor.__init__, dict[tuple[int, ...], Any]()

    def patch_once(function: Any) -> Any:
        """Patch the language that a module's functions see at the first call of one, and leave it patched."""
        if id(function.__globals__) not in patched:
            patch_lang(function)
            patched.add(id(function.__globals__))
        return SimpleNamespace(restore=lambda: None)

    def numpy_dtype(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in dtypes:
            dtypes[name] = dtype_of(dtype)
        return dtypes[name]

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *[getattr(size, "value", size) for size in shape])
        if key not in types:
            make_type(self, element_ty, shape)
            types[key] = dict(self.__dict__)
        self.__dict__.update(types[key], element_ty=element_ty)

    def tensor(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape) if type.is_block() else ()
        if key not in shapes:
            make_tensor(self, handle, type)
            shapes[key] = dict(self.__dict__)
        self.__dict__.update(shapes[key], handle=handle, type=type, dtype=type.scalar)

    def generic_reduce(self: Any, tensors: Any) -> list[Any]:
        """Combine slices in the order of Triton's own loop over numbers."""
        axis, parts = self.axis, [x.handle.data for x in tensors]
        if axis is None:
            axis, parts = 0, [x.reshape(-1) for x in parts]
        slices = [
            tuple(self.to_tensor(part.take(i, axis), x.dtype) for part, x in zip(parts, tensors, strict=True))
            for i in range(parts[0].shape[axis])
        ]
        found = slices[0]
        for following in slices[1:]:
            found = self.combine_fn.fn(*found, *following)
            found = found if isinstance(found, tuple) else (found,)
        shape = [1 if i == axis or self.axis is None else n for i, n in enumerate(tensors[0].handle.data.shape)]
        data = [x.handle.data if x.shape else x.handle.data.reshape(()) for x in found]
        return [
            self.to_tensor(part.reshape(shape) if self.keep_dims else part, x.dtype)
            for part, x in zip(data, tensors, strict=True)
        ]

    interpreter._patch_lang = patch_once
    interpreter.ReduceOps.generic_reduce = generic_reduce
    # Without `debug`, which the interpreter never sets, what is found is dropped.
    if not interpreter.interpreter_builder.options.debug:
        interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    interpreter._get_np_dtype = numpy_dtype
    tl.block_type.__init__, tl.tensor.__init__ = block_type, tensor
