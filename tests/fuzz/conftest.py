"""What the tests of wrong things share: the process that they are given to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fuzz.subject import Subject


@pytest.fixture(scope="module")
def subject() -> Iterator[Subject]:
    subject = Subject()
    yield subject
    subject.close()
