"""Measuring: methods side by side, into rows."""
