"""One drafter a file; the file's name is the drafter's name. CONTRIBUTING.md shows how to add one."""
