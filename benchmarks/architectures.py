"""Measures every architecture that is claimed, and writes docs/architectures.md from it; about a minute.

The cases and the measurement are those of the tests.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import transformers

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from support.architecture_page import page  # noqa: E402


def main() -> None:
    """Writes the page."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    (ROOT / "docs" / "architectures.md").write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
