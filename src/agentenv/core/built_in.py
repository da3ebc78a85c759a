"""Names of the templates that the product can make by itself. Their recipes are in `template.recipes`."""

BASE = "base"
"""A small Debian; every node has it."""
CODE_INTERPRETER = "code-interpreter-v1"
"""What E2B's code interpreter clients ask for (contract section 4)."""
BUILT_IN = (BASE, CODE_INTERPRETER)
