"""The model: attention against a dense reference, causality, documents apart, schedule, FP8, every switch."""
import math
import sys
from dataclasses import replace
from functools import cache
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import train_gpt
from kernels.attention.flash import ATTENTION, choose_attention, fit_tiles
from kernels.attention.output import scaled_linear, scaled_linear_reference
from kernels.attention.qkv import qkv_heads, qkv_heads_reference
from kernels.attention.rotary import rotary_tables, rotate
from kernels.embedding.rows import embedding, embedding_reference, sort_rows
from kernels.embedding.smear import smear, smear_reference
from kernels.fp8 import matmul as fp8_linear
from kernels.fp8.formats import normed_scale
from kernels.fp8.quantize import quantize_reference
from kernels.fp8.weights import fp8_weights_reference
from kernels.mlp import fp8_mlp as mlp
from kernels.mlp import residual, residual_fp8
from kernels.mlp.residual import mlp_input_reference, norm_fork_reference
from kernels.mlp.residual_fp8 import mlp_input_fp8, norm_fork_fp8

pytestmark = pytest.mark.usefixtures("large_tiles")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HERE = ["plain"] if DEVICE.type == "cpu" else sorted({"plain", "varlen", choose_attention("auto", DEVICE)[0]})


def dense_attention(q, k, v, cu_seqlens, window, scale):
    """All pairs of tokens, in float64."""
    n = len(q)
    sequence = torch.tensor([sum(int(b) <= i for b in cu_seqlens) for i in range(n)])
    i, j = torch.arange(n)[:, None], torch.arange(n)[None]
    allowed = (j <= i) & (i - j <= window) & (sequence[i] == sequence[j])
    scores = torch.einsum("ihd,jhd->hij", q.double(), k.double()) * scale
    return torch.einsum("hij,jhd->ihd", scores.masked_fill(~allowed, -torch.inf).softmax(-1), v.double())


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("window", [1, 16, 100, 5000])
@pytest.mark.parametrize("dims", [(64, 64), (32, 64)], ids=str)
def test_attention_backends_against_dense(backend, window, dims):
    torch.manual_seed(0)
    n, dtype = 1100, torch.float32 if DEVICE.type == "cpu" else torch.bfloat16
    cu_seqlens = torch.tensor([0, 3, 700, 701, 1000, n, n, n], dtype=torch.int32)
    q, k, v = (torch.randn(n, 2, dim, dtype=dtype).requires_grad_() for dim in (dims[0], *dims))
    q64, k64, v64 = (x.detach().double().requires_grad_() for x in (q, k, v))
    expected = dense_attention(q64, k64, v64, cu_seqlens[:6], window, 0.1)
    weight = torch.randn_like(expected)
    expected.backward(weight)
    on_device = [x.detach().to(DEVICE).requires_grad_() for x in (q, k, v)]
    out = ATTENTION[backend](*on_device, cu_seqlens.to(DEVICE), 697, window, 0.1)
    out.backward(weight.to(out))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.cpu().double(), expected, atol=tolerance, rtol=tolerance)
    for x, x64 in zip(on_device, (q64, k64, v64)):
        torch.testing.assert_close(x.grad.cpu().double(), x64.grad, atol=2 * tolerance, rtol=tolerance)


def test_flash4_chooses_its_tiles_by_the_wider_heads():
    def tiles(head_dim, head_dim_v, causal, sparse_block_size_q=None):
        return head_dim, head_dim_v, causal, sparse_block_size_q

    interface = SimpleNamespace(_tile_size_bwd_sm90=tiles)               # of a version without the other
    for _ in range(2):
        fit_tiles(interface)
        assert interface._tile_size_bwd_sm90(64, 128, True, sparse_block_size_q=3) == (128, 128, True, 3)
        assert interface._tile_size_bwd_sm90(192, 128, True) == (192, 128, True, None)
    assert interface._tile_size_bwd_sm90.__wrapped__ is tiles and not hasattr(interface, "_tile_size_fwd_sm90")


def test_attention_is_deterministic_where_torch_shall_be(monkeypatch):
    asked = []
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    interface = SimpleNamespace(flash_attn_varlen_func=lambda q, k, v, **named: asked.append(named["deterministic"]) or q, interface=None)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", interface)
    x, cu_seqlens = torch.randn(4, 1, 8), torch.tensor([0, 4], dtype=torch.int32)
    for on in (True, False):
        torch.use_deterministic_algorithms(on)
        ATTENTION["flash4"](x, x, x, cu_seqlens, 4, 2, 0.1)
    assert asked == [True, False]


def test_torchs_attention_gets_queries_keys_and_values_of_one_width(monkeypatch):
    """With zeros that change no product: the gradients too are those of the narrow ones."""
    def equal_widths(q, k, v, cu_seqlens, *_, scale, window_size):
        assert q.shape == k.shape == v.shape
        return ATTENTION["plain"](q, k, v, cu_seqlens, 60, window_size[0], scale)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", equal_widths)
    torch.manual_seed(0)
    cu_seqlens = torch.tensor([0, 40, 60], dtype=torch.int32)
    for qk_dim, head_dim in ((8, 16), (16, 8), (16, 16)):
        leaves = [torch.randn(60, 2, dim, requires_grad=True) for dim in (qk_dim, qk_dim, head_dim)]
        results = []
        for backend in ("plain", "varlen"):
            out = ATTENTION[backend](*leaves, cu_seqlens, 60, 9, 0.1)
            results.append([out, *torch.autograd.grad(out.sin().sum(), leaves)])
        for plain, varlen in zip(*results):
            torch.testing.assert_close(varlen, plain)


