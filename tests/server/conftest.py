"""A server for every test of this folder that asks for one."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from support.serving import Serving
from support.serving import serving as serving_context


@pytest.fixture
async def serving() -> AsyncIterator[Serving]:
    """Steps run only as the test allows them."""
    async with serving_context() as made:
        yield made


@pytest.fixture
async def free(serving: Serving) -> Serving:
    """The same, with steps running as fast as they can."""
    serving.runner.open()
    return serving
