"""fairseq2: apply_layerwise_ac."""

from __future__ import annotations

import pytest

from ebb_tests.frameworks.own_checkpointing import check_regions, load, plain, stack

ac = load("fairseq2.models.utils.ac")


@pytest.mark.parametrize(("every", "regions"), [(1, 4), (2, 2)])
def test_layerwise_ac(every, regions):
    def own():
        model, loss = stack(plain)()
        ac.apply_layerwise_ac(model.layers, every)
        return model, loss

    check_regions(stack(plain), own, regions)