def test_attention_never_looks_across_documents():
    torch.manual_seed(0)
    cu_seqlens = torch.tensor([0, 40, 90, 128], dtype=torch.int32)
    q, k, v = (torch.randn(128, 2, 16) for _ in range(3))
    before = train_gpt.ATTENTION["plain"](q, k, v, cu_seqlens, 64, 1000, 0.1)
    for x in (q, k, v):
        x[40:90] = torch.randn(50, 2, 16)
    after = train_gpt.ATTENTION["plain"](q, k, v, cu_seqlens, 64, 1000, 0.1)
    changed = (before != after).flatten(1).any(1)
    assert changed[40:90].all() and not changed[:40].any() and not changed[90:].any()


def awake(model: train_gpt.GPT, to_train: bool = False) -> None:
    """Give every parameter that starts at zero a value, so that every path carries something; a table gets a whole gradient unless `to_train`."""
    torch.manual_seed(5)
    if model.ngrams and not to_train:
        vars(model.ngram_table).pop("row_gradients", None)
    with torch.no_grad():
        for p in model.parameters():
            if not p.any():
                p.normal_(std=0.1)
        model.scalars.fill_(0.7)


def loss_of(trainer, batch, scored: slice) -> torch.Tensor:
    """Training and next-token loss over the scored positions alone."""
    targets = torch.full_like(batch.targets, -1)
    targets[scored] = batch.targets[scored]
    with torch.no_grad():
        return torch.stack(trainer.model(train_gpt.to_device(batch._replace(targets=targets), DEVICE), trainer.schedule.at(0)))


@pytest.fixture
def config(config):
    """With n-grams, and FP8 in layers, only where a test asks for them, on a GPU as on a CPU."""
    return replace(config, ngram_rows=0, fp8_mlp=False, fp8_attention=False)


INGREDIENTS = {"ngram_rows": 512}


@pytest.fixture(params=[{}, INGREDIENTS | {"qk_dim": 16}], ids=["recipe", "every ingredient and narrow queries and keys"])
def trainer(config, request):
    return train_gpt.Trainer(replace(config, **request.param), train_gpt.World())


@pytest.mark.parametrize("position", [1, 17, 63, 100, 127])
def test_model_is_causal(trainer, position):
    """Another token at `position`: every loss that does not predict it or what follows it is the same, bit for bit."""
    awake(trainer.model)
    batch = trainer.loader.batches(0)[1]
    changed = batch.tokens.clone()
    changed[position] = (changed[position] + 1) % 200
    earlier = slice(0, position)
    assert torch.equal(loss_of(trainer, batch, earlier), loss_of(trainer, batch._replace(tokens=changed), earlier))
    here = slice(position, position + 1)
    assert not torch.equal(loss_of(trainer, batch, here), loss_of(trainer, batch._replace(tokens=changed), here))


def test_documents_do_not_see_each_other(trainer):
    """Smear, n-grams, key offset and multi-token targets stop at a sequence's start as attention does."""
    awake(trainer.model)
    batch = max(trainer.loader.batches(0), key=lambda batch: len(batch.cu_seqlens.unique()))
    starts = batch.cu_seqlens.unique().tolist()
    assert len(starts) > 3
    first, last = starts[1], starts[2]
    changed = batch.tokens.clone()
    changed[first:last] = (changed[first:last] + 1) % 200
    for other in (slice(0, first), slice(last, None)):
        assert torch.equal(loss_of(trainer, batch, other), loss_of(trainer, batch._replace(tokens=changed), other))


