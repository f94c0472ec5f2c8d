"""What earlier text says about the next token. All parts are off by default.

Preset `corpus` has guesses, and `sprint` has all three.

1. Guesses (`--near_match 1,2,4,8`). A token reads rows of the n-gram table for its last 2, 3, … tokens
   (kernels/ngrams). With guesses it reads one more row, for the token that followed when its last tokens came
   before in the same sequence. If matches of several lengths are found, the longest counts, and of its places
   the latest. The row depends on the guess and on the length of the match (`guess_rows`), so the model learns
   how far to trust each length. The rows, their exchange between ranks and their optimizer are those of the
   n-gram table. A token's guess depends on no later token.
2. Counts (`--retrieval 2,3`). Where the model is scored, p becomes (1 − s) p + s k/c, where s is 0.005, for
   each length of context in turn. The context occurs at c places in the training text, and at k of them the
   target follows (Jelinek and Mercer, 1980: interpolated n-grams). Training does not use the counts. The text
   is gathered on the clock, step by step and in the order of the micro-batches, so it is the same for any
   number of ranks; it is sorted on the clock when the model is to be scored.
   With `--retrieval 2,3` and s = 0.01 the loss is lower by 0.008 on `val`, 0.006 on `clean` and 0.009 on
   `fineweb`, for the weights of one run with a long n-gram table, and steps take as long
   (records/measuring.md). With a small table the loss is lower by 0.016, 0.007 and 0.014, measured on parts
   of the texts. There more than the whole gain on `clean` comes from trigrams with 1 to 9 places in the
   training text. Perhaps a row of the table learns too little from so few places.
3. States (`--states N`). Where the model is scored, what followed similar states of the last N training
   tokens has up to 27% of the probability (kNN-LM; datastore.py). The states are what the last layer's MLP
   reads, as training made them. After a whole run with six layers 160 M states lower the loss by 0.066 on
   `val`, 0.039 on `clean` and 0.060 on `fineweb`, on some 500,000 targets of each (seed 1454, 9eeae60).
   Counts beside them are worth 0.001 on `clean` and 0.005 on `val`.

- `matching.py`: earlier places inside a sequence, the longest match. The keys of the last tokens come
  from kernels/ngrams/hashing.py.
- `guesses.py`: `Guesses`, which rows tokens read.
- `counts.py`: `TextCounts`, the n-grams of the training text.
- `datastore.py`: `Datastore`, the states of the training text. `cells.py`: the kernel that puts states into
  cells. `neighbours.py`: the kernel that searches cells.
- `memory.py`: `TextMemory`, counts and states as one object.

Whose idea: a row for what followed a match in the document, and rows for what followed in earlier steps, are
open proposals to the public speedrun. The second saves 46% of the steps by its authors' figures, which we
have not checked. Here two such rows were worth 0.037 of loss on `val`, which repeats the training text, and
0.001 and 0.002 on `clean` and `fineweb`. 1c79697 is the last commit with these rows; counts in the output
take their place.

How often such a match was right (23 November 2026, 150 M tokens of earlier steps, the first 500,000 tokens of
each text, cut at 2,048; percent of the tokens with such a longest match and, in brackets, percent of these
whose next token is what followed):

    where              tokens         val            clean          fineweb
    in earlier steps   20             2.4 (97)       0.0 (–)        0.04 (94)
                       10 to 19       1.1 (78)       0.1 (28)       0.12 (58)
                        6 to 9        6.3 (34)       4.9 (23)       3.6 (22)
    in the sequence     8 or more     0.6 (76)       0.3 (76)       1.1 (77)
                        4 to 7        2.8 (46)       2.0 (44)       3.7 (52)
                        2 to 3       14.5 (28)      12.4 (27)      15.2 (30)
                        1            38.0 (12)      36.7 (11)      37.8 (13)

Of the first 524,288 tokens of `clean` 27, 33 and 34% have a longest match of 2, 3 and 4 or more tokens in
188 M training tokens (27 November 2026). The token after the match's latest place is right for 12, 14 and
18% of them.
"""
from kernels.ngrams.hashing import suffix_keys, suffix_keys_reference
from kernels.retrieval.counts import TextCounts
from kernels.retrieval.datastore import Datastore
from kernels.retrieval.guesses import Guesses
from kernels.retrieval.matching import guess_rows, near_guesses
from kernels.retrieval.memory import TextMemory
