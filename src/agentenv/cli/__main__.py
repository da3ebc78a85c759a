"""`python -m agentenv.cli` is `aenv`."""

from agentenv.cli.main import main

if __name__ == "__main__":
    main()
