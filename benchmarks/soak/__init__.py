"""A server under everything that strangers, machines and time do to it: `python -m benchmarks.soak`."""
