"""Triton's interpreter, made faster: what it finds out again for each operation and launch is kept.

The suite spends a third of its time in it. No number that a kernel computes depends on any of this, and
tests/kernels/test_interpreter.py holds what is kept against what the interpreter would find. `hasten` leaves
every Triton but the one that this was written for as it is.
"""
import builtins
import inspect
from collections.abc import Callable

import numpy as np
import triton
from triton import language as tl
from triton.language import core
from triton.runtime import interpreter

VERSION = "3.7."
PACKAGES = tl, core, core.tensor, tl.math, core.tensor_descriptor_base
SEMANTIC = interpreter.interpreter_semantic
OWN = {"patch_lang": interpreter._patch_lang, "np_dtype": interpreter._get_np_dtype,
       "block": core.block_type.__init__, "tensor": core.tensor.__init__, "unwrap": core._unwrap_if_constexpr,
       "broadcast": SEMANTIC.broadcast_impl_value, "operands": SEMANTIC.binary_op_type_checking_impl}
BUILTINS = {package: [name for name, member in inspect.getmembers(package) if core.is_builtin(member)]
            for package in PACKAGES}
languages: dict[Callable, list] = {}        # by function: under which names it knows triton.language
np_dtypes: dict[str, object] = {}           # by the name of Triton's type
shapes: dict[tuple, tuple] = {}             # of blocks: as Triton has it, the number of elements, as text
made: dict[int, tuple] = {}                 # the same by id of Triton's shape, which is kept alive here
constants: dict[int, tuple] = {}            # by that id as well: the shape of a tensor, and its size
common: dict[tuple, core.tuple] = {}        # by the ids of two: the shape that both become, as Triton has it
interpreted: dict[Callable, Callable] = {}  # by built-in function


def interpret(member: Callable) -> Callable:
    """A built-in function that is called without `_semantic`, or with one that is not heeded."""
    return lambda *args, _semantic=None, **named: member(*args, **named, _semantic=SEMANTIC)


def patch_builtin(package: object, builder: object, scope: object) -> None:
    """Have each built-in function of `package` interpreted. Their names are those of before."""
    for name in BUILTINS[package]:
        member = getattr(package, name)
        if core.is_builtin(member):
            if member not in interpreted:
                interpreted[member] = interpret(member)
            scope.set_attr(package, name, interpreted[member])


def patch_lang(fn: Callable) -> object:
    """The same for all of the language, but where a function is called by one for which that was done."""
    if fn not in languages:
        languages[fn] = [x for x in (tl, core) if any(value is x for value in fn.__globals__.values())]
    if languages[fn] and not any(core.is_builtin(x.load) for x in languages[fn]):
        return interpreter._LangPatchScope()
    return OWN["patch_lang"](fn)


def np_dtype(kind: core.dtype) -> object:
    if kind.name not in np_dtypes:
        np_dtypes[kind.name] = OWN["np_dtype"](kind)
    return np_dtypes[kind.name]


def block_type(self: core.block_type, element_ty: core.dtype, shape: object) -> None:
    """`__init__` of the type of a block. Triton makes one for each operand of each operation."""
    known = made.get(id(shape))
    if known is None:
        sizes = builtins.tuple(core._unwrap_shape(shape))
        known = shapes.get(sizes)
        usual = isinstance(shape, (list, core.tuple)) and all(type(size) is int for size in sizes)
        if known is None or not usual:
            OWN["block"](self, element_ty, shape)
            known = shapes[sizes] = made[id(self.shape)] = self.shape, self.numel, str(self.shape)
    self.element_ty, (self.shape, self.numel, text) = element_ty, known
    self.name = f"<{text}, {element_ty}>"


def tensor(self: core.tensor, handle: object, type: core.dtype) -> None:
    """`__init__` of a tensor, whose shape consists of constants that know their types."""
    shape = type.shape if type.is_block() else None
    if id(shape) not in constants:
        OWN["tensor"](self, handle, type)
        constants[id(shape)] = self.shape, self.numel, shape
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel, _ = constants[id(shape)]


def unwrap(x: object) -> object:
    """The value of a constant, as most often is wanted of one, a tensor or a number."""
    if type(x) is core.constexpr:
        return x.value
    return x if type(x) in (core.tensor, int, float, bool) else OWN["unwrap"](x)


def stretch(x: core.tensor, shape: core.tuple) -> core.tensor:
    """`x`, which may be a scalar, in a larger shape."""
    sizes, data = list(shape), x.handle.data
    if x.type.is_block():
        data = np.broadcast_to(data, sizes)
    else:
        data = np.full(sizes, data, dtype=np_dtype(x.handle.dtype))
    handle = interpreter.TensorHandle(data, x.handle.dtype.scalar)
    return core.tensor(handle, core.block_type(x.dtype, shape))


def broadcast(a: core.tensor, b: core.tensor) -> tuple[core.tensor, core.tensor]:
    """Both in one shape, which Triton finds by comparing constants one by one."""
    one = id(a.type.shape) if a.type.is_block() else 0
    other = id(b.type.shape) if b.type.is_block() else 0
    if one == other:
        return a, b
    if (one, other) not in common:
        common[one, other] = OWN["broadcast"](a, b)[0].type.shape
    shape = common[one, other]
    return (a if one == id(shape) else stretch(a, shape)), (b if other == id(shape) else stretch(b, shape))


def operands(a: object, b: object, *allowed: bool, **more: bool) -> tuple[core.tensor, core.tensor]:
    """Both of one type and shape. Two tensors of one type need no cast, but for divisions and pointers."""
    alike = type(a) is type(b) is core.tensor and a.dtype.name == b.dtype.name
    if alike and not a.dtype.is_ptr() and allowed[3:] != (True,) and not more:
        return broadcast(a, b)
    return OWN["operands"](a, b, *allowed, **more)


def hasten() -> None:
    """Change Triton, before it interprets anything."""
    if not triton.__version__.startswith(VERSION):
        return
    interpreter._patch_builtin, interpreter._patch_lang = patch_builtin, patch_lang
    interpreter._get_np_dtype = np_dtype
    core.block_type.__init__, core.tensor.__init__ = block_type, tensor
    core._unwrap_if_constexpr = unwrap
    SEMANTIC.broadcast_impl_value, SEMANTIC.binary_op_type_checking_impl = broadcast, operands
    # Whether a sum of integers overflows is computed for each sum, but told only in the mode for debugging.
    assert not interpreter.InterpreterOptions.debug
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
