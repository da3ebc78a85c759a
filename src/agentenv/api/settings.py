"""What the HTTP API needs to know about the node it speaks for."""

from __future__ import annotations

from dataclasses import dataclass

from agentenv.config.schema import ApiConfig

BODY_LIMIT_BYTES = 8 * 1024 * 1024  # far above any legal request of the contract; uploads never pass through the API


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """`domain` is what clients put after `<port>-<sandboxId>.`; it may carry a port (contract section 1.2)."""

    domain: str
    max_timeout_hours: int = 24
    body_limit_bytes: int = BODY_LIMIT_BYTES

    @classmethod
    def from_config(cls, config: ApiConfig) -> ApiSettings:
        """The settings of a configured node."""
        return cls(domain=config.client_domain, max_timeout_hours=config.max_timeout_hours)
