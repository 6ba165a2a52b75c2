"""The format of a folder of measurements, shared by the code that writes rows and the report.

docs/benchmarks.md lists the keys of a row.
"""

from __future__ import annotations

VERSION = 1
"""Format version of rows."""
ROWS, SETTINGS = "rows.jsonl", "settings.json"
"""The files of a folder."""
MODES = ("generate", "replay", "batch")
"""In the order of a report."""
BASELINE, REPLAY_BASELINE = BASELINES = "generate", "plain"
"""What speedups refer to: transformers' own decoding, and in replay plain decoding in our loop."""
HINDSIGHT = "oracle"
"""The method that knows what will be accepted: a bound, never ranked as the fastest."""
CLOCKS = {"wall": ("seconds", "total_seconds"), "processor": ("processor_seconds", "processor_seconds")}
"""Keys of decoding time and of whole calls for each clock; processor time is known of whole calls only."""
