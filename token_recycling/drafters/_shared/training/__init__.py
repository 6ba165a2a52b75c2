"""Training of the small parts that some drafters need: the target's own outputs, one loop, one file format."""
