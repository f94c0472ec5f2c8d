"""The hashed table of n-grams: rows for the last 2, 3, 4 and 5 tokens, added to the values of single heads.

Most of the model's parameters are here. README.md explains what the table is, costs and brings. In reading
order:

- `hashing.py`: `ngram_index`, which rows a token's last tokens name.
- `table.py`: `NGrams`, the model's module. It looks these rows up and sends them off.
- `exchange.py`: every rank holds some columns of every row; an all-to-all makes rows whole.
- `shared_gradient.py`: all layers add the same rows to their values. It sums the gradient over the layers.
- `row_gradients.py`: the table's gradient, of only the rows that were read.

The update of these rows is `kernels/optimizer/sparse_adam.py`.
"""
from kernels.ngrams.exchange import ColumnExchange, parts_of_rows, whole_rows
from kernels.ngrams.hashing import HASH, ngram_index, ngram_index_reference
from kernels.ngrams.row_gradients import RowGradients, enlist, enlist_reference, no_gradients
from kernels.ngrams.shared_gradient import NGramValues, share_values, share_values_reference
from kernels.ngrams.table import InFlight, NGrams, TableState
