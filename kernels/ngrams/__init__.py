from kernels.ngrams.row_gradients import RowGradients, no_gradients
from kernels.ngrams.shared_gradient import NGramValues, share_values, share_values_reference
from kernels.ngrams.table import HASH, InFlight, NGrams, ngram_index, table_row_bytes

__all__ = ["HASH", "InFlight", "NGramValues", "NGrams", "RowGradients", "ngram_index", "no_gradients", "share_values", "share_values_reference", "table_row_bytes"]
