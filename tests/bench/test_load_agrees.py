"""The load generator's figures against those of an independent client, on real streams of Baton."""

from __future__ import annotations

import pytest

from tests.bench.side_by_side import side_by_side
from tests.e2e.fleet import fleet

WITHIN = 0.05


@pytest.mark.e2e
@pytest.mark.slow
def test_the_figures_agree_with_those_of_openais_client() -> None:
    with fleet() as running:
        pairs = side_by_side(running.url, 10)
    apart = {name: pair for name, pair in pairs.items() if abs(pair.ratio - 1) > WITHIN}
    assert not apart, pairs
