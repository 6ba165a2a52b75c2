"""Training text: Python source that any machine has, split by file name and encoded as token ids.

The corpus is the standard library of the running interpreter plus the installed packages, so anyone can rebuild it
without a download. Files are held out by a hash of their *name*, not at random, so that all machines hold out the same
files. A training file with the same text as a held-out file is dropped.
"""

from __future__ import annotations

import hashlib
import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
HELD_OUT_SHARE = 64
"""One of this many files is held out."""

MAX_FILE_BYTES = 100_000
MAX_LINE_CHARACTERS = 400

# A line break includes the indentation after it, so that both cost one token. A name includes a dot, underscore or
# space before it. Digits form groups of at most three.
_PIECES = Regex(r"\n\s*|[ ._]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+")


@dataclass(frozen=True)
class Source:
    """One file of the corpus; `name` is the name of its root followed by the path below the root."""

    name: str
    text: str

    @property
    def held_out(self) -> bool:
        return int(hashlib.sha1(self.name.encode()).hexdigest(), 16) % HELD_OUT_SHARE == 0


def default_roots() -> dict[str, Path]:
    """Return the folders of the standard library and of installed packages."""
    return {"stdlib": Path(sysconfig.get_path("stdlib")), "site": Path(sysconfig.get_path("purelib"))}


def read_sources(roots: dict[str, Path]) -> list[Source]:
    """Return all usable files below `roots`, sorted by name; exact copies appear once (a held-out copy wins)."""
    sources: dict[str, Source] = {}
    for root_name, root in roots.items():
        for path in sorted(root.rglob("*.py")):
            relative = path.relative_to(root)
            if root_name == "stdlib" and relative.parts[0] in {"site-packages", "lib2to3", "idlelib"}:
                continue
            text = _usable_text(path)
            if text is None:
                continue
            source = Source(f"{root_name}/{relative.as_posix()}", text)
            digest = hashlib.sha1(text.encode()).hexdigest()
            if digest not in sources or source.held_out:
                sources[digest] = source
    return sorted(sources.values(), key=lambda source: source.name)


def _usable_text(path: Path) -> str | None:
    """Return the file's text, or None if it is not UTF-8 or probably not handwritten: too short or long, long lines."""
    raw = path.read_bytes()
    if not 200 <= len(raw) <= MAX_FILE_BYTES:
        return None
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        return None
    if max(map(len, text.splitlines())) > MAX_LINE_CHARACTERS:
        return None
    return text.replace("\r\n", "\n")


def licences(sources: list[Source]) -> dict[str, str]:
    """Return the license of every package in the corpus, as stated in its metadata; the PSF license for the library."""
    tops = {source.name.split("/")[1].removesuffix(".py") for source in sources if source.name.startswith("site/")}
    stated = {"python standard library": "PSF-2.0"}
    for top, distributions in sorted(metadata.packages_distributions().items()):
        if top in tops:
            info: Any = metadata.metadata(distributions[0])  # an email.message.Message, more than its type says
            classifiers = [c.split(" :: ")[-1] for c in info.get_all("Classifier", []) if c.startswith("License")]
            first_line = (info.get("License") or "").strip().split("\n")[0]
            stated[distributions[0]] = (
                info.get("License-Expression") or first_line or ", ".join(classifiers) or "not stated"
            )
    return stated


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer: any text round-trips exactly, and id 0 is the end-of-text token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(_PIECES, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=True,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )


def encode(tokenizer: PreTrainedTokenizerFast, sources: list[Source], seed: int = 0) -> np.ndarray:
    """Return all sources, in seeded order, as one uint16 array with an end-of-text token after each source."""
    if len(tokenizer) > 2**16:
        raise ValueError(
            f"the vocabulary must have at most 65,536 tokens, got {len(tokenizer)}: ids are stored in 16 bits"
        )
    order = list(sources)
    random.Random(seed).shuffle(order)
    pieces = []
    for start in range(0, len(order), 256):
        batch = [source.text for source in order[start : start + 256]]
        for ids in tokenizer(batch, add_special_tokens=False)["input_ids"]:
            pieces.append(np.array([*ids, tokenizer.eos_token_id], dtype=np.uint16))
    return np.concatenate(pieces)
