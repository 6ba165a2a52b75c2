"""Training of the small parts that some drafters need beside a model: the target's own texts, one loop, one file."""
