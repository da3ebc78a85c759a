"""What tests of the API ask for again and again."""

from __future__ import annotations

from typing import Any

import httpx


async def create(client: httpx.AsyncClient, **fields: Any) -> str:
    """A sandbox of the template `base`; returns its id."""
    response = await client.post("/v2/sandboxes", json={"templateID": "base", **fields})
    assert response.status_code == 201, response.text
    return response.json()["sandboxID"]
