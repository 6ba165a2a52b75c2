"""Logging for the command line programs of the package."""

import logging
import logging.handlers
import os
import sys

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}

_root = logging.getLogger("package")


class ColorFormatter(logging.Formatter):
    """A formatter that colors the level name if the stream is a terminal."""

    colors = {
        logging.DEBUG: "\033[36m",
        logging.INFO: "\033[32m",
        logging.WARNING: "\033[33m",
        logging.ERROR: "\033[31m",
    }
    reset = "\033[0m"

    def format(self, record):
        message = super().format(record)
        color = self.colors.get(record.levelno)
        if color is None:
            return message
        return f"{color}{message}{self.reset}"


def get_logger(name=None):
    """Return a logger with the specified name."""
    if name is None:
        return _root
    return _root.getChild(name)


def set_verbosity(level):
    """
    Set the verbosity level of all loggers of the package.