"""The data plane and front door: one port for the API and for every port of every sandbox."""

from agentenv.proxy.limits import ProxySettings
from agentenv.proxy.routes import CloseSignal, FastRouteTable, ProxyRefusal, RequestInfo, Route, RouteTable, SandboxTarget
from agentenv.proxy.server import ProxyServer, ProxyStats

__all__ = [
    "CloseSignal",
    "FastRouteTable",
    "ProxyRefusal",
    "ProxyServer",
    "ProxySettings",
    "ProxyStats",
    "RequestInfo",
    "Route",
    "RouteTable",
    "SandboxTarget",
]
