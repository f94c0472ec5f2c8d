"""What tokens have in common by their spelling, and that the rows of n-grams of classes follow it."""
from types import SimpleNamespace

import numpy as np
import torch
from conftest import TINY

import train_gpt
from data.classes import GPT2_SIZE, gpt2_classes, gpt2_features, gpt2_tokens, roots, token_features
from kernels import ngrams
from kernels.ranks.collectives import Collectives

WORDS = [b"the", b" The", b"THE", "É".encode(), b"e", b" ", b"", b"\xff", b"\xc3", b"the ", b"ing", b"-"]


def test_which_tokens_share_a_class():
    assert token_features(WORDS)[:, 0].tolist() == [0, 0, 0, 3, 3, 5, 6, 7, 8, 0, 10, 11]


def test_which_tokens_share_a_form():
    words = [b" nation", b"Nations", b" nationally", b" stations", b" ties", b"ties", b" cats", b" 12",
             b" 99", b"12", b" USA", b" U", b" (", b" s", b"it's"]
    assert token_features(words)[:, 2].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 7, 9, 10, 11, 12, 6, 14]
    together = token_features([b" nation", b" station", b" cats", b" dogs", b" Dogs", b" ab", b" cab", b"ab"])
    assert together[:, 2].tolist() == [0, 1, 2, 2, 4, 5, 5, 7]


def test_roots_are_what_the_encoder_began_a_token_with():
    """Its last join in "nationals" is of "national" and "s", in "national" of "nation" and "al"."""
    letters = [bytes([letter]) for letter in b"alntiosN"]
    joined = [b"io", b"ion", b"ti", b"na", b"tion", b"nation", b"Na", b"Nation", b"al", b"national",
              b"nationals", b"Nationals", b"als", b"alone"]
    tokens = letters + joined
    grown = {token: tokens[root] for token, root in zip(tokens, roots(tokens)) if tokens[root] != token}
    assert grown == {b"national": b"nation", b"nationals": b"nation", b"Nationals": b"Nation"}
    features = token_features(tokens)[:, 1]
    assert {tokens[i] for i in np.flatnonzero(features == tokens.index(b"nation"))} == {
        b"nation", b"Nation", b"national", b"nationals", b"Nationals"}
    # Two letters are no root, and what is no text is its own.
    assert all(features[tokens.index(token)] == tokens.index(token) for token in (b"ion", b"tion", b"als"))
    bytes_of_one = [b"\xe2", b"\x82", b"\xac", b"\xe2\x82", "€".encode()]
    assert token_features(bytes_of_one)[:, 1].tolist() == [*range(5)]


def test_roots_of_gpt2():
    tokens, features = gpt2_tokens(), gpt2_features()
    root = {token: features[tokens.index(token), 1] for token in (
        b" walk", b"Walk", b" walking", b" walked", b" Walker", b" govern", b" governments", b" talk")}
    assert len({root[token] for token in (b" walk", b"Walk", b" walking", b" walked", b" Walker")}) == 1
    assert root[b" govern"] == root[b" governments"] != root[b" walk"] != root[b" talk"]


def test_the_features_of_gpt2_that_are_kept():
    features, classes = gpt2_features(), gpt2_classes()
    assert features.shape == (GPT2_SIZE, 3) and features.dtype == classes.dtype == np.int32
    assert [len(np.unique(feature)) for feature in features.T] == [32_993, 15_722, 3_946]
    for feature in features.T:
        assert (feature <= np.arange(GPT2_SIZE)).all() and (feature[feature] == feature).all()
        assert (feature == 50256).sum() == 1
    assert classes[262] == classes[464] == classes[383]         # " the", "The" and " The"
    made = token_features(gpt2_tokens())        # The file has the features that the code makes.
    assert np.array_equal(made, features[:-1])


def test_rows_of_classes():
    """Equal classes find equal rows, and without classes rows are those of the tokens."""
    tokens, starts = torch.tensor([1, 2, 3, 1, 5, 3]), torch.tensor([True, False, False, True, False, False])
    classes = torch.tensor([0, 1, 2, 3, 4, 2], dtype=torch.int32)
    rows = ngrams.ngram_index_reference(tokens, starts, (2, 3), 10_007, classes)
    of_classes = ngrams.ngram_index_reference(classes[tokens], starts, (2, 3), 10_007)
    assert torch.equal(rows[:6], rows[6:]) and torch.equal(rows, of_classes)
    plain = ngrams.ngram_index_reference(tokens, starts, (2, 3), 10_007)
    assert not torch.equal(plain[:6], plain[6:])
    table = ngrams.NGrams((2, 3), 10_007, 16, 1, Collectives(1), torch.float32, torch.device("cpu"), classes)
    table.find_by(ngrams.ngram_index_reference)
    batch = SimpleNamespace(tokens=tokens, cu_seqlens=torch.tensor([0, 3, 6]))
    assert torch.equal(table.find(batch), rows)


def test_all_rows_are_used_and_a_missing_token_is_none():
    """Token 0 is another one than none before the start of a sequence, and every row can be found."""
    one, two = (ngrams.ngram_index_reference(tokens, torch.arange(len(tokens)) == 0, (2,), 2 ** 30)
                for tokens in map(torch.tensor, ([5], [0, 5])))
    assert one[-1] != two[-1]
    rows = ngrams.ngram_index_reference(torch.arange(200), torch.zeros(200, dtype=torch.bool), (2,), 7)
    assert set(rows.tolist()) == set(range(7))


def test_a_model_takes_the_classes_of_gpt2():
    words = ["--preset", "cpu", *TINY, "--vocab_size", "50257", "--ngram_classes", "true"]
    model = train_gpt.GPT(train_gpt.parse(words)[0], torch.device("cpu"), Collectives(1))
    assert torch.equal(model.ngrams.classes, torch.from_numpy(gpt2_classes()))
    assert "ngrams.classes" not in model.state_dict()
