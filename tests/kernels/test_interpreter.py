"""What tests/interpreter.py keeps is what Triton's interpreter would find, and kernels compute the same."""
import inspect

import interpreter as ours
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
    monkeypatch.setattr(interpreter.interpreter_builder, "options", interpreter.InterpreterOptions())
    assert all(map(same_bits, ours_found, both_ways(qkv_heads)(*inputs, grads)))
