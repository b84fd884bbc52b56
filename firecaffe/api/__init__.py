"""The commands as functions, for a script, a prompt or a notebook."""
