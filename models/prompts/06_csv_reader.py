import csv
import datetime
import os


class TableError(Exception):
    """Raised when a table cannot be read."""


def parse_value(text):
    """Convert a cell to int, float or date if it looks like one."""
    if text == "":
        return None
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        pass
    try:
        return datetime.date.fromisoformat(text)
    except ValueError:
        return text


def read_table(filename, delimiter=",", columns=None):
    """Read a CSV file and return a list of dicts, one for each row.

    If columns is given, only these columns are kept.
    """
    if not os.path.exists(filename):
        raise TableError(f"file not found: {filename}")
    rows = []
    with open(filename, newline="", encoding="utf-8") as f:
        reader = csv.DictReader(f, delimiter=delimiter)