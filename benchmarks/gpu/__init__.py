"""What the fast path is worth on an accelerator: `python -m benchmarks.gpu`, and `.grown` for whole texts."""
