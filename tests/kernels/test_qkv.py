"""From the Q, K, V matmul to attention: norms, rotation, key offset, value rows, n-gram rows, gradients."""
from dataclasses import replace

import pytest
import torch
from checks import DEVICE, DTYPE, DTYPES, assert_as_exact_as_pytorch, error, random, same_bits

from kernels.attention.example_inputs import HeadInputs, both_ways
from kernels.attention.inputs import HeadShape, Positions, Projection, Rows, ValueRows
from kernels.attention.output import scaled_linear
from kernels.attention.qkv import project_heads, qkv_heads, qkv_heads_reference
from kernels.attention.qkv_kernels import CONFIGS, heads_backward, heads_forward
from kernels.attention.value_gate import value_mix, value_rows
from kernels.embedding import lookup, sort_rows
from kernels.example import in_double
from kernels.gradients import Gradient
from kernels.ngrams.shared_gradient import NGramValues, share_values, share_values_reference

# Which backward passes must repeat the first to the bit: that of another call, and a second one of its graph.
# The interpreter takes its time for each token and has one order anyway.
REPEATS = (False, True) if DEVICE.type == "cuda" else (True,)


def sized(n, heads, dims, value, key_offset=True, dtype=DTYPE, starts=(0, 7, 8, 20)) -> HeadInputs:
    return HeadInputs(n, heads, *dims, DEVICE, dtype, key_offset, value, starts=starts)


