"""Triton kernels and their launchers; see README.md. Importing this does not import triton."""
