"""`python -m token_recycling`: the command line, where the command `token-recycling` is not on the path."""

from .cli.app import app

if __name__ == "__main__":
    app()
