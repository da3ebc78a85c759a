import asyncio

import pytest
import uvloop
from proxy_rig import Rig


def pytest_asyncio_loop_factories():
    """Every test with a loop runs on both loops the product may use."""
    return {"asyncio": asyncio.SelectorEventLoop, "uvloop": uvloop.new_event_loop}


@pytest.fixture
async def rig(tmp_path):
    rig = Rig(tmp_path)
    yield rig
    await rig.stop()
