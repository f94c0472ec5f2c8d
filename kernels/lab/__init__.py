"""A study of Newton–Schulz, for people who change it. Training does not need this folder.

- record_momentum.py: saves the matrices that a training run orthogonalises.
- polar_error.py: how far from the polar factor Newton–Schulz leaves these and made-up ones
  (polar_error.json, which kernels/README.md shows).
"""
