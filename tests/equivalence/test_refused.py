"""Models that would be answered wrongly are refused at load, with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchserve.errors import UnsupportedModelError
from tests.equivalence.harness import build
from tests.tiny_models import REFUSED


@pytest.mark.cpu_backend
@pytest.mark.parametrize("family", sorted(REFUSED))
def test_refused_with_a_reason(family: str, tiny_model: dict[str, Path]) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        build(tiny_model[family])
    assert len(str(error.value)) > 30
