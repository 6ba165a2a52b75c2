import configparser
import json
import os
from pathlib import Path

DEFAULTS = {
    "host": "localhost",
    "port": 8080,
    "debug": False,
    "timeout": 30.0,
}


class ConfigError(Exception):
    """Raised for a configuration file that cannot be used."""


def load_json(path):
    """Load a configuration from a JSON file."""
    with open(path, encoding="utf-8") as f:
        data = json.load(f)
    if not isinstance(data, dict):
        raise ConfigError(f"expected a JSON object in {path}, got {type(data).__name__}")
    return data


def load_ini(path, section="main"):
    """Load a configuration from one section of an INI file."""
    parser = configparser.ConfigParser()
    parser.read(path, encoding="utf-8")
    if not parser.has_section(section):
        raise ConfigError(f"no section {section!r} in {path}")
    return dict(parser.items(section))


def load_config(path=None, environ=os.environ):
    """Load the configuration from a file and from environment variables.

    Environment variables start with APP_ and win over the file, which
    wins over the defaults.
    """
    config = dict(DEFAULTS)
    if path is not None: