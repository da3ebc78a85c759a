"""One module per command; each holds `command`. Adding a module adds the command."""
