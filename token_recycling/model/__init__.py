"""One forward pass of a model over a draft tree."""
