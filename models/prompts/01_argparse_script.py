"""Count words, lines and bytes of text files, and print the most common words."""

import argparse
import collections
import re
import sys

WORD = re.compile(r"[A-Za-z]+")


def count_words(text):
    """Return a Counter with the lower-case words of the text."""
    return collections.Counter(word.lower() for word in WORD.findall(text))


def read_text(path, encoding):
    if path == "-":
        return sys.stdin.read()
    with open(path, encoding=encoding) as f:
        return f.read()


def build_parser():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", default=["-"], help="files to read, - for standard input")
    parser.add_argument("-n", "--number", type=int, default=10, help="how many words to print")
    parser.add_argument("-e", "--encoding", default="utf-8", help="encoding of the files")
    parser.add_argument("-v", "--verbose", action="store_true", help="print the counts of every file")
    return parser


def main(argv=None):
    parser = build_parser()
    args = parser.parse_args(argv)
    total = collections.Counter()
    for path in args.files: