"""Fused GPU twins in Triton. Importing a module here imports triton: `finback.kernels` does it when one is used."""
