import fnmatch
import hashlib
import os
import shutil
from pathlib import Path


def iter_files(root, pattern="*", follow_symlinks=False):
    """Yield the paths of all files below root whose name matches the pattern."""
    for dirpath, dirnames, filenames in os.walk(root, followlinks=follow_symlinks):
        dirnames.sort()
        for filename in sorted(filenames):
            if fnmatch.fnmatch(filename, pattern):
                yield os.path.join(dirpath, filename)


def file_digest(path, algorithm="sha256", block_size=65536):
    """Return the hexadecimal digest of the contents of a file."""
    digest = hashlib.new(algorithm)
    with open(path, "rb") as f:
        while True:
            block = f.read(block_size)
            if not block:
                break
            digest.update(block)
    return digest.hexdigest()


def directory_size(root):
    """Return the total size in bytes of all files below root."""
    return sum(os.path.getsize(path) for path in iter_files(root))


def find_duplicates(root, pattern="*"):
    """Return lists of paths of files with equal contents.

    Files are compared by size first, so that only files of the same size
    have to be read.
    """
    by_size = {}
    for path in iter_files(root, pattern):