"""The model for the library transformers, in plain PyTorch and one file: `use.export` puts it beside weights.

The project's own model is `GPT` in train_gpt.py, which says why each part is there and whose idea it is. A
test compares the logits of both. Here the learned scales of attention's matrices are multiplied into the
matrices. A token attends only to tokens of its own document, which begins at a start token. So batches may be
padded on either side with the start token, and no attention mask is needed.
"""
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


class SpeedrunConfig(PretrainedConfig):
    """What `use.export` writes into config.json: sizes, and in `layers` what each layer has."""
    model_type = "readable_speedrun"


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.size(-1),), eps=torch.finfo(torch.float32).eps)


def previous(x: Tensor, is_start: Tensor) -> Tensor:
    """x (batch, n, …) of the token before; zero where a document starts, is_start (batch, n)."""
    before = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)
    return before.masked_fill(is_start.view(*is_start.shape, *[1] * (x.dim() - 2)), 0)


class Layer(nn.Module):
    """Attention and an MLP; `shape` is an entry of `SpeedrunConfig.layers`."""

    def __init__(self, config: SpeedrunConfig, shape: dict):
        super().__init__()
        self.config, self.shape, width = config, shape, config.width

        def matrix(*size: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*size))
        self.qkv = matrix(config.heads * (2 * config.qk_dim + config.head_dim), width)
        self.out, self.scales = matrix(width, config.heads * config.head_dim), matrix(2)
        self.mlp_in, self.mlp_out = matrix(4 * width, width), matrix(4 * width, width)
        if shape["values"]:
            self.values = matrix(config.padded_vocab, config.heads * config.head_dim)
            self.gate = matrix(config.heads, config.gate_channels)
        if config.attention_gate_channels:
            self.attention_gate = matrix(config.heads, config.attention_gate_channels)
        if config.ngrams:
            self.ngram_scale = matrix(len(config.ngrams))

    def attend(self, x: Tensor, tokens: Tensor, age: Tensor, position: tuple, rows: Tensor | None) -> Tensor:
        """Attention's update from the normed stream x (batch, n, width); `rows` (batch, n, k, head_dim)."""
        config, dims = self.config, (self.config.qk_dim, self.config.qk_dim, self.config.head_dim)
        parts = F.linear(x, self.qkv).split([config.heads * dim for dim in dims], -1)
        q, k, v = (part.unflatten(-1, (config.heads, dim)) for part, dim in zip(parts, dims))
        q, k = (self.rotate(norm(part), *position) for part in (q, k))
        if self.shape["key_offset"]:
            turned = 2 * position[0].shape[-1]
            k = torch.cat([k[..., :turned], previous(k[..., turned:], age == 0)], -1)
        if self.shape["values"]:
            extra, half = F.embedding(tokens, self.values), config.gate_channels // 2
            seen = torch.cat([x[..., :half], extra[..., :half]], -1)
            v = v + 2 * torch.sigmoid(F.linear(seen, self.gate))[..., None] * extra.view_as(v)
        if rows is not None:
            count = rows.shape[2]
            v = torch.cat([v[:, :, :count] + self.ngram_scale[:, None] * rows, v[:, :, count:]], 2)
        at = torch.arange(x.shape[1], device=x.device)
        distance = at[:, None] - at
        mask = (distance >= 0) & (distance <= age[..., None].clamp(max=self.shape["window"]))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None], scale=config.attention_scale)
        if config.attention_gate_channels:
            seen = q[..., config.qk_dim - config.attention_gate_channels:]
            y = y * 2 * torch.sigmoid((seen * self.attention_gate[:, None]).sum(-1, keepdim=True))
        return F.linear(y.transpose(1, 2).flatten(2), self.out)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        r = cos.shape[-1]
        a, b, rest = x[..., :r], x[..., r:2 * r], x[..., 2 * r:]
        return torch.cat([a * cos - b * sin, a * sin + b * cos, rest], -1)

    def forward(self, x: Tensor, seen: Tensor, *inputs) -> Tensor:
        """The residual stream after this layer, from x before it and `seen`, which attention reads."""
        x = self.scales[0] * (x + self.attend(norm(seen), *inputs))
        return self.scales[1] * x + F.relu(F.linear(norm(x), self.mlp_in)).square() @ self.mlp_out


