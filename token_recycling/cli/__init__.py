"""The command `token-recycling`: `app` has the commands, the modules beside it what they need of a terminal."""
