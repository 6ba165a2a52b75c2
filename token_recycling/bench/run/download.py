"""Data sets by name: downloaded once from a fixed commit, and accepted only with the SHA-256 given here.

The checksums are those of the files committed in the named repositories; a mirror, a proxy's error page or a changed
file is refused. Files are kept in `$TOKEN_RECYCLING_CACHE`, else in `token_recycling` below the user's cache folder.
"""

from __future__ import annotations

import urllib.request
from pathlib import Path
from typing import NamedTuple

from ..._util.files import cache_folder, replacing, sha256

_TIMEOUT = 30


class DataSource(NamedTuple):
    """URL and checksum of a data set."""

    url: str
    sha256: str


SOURCES = {
    "spec_bench": DataSource(
        "https://raw.githubusercontent.com/hemingkx/Spec-Bench/"
        "66230f10cb0a02aced5ef3ce1e85163c16160454/data/spec_bench/question.jsonl",
        "4b6d33e79484f9841c487ee87d1cf6aa8c6066f61d5d482ff09e5a007fafdf04",
    ),
    "mbpp": DataSource(
        "https://raw.githubusercontent.com/Luowaterbi/TokenRecycling/"
        "8560e99c54220657b2121160340cb241b82f91aa/data/mbpp/question.jsonl",
        "4ef443d46893b3c806247b8b074da1f4f2d04cd97f64b7934549dad16d292399",
    ),
}
"""Spec-Bench (Xia et al., 2401.07851): 480 questions; MBPP (Austin et al., 2108.07732) as questions: 399, as in the
program of Token Recycling's authors.
"""


def download(name: str) -> Path:
    """Return the file of a data set, from the cache or its source; raises ValueError or OSError with the fix."""
    source, path = SOURCES[name], cache_folder().expanduser() / f"{name}.jsonl"
    if path.is_file():
        if (found := sha256(path)) != source.sha256:
            raise ValueError(
                f"{path} was changed or damaged: its SHA-256 must be {source.sha256}, got {found}; delete the file to "
                "download it again"
            )
        return path
    try:
        with urllib.request.urlopen(source.url, timeout=_TIMEOUT) as answer:
            data = answer.read()
    except OSError as error:  # no network, no such host, a refusal: URLError and HTTPError are OSErrors too
        raise OSError(
            f"cannot download {name} from {source.url}: {error}; without a network, fetch the file elsewhere and give "
            f"its path: --data {name}=FILE"
        ) from error
    with replacing(path) as temporary:
        Path(temporary).write_bytes(data)
        if (found := sha256(Path(temporary))) != source.sha256:
            raise ValueError(
                f"{name} from {source.url} must have SHA-256 {source.sha256}, got {len(data):,} bytes with {found}; "
                "nothing was kept: is there a proxy that changes downloads?"
            )
    return path
