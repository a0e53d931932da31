"""What the end of the child process says; apart from its parent's module, which another interpreter cannot import."""

NO_GRAMMARS_STATUS = 3
"""No grammar can be laid over the tokens of its model."""
