"""What tokens have in common by their spelling, and that the rows of n-grams of classes follow it."""
import numpy as np
import torch
from conftest import TINY

import train_gpt
from data.classes import GPT2_SIZE, gpt2_classes, gpt2_features, gpt2_tokens, token_features
from kernels import ngrams
from kernels.ranks.collectives import Collectives

WORDS = [b"the", b" The", b"THE", "É".encode(), b"e", b" ", b"", b"\xff", b"\xc3", b"the ", b"ing", b"-"]


def test_which_tokens_share_a_class():
    assert token_features(WORDS)[:, 0].tolist() == [0, 0, 0, 3, 3, 5, 6, 7, 8, 0, 10, 11]


def test_which_tokens_share_a_stem_or_a_form():
    words = [b" nation", b"Nations", b" nationally", b" stations", b" ties", b"ties", b" cats", b" 12",
             b" 99", b"12", b" USA", b" U", b" (", b" s", b"it's"]
    _, stems, forms = token_features(words).T
    assert stems.tolist() == [0, 0, 2, 3, 4, 4, 6, 7, 8, 7, 10, 11, 12, 13, 14]
    assert forms.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 7, 9, 10, 11, 12, 6, 14]
    together = token_features([b" nation", b" station", b" cats", b" dogs", b" Dogs", b" ab", b" cab", b"ab"])
    assert together[:, 2].tolist() == [0, 1, 2, 2, 4, 5, 5, 7]
    assert together[:, 1].tolist() == [0, 1, 2, 3, 3, 5, 6, 5]


def test_the_features_of_gpt2_that_are_kept():
    features, classes = gpt2_features(), gpt2_classes()
    assert features.shape == (GPT2_SIZE, 3) and features.dtype == classes.dtype == np.int32
    assert [len(np.unique(feature)) for feature in features.T] == [32_993, 21_670, 3_946]
    for feature in features.T:
        assert (feature <= np.arange(GPT2_SIZE)).all() and (feature[feature] == feature).all()
        assert (feature == 50256).sum() == 1
    assert classes[262] == classes[464] == classes[383]         # " the", "The" and " The"
    some = slice(20_000, 20_400)
    assert len(np.unique(token_features(gpt2_tokens()[some])[:, 1])) == len(np.unique(features[some, 1]))


def test_rows_of_classes():
    """Equal classes find equal rows, and without classes rows are those of the tokens."""
    tokens, starts = torch.tensor([1, 2, 3, 1, 5, 3]), torch.tensor([True, False, False, True, False, False])
    classes = torch.tensor([0, 1, 2, 3, 4, 2], dtype=torch.int32)
    rows = ngrams.ngram_index(tokens, starts, (2, 3), 10_007, classes)
    of_classes = ngrams.ngram_index(classes[tokens], starts, (2, 3), 10_007)
    assert torch.equal(rows[:6], rows[6:]) and torch.equal(rows, of_classes)
    plain = ngrams.ngram_index(tokens, starts, (2, 3), 10_007)
    assert not torch.equal(plain[:6], plain[6:])
    table = ngrams.NGrams((2, 3), 10_007, 16, 1, Collectives(1), torch.float32, torch.device("cpu"), classes)
    assert torch.equal(table.index(ngrams.ngram_index, tokens, starts), rows)


def test_all_rows_are_used_and_a_missing_token_is_none():
    """Token 0 is another one than none before the start of a sequence, and every row can be found."""
    one, two = (ngrams.ngram_index(torch.tensor(tokens), torch.arange(len(tokens)) == 0, (2,), 2 ** 30)
                for tokens in ([5], [0, 5]))
    assert one[-1] != two[-1]
    rows = ngrams.ngram_index(torch.arange(200), torch.zeros(200, dtype=torch.bool), (2,), 7)
    assert set(rows.tolist()) == set(range(7))


def test_a_model_takes_the_classes_of_gpt2():
    words = ["--preset", "cpu", *TINY, "--vocab_size", "50257", "--ngram_classes", "true"]
    model = train_gpt.GPT(train_gpt.parse(words)[0], torch.device("cpu"), Collectives(1))
    assert torch.equal(model.ngrams.classes, torch.from_numpy(gpt2_classes()))
    assert "ngrams.classes" not in model.state_dict()
