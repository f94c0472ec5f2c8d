"""What tests/interpreter.py keeps is what Triton's interpreter would find, and kernels compute the same."""
import inspect
from collections.abc import Callable
from itertools import product

import interpreter as ours
import numpy as np
import pytest
from checks import DEVICE, DTYPE, same_bits
from triton.language import core
from triton.runtime import interpreter

from kernels.attention.example_inputs import HeadInputs, both_ways
from kernels.attention.qkv import qkv_heads
from kernels.attention.qkv_kernels import heads_kernel

pytestmark = pytest.mark.skipif(interpreter._patch_builtin is not ours.patch_builtin,
                                reason="kernels run on a GPU, or Triton is another one")
SCALARS = [x for x in vars(core).values() if type(x) is core.dtype and x.name != "void"]


def assert_same_attributes(own: str, change, kind: type, *words) -> None:
    """Of what `change` makes and of what the interpreter's own function makes."""
    found = [object.__new__(kind), object.__new__(kind)]
    change(found[0], *words)
    ours.OWN[own](found[1], *words)
    mine, theirs = ({name: repr(value) for name, value in vars(x).items()} for x in found)
    assert mine == theirs


@pytest.mark.parametrize("scalar", [*SCALARS, core.pointer_type(core.float32)], ids=str)
def test_types_and_tensors_are_the_interpreters(scalar):
    for shape in ([1], [4, core.constexpr(8)], [8, 4], [2, 1, 2]):
        block = core.block_type(scalar, shape)
        for given in (shape, shape, block.shape):       # seen for the first time and again
            assert_same_attributes("block", ours.block_type, core.block_type, scalar, given)
        for kind in (scalar, block):
            assert_same_attributes("tensor", ours.tensor, core.tensor, None, kind)
            assert ours.np_dtype(kind) == ours.OWN["np_dtype"](kind)


def operand(scalar: core.dtype, shape: list[int]) -> core.tensor:
    """Ones; a scalar for no shape."""
    handle = interpreter.TensorHandle(np.ones(shape or [1], ours.np_dtype(scalar)), scalar)
    return core.tensor(handle, core.block_type(scalar, shape) if shape else scalar)


def outcome(function: Callable, *words) -> object:
    """Types and numbers of the results, or the error."""
    try:
        return [(repr(x.type), repr(x.handle.dtype), x.handle.data.dtype, x.handle.data.tolist())
                for x in function(*words)]
    except Exception as error:          # of which Triton has some of its own
        return str(error)


@pytest.mark.parametrize("allowed", [(), (True, True), (False, False, True, True)], ids=str)
def test_operands_become_the_interpreters(monkeypatch, allowed):
    """Of each pair of types, and of shapes, seen for the first time and again."""
    kinds = [operand(kind, shape) for kind in (*SCALARS, core.pointer_type(core.float32))
             for shape in ([], [4, 8])]
    shaped = [operand(core.float32, shape) for shape in ([], [8], [1], [4, 8], [4, 1], [2, 4, 1])]
    pairs = 2 * [*product(kinds, [*kinds, 2, -0.5]), *product(shaped, shaped)]
    found = [outcome(ours.operands, *pair, *allowed) for pair in pairs]
    monkeypatch.setattr(ours.SEMANTIC, "broadcast_impl_value", ours.OWN["broadcast"])
    assert found == [outcome(ours.OWN["operands"], *pair, *allowed) for pair in pairs]


@pytest.mark.parametrize("x", [3, None, [core.constexpr(2)], core.constexpr("a"), core.tuple([1])], ids=repr)
def test_constants_are_unwrapped_as_the_interpreter_does(x):
    assert repr(ours.unwrap(x)) == repr(ours.OWN["unwrap"](x))


@pytest.mark.parametrize("shape", [[1.0], [3], [], (1,)], ids=str)
def test_a_shape_that_is_none_is_refused(shape):
    core.block_type(core.float32, [1])
    with pytest.raises((TypeError, ValueError, AssertionError)):
        core.block_type(core.float32, shape)


def members() -> dict:
    return {(package, name): member for package in ours.PACKAGES
            for name, member in inspect.getmembers(package)}


def test_the_language_is_patched_once_and_put_back():
    before = members()
    builtin = {place for place, member in before.items() if core.is_builtin(member)}
    by_place = {(package, name) for package, names in ours.BUILTINS.items() for name in names}
    assert builtin <= by_place
    scope = interpreter._patch_lang(heads_kernel.fn)
    inside = members()
    assert not [place for place in builtin if place[0] is not core and core.is_builtin(inside[place])]
    assert not interpreter._patch_lang(heads_kernel.fn)._changes
    scope.restore()
    assert members() == before


def test_kernels_compute_the_same_as_without(monkeypatch):
    *inputs, grads = HeadInputs(9, 2, 16, 32, DEVICE, DTYPE, True, True, starts=(0, 4)).from_qkv()
    ours_found = both_ways(qkv_heads)(*inputs, grads)
    monkeypatch.setattr(interpreter, "_patch_lang", ours.OWN["patch_lang"])
    monkeypatch.setattr(interpreter, "_get_np_dtype", ours.OWN["np_dtype"])
    monkeypatch.setattr(core.block_type, "__init__", ours.OWN["block"])
    monkeypatch.setattr(core.tensor, "__init__", ours.OWN["tensor"])
    monkeypatch.setattr(core, "_unwrap_if_constexpr", ours.OWN["unwrap"])
    monkeypatch.setattr(ours.SEMANTIC, "broadcast_impl_value", ours.OWN["broadcast"])
    monkeypatch.setattr(ours.SEMANTIC, "binary_op_type_checking_impl", ours.OWN["operands"])
    monkeypatch.setattr(interpreter.interpreter_builder, "options", interpreter.InterpreterOptions())
    assert all(map(same_bits, ours_found, both_ways(qkv_heads)(*inputs, grads)))
