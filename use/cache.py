"""A key-value cache: the model reads a few new tokens, and keeps keys and values of the tokens before them.

`Reader` runs `GPT.forward` as it is, with three operations exchanged: the one that makes queries, keys and
values also remembers keys and values; attention reads the remembered ones; the head gives logits, not a loss.
Beside attention three parts look back from a token: the smear (one token), the n-grams (some tokens) and the
key offset (one token). For the smear and the n-grams a few earlier tokens are read again with the new ones.
For the key offset the other half of the newest key is remembered too.

Two further parts that a model may have look back over the whole document. The rows of near matches are found
anew from all tokens that were read. The copy head's keys are remembered; the copied probability goes into the
logits, which are then logarithms of probabilities.
"""
import torch
import torch.nn.functional as F
from torch import Tensor

from data.loader import Batch
from kernels import loss
from kernels.attention import HeadShape, Positions
from kernels.attention.plain import gated
from kernels.sequence import Sequences
from use.model import Saved, logits

PIECE = 512     # tokens of a prompt that are read at a time; memory grows with them and the window


class Reader:
    """Several samples of one length, which read the same number of tokens at a time.

    The model must run in plain PyTorch (`use.model.PLAIN`), and from now on belongs to the reader.
    """

    def __init__(self, saved: Saved):
        self.model, self.step, config = saved.model, saved.step, saved.model.config
        self.cos, self.sin, _ = self.model.rotary[self.step.windows[1] * config.window_block]
        self.start, self.config = config.document_start, config
        self.again = max((*config.ngrams, 2)) - 1       # tokens before the new ones that are read again
        self.tokens = torch.empty(1, 0, dtype=torch.long, device=self.model.device)     # (samples, read)
        self.age = self.tokens                          # of each token: how many since its document's start
        # Of each layer: keys, values, and the other half of the newest key.
        self.past: list[tuple[Tensor, ...]] = []
        # The copy head's keys, (samples, read, channels).
        self.copied = torch.empty(1, 0, config.copy_channels, device=self.model.device)
        self.model.never = None         # A prompt may end inside a word, where any token may follow.
        guesses = self.model.ngrams.guesses
        self.qkv, self.rows = self.model.ops.qkv, guesses.rows
        self.model.attention, guesses.rows = self.attend, self.guess
        self.model.ops = self.model.ops._replace(
            qkv=self.remember, pointer_sums=self.point, head_loss=self.last_logits)

    def spread(self, samples: int) -> None:
        """From now on read `samples` samples. All of them have read the tokens that were read so far."""
        self.tokens, self.age = (x.expand(samples, -1) for x in (self.tokens, self.age))
        self.copied = self.copied.expand(samples, -1, -1)
        self.past = [tuple(x.expand(samples, *x.shape[1:]) for x in layer) for layer in self.past]

    @torch.no_grad()
    def read(self, tokens: Tensor) -> Tensor:
        """Logits (samples, n, padded vocabulary) after each of the next tokens (samples, n)."""
        if tokens.shape[1] > PIECE:
            return torch.cat([self.read(piece) for piece in tokens.split(PIECE, 1)], 1)
        before, n = self.tokens.shape[1], tokens.shape[1]
        if before + n > len(self.cos):
            raise ValueError(f"{before + n} tokens, the reader was made for {len(self.cos)}")
        self.new, self.layer = n, 0
        self.tokens = torch.cat([self.tokens, tokens], 1)
        at = torch.arange(before, before + n, device=tokens.device)
        started = torch.where((tokens == self.start) | (at == 0), at, -1)
        if before:
            started[:, 0] = torch.maximum(started[:, 0], before - 1 - self.age[:, -1])
        self.age = torch.cat([self.age, at - started.cummax(1).values], 1)
        self.first = max(before - self.again, 0)
        rows = self.tokens[:, self.first:]
        starts = rows == self.start
        starts[:, 0] = True
        flat, cu_seqlens = rows.flatten().int(), starts.flatten().nonzero()[:, 0].int()
        cu_seqlens = torch.cat([cu_seqlens, cu_seqlens.new_tensor([len(flat)])])
        batch = Batch(flat, torch.full_like(flat, -1), cu_seqlens, *[flat[:0]] * 3, rows.shape[1])
        return self.model(batch, self.step)

    def of_new(self, x: Tensor) -> Tensor:
        """(samples, new, …) of x (samples · (again + new), …)."""
        return x.unflatten(0, (len(self.tokens), -1))[:, -self.new:]

    def remember(self, x, projection, positions, value_rows, ngram_values, shape: HeadShape) -> tuple:
        """Queries (n, heads, qk_dim); keys and values (samples, remembered and new, heads, …)."""
        samples, here = len(self.tokens), slice(self.first, self.tokens.shape[1])
        cos, sin = (table[here].repeat(samples, 1) for table in (self.cos, self.sin))
        q, k, v = self.qkv(x, projection, Positions(cos, sin, positions.is_start), value_rows, ngram_values,
                           shape._replace(key_offset=False))
        k, v, rotary = self.of_new(k), self.of_new(v), 2 * cos.shape[1]
        empty = k[:, :0], v[:, :0], torch.zeros_like(k[:, :1, :, rotary:])
        keys, values, other = self.past[self.layer] if self.past[self.layer:] else empty
        other = torch.cat([other, k[..., rotary:]], 1)
        if shape.key_offset:
            is_start = (self.age[:, -self.new:] == 0)[..., None, None]
            k = torch.cat([k[..., :rotary], other[:, :-1].masked_fill(is_start, 0)], -1)
        keys, values = torch.cat([keys, k], 1), torch.cat([values, v], 1)
        reach = max(self.step.windows) * self.config.window_block
        self.past[self.layer:self.layer + 1] = [(keys[:, -reach:], values[:, -reach:], other[:, -1:])]
        self.layer += 1
        return q, keys, values

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, sequences: Sequences, window: int,
               scale: float, gate: Tensor | None) -> Tensor:
        """Attention as in kernels/attention/flash.py; the output of tokens that are read again is zero."""
        queries = self.of_new(q)
        newest = torch.arange(keys.shape[1], device=q.device) - (keys.shape[1] - self.new)
        distance = torch.arange(self.new, device=q.device)[:, None] - newest
        reach = self.age[:, -self.new:, None].clamp(max=window)
        mask = (distance >= 0) & (distance <= reach)                # (samples, new, keys)
        heads_first = (x.transpose(1, 2) for x in (queries, keys, values))
        y = F.scaled_dot_product_attention(*heads_first, attn_mask=mask[:, None], scale=scale)
        out = y.new_zeros(len(self.tokens), len(q) // len(self.tokens), *values.shape[2:])
        out[:, -self.new:] = y.transpose(1, 2)
        return gated(out.flatten(0, 1), q, gate)

    def guess(self, tokens: Tensor, is_start: Tensor, count: int) -> Tensor:
        """As `Guesses.rows` on all tokens read so far; returns rows of tokens read again or new."""
        rows = self.rows(self.tokens.flatten(), (self.age == 0).flatten(), count)
        return rows.unflatten(0, self.tokens.shape)[:, self.first:].flatten(0, 1)

    def point(self, q: Tensor, k: Tensor, tokens: Tensor, targets: Tensor, sequences: Sequences,
              scale: float) -> tuple:
        """As `pointer_sums`, with the keys of earlier tokens. `pointed` gets the share of every next token.

        The sums of tokens that are read again are -inf.
        """
        self.copied = torch.cat([self.copied, self.of_new(k).float()], 1)
        scores = scale * self.of_new(q).float() @ self.copied[:, :-1].mT
        newest = torch.arange(scores.shape[2], device=q.device) - (self.tokens.shape[1] - self.new)
        distance = torch.arange(self.new, device=q.device)[:, None] - newest
        earlier = (distance > 0) & (distance <= self.age[:, -self.new:, None])
        scores = scores.masked_fill(~earlier, -torch.inf)
        followers = self.tokens[:, None, 1:].expand_as(scores)
        every = scores.logsumexp(2, keepdim=True)
        share = (scores - every).exp().masked_fill(~earlier, 0)
        nothing = share.new_zeros(*share.shape[:2], self.config.padded_vocab)
        self.pointed = nothing.scatter_add(2, followers, share)
        sums = every.new_full((len(self.tokens), len(q) // len(self.tokens)), -torch.inf)
        sums[:, -self.new:] = every[..., 0]
        return sums.flatten(), sums.flatten()

    def last_logits(self, x: Tensor, head: Tensor, wanted: loss.Targets, *_, **__) -> Tensor:
        alone = logits(self.of_new(x).flatten(0, 1), head).unflatten(0, (-1, self.new))
        if wanted.mixture is None:
            return alone
        log_rest = self.of_new(wanted.mixture.log_rest)[..., None]
        copied = -log_rest.expm1() * self.pointed       # 1 − e^(log (1 − a)) is a.
        return torch.logaddexp(alone.log_softmax(2) + log_rest, copied.log())
