"""The measures by which the default drafter is judged, as one command: `make bench-default`.

What is measured is a table, `scenarios`; `models` makes the models and `texts` the questions. `run` drives the bench of
the package, and `first_token` times what that does not. `figures` has ratios and their intervals, `bars` what is to be
reached, `report` writes both down. docs/benchmark.md says what the tables mean.
"""