@pytest.mark.parametrize("dims, dtype", [((16, 16), DTYPES[0]), ((8, 16), DTYPES[-1])])
def test_where_blocks_of_tokens_end_changes_nothing(dims, dtype):
    """The key offset reaches from one block into the next. The first token is a start, said or not."""
    _, _, seen, value, *_, grads = sized(21, 2, dims, True, dtype=dtype).from_qkv()
    mix, results = value_mix(seen, value.source, value.gate), []
    for tuned in ((1, 1), (4, 1), (8, 4), (32, 8)):
        torch.manual_seed(1)
        size = sized(21, 2, dims, True, dtype=dtype, starts=(0, 4, 5, 16) if tuned[0] > 4 else (4, 5, 16))
        inputs = size.random(21, size.columns), size.positions(), value.source, mix
        q_k_v = heads_forward(*inputs, None, size.shape, tuned)
        results.append([*q_k_v, *heads_backward(grads, *inputs, size.shape, tuned=tuned)[:3]])
    for other in results[1:]:
        for x, y in zip(results[0], other, strict=True):
            assert error(x, y.double()) < (1e-6 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("head_dim, starts", [(8, ()), (12, (0,)), (12, (0, 5)), (8, (4,))])
def test_qkv_heads_reference_is_what_it_says(head_dim, starts):
    """Each token's q, k and v by hand, and all gradients by finite differences, in float64."""
    size = sized(6, 2, (8, head_dim), True, dtype=torch.float64, starts=starts)
    qkv, positions, seen, value, _, shape, _ = in_double(size.from_qkv())
    (cos, sin, is_start), (rows, gate, _) = positions, value
    q, k, v = qkv_heads_reference(qkv, positions, seen, value, None, shape)
    for token in range(6):
        for head in range(2):
            channels, own_key = slice(8 * head, 8 * head + 8), slice(16 + 8 * head, 16 + 8 * head + 8)
            query, key, before = (
                x / (x.square().mean() + 2 ** -23).sqrt()
                for x in (qkv[token, channels], qkv[token, own_key], qkv[token - 1, own_key]))
            follows = float(token > 0 and not is_start[token])
            for x, rest, out in ((query, query[4:], q), (key, before[4:] * follows, k)):
                a, b = x[:2], x[2:4]
                expected = torch.cat([a * cos[token] - b * sin[token], a * sin[token] + b * cos[token], rest])
                torch.testing.assert_close(out[token, head], expected)
            mix = 2 * torch.sigmoid(gate[head] @ torch.cat([seen[token], rows[token, :6]]))
            own, row = (x[head_dim * head:][:head_dim] for x in (qkv[token, 32:], rows[token]))
            torch.testing.assert_close(v[token, head], own + mix * row)

    def heads(qkv, seen, *value):
        return qkv_heads_reference(qkv, positions, seen, ValueRows(*value), None, shape)

    assert torch.autograd.gradcheck(heads, [x.detach().requires_grad_() for x in (qkv, seen, rows, gate)])


def layers_with_ngrams(functions, layers: list, shared: list, repeat: bool = False) -> list[torch.Tensor]:
    """q, k, v of layers that all add the n-gram rows of `shared`, and all gradients.

    `layers`: what `HeadInputs.from_qkv` made for each, with fewer gradients where nothing reads the last
    results, and none where nothing reads the layer. `shared`: rows and scales. `repeat`: take the gradients
    from the second backward pass through the graph.
    """
    share, function = functions
    rows, scales = shared = [x.detach().clone().requires_grad_() for x in shared]
    wanted, outs, grads = [*shared], [], []
    for (qkv, positions, seen, value, _, shape, of_layer), ngrams in zip(layers, share(1 * rows, scales)):
        leaves = [x.detach().requires_grad_() for x in (qkv, seen, *(value or ())[:2]) if x is not None]
        qkv, seen, value = leaves[0], leaves[1] if value else None, ValueRows(*leaves[2:]) if value else None
        out = function(qkv, positions, seen, value, ngrams, shape)
        outs, grads = [*outs, *out[:len(of_layer)]], [*grads, *(g.to(out[0]) for g in of_layer)]
        if of_layer:  # without v nothing depends on the value rows
            wanted += leaves if len(of_layer) == 3 else leaves[:1]
    if repeat:  # one backward pass that does not reach the rows, and a whole one
        torch.autograd.grad(outs, wanted[-1], grads, retain_graph=True)
        torch.autograd.grad(outs, wanted, [3 * g for g in grads], retain_graph=True)
    return [*(x.detach() for x in outs), *torch.autograd.grad(outs, wanted, grads)]


@pytest.mark.parametrize("value, key_offset, dtype", [(False, True, DTYPES[0]), (True, False, DTYPES[-1])])
@pytest.mark.parametrize("n, heads, dims, count", [
    (13, 2, (16, 32), 1), (1, 2, (16, 16), 2), (9, 3, (32, 16), 2), (9, 1, (64, 128), 1)])
def test_ngram_rows_in_the_values_of_all_layers(n, heads, dims, count, key_offset, value, dtype):
    """The gradients of the rows and of all scales at once; also where v's is not contiguous or not there."""
    size = sized(n, heads, dims, value, key_offset, dtype)
    layers = [size.from_qkv() for _ in range(4)]
    q_grad, k_grad, _ = layers[1][-1]
    layers[1] = *layers[1][:-1], (q_grad, k_grad, random(heads, dims[1], n, dtype=dtype).permute(2, 0, 1))
    layers[2] = *layers[2][:-1], layers[2][-1][:2]  # its values are not read
    layers[3] = *layers[3][:-1], ()  # nothing of it is read
    shared = [random(n, count, dims[1], dtype=dtype), torch.randn(4, count, device=DEVICE)]
    plainly, by_kernels = (share_values_reference, qkv_heads_reference), (share_values, qkv_heads)
    exact = layers_with_ngrams(plainly, [in_double(layer) for layer in layers], [x.double() for x in shared])
    plain, ours = (layers_with_ngrams(functions, layers, shared) for functions in (plainly, by_kernels))
    for x, theirs, right in zip(ours, plain, exact, strict=True):
        assert_as_exact_as_pytorch(x, theirs, right, 1e-5 if x.shape == (4, count) else 1e-7)
    assert any(x.shape == (4, count) and x[0].all() and not x[2:].any() for x in ours)
    for repeat in REPEATS:
        assert all(map(torch.equal, ours, layers_with_ngrams(by_kernels, layers, shared, repeat)))


@pytest.mark.parametrize("dims, dtype", [((16, 16), DTYPES[0]), ((8, 16), DTYPES[-1])])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_value_rows_are_read_where_they_are(dims, dtype, index):
    """The same bits as from gathered rows, and the table's gradient is that of `lookup`."""
    size = sized(37, 3, dims, True, dtype=dtype)
    qkv, positions, seen, (_, gate, _), _, shape, grads = size.from_qkv()
    order = sort_rows(torch.randint(5, (37,), device=DEVICE).to(index))
    found = []
    for look_up in (lookup, lambda table, order: lookup(table, order)):
        torch.manual_seed(3)
        table = random(5, size.width, dtype=dtype).requires_grad_()
        leaves = [x.detach().clone().requires_grad_() for x in (qkv, seen, gate)]
        value = value_rows(look_up, table, order, leaves[2])
        assert (value.where is None) == (look_up is not lookup)
        out = qkv_heads(leaves[0], positions, leaves[1], value, None, shape)
        torch.autograd.backward(out, [g.to(x) for g, x in zip(grads, out)])
        found.append([*out, *(x.grad for x in leaves), table.grad])
    assert found[0][-1].any() and all(map(torch.equal, *found))


@pytest.mark.parametrize("value", [False, True])
def test_ngram_rows_reach_no_other_head(value):
    """In every configuration."""
    size = sized(13, 3, (16, 32), value)
    qkv, positions, seen, value_rows, _, shape, _ = size.from_qkv()
    rows, scales = random(13, 2, 32), torch.randn(1, 2, device=DEVICE)
    plain = qkv_heads(qkv, positions, seen, value_rows, None, shape)
    source = value_rows.source if value else None
    value_inputs = source, value_mix(seen, source, value_rows.gate) if value else None
    wanted = plain[2][:, :2].double() + rows.double() * scales[0, :, None].double()
    for tuned in CONFIGS:
        q, k, v = heads_forward(qkv, positions, *value_inputs, NGramValues(rows, scales[0]), shape, tuned)
        assert torch.equal(v[:, 2], plain[2][:, 2])
        assert error(v[:, :2], wanted) < (1e-6 if v.dtype == torch.float32 else 1e-2)
        assert error(q, plain[0].double()) < 1e-3 and error(k, plain[1].double()) < 1e-3
    results = layers_with_ngrams((share_values, qkv_heads), [size.from_qkv()], [rows, scales])
    assert all(x.isfinite().all() for x in results)


def test_no_tokens_have_gradients_of_zero():
    empty = sized(0, 3, (16, 32), True).from_qkv()
    shared = [random(0, 1, 32), torch.randn(1, 1, device=DEVICE)]
    nothing = both_ways(qkv_heads)(*empty)
    assert [x.numel() for x in nothing] == [0] * 6 + [36] and all(x.is_contiguous() for x in nothing[:3])
    nothing = layers_with_ngrams((share_values, qkv_heads), [empty], shared)
    assert [x.numel() for x in nothing] == [0, 0, 0, 0, 1, 0, 0, 0, 36] and nothing[4].eq(0).all()


def test_ngram_values_that_do_not_fit_are_refused():
    qkv, positions, *_, shape, _ = sized(10, 2, (16, 32), False, key_offset=False).from_qkv()
    rows, one = random(10, 1, 32), torch.ones(1, device=DEVICE)
    for name, ngrams in (
        ("rows", NGramValues(rows[:5], one)), ("rows", NGramValues(rows.double(), one)),
        ("rows", NGramValues(rows[:, 0], one)), ("rows", NGramValues(random(10, 1, 64)[..., ::2], one)),
        ("rows", NGramValues(rows.repeat(1, 3, 1), one.repeat(3))),
        ("scale", NGramValues(rows, one.double())), ("scale", NGramValues(rows, one.repeat(2))),
    ):
        with pytest.raises(ValueError, match=f"ngrams.{name} must be"):
            qkv_heads(qkv, positions, None, None, ngrams, shape)
    plain = share_values_reference(rows.requires_grad_(), one[None])[0]
    out = qkv_heads(qkv, positions, None, None, plain, shape)
    with pytest.raises(ValueError, match="must be from `share_values`"):
        out[2].sum().backward()


def test_qkv_heads_refuse_what_they_cannot_do():
    size = sized(10, 2, (16, 16), True, key_offset=False)
    qkv, positions, seen, value, _, shape, _ = size.from_qkv()
    good = dict(qkv=qkv, cos=positions.cos, sin=positions.sin, is_start=positions.is_start, seen=seen,
                rows=value.rows, gate=value.gate)
    cos, sin, is_start, rows, gate = (good[name] for name in ("cos", "sin", "is_start", "rows", "gate"))
    wrong = {"qkv": (qkv.double(), qkv[:, :-1], qkv.mT.contiguous().mT, qkv[0]),
             "cos": (cos[:5], cos.double(), cos[:, :0], cos.repeat(2, 1)),
             "sin": (sin[:, :2], sin.mT.contiguous().mT), "is_start": (is_start[:3], is_start.int()),
             "seen": (seen[:3], seen.mT), "rows": (rows[:, :16], rows.double()),
             "gate": (gate[:1], gate[:, :5], gate.double())}

    def heads(qkv, cos, sin, is_start, seen, rows, gate, shape=shape):
        return qkv_heads(qkv, Positions(cos, sin, is_start), seen, ValueRows(rows, gate), None, shape)

    for name, tensors in wrong.items():
        for tensor in tensors:
            with pytest.raises(ValueError, match="must be"):
                heads(**good | {name: tensor})
    for dims in ((12, 12), (96, 96), (64, 64), (18, 12), (16, 32), (32, 16)):
        with pytest.raises(ValueError, match="powers of two"):
            heads(**good, shape=HeadShape(*dims, False))
    whole = torch.zeros(20, dtype=torch.int32, device=DEVICE)
    for index in (whole[:9], whole[:10].float(), whole[::2]):
        with pytest.raises(ValueError, match="index must be"):
            qkv_heads(qkv, positions, seen, ValueRows(rows, gate, Rows(rows, index)), None, shape)
    with pytest.raises(ValueError, match="grad must be"):
        mix = value_mix(seen, Rows(rows), gate)
        heads_backward([random(9, 2, 16)] * 3, qkv, positions, Rows(rows), mix, shape)


@pytest.mark.parametrize("heads", [qkv_heads, qkv_heads_reference])
@pytest.mark.parametrize("value", [False, True])
def test_project_heads_is_the_matmul_and_then_the_heads(heads, value):
    """Bit for bit, and the gate sees a copy of x's first channels."""
    size = sized(21, 2, (16, 32), value, dtype=DTYPE)
    x, projection, positions, value_rows, _, shape, _ = size.from_x()
    qkv, seen = scaled_linear(x, projection.weight, projection.scale, 6 * value)
    wanted = heads(qkv, positions, seen if value else None, value_rows, None, shape)
    found = project_heads(heads, x, projection, positions, value_rows, None, shape)
    assert all(map(same_bits, found, wanted))


@pytest.mark.parametrize("accumulate", [False, True])
def test_project_heads_fill_the_weights_gradient(accumulate):
    x, projection, positions, value, _, shape, grads = sized(21, 2, (16, 32), True).from_x()
    weight, old = projection.weight.requires_grad_(), torch.ones_like(projection.weight)
    returned, = torch.autograd.grad(
        project_heads(qkv_heads, x, projection, positions, value, None, shape), weight, grads)
    buffer = old.clone()
    into = Projection(weight, projection.scale, Gradient(buffer, accumulate))
    out = project_heads(qkv_heads, x, into, positions, value, None, shape)
    assert torch.autograd.grad(out, weight, grads, allow_unused=True) == (None,)
    expected = accumulate + returned.double()
    assert error(buffer, expected) < torch.finfo(buffer.dtype).eps
    assert accumulate or torch.equal(buffer, returned)


def test_the_reference_compiles_as_one_graph():
    """With everything that a layer can have."""
    qkv, positions, seen, value, ngrams, shape, _ = replace(
        sized(21, 2, (16, 32), True, dtype=torch.float32), ngrams=1).from_qkv()
    compiled = torch.compile(qkv_heads_reference, fullgraph=True, backend="eager")
    inputs = qkv, positions, seen, value, share_values_reference(*ngrams)[0], shape
    assert all(map(torch.equal, compiled(*inputs), qkv_heads_reference(*inputs)))


@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs tens of GB and a GPU")
def test_heads_of_more_than_2_to_the_31_elements():
    rows, columns, last = 700_000, 3072, slice(-64, None)
    x = random(rows, columns)
    assert x.numel() > 2**31
    cos, sin = (torch.rand(rows, 32, device=DEVICE) for _ in range(2))
    positions = Positions(cos, sin, torch.arange(rows, device=DEVICE) % 1000 == 0)
    few, shape = Positions(*(table[last] for table in positions)), HeadShape(128, 128, True)
    ours = heads_forward(x, positions, None, None, None, shape)
    for a, b in zip(ours, heads_forward(x[last], few, None, None, None, shape)):
        assert torch.equal(a[last][1:], b[1:])
    del ours
    grads = [x.view(3, rows, -1, 128)[0]] * 3
    grad = heads_backward(grads, x, positions, None, None, shape)[0]
    again = heads_backward([g[last] for g in grads], x[last], few, None, None, shape)[0]
    assert torch.equal(grad[last][1:], again[1:])
