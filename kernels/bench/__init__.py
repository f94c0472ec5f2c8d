"""Check every kernel against float64 and time it against PyTorch: `python -m kernels.bench --help`.

A kernel's module says what to run: its `examples("real", …)` are the shapes of training. In reading order:

- discover.py finds the examples of all kernel modules.
- timing.py checks and times one.
- results.py keeps what was measured (results.json: one row an example, with its own GPU, date, versions and
  commit)
  and writes the tables of kernels/README.md.
- figure.py draws the symmetric matmuls and Newton–Schulz over the size of the matrices.
- __main__.py is the command.
"""
