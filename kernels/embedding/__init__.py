from kernels.embedding.rows import (
    RowOrder,
    already_sorted,
    lookup,
    lookup_reference,
    sort_beside,
    sort_rows,
    unsorted,
)
from kernels.embedding.smearing import smear, smear_reference

__all__ = ["RowOrder", "already_sorted", "lookup", "lookup_reference", "smear", "smear_reference", "sort_beside", "sort_rows", "unsorted"]