def test_key_offset_takes_the_position_free_half_from_the_token_before():
    torch.manual_seed(0)
    n, heads, qk_dim, head_dim, width = 12, 2, 8, 16, 32
    x, weight = torch.randn(n, width), torch.randn(2 * width, width)
    cos, sin, _ = rotary_tables([8], n, qk_dim // 2, 1024.0, 0.1, True, torch.device("cpu"))[8]
    is_start = torch.zeros(n, dtype=torch.bool)
    is_start[[0, 7]] = True
    qkv = F.linear(x, weight)
    plain, offset = (qkv_heads_reference(qkv, cos, sin, is_start, None, None, None, qk_dim, head_dim, on)[1] for on in (False, True))
    half = qk_dim // 2
    assert torch.equal(plain[..., :half], offset[..., :half])
    for i in range(n):
        expected = torch.zeros(heads, half) if is_start[i] else plain[i - 1, :, half:]
        assert torch.equal(offset[i, :, half:], expected)


@pytest.mark.parametrize("lengths", [(2,), (3,), (1, 2, 3), (3, 2)])
def test_ngrams_stop_at_a_sequences_start(lengths):
    tokens = torch.tensor([7, 5, 6, 9, 5, 6, 9, 5, 6, 9], dtype=torch.int32)
    is_start = torch.zeros(10, dtype=torch.bool)
    is_start[[0, 4, 7]] = True
    found = train_gpt.ngram_index(tokens, is_start, lengths, 10_007).view(10, len(lengths)).T
    seen = [(None, None, 7), (None, 7, 5), (7, 5, 6), (5, 6, 9), (None, None, 5), (None, 5, 6), (5, 6, 9)]
    for length, index in zip(lengths, found):
        assert index.ge(0).all() and index.lt(10_007).all() and torch.equal(index[4:7], index[7:])
        for i, a in enumerate(seen):
            for j, b in enumerate(seen):
                assert bool(index[i] == index[j]) == (a[-length:] == b[-length:])


def test_multi_token_loss_against_cross_entropy():
    torch.manual_seed(0)
    n, width, vocab = 40, 16, 64
    x, head = torch.randn(n, width), torch.randn(vocab, width)
    targets = torch.randint(0, vocab, (n,), dtype=torch.int32)
    targets[[5, 30]] = -1
    is_start = torch.zeros(n, dtype=torch.bool)
    is_start[[0, 13, 14, 33]] = True
    weights = torch.tensor([1.0, 0.5, 0.25])
    total, next_token = train_gpt.head_loss_reference(x, head, targets, is_start, weights, fp8=False)
    logits = 23 * torch.sigmoid((x @ head.T + 5) / 7.5)
    sequence = is_start.cumsum(0)
    expected = [0.0, 0.0, 0.0]
    for i in range(n):
        for ahead in range(3):
            if i + ahead < n and sequence[i] == sequence[i + ahead] and targets[i + ahead] >= 0:
                expected[ahead] += F.cross_entropy(logits[i], targets[i + ahead].long()).item()
    assert next_token.item() == pytest.approx(expected[0], rel=1e-5)
    assert total.item() == pytest.approx(sum(w * e for w, e in zip((1, 0.5, 0.25), expected)), rel=1e-5)


def test_rotary_keeps_products_relative_and_yarn_slows_slow_channels():
    tables = rotary_tables([128, 512], 300, 16, 1024.0, 0.1, True, torch.device("cpu"))
    for cos, sin, _ in tables.values():
        q, k = torch.randn(1, 1, 32).expand(300, 1, 32), torch.randn(1, 1, 32).expand(300, 1, 32)
        products = torch.einsum("ihd,jhd->ij", rotate(q, cos, sin), rotate(k, cos, sin))
        torch.testing.assert_close(products[10, 3], products[210, 203], atol=1e-4, rtol=1e-4)
    fast, slow = (torch.atan2(t[1][1], t[0][1]) for t in (tables[128], tables[512]))
    assert slow[-1] == pytest.approx(fast[-1].item() / 4) and slow[0] <= fast[0] and tables[512][2] > tables[128][2] == 0.1


def test_schedule_follows_its_table():
    config = replace(train_gpt.PRESETS["speedrun"], steps=690)
    schedule = train_gpt.Schedule(config)
    at = schedule.at
    assert len(schedule) == 705 and sum(step.batch_tokens for step in schedule) == 230 * 786_432 + 15 * 393_216
    assert [at(i).batch_tokens for i in (0, 229, 230, 459, 460, 704)] == [131_072] * 2 + [262_144] * 2 + [393_216] * 2
    assert [at(i).windows for i in (0, 230, 460, 690)] == [(1, 3), (3, 7), (5, 11), (6, 13)]
    assert at(0).lr == 1 and at(275).lr == pytest.approx(1.52) and at(704).lr == pytest.approx(1.73 * 0.15)
    assert at(459).tied and not at(460).tied and [at(i).update_adam for i in range(4)] == [False, True, False, True]
    assert at(0).multi_token == (1, 0.5, 0.25) and at(230).multi_token == (1, 0.5) and at(460).multi_token == (1,)
    assert at(115).multi_token == (1, 0.5, 0.125) and at(345).multi_token == (1, 0.25)
    assert (at(0).momentum, at(300).momentum, at(704).momentum) == (0.85, 0.95, 0.85)
    assert schedule.validation(705).windows == (6, 20) and schedule.validation(250).windows == (3, 7)
    assert schedule.validation(460).tied and not schedule.validation(461).tied


def test_fp8_linear_is_near_the_plain_product_and_honours_the_gradient():
    torch.manual_seed(0)
    x = F.rms_norm(torch.randn(64, 128), (128,)).bfloat16().requires_grad_()
    weight = (torch.randn(96, 128) * 0.05).bfloat16().requires_grad_()
    gradient = torch.randn(64, 96).bfloat16() * 0.1
    results = []
    for linear in (fp8_linear.linear_reference, fp8_linear.fp8_linear):
        out = linear(x, weight)
        results.append([out, *torch.autograd.grad(out, (x, weight), gradient)])
    twice = torch.autograd.grad(fp8_linear.fp8_linear(x, weight), (x, weight), 2 * gradient)
    for plain, fp8, limit in zip(*results, (0.05, 0.15, 0.15)):
        assert (plain.float() - fp8.float()).norm() / plain.float().norm() < limit
    for once, double in zip(results[1][1:], twice):
        torch.testing.assert_close(2 * once, double)


def test_the_mlp_may_write_over_what_compiled_code_returned(monkeypatch):
    """`MLP` adds in place to an output of `mlp_input`, which neither compiled code nor the kernel may have kept for its backward."""
    def whole(first, second):
        x, *weights = (tensor.clone().requires_grad_() for tensor in inputs)
        scales = torch.tensor([0.9, 1.1], device=DEVICE, requires_grad=True)
        stream, normed = first((x, x.sin()), scales)
        out, = second(stream, normed, *weights)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), (x, *weights, scales))]

    for name in ("relu_squared", "relu_squared_backward"):  # on GPUs the kernels take minutes to compile in float32
        monkeypatch.setattr(mlp, name, getattr(mlp, f"{name}_reference"))
    torch.manual_seed(0)
    inputs = [torch.randn(n, 16, device=DEVICE) for n in (48, 64, 64)]
    compiled = torch.compile(mlp_input_reference, backend="aot_eager", fullgraph=True)
    expected = whole(mlp_input_reference, lambda *tensors: mlp.mlp_reference(*tensors, False))
    for first in (compiled, mlp_input_reference, residual.mlp_input):
        found = whole(first, lambda *tensors: mlp.mlp(*tensors, False))
        for mine, wanted, bound in zip(found, expected, (1e-5, 1e-5, 1e-5, 1e-5, 1e-3), strict=True):    # the last, of the scales, cancels
            assert (mine - wanted).norm() <= bound * wanted.norm()       # single elements of gradients of 7e5 are right to 0.01


