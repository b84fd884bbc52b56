"""The options of each command, one file per command. None loads training code: help is fast."""
