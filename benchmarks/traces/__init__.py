"""Recorded conversations and edits, replayed: `python -m benchmarks.traces`."""
