"""One file a command: a function whose arguments are the command's own."""
