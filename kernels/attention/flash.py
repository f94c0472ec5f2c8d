"""softmax(scale · q kᵀ) v, causal, over a sliding window within each document: one function, four backends.

Each takes

    q, k (n, heads, qk_dim), v (n, heads, head_dim)     all documents one after another, bf16 on GPUs
    sequences                                           where each document starts and ends
    window                                              A token sees itself and `window` tokens before it.
    scale                                               of the scores
    gate (heads, channels) float32                      weights of gates of the output (`plain.py`), or None

and returns (n, heads, head_dim). `bounded` needs contiguous queries and keys whose norm is known.
`attention_reference` is the plain PyTorch form.

Forward / backward in µs without gates, 6 heads of 64 channels (values: 128), bf16, sequences of up to 2,048
tokens as in the records (torch 2.11, flash-attn-4 4.0.0b36 on an H200; bounded on an H100):
    32,768 tokens, window  128:  flash4  95 /   –     bounded  63 /   194
    98,304 tokens, window  640:  flash4 408 / 1,058   bounded 253 /   842
    98,304 tokens, window 1408:  flash4 468 / 1,219   bounded 328 / 1,070
Kernels before and after its main one take 181 µs of flash4's backward pass (98,304 tokens, in a step).
varlen took 1.8 to 1.9 times as long as flash4 (6 heads of 128, 49,152 tokens, window 1,408).
FlashAttention: arXiv 2205.14135; version 4, github.com/Dao-AILab/flash-attention.
"""
import os
from collections.abc import Callable
from functools import wraps
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.attention.bounded import CHANNELS, LARGEST, bounded_attention
from kernels.attention.plain import attention_reference, gated
from kernels.sequence import Sequences


def fit_tiles(interface: ModuleType) -> None:
    """Make FlashAttention-4 choose Hopper's tiles by the wider of q's and v's heads.

    Version 4.0.0b36 chooses by q's heads alone. For queries of 64 channels and values of 128 its tiles take
    240 KB of shared memory in the backward pass, where 227 exist, and spill registers in both passes. Tiles
    chosen by the wider heads spill nothing (compiled for sm_90a).
    """
    for name in ("_tile_size_fwd_sm90", "_tile_size_bwd_sm90"):
        choose = getattr(interface, name, None)
        if choose is not None and not hasattr(choose, "__wrapped__"):
            setattr(interface, name, by_the_wider(choose))


def by_the_wider(choose: Callable) -> Callable:
    @wraps(choose)
    def tiles(head_dim: int, head_dim_v: int, *more, **named):
        return choose(max(head_dim, head_dim_v), head_dim_v, *more, **named)
    return tiles


def import_flash4() -> None:
    """ImportError without FlashAttention-4. The variable lets it keep compiled kernels for the next start."""
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    import flash_attn.cute  # noqa: F401


def flash4_attention(
    q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, window: int, scale: float,
    gate: Tensor | None = None,
) -> Tensor:
    """FlashAttention-4; repeatable bit for bit where torch is asked for deterministic algorithms."""
    import_flash4()
    from flash_attn.cute import flash_attn_varlen_func, interface
    if q.size(-1) != v.size(-1):
        fit_tiles(interface)
    out = flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=sequences.bounds, cu_seqlens_k=sequences.bounds,
        max_seqlen_q=sequences.longest, max_seqlen_k=sequences.longest, softmax_scale=scale, causal=True,
        window_size=(window, 0),
        # Otherwise the gradient of q is summed in the order in which blocks happen to end.
        deterministic=torch.are_deterministic_algorithms_enabled())
    return gated(out[0] if isinstance(out, tuple) else out, q, gate)


def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, window: int, scale: float,
    gate: Tensor | None = None,
) -> Tensor:
    """PyTorch's own. It wants q, k and v of one width: narrower ones get zeros, which change no result."""
    from torch.nn.attention.varlen import varlen_attn
    wider = max(q.size(-1), v.size(-1))
    padded = (x if x.size(-1) == wider else F.pad(x, (0, wider - x.size(-1))) for x in (q, k, v))
    out = varlen_attn(
        *padded, sequences.bounds, sequences.bounds, sequences.longest, sequences.longest, scale=scale,
        window_size=(window, 0))
    return gated(out[..., :v.size(-1)], q, gate)


ATTENTION: dict[str, Callable[..., Tensor]] = {
    "bounded": bounded_attention,
    "flash4": flash4_attention,
    "varlen": varlen_attention,
    "plain": attention_reference,
}


def why_not(name: str, device: torch.device, dims: tuple[int, int] = (64, 128), scale: float = 0.15) -> str:
    """Why the backend `name` does not run on `device`; empty if it does.

    `dims`: the channels of a head's queries and of its values; `scale`: of the scores. Both default to the
    records'.
    """
    if name == "plain":
        return ""
    if device.type != "cuda":
        return "no GPU"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return "fused attention needs an Ampere GPU or newer"
    if name == "bounded" and not (set(dims) <= set(CHANNELS) and scale * dims[0] <= LARGEST):
        return (f"its heads have {', '.join(map(str, CHANNELS))} channels, "
                f"and attention_scale · qk_dim is at most {LARGEST:g}")
    if name == "flash4":
        if capability < (9, 0):
            return "FlashAttention-4 needs Hopper or newer"
        try:
            import_flash4()
        except ImportError as error:
            return f"FlashAttention-4 is not usable ({error}); `pip install --pre flash-attn-4`"
    return ""


def choose_attention(wanted: str, device: torch.device, *shape) -> tuple[str, str]:
    """The backend to use on `device`, and why it is not the fastest one (empty if it is).

    `wanted`: a name from `ATTENTION`, or "auto"; `shape`: the last arguments of `why_not`. "auto" takes
    "bounded" only on Hopper, where it was timed.
    """
    if wanted != "auto":
        return wanted, "as asked"
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
    note, names = "", [name for name in ATTENTION if hopper or name != "bounded"]   # the fastest first
    while reason := why_not(names[0], device, *shape):
        note = note or reason
        names.pop(0)
    return names[0], note
