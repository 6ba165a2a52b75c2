"""Drafting inside serving engines: a module each, which imports its engine when the engine loads it."""
