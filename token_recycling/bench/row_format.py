"""The format of a folder of measurements: what those who write rows and those who report on them agree on.

docs/benchmarks.md lists the keys of a row.
"""

from __future__ import annotations

VERSION = 1
"""Of the rows."""
ROWS, SETTINGS = "rows.jsonl", "settings.json"
"""The files of a folder."""
MODES = ("generate", "replay", "batch")
"""In the order in which a report shows them."""
BASELINE, REPLAY_BASELINE = BASELINES = "generate", "plain"
"""What speedups refer to: transformers' own decoding, and where that cannot run, plain decoding in our loop."""
HINDSIGHT = "oracle"
"""The name of the method that knows what will be accepted: a bound for others, and never the fastest itself."""
CLOCKS = {"wall": ("seconds", "total_seconds"), "processor": ("processor_seconds", "processor_seconds")}
"""The keys of decoding alone and of a whole call by what a report measures time with; by processor time there is the
whole call alone.
"""
