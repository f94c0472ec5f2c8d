"""Studies of the kernels, for people who change them. Training does not need this folder.

- triples.py: choices of Newton–Schulz's coefficients on made-up spectra, in float64 on a CPU.
- record_momentum.py: saves the matrices that a training run orthogonalises.
- polar_error.py: how far from the polar factor Newton–Schulz leaves these and made-up ones
  (polar_error.json).
- stress.py: thousands of orthogonalisations, each checked; or every kernel on odd shapes, for
  compute-sanitizer.
- figures/: the figures of kernels/README.md, drawn by polar_error.py and kernels/bench.
"""
