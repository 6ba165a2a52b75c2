"""Context managers for changing global state and putting it back."""

import contextlib
import os
import sys
import tempfile
import time


@contextlib.contextmanager
def working_directory(path):
    """Change the current directory for the duration of a with block."""
    previous = os.getcwd()
    os.chdir(path)
    try:
        yield path
    finally:
        os.chdir(previous)


@contextlib.contextmanager
def environment(**variables):
    """Set environment variables for the duration of a with block."""
    previous = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in previous.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


class Timer:
    """Measure the time spent in a with block."""

    def __init__(self, name=None, file=None):
        self.name = name
        self.file = file or sys.stderr
        self.elapsed = None

    def __enter__(self):