@pytest.mark.parametrize("fused", [False, True])
def test_rows_in_a_heads_values_keep_their_gradient_without_some_kernels(config, fused):
    """By heads' kernel or without it: of every layer's scalar as well; the twin compiles with its terms."""
    model, results = train_gpt.Trainer(replace(config, ngram_rows=512), train_gpt.World()).model, []
    awake(model)
    batch = train_gpt.to_device(train_gpt.Trainer(config, train_gpt.World()).loader.batches(0)[0], DEVICE)
    compiled = torch.compile(qkv_heads_reference, backend="aot_eager", fullgraph=True)
    kernels = {qkv_heads_reference: qkv_heads if fused else compiled}
    twins = {twin: twin for twin in model.part}
    for parts in (twins, twins | kernels):
        model.part = parts
        model.zero_grad()
        model(batch, train_gpt.Schedule(model.config).at(0))[0].backward()
        results.append([model.ngram_scalars.grad.clone(), model.ngram_table.grad.clone()])
    for plain, ours in zip(*results, strict=True):
        assert plain.any() and (ours.float() - plain.float()).norm() <= (1e-4 if DEVICE.type == "cpu" else 5e-2) * plain.float().norm()


def test_fp8_off_leaves_no_fp8_product(config, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("an FP8 product with FP8 off")
    monkeypatch.setattr(train_gpt, "has_fp8", lambda device: True)
    monkeypatch.setattr(torch, "_scaled_mm", refuse)
    for fp8 in (True, False):
        trainer = train_gpt.Trainer(replace(config, fp8=fp8, fp8_mlp=True, fp8_attention=True), train_gpt.World())
        assert trainer.model.fp8 is fp8
        if fp8:
            with pytest.raises(AssertionError, match="FP8 product"):
                trainer.step(trainer.schedule.at(0), trainer.loader.batches(0))
        else:
            trainer.step(trainer.schedule.at(0), trainer.loader.batches(0))


@pytest.mark.parametrize("fp8_weight_grads", [False, True])
def test_the_mlp_is_told_whether_its_weights_gradients_are_fp8(config, fp8_weight_grads, monkeypatch):
    """And gets the same FP8 weights for all micro-batches of a step, new ones for the next."""
    trainer, told, made = train_gpt.Trainer(replace(config, fp8_weight_grads=fp8_weight_grads), train_gpt.World()), [], []
    trainer.model.fp8_mlp = True                                         # as on a GPU
    monkeypatch.setattr(train_gpt, "fp8_weights", lambda weights: made.append(weights) or fp8_weights_reference(weights))

    def record(residual, x, w_in, w_out, *fp8):
        told.append(fp8)
        return mlp.mlp_reference(residual, x, w_in, w_out, False)

    trainer.model.part[mlp.mlp_reference] = record
    layers = len(config.layers)
    for index in range(2):
        trainer.step(trainer.schedule.at(index), trainer.loader.batches(index))
        assert len(made) == layers * (index + 1)
    assert len(told) == 2 * layers * config.micro_batches > 2 * len(made) and {fp8[:2] for fp8 in told} == {(True, fp8_weight_grads)}
    assert len({id(weights) for *_, weights, _ in told}) == len(made)
    assert [into is not None for *_, into in told] == ([True] * layers + [False] * layers * (config.micro_batches - 1)) * 2


@pytest.mark.parametrize("fp8_weight_grads", [False, True])
def test_the_first_micro_batch_writes_what_the_others_add_to(config, fp8_weight_grads):
    """The MLPs' gradients, whatever stood there; all others are added. Then each weight's is the sum over micro-batches."""
    trainer = train_gpt.Trainer(replace(config, fp8_weight_grads=fp8_weight_grads), train_gpt.World())
    model, step, results = trainer.model, trainer.schedule.at(0), []
    awake(model)
    model.fp8_mlp, layers = True, len(config.layers)                     # as on a GPU
    batches = [train_gpt.to_device(batch, DEVICE) for batch in trainer.loader.batches(0)[:2]]
    for fresh in (False, True):
        model.zero_grad(set_to_none=False)
        for matrix in model.bank[layers:]:
            matrix.grad.fill_(7.0 if fresh else 0.0)
        for batch in batches:
            model(batch, step, fresh=fresh and batch is batches[0])[0].backward()
        results.append([p.grad.clone() for p in model.parameters()])
    assert all(map(torch.equal, *results)) and results[0][layers].any()


NORMED_IN_FP8 = {mlp.mlp_reference: mlp.mlp, mlp_input_reference: mlp_input_fp8, norm_fork_reference: norm_fork_fp8}


def norm_and_round(*arguments):
    """`residual_fp8`, but for its rounding, which is torch's."""
    x, normed, rms = residual.residual(*arguments)
    return x, *quantize_reference(normed, torch.tensor(normed_scale(normed.size(1))), in_pairs=True), rms


def test_a_model_without_norms_in_bf16_has_nearly_its_gradients(trainer, monkeypatch):
    """Of every parameter: what attention and MLPs read is in FP8 alone, in place of in FP8 as well."""
    model, results = trainer.model, []
    if DEVICE.type == "cpu":                                             # the interpreter's rounding is poor
        monkeypatch.setattr(mlp, "quantize", lambda x, scale, both, in_pairs: quantize_reference(x, scale, in_pairs=in_pairs))
        monkeypatch.setattr(residual_fp8, "residual_fp8", norm_and_round)
    awake(model)
    batch, step = train_gpt.to_device(trainer.loader.batches(0)[0], DEVICE), trainer.schedule.at(0)
    model.fp8_mlp = model.fp8_attention = True                           # as on a GPU
    plain = model.part | train_gpt.KERNELS["fused_residual"] | train_gpt.KERNELS["fused_qkv"]
    for parts in ({mlp.mlp_reference: mlp.mlp}, NORMED_IN_FP8):
        model.part = plain | parts
        model.zero_grad(set_to_none=False)
        loss, _ = model(batch, step)
        loss.backward()
        results.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    for (name, _), two, one in zip([("loss", None), *model.named_parameters()], *results, strict=True):
        assert torch.equal(one, two) or F.cosine_similarity(one.flatten().double(), two.flatten().double(), dim=0) > 0.98, name


@pytest.mark.parametrize("off, wanted", [("", (True, True)), ("fused_residual", (False, False)), ("fp8_attention", (False, True)),
                                         ("fp8_weight_grads", (True, False)), ("fp8_mlp", (True, False))])
def test_what_fp8_products_alone_read_is_normed_into_fp8(config, off, wanted, monkeypatch):
    on_a_gpu = train_gpt.compiled
    for name in ("has_fp8", "has_mlp"):
        monkeypatch.setattr(train_gpt, name, lambda device: True)
    monkeypatch.setattr(train_gpt, "compiled", lambda config, device, *functions: on_a_gpu(config, torch.device("cuda"), *functions))
    on = {"compile": False, "fp8_mlp": True, "fp8_attention": True}
    model = train_gpt.GPT(replace(config, **on | ({off: False} if off else {})), train_gpt.World())
    assert (model.part[norm_fork_reference] is norm_fork_fp8, model.part[mlp_input_reference] is mlp_input_fp8) == wanted


@pytest.mark.parametrize("setting", [None, "fp8", "fused_qkv", "fp8_attention"])
def test_fp8_attention_needs_fp8_and_its_kernels(config, setting, monkeypatch):
    on_a_gpu = train_gpt.compiled
    monkeypatch.setattr(train_gpt, "has_fp8", lambda device: True)
    monkeypatch.setattr(train_gpt, "compiled", lambda config, device, *functions: on_a_gpu(config, torch.device("cuda"), *functions))
    settings = {name: name != setting for name in ("fp8", "fused_qkv", "fp8_attention")}
    model = train_gpt.GPT(replace(config, compile=False, fused_mlp=False, **settings), train_gpt.World())
    assert model.fp8_attention is (setting is None)


@pytest.mark.parametrize("changes", [{}, {"value_embeddings": False}], ids=str)
def test_fp8_attention_gives_the_model_nearly_its_gradients(trainer, changes, monkeypatch):
    """With layers that share a normed residual, key offset, value rows and gates, or without; and of the same parameters."""
    config, results = replace(trainer.config, **changes), []
    if DEVICE.type == "cpu":                                             # the interpreter's rounding is poor
        monkeypatch.setattr(mlp, "quantize", lambda x, scale, both, in_pairs: quantize_reference(x, scale, in_pairs=in_pairs))
    model = train_gpt.Trainer(config, train_gpt.World()).model
    awake(model)
    batch, step = train_gpt.to_device(trainer.loader.batches(0)[0], DEVICE), trainer.schedule.at(0)
    for fp8 in (False, True):
        model.fp8_attention = fp8
        model.zero_grad(set_to_none=True)
        loss, _ = model(batch, step)
        loss.backward()
        results.append({"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}})
    plain, fp8 = results
    assert plain.keys() == fp8.keys() and abs(fp8["loss"] - plain["loss"]) < 0.01 * plain["loss"]
    for name, grad in plain.items():
        assert F.cosine_similarity(grad.flatten().double(), fp8[name].flatten().double(), dim=0) > 0.95, name
    assert not torch.equal(plain["bank.0"], fp8["bank.0"])


@pytest.mark.parametrize("setting", train_gpt.KERNELS)
def test_a_kernel_that_is_switched_off_leaves_its_reference(config, setting, monkeypatch):
    """And a device without CUDA runs twins whatever is on. Without the embedding's kernel no row is listed for the row update's."""
    monkeypatch.setattr(train_gpt, "has_mlp", lambda device: True)
    twins = [twin for pairs in train_gpt.KERNELS.values() for twin in pairs]
    config = replace(config, compile=False, **{name: name != setting for name in train_gpt.KERNELS})
    off = {setting, "fused_row_update"} if setting == "fused_embedding" else {setting}
    expected = {twin: twin if name in off else kernel for name, pairs in train_gpt.KERNELS.items() for twin, kernel in pairs.items()}
    assert train_gpt.compiled(config, torch.device("cuda"), *twins) == expected
    assert train_gpt.compiled(config, torch.device("cpu"), *twins) == {twin: twin for twin in twins}


def test_tokens_are_sorted_only_for_the_kernel_that_needs_it(trainer, monkeypatch):
    """And with that kernel the tables' gradients are their twin's."""
    sorts, gradients, model = [], [], trainer.model
    monkeypatch.setattr(train_gpt, "sort_beside", lambda index: sorts.append(index) or sort_rows(index))
    awake(model)
    step = trainer.schedule.at(0)
    batch = train_gpt.to_device(trainer.loader.batches(0)[0], DEVICE)
    for lookup, count in ((embedding_reference, 0), (embedding, 1 + bool(model.ngrams))):
        model.part = model.part | {embedding_reference: lookup}
        with torch.no_grad():
            model(batch, step)
        assert not sorts
        model.zero_grad(set_to_none=False)
        model(batch, step)[0].backward()
        assert len(sorts) == count
        gradients.append([table.grad.clone() for table in (model.head, *[model.ngram_table] * bool(model.ngrams), *model.value_tables)])
    for twin, kernel in zip(*gradients):
        assert (kernel - twin).norm() < (1e-5 if DEVICE.type == "cpu" else 1e-2) * twin.norm()


@pytest.mark.parametrize("twin, kernel", [(qkv_heads_reference, qkv_heads), (smear_reference, smear)])
def test_a_kernel_gives_the_model_its_twins_gradients(trainer, twin, kernel):
    model, results = trainer.model, []
    awake(model)
    batch = train_gpt.to_device(trainer.loader.batches(0)[0], DEVICE)
    for function in (twin, kernel):
        model.part = model.part | {twin: function}
        model.zero_grad(set_to_none=True)
        loss, _ = model(batch, trainer.schedule.at(0))
        loss.backward()
        results.append([loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    for plain, ours in zip(*results, strict=True):
        assert (ours.float() - plain.float()).norm() <= (1e-5 if DEVICE.type == "cpu" else 2e-2) * plain.float().norm()


@pytest.mark.parametrize("changes", [{}, {"value_embeddings": False}], ids=str)
def test_scaled_products_and_gates_by_their_columns_give_the_model_the_plain_gradients(config, changes, monkeypatch):
    """In layers with and without value rows, and where several layers read one normed residual."""
    model, results = train_gpt.Trainer(replace(config, **changes), train_gpt.World()).model, []
    awake(model)
    batch = train_gpt.to_device(train_gpt.Trainer(config, train_gpt.World()).loader.batches(0)[0], DEVICE)
    for function in (scaled_linear_reference, scaled_linear):
        monkeypatch.setattr(train_gpt, "scaled_linear", function)
        model.zero_grad()
        loss, _ = model(batch, train_gpt.Schedule(config).at(0))
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    for plain, ours in zip(*results, strict=True):
        assert (ours.float() - plain.float()).norm() <= (1e-5 if DEVICE.type == "cpu" else 2e-2) * plain.float().norm()


def unsummed_mlp(residual, x, w_in, w_out, *_):
    """As in FP8: two summands; without its rounding."""
    return residual, F.relu(F.linear(x, w_in)).square() @ w_out


# The last layer's attention reads what entered layer 2, which has not summed it; and from 2 on the head subtracts what nobody has.
LATE = (train_gpt.Layer(value_embedding=True), train_gpt.Layer(long_window=True), train_gpt.Layer(attends_to=0),
        train_gpt.Layer(attends_to=1))


@pytest.mark.parametrize("changes", [{}, {"late_input": False}, {"layers": LATE, "backout_layer": 2, "ngram_rows": 512}],
                         ids=["recipe", "less", "late"])
def test_model_with_residual_kernels_is_that_with_their_twins(config, changes):
    """Loss and the gradient of every parameter: rows that all layers share, streams that several layers read, sums not yet made."""
    trainer, results = train_gpt.Trainer(replace(config, **changes), train_gpt.World()), []
    model, step = trainer.model, trainer.schedule.at(0)
    awake(model)
    batch = train_gpt.to_device(trainer.loader.batches(0)[0], DEVICE)
    unsummed = {mlp.mlp_reference: unsummed_mlp}
    plain, kernels = model.part, train_gpt.KERNELS["fused_residual"]
    for parts in ({}, kernels, unsummed, kernels | unsummed):
        model.part = plain | parts
        model.zero_grad(set_to_none=False)
        loss, _ = model(batch, step)
        loss.backward()
        results.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    for (name, _), twin, *others in zip([("loss", None), *model.named_parameters()], *results):
        for other in others:
            assert (other - twin).norm() <= (1e-4 if DEVICE.type == "cpu" else 5e-2) * twin.norm(), name


UNSUMMED = {mlp.mlp_reference: unsummed_mlp}


@pytest.mark.parametrize("parts, kernels", [({}, False), ({}, True), (UNSUMMED, False), (UNSUMMED, True), (NORMED_IN_FP8, True)],
                         ids=["twins", "kernels", "unsummed twins", "unsummed", "FP8"])
def test_gradients_are_complete_behind_what_a_layer_reads(trainer, parts, kernels):
    """Of a layer and of all later ones, and that of the layer before has not begun."""
    model, later = trainer.model, {}
    awake(model)
    model.part = model.part | parts | (train_gpt.KERNELS["fused_residual"] | parts if kernels else {})
    if parts is NORMED_IN_FP8:
        model.fp8_mlp = model.fp8_attention = True
    count = len(model.config.layers)
    banks = [[model.bank[i], *model.bank[count + 2 * i:][:2]] for i in range(count)]

    def reached(layer: int, x: torch.Tensor | None) -> None:
        if x is not None:
            x.register_hook(lambda _: later.update({layer: [[p.grad.clone() for p in bank] for bank in banks]}))

    model(train_gpt.to_device(trainer.loader.batches(0)[0], DEVICE), trainer.schedule.at(0), reached)[0].backward()
    assert list(later) == [*reversed(range(len(banks) + 1))]
    for layer, seen in later.items():
        for i, (bank, grads) in enumerate(zip(banks, seen)):
            assert all(torch.equal(grad, p.grad if i >= layer else torch.zeros_like(p)) for p, grad in zip(bank, grads))


@cache                                  # the recipe's are wanted for every trick
def losses_of_stages(config: train_gpt.Config) -> list[float]:
    """Of a step of each stage, one after the other."""
    trainer = train_gpt.Trainer(config, train_gpt.World())
    awake(trainer.model, to_train=True)
    return [trainer.step(step, trainer.loader.batches(step.index)).item() for step in map(trainer.schedule.at, (1, 3, 5))]


SWITCHES = ["value_embeddings", "smear", "key_offset", "backout", "late_input", "yarn", "neuron_norm",
            "cautious"]


@pytest.mark.parametrize("off", [*({name: False} for name in SWITCHES), {"tied_share": 0.0},
                                 {"multi_token": (((1.0, 1.0),),) * 3}, *({name: on} for name, on in INGREDIENTS.items())],
                         ids=lambda off: next(iter(off)))
def test_every_trick_can_be_switched_off(config, off):
    config = replace(config, micro_batches=2, batch_tokens=(256, 512, 512))
    recipe, less = losses_of_stages(config), losses_of_stages(replace(config, **off))
    assert all(map(math.isfinite, less)) and recipe != less


@pytest.mark.parametrize("name", INGREDIENTS)
def test_an_ingredient_adds_what_it_needs_and_starts_neutral(config, name):
    """Off: no parameter, no buffer. On: those of the recipe start as they do without it, and so does the loss."""
    off, on = (train_gpt.Trainer(replace(config, **{name: value}), train_gpt.World())
               for value in (type(INGREDIENTS[name])(), INGREDIENTS[name]))
    recipe, states = train_gpt.GPT(config, train_gpt.World()).state_dict(), [trainer.model.state_dict() for trainer in (off, on)]
    assert list(recipe) == list(states[0]) and all(torch.equal(states[1][key], value) for key, value in recipe.items())
    assert set(states[1]) - set(recipe)
    losses = [trainer.step(trainer.schedule.at(0), trainer.loader.batches(0)) for trainer in (off, on)]
    assert torch.equal(*losses)


def test_every_parameter_of_every_ingredient_learns(config):
    model = train_gpt.Trainer(replace(config, **INGREDIENTS), train_gpt.World()).model
    groups = train_gpt.parameter_groups(model, config)
    assert sorted(id(p) for group in groups for p in group.params) == sorted(id(p) for p in model.parameters())
    awake(model)
    batch = train_gpt.Trainer(config, train_gpt.World()).loader.batches(0)[0]
    model(train_gpt.to_device(batch, DEVICE), train_gpt.Schedule(config).at(5))[0].backward()
    assert [name for name, p in model.named_parameters() if not p.grad.any()] == []


@pytest.mark.parametrize("qk_dim, squares", [(16, 3), (32, 4), (64, 6)])
def test_queries_and_keys_of_another_width_than_values(config, qk_dim, squares):
    """Shapes, FLOP, and a loss that falls; the layers' and the MLPs' initial values come from one stream, whatever their shapes."""
    config = replace(config, qk_dim=qk_dim, steps=12, epochs=9, micro_batches=2, batch_tokens=(512,) * 3)
    trainer = train_gpt.Trainer(config, train_gpt.World())
    model, layers, width = trainer.model, len(config.layers), config.width
    assert [len(m) for m in model.bank] == [squares * width] * layers + [4 * width] * 2 * layers
    flops = [sum(m.numel() for m in model.bank) * 6, 6 * (width + 2 * qk_dim)]
    near, far = (trainer.schedule.at(0)._replace(windows=windows, sequence_length=9999) for windows in ((0, 0), (1, 1)))
    assert model.flops_per_token(far) - model.flops_per_token(near) == flops[1] * layers * config.window_block
    assert model.flops_per_token(near) == flops[0] + 6 * len(model.head) * width
    shard = trainer.optimizer.shards["attention"]
    assert shard.matrix_lr.shape == (squares * layers, 1, 1) and shard.second.shape == (layers, squares * width, 1)
    losses = [trainer.step(step, trainer.loader.batches(step.index)).item() for step in trainer.schedule]
    assert losses[-1] < losses[0] - 1


def test_queries_and_keys_must_fill_whole_matrices(config):
    for qk_dim in (0, 8, 24):
        with pytest.raises(train_gpt.UserError, match=f"--qk_dim {qk_dim}: .* use a multiple of 16"):
            train_gpt.check_config(replace(config, qk_dim=qk_dim))


def test_flops_grow_with_the_window(trainer):
    flops = trainer.model.flops_per_token
    assert flops(trainer.schedule.at(5)) > flops(trainer.schedule.at(0)) > flops(trainer.schedule.at(0), 256) > 0


@pytest.mark.parametrize("lookup", [embedding_reference, embedding])
def test_a_sample_of_the_whole_vocabulary_is_the_full_softmax(config, lookup):
    """With the gradients of the head, which is the embedding too here, and with targets that are not scored."""
    results = []
    for samples in (0, 10_000):
        trainer = train_gpt.Trainer(replace(config, softmax_samples=samples), train_gpt.World())
        model, step = trainer.model, trainer.schedule.at(0)
        awake(model)
        model.part = model.part | {embedding_reference: lookup}
        batch = train_gpt.to_device(trainer.loader.batches(0)[0], DEVICE)
        assert step.tied and len(batch.columns) == (320 if samples else 0)
        batch.targets[[3, 70]] = -1
        loss, next_token = model(batch, step)
        loss.backward()
        results.append([loss.detach(), next_token.detach(), *(p.grad for p in model.parameters())])
    tolerance = 1e-5 if DEVICE.type == "cpu" else 2e-2
    for full, sampled in zip(*results):
        torch.testing.assert_close(sampled, full, atol=tolerance * full.abs().max().item(), rtol=tolerance)


@pytest.mark.parametrize("lookup", [embedding_reference, embedding])
def test_sampled_softmax_has_gradients_for_its_rows_alone(config, lookup):
    trainer = train_gpt.Trainer(replace(config, softmax_samples=64), train_gpt.World())
    model, step = trainer.model, trainer.schedule.at(0)._replace(tied=False)
    model.part = model.part | {embedding_reference: lookup}
    batch = train_gpt.to_device(trainer.loader.batches(0)[0], DEVICE)
    assert len(batch.columns) == 256
    model(batch, step)[0].backward()
    assert model.head.grad.any(1).nonzero().flatten().tolist() == batch.columns.tolist()


def test_sampled_softmax_trains_and_leaves_validation_as_it_was(config):
    config = replace(config, steps=15, epochs=9, micro_batches=2, batch_tokens=(512,) * 3)
    trainers = [train_gpt.Trainer(replace(config, softmax_samples=samples), train_gpt.World()) for samples in (0, 64)]
    validation = [trainer.validate(trainer.schedule.validation(0)) for trainer in trainers]
    assert validation[0] == validation[1]
    for trainer in trainers:
        for step in trainer.schedule:
            loss = trainer.step(step, trainer.loader.batches(step.index)).item()
    losses = [trainer.validate(trainer.schedule.validation(17)) for trainer in trainers]
    assert max(losses) < validation[0] - 1 and abs(losses[1] - losses[0]) < 0.1 and abs(loss - losses[1]) < 0.3
