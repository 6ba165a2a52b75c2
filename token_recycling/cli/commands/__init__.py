"""One file per command: a function whose parameters are the command's arguments and options."""
