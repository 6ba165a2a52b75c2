"""Benchmarks of captured passes on an accelerator: `python -m benchmarks.gpu`, with `.grown` for whole outputs."""
