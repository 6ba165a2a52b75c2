"""What is learned from a step, and drafted from it."""
