"""From token ids to the rows that enter the first layer, and every other look-up in a table of rows.

In reading order:

- `rows.py`: `lookup`, rows of a table by their numbers, and the sorted numbers, which its gradient needs.
- `row_sums.py`: the gradient of a look-up. It sums over equal rows and adds to only the rows that were read.
- `smearing.py`: `smear`, which gives each token's embedding a gated share of the previous token's embedding.

The token embedding, the head's rows of a sampled softmax and the n-gram table (`kernels/ngrams`) are all read
by `lookup`. Value embeddings are read where they are used (`lookup_later`).
"""
from kernels.embedding.row_sums import add_rows, add_rows_reference
from kernels.embedding.rows import (
    RowOrder,
    lookup,
    lookup_later,
    lookup_reference,
    sort_beside,
    sort_rows,
    take_rows,
    unsorted,
)
from kernels.embedding.smearing import smear, smear_reference
