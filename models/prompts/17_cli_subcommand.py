"""The `archive` command: pack a directory, unpack it again, list what it holds."""

import argparse
import os
import sys
import zipfile


class Command:
    """Base class for the subcommands."""

    name = None
    help = None

    def add_arguments(self, parser):
        """Add the arguments of this command to its parser."""

    def run(self, args):
        raise NotImplementedError


class PackCommand(Command):
    name = "pack"
    help = "pack a directory into an archive"

    def add_arguments(self, parser):
        parser.add_argument("directory", help="the directory to pack")
        parser.add_argument("archive", help="the archive to write")
        parser.add_argument("--exclude", action="append", default=[], help="names to leave out")

    def run(self, args):
        with zipfile.ZipFile(args.archive, "w", zipfile.ZIP_DEFLATED) as archive:
            for root, dirs, files in os.walk(args.directory):
                dirs[:] = [name for name in dirs if name not in args.exclude]
                for name in files:
                    if name not in args.exclude:
                        path = os.path.join(root, name)
                        archive.write(path, os.path.relpath(path, args.directory))
        return 0


class ListCommand(Command):
    name = "list"