"""Which tokens never follow which: against an encoder, on GPT-2's tokens, and in the loss of a model."""
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, TINY

import train_gpt
from data import canonical
from data.canonical import CONTRACTIONS, gpt2_pairs, impossible_pairs, kind
from data.classes import GPT2_SIZE, gpt2_tokens
from kernels import loss
from kernels.loss.cross_entropy import CAP, NEVER, SHIFT, WIDTH, set_bits
from kernels.ranks.collectives import Collectives
from records.run.settings import UserError

CPU = torch.device("cpu")
GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if GPU else ("cpu", torch.float32)
COLUMNS = 50_304


def encode(text: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """Byte-pair encoding of one word, by its definition."""
    parts = [bytes([byte]) for byte in text]
    while joins := [(ranks[a + b], i) for i, (a, b) in enumerate(zip(parts, parts[1:])) if a + b in ranks]:
        _, i = min(joins)
        parts[i:i + 2] = [parts[i] + parts[i + 1]]
    return parts


def learned(letters: str, joins: int, seed: int) -> list[bytes]:
    """A vocabulary that was learned from random text in which some letters come more often."""
    rng = random.Random(seed)
    text = [bytes([byte]) for byte in rng.choices(letters.encode(), range(1, len(letters) + 1), k=4000)]
    tokens = sorted({*text})
    for _ in range(joins):
        (a, b), _ = Counter(zip(text, text[1:])).most_common(1)[0]
        tokens.append(a + b)
        made, i = [], 0
        while i < len(text):
            both = text[i:i + 2] == [a, b]
            made.append(a + b if both else text[i])
            i += 1 + both
        text = made
    return list(dict.fromkeys(tokens))


@pytest.mark.parametrize("seed", range(3))
def test_pairs_are_those_that_the_encoder_never_writes(seed):
    """Every pair of two vocabularies that were learned; all texts are words of letters."""
    tokens = learned("abc", 40, seed) if seed else learned("abcdefgh", 60, seed)
    ranks = {token: rank for rank, token in enumerate(tokens)}
    columns = -(-(len(tokens) + 9) // 8) * 8
    bits = np.unpackbits(impossible_pairs(tokens, columns), axis=1, bitorder="little").astype(bool)
    wanted = np.array([[encode(a + b, ranks) != [a, b] for b in tokens] for a in tokens])
    assert 0.05 < wanted.mean() < 0.95 and np.array_equal(bits[:-1, :len(tokens)], wanted)
    assert not bits[:, len(tokens)].any() and not bits[-1, :len(tokens)].any()      # the start of a document
    assert bits[:, len(tokens) + 1:].all()                                          # no tokens


def test_of_which_kind_characters_are():
    words = {"a": "letter", " ß": "letter", "ا": "letter", "7": "number", "½": "number", " ": "blank",
             "\n": "space", "\u00a0": "space", "!": "other", "\u0301": "other"}
    assert {word: kind(word.encode(), last=True) for word in words} == words
    assert kind("é!".encode(), last=False) == "letter" and kind(" é".encode(), last=False) == "blank"
    assert kind("é".encode()[:1], last=True) == kind("é".encode()[1:], last=False) == "part"
    assert kind("é".encode()[:1], last=False) == "unknown"


@pytest.fixture(scope="module")
def never() -> np.ndarray:
    return gpt2_pairs(COLUMNS)


@pytest.mark.parametrize(("columns", "script"), [
    (16, "exit 1"), (24, f"head -c {3 * GPT2_SIZE} /dev/zero; exit 1"), (32, "head -c 9 /dev/zero")])
def test_without_another_process_this_one_works_the_pairs_out(tmp_path, monkeypatch, columns, script):
    """Where it fails, also behind its last byte, or writes too little. Asking again takes no time."""
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(canonical.sys, "executable", str(program))
    monkeypatch.setattr(canonical, "impossible_pairs", lambda tokens, size: [len(tokens), size])
    assert gpt2_pairs(columns) is gpt2_pairs(columns) and gpt2_pairs(columns) == [GPT2_SIZE - 1, columns]


def test_pairs_of_gpt2(never):
    tokens = gpt2_tokens()
    number = {token: i for i, token in enumerate(tokens)}
    assert len(tokens) == GPT2_SIZE - 1 and number[b" the"] == 262
    assert never.shape == (GPT2_SIZE, COLUMNS // 8)

    def follows(a: bytes, b: bytes) -> bool:
        return not never[number[a], number[b] >> 3] >> (number[b] & 7) & 1

    assert not follows(b"th", b"e") and not follows(b" ", b"the") and not follows(b"1", b"0")
    assert follows(b" the", b" cat") and follows(b" speed", b"runner") and follows(b"the", b".")
    assert all(follows(a, b"the") for a in CONTRACTIONS) and not follows(b"s", b"the"[:1])
    assert follows("é".encode()[:1], b"a")      # Nobody knows what stands there.
    assert 0.028 < np.bitwise_count(never[:-1, :len(tokens) // 8]).mean() / 8 < 0.0281


def test_texts_have_no_such_pair_and_the_encoder_would_write_others(never):
    """Of the project's own texts, and of one with all that the rule for words is difficult about."""
    tiktoken = pytest.importorskip("tiktoken")
    from tiktoken_ext.openai_public import r50k_pat_str
    tokens = gpt2_tokens()
    encoding = tiktoken.Encoding("gpt2", pat_str=r50k_pat_str, special_tokens={"<|endoftext|>": len(tokens)},
                                 mergeable_ranks={token: i for i, token in enumerate(tokens)})
    rng = random.Random(0)
    odd = ["it'sa 'sa ''s 'S can'tell they'red", "  two   blanks\n\n \n  lines\t\ttabs\u00a0 \u2003x \u00a0y",
           "½²٣4 a1b2 é e\u0301 ﬁ ß ǅ 汉字かな 한국 עברית ا\u064e 👩‍👩‍👧 …—“quoted”’s \ufeff\u200b <|endoftext|>",
           *("".join(map(chr, rng.choices([*[32, 39, 160] * 900, *range(33, 0x2fff)], k=400)))
             for _ in range(50)),
           *("".join(rng.choices("aest' \n.1é", k=400)) for _ in range(50)),
           # Symbols right before letters, both of which GPT-2 has in pieces.
           *("".join(chr(rng.choice(symbols)) + chr(rng.randrange(0x4e00, 0x9fff)) for _ in range(2000))
             for symbols in (range(0x1f300, 0x1f6ff), range(0x2700, 0x27bf), range(0x3000, 0x303f),
                             range(0xff01, 0xff5e)))]
    for text in [*odd, *(path.read_text() for path in (*ROOT.glob("*.md"), *ROOT.glob("data/*.py")))]:
        ids = np.array(encoding.encode(text, disallowed_special=()), np.int64)
        bits = never[ids[:-1], ids[1:] >> 3] >> (ids[1:] & 7) & 1
        assert not bits.any(), [tokens[i] for i in ids[np.flatnonzero(bits)[0]:][:2]]
    tried = 0
    for a in rng.sample(range(len(tokens)), 300):
        ruled_out = np.flatnonzero(np.unpackbits(never[a], bitorder="little")[:len(tokens)])
        for b in rng.sample(ruled_out.tolist(), min(5, len(ruled_out))):
            text = (tokens[a] + tokens[b]).decode(errors="ignore")
            if text.encode() == tokens[a] + tokens[b]:
                assert encoding.encode(text) != [a, b], (tokens[a], tokens[b])
                tried += 1
    assert tried > 500


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("head_loss", [loss.head_loss, loss.head_loss_reference])
def test_the_loss_gives_their_probability_to_the_others(head_loss, mixed):
    """Against a softmax in float64 over what is left. What is ruled out costs NEVER more, unless mixed."""
    torch.manual_seed(0)
    n, width, rows = 7, 16, 320
    x, head = (torch.randn(*shape, device=DEVICE).to(DTYPE) for shape in ((n, width), (rows, width)))
    targets = torch.randint(rows, (n,), dtype=torch.int32, device=DEVICE)
    targets[5] = -1
    never = torch.randint(256, (n, rows // 8), dtype=torch.uint8, device=DEVICE)
    for token in range(n):      # Of the scored targets only the fourth is ruled out.
        place = targets[token].clamp(min=0).item()
        byte = int(never[token, place // 8]) & ~(1 << place % 8) | (token == 3) << place % 8
        never[token, place // 8] = byte
    bits = set_bits(never, rows)
    scores = CAP * torch.sigmoid((x.double() @ head.double().T + SHIFT) / WIDTH)
    log_p = scores.masked_fill(bits, -NEVER).log_softmax(1)
    log_p = log_p.gather(1, targets.clamp(min=0).long()[:, None])[:, 0]
    share = torch.full((n,), 0.25 * mixed, dtype=torch.float64, device=DEVICE)
    other = torch.linspace(0.1, 0.7, n, dtype=torch.float64, device=DEVICE)
    wanted = -torch.logaddexp((1 - share).log() + log_p, (share * other).log()).masked_fill(targets < 0, 0)
    odds = (share * other / (1 - share)).log().float()
    mixture = loss.Mixture(odds, (1 - share).log().float()) if mixed else None
    first = torch.arange(n, device=DEVICE) == 0
    given = loss.Targets(targets, first, torch.ones(1, device=DEVICE), mixture, never)
    with torch.no_grad():
        found = head_loss(x, head, given, False)
    assert mixed and wanted[3] < 3 or wanted[3] > NEVER
    for value in found:
        assert value.item() == pytest.approx(wanted.sum().item(), rel=5e-3 if GPU else 1e-5)


def test_a_model_is_scored_with_it_and_trained_without():
    """Scores are better where the text is one that the encoder could have written; training's bits stay."""
    words = ["--preset", "cpu", *TINY, "--vocab_size", str(GPT2_SIZE), "--copy_channels", "16"]
    config = train_gpt.parse(words)[0]
    plain, masked = (train_gpt.GPT(replace(config, canonical=canonical), CPU, Collectives(1))
                     for canonical in (False, True))
    assert "never" not in masked.state_dict() and masked.never.bits.shape == (GPT2_SIZE, COLUMNS // 8)
    tokens = torch.tensor([50256, 1169, 3797, 3332, 319, 262, 2603, 13], dtype=torch.int32)    # the cat sat …
    none, cu_seqlens = tokens[:0], torch.tensor([0, 7], dtype=torch.int32)
    batch = train_gpt.Batch(tokens[:-1], tokens[1:], cu_seqlens, none, none, none, 7)
    step = train_gpt.Schedule(config).validation(1)
    for model in (plain, masked):
        torch.nn.init.normal_(model.head, std=0.5, generator=torch.Generator().manual_seed(1))
    assert torch.equal(plain(batch, step)[1], masked(batch, step)[1])
    with torch.no_grad():
        states = []
        ops = plain.ops
        plain.ops = ops._replace(
            head_loss=lambda x, *rest, **more: (states.append(x), ops.head_loss(x, *rest, **more))[1])
        before, after = plain(batch, step)[1].item(), masked(batch, step)[1].item()
        bits = set_bits(masked.never.behind(tokens[:-1]), config.padded_vocab)
        scores = CAP * torch.sigmoid((F.linear(states[0], plain.head).double() + SHIFT) / WIDTH)
        taken = scores.softmax(1).masked_fill(bits, 0).sum(1).log().sum().item()
    assert taken < -0.1 and plain.copy_head.weight is not None
    assert after < before and after == pytest.approx(before + taken, rel=0.02)


def test_a_rehearsal_does_not_wait(config, monkeypatch):
    """The warm-up goes through a score before the pairs are known. The first real one asks for them."""
    trainer = train_gpt.Trainer(config, train_gpt.World())
    trainer.model.never = never = canonical.Never(config.padded_vocab, CPU)
    monkeypatch.setattr(canonical, "gpt2_pairs", lambda columns: pytest.fail("waited"))
    monkeypatch.setattr(trainer, "step", lambda *_: None)
    trainer.rehearse()
    assert not never.known and not never.bits.any()
    pairs = np.zeros(never.bits.shape, np.uint8)
    pairs[:, 0] = 1
    monkeypatch.setattr(canonical, "gpt2_pairs", lambda columns: pairs)
    trainer.validate(trainer.schedule.validation(1))
    assert never.known and never.bits[:, 0].all()


def test_only_for_gpt2():
    with pytest.raises(UserError, match="only of GPT-2's 50257 tokens is known which never follow"):
        train_gpt.parse(["--preset", "cpu", "--canonical", "true"])
