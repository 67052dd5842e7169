"""Servers for this folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.rejected_peers.job import Job

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Job]:
    one = Job(tmp_path)
    yield one
    one.close()


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """One for all tests that do it no harm, which is what they test."""
    one = Job(tmp_path_factory.mktemp("job"))
    one.begin()
    yield one
    one.close()
