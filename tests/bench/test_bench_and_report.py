"""The command line from measurement to report, without stand-ins."""

import json

import pytest
from support.commandline import run


@pytest.mark.nightly
def test_bench_writes_the_report(tiny_model_dir, tmp_path):
    data, output = tmp_path / "data.jsonl", tmp_path / "out"
    lines = [{"text": "def add(a, b):\n    return a + b"}, {"prompt": "import os", "completion": "\nimport sys"}]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ("--max-new-tokens", 4, "--output", output)
    methods = ("--method", "prompt_lookup_hf", "--method", "recycling:tree=4")
    result = run("bench", tiny_model_dir, "--data", data, *methods, "--repeats", 2, *options)
    assert result.exit_code == 0, result.stderr
    text = (output / "report.md").read_text()
    assert "recycling (tree=4)" in text
    assert "transformers prompt lookup (10)" in text
    assert result.stdout.rstrip() == text.rstrip()
    for more in (("--method", "cold:recycling:tree=4"), ("--method", "recycling:tree=4", "--batch", 2)):
        result = run("bench", tiny_model_dir, "--data", data, *more, "--fresh", *options)
        assert result.exit_code == 0, result.stderr
