"""Grammars that constrain outputs: compilation, the grammar state of a sequence, and drafts that follow the grammar."""
