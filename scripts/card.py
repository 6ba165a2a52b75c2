"""Write the model card of a shipped model from the figures of its training."""

from __future__ import annotations

from typing import Any

ROLES = {
    "target": "The model that decides what is said: the demo, the tests and the benchmark decode with it.",
    "draft": "A smaller model with the same tokenizer, for drafting what the target may say.",
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

{ROLES[name]} It continues Python source and nothing else, and it is far too small to be relied on.

| | |
|---|---|
| architecture | llama, {figures["layers"]} layers, hidden size {figures["hidden_size"]}, tied embeddings |
| parameters | {figures["parameters"]:,}, stored in bfloat16 |
| tokenizer | byte-level BPE, {figures["vocab_size"]:,} tokens; a line break and its indentation are one token |
| context | {figures["context"]:,} tokens |
| trained on | {figures["tokens"]:,} tokens of {figures["train_files"]:,} files ({figures["train_bytes"]:,} bytes) |
| **held out** | **{figures["held_out_bits_per_byte"]:.3f} bits per byte** on {figures["held_out_files"]} files |

Held out are the files whose name has a hash that is 0 modulo 64: the same ones on every machine. `training.json` lists
them. They come from the same packages as the files trained on, so that they share style and names with them; of exact
copies one remains, but no near copies were removed. The figure says how well the model knows this kind of text, not how
well it writes programs.

`python scripts/train.py` repeats the training: `prepare`, `fit {name}`, `export {name}`.

## Data and licences

Python source that any machine with this project has: the standard library and the installed packages, without files
of more than 100,000 bytes, lines of more than 400 characters, or encodings other than UTF-8.

| package | licence, as its metadata states it |
|---|---|
{licences}
"""
