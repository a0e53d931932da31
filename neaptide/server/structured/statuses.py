"""Exit statuses of the child process. They have their own module, as another interpreter cannot import the parent's."""

NO_GRAMMARS_STATUS = 3
"""The model's tokenizer does not support grammars."""
