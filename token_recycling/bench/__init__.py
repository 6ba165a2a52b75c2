"""Measuring methods against each other, and the report of what was measured."""
