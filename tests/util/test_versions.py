"""Supported releases, messages outside of the range, and substitutes for classes that a release lacks."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from support.releases import needs
from transformers import LlamaConfig

from token_recycling._util.versions import SUPPORTED, outside
from token_recycling.model import compat as differences

pytestmark = pytest.mark.core

LACKING = [
    "DummyLayer",
    "DynamicIndexedLayer",
    "StaticIndexedLayer",
    "LinearAttentionLayer",
    "LinearAttentionCacheLayerMixin",
    "MtpModel",
    "MtpCache",
    "DFlashTokenCandidateGenerator",
]


def as_of(monkeypatch, version):
    """Return the module `compat` as loaded with another release of transformers."""
    monkeypatch.setattr(transformers, "__version__", version)
    spec = importlib.util.spec_from_file_location("token_recycling.model.compat", differences.__file__)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.mark.parametrize(
    ("transformers", "torch", "expected"),
    [
        ("5.10.1", "2.9.0+cpu", None),
        ("5.24.7", "2.15.9", None),
        (None, "2.13.0", None),
        ("5.9.0", "2.9.0", "transformers must be 5.10 to 5.24, got 5.9.0; pip install"),
        ("5.25.0", "2.9.0", "transformers must be 5.10 to 5.24, got 5.25.0; pip install"),
        ("5.10.0", "2.8.0+cu126", "torch must be 2.9 to 2.15, got 2.8.0+cu126; pip install"),
    ],
)
def test_message_outside_the_range_is_one_line(transformers, torch, expected):
    said = outside({"transformers": transformers, "torch": torch})
    assert (said is None) == (expected is None)
    assert said is None or (said.startswith(expected) and "\n" not in said)


def test_import_warns_above_the_range_and_fails_below_it(tmp_path, monkeypatch):
    """The warning does not import torch."""
    described = tmp_path / "transformers-6.0.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 6.0.0\n")
    package = str(Path(differences.__file__).parents[1])
    code = "import token_recycling, sys; assert 'torch' not in sys.modules"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), package])}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    (line,) = done.stderr.splitlines()
    assert "transformers must be 5.10 to 5.24, got 6.0.0" in line
    with pytest.raises(ImportError, match=r"transformers must be 5\.10 to 5\.24, got 4\.57\.1"):
        as_of(monkeypatch, "4.57.1")


@needs(5, 23)
def test_newest_release_has_all_classes(monkeypatch):
    here = as_of(monkeypatch, ".".join(map(str, SUPPORTED["transformers"][1])))
    for name in LACKING:
        here.needed(getattr(here, name), name)


def test_missing_classes_match_no_object_and_are_named_when_needed(monkeypatch):
    here = as_of(monkeypatch, "5.10.1")
    for name in LACKING:
        kind = getattr(here, name)
        assert not isinstance(transformers.DynamicCache(config=LlamaConfig()).layers[0], kind)
        with pytest.raises(ValueError, match=r"transformers >= 5\.\d+, got 5\.10\.1"):
            here.needed(kind, "this")


def test_family_that_changed_between_releases_is_not_accepted_as_compared(monkeypatch):
    before = as_of(monkeypatch, "5.10.1")
    assert not before.is_as_compared("doge")
    assert before.is_as_compared("llama")
    assert differences_of_now(monkeypatch).is_as_compared("doge")


@pytest.mark.parametrize(
    ("asked", "before", "now"), [(-3, 7, 7), (-30, 0, 0), (0, 0, 10), (4, 4, None), (40, 10, None)]
)
def test_crop_follows_the_release(monkeypatch, asked, before, now):
    assert as_of(monkeypatch, "5.10.1").left_by_crop(asked, 10) == before
    if now is None:
        with pytest.raises(ValueError, match=f"<= 0, got {asked}"):
            differences_of_now(monkeypatch).left_by_crop(asked, 10)
    else:
        assert differences_of_now(monkeypatch).left_by_crop(asked, 10) == now


def differences_of_now(monkeypatch):
    """Return `compat` of release 5.23, without the classes added since 5.10."""
    made = as_of(monkeypatch, "5.10.1")
    monkeypatch.setattr(made, "_TRANSFORMERS", (5, 23))
    return made


def test_callers_cache_is_recognized_before_5_17(monkeypatch):
    """Transformers marks callers' caches since 5.17; before, our `generate` marks them."""
    before = as_of(monkeypatch, "5.10.1")
    made, given = transformers.DynamicCache(), transformers.DynamicCache()
    for cache in (given, None):
        before.mark_callers(cache)
    assert not getattr(made, before.CALLERS, False)
    assert getattr(given, before.CALLERS)