class CopyHead(nn.Module):
    """Gives part of the next token's probability to tokens that followed similar states in the document."""

    def __init__(self, config: SpeedrunConfig):
        super().__init__()
        self.scale = config.copy_scale
        self.weight = nn.Parameter(torch.empty(2 * config.copy_channels, config.width))
        self.gate, self.bias = (nn.Parameter(torch.empty(n)) for n in (config.copy_channels, 1))

    def forward(self, x: Tensor, logits: Tensor, tokens: Tensor, age: Tensor) -> Tensor:
        """Logarithms (batch, n, vocabulary) of the sum of copied probabilities and those of `logits`.

        x (batch, n, width) is the input of the head; a token sees the `age` (batch, n) tokens before it.
        """
        q, k = map(norm, F.linear(x, self.weight).chunk(2, -1))
        at = torch.arange(x.shape[1], device=x.device)
        distance = at[:, None] - at
        earlier = (distance > 0) & (distance <= age[..., None])
        scores = (self.scale * q @ k.mT).masked_fill(~earlier, -torch.inf)
        rest = F.linear(q, self.gate[None], self.bias)              # the score of not copying
        shares = torch.cat([scores, rest], -1).softmax(-1)
        followers = tokens.roll(-1, 1)[:, None].expand_as(scores)   # Nothing points at the last.
        alone = logits.softmax(-1) * shares[..., -1:]
        return alone.scatter_add(2, followers, shares[..., :-1]).log()


class SpeedrunForCausalLM(PreTrainedModel, GenerationMixin):
    """Logits of the next token. `generate` reads the whole text again for every token."""
    config_class = SpeedrunConfig

    def __init__(self, config: SpeedrunConfig):
        super().__init__(config)
        self.head = nn.Parameter(torch.empty(config.padded_vocab, config.width))     # the embedding, too
        self.scalars = nn.Parameter(torch.empty(2))
        self.smear_gate = nn.Parameter(torch.empty(config.gate_channels)) if config.smear else None
        self.copy_head = CopyHead(config) if config.copy_channels else None
        self.layers = nn.ModuleList(Layer(config, shape) for shape in config.layers)
        turned = config.max_position_embeddings, config.rotary
        self.register_buffer("cos", torch.empty(*turned))
        self.register_buffer("sin", torch.empty(*turned))
        if config.ngrams:
            self.register_buffer("ngram_numbers", torch.empty(config.ngram_written, dtype=torch.int32))
            self.ngram_rows = nn.Parameter(torch.empty(config.ngram_written, config.head_dim))
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Weights come from a run."""

    def rows(self, tokens: Tensor, is_start: Tensor) -> Tensor | None:
        """The rows (batch, n, k, head_dim) of the n-grams that end at each token; zero if never written."""
        if not self.config.ngrams:
            return None
        token, index, found = tokens + 1, 0, []
        for factor in self.config.ngram_hash[:max(self.config.ngrams)]:
            index = token * factor ^ index
            found.append(index)
            token = previous(token, is_start)
        wanted = torch.stack([found[n - 1] % self.config.ngram_count for n in self.config.ngrams], 2).int()
        place = torch.searchsorted(self.ngram_numbers, wanted).clamp(max=len(self.ngram_numbers) - 1)
        return F.embedding(place, self.ngram_rows) * (self.ngram_numbers[place] == wanted)[..., None]

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **_) -> CausalLMOutput:
        """Each row of `input_ids` (batch, n) begins with the start token; `labels` are like them, or -100.

        As in training the loss includes the logits of the vocabulary's padding, which are not returned.
        """
        config, n = self.config, input_ids.shape[1]
        if n > len(self.cos):
            raise ValueError(f"{n} tokens, the model takes {len(self.cos)}")
        at = torch.arange(n, device=input_ids.device)
        is_start = (input_ids == config.bos_token_id) | (at == 0)
        age = at - torch.where(is_start, at, 0).cummax(1).values
        position, rows = (self.cos[:n, None], self.sin[:n, None]), self.rows(input_ids, is_start)
        x = norm(F.embedding(input_ids, self.head))
        if self.smear_gate is not None:
            mix = self.scalars[0] * torch.sigmoid(x[..., :len(self.smear_gate)] @ self.smear_gate)
            x = norm(x + mix[..., None] * previous(x, is_start))
        streams = [x]
        for layer in self.layers:
            seen = streams[layer.shape["source"]]
            streams.append(layer(streams[-1], seen, input_ids, age, position, rows))
        x = streams[-1]
        if config.backout is not None:
            x = x - self.scalars[1] * streams[config.backout]
        x, (cap, shift, width) = norm(x), config.softcap
        logits = cap * torch.sigmoid((F.linear(x, self.head).float() + shift) / width)
        if self.copy_head is not None:
            logits = self.copy_head(x, logits, input_ids, age)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss, logits=logits[..., :config.vocab_size])
