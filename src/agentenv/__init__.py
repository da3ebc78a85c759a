"""AgentENV: real Linux microVMs for agents, behind the E2B API."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("agentenv")
except PackageNotFoundError:  # running from a tree that was never installed
    __version__ = "0.0.0"
