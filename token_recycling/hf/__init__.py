"""The library inside transformers' own generate()."""
