"""Grammars that hold outputs to a form: where a sequence is in one, and drafts that keep to it."""
