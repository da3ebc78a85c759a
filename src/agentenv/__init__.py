"""AgentENV: real Linux microVMs for agents, behind the E2B API."""


def __getattr__(name: str) -> str:
    """`__version__`, looked up when asked for: to read the installation's records takes longer than all the rest of a start."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("agentenv")
    except PackageNotFoundError:  # running from a tree that was never installed
        return "0.0.0"
