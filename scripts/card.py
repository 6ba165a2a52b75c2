"""Write the model card of a shipped model from the figures of its training."""

from __future__ import annotations

from typing import Any

ROLES = {
    "target": "The target model: the tests, the documentation and the benchmarks decode with it.",
    "draft": "A smaller model with the same tokenizer, which drafts for the target.",
}


def model_card(name: str, figures: dict[str, Any]) -> str:
    """Return the card as Markdown with the hub's metadata block; `figures` are those of training.json."""
    licences = "\n".join(f"| {package} | {licence} |" for package, licence in figures["licences"].items())
    return f"""---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
tags: [code, python, tiny]
---

# {name}

{ROLES[name]} It continues Python source and nothing else, and is far too small to be relied on.

| | |
|---|---|
| architecture | llama, {figures["layers"]} layers, hidden size {figures["hidden_size"]}, tied embeddings |
| parameters | {figures["parameters"]:,}, stored in bfloat16 |
| tokenizer | byte-level BPE, {figures["vocab_size"]:,} tokens; a line break and its indentation are one token |
| context | {figures["context"]:,} tokens |
| trained on | {figures["tokens"]:,} tokens of {figures["train_files"]:,} files ({figures["train_bytes"]:,} bytes) |
| **held out** | **{figures["held_out_bits_per_byte"]:.3f} bits per byte** on {figures["held_out_files"]} files |

Files whose name has a hash of 0 modulo 64 are held out, the same files on every machine. `training.json` lists them.
They come from the same packages as the training files, so they share style and names. Exact copies were removed, near
copies were not. The figure measures how well the model predicts this kind of text, not how well it writes programs.

`python scripts/train.py` repeats the training: `prepare`, `fit {name}`, `export {name}`.

## Data and licenses

Python source that any machine with this project has: the standard library and the installed packages, except files
of more than 100,000 bytes, lines of more than 400 characters, or encodings other than UTF-8.

| package | license, as stated in its metadata |
|---|---|
{licences}
"""
