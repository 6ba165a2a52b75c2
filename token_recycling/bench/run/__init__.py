"""Measure methods side by side, into rows."""
