"""What is wrong with a file's bytes, before anyone says which file it is."""


class DamagedError(Exception):
    """The bytes are not what docs/fcz.md says; `read` names the file."""
