"""The commands of `aenv`: a module is a verb, a folder a group of verbs. Adding a module adds the command."""
