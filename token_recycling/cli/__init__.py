"""The command `token-recycling`: `app` registers the commands; the modules next to it handle options and output."""
