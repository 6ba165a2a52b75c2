"""The loop: draft, forward, accept, keep, learn."""
