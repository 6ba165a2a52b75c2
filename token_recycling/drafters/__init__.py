"""One file per drafter, named like the drafter. CONTRIBUTING.md shows how to add one."""
