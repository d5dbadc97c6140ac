"""A configuration that promises absurdly many tensors is refused at once, before a layout is built of them."""

from __future__ import annotations

import pytest

from areno_fn.contracts.errors import ModelError
from areno_fn.models.layouts import FAMILY_LAYOUTS, TokenLayout

ABSURD = 10**12


@pytest.mark.parametrize("family", FAMILY_LAYOUTS, ids=lambda family: family.name)
def test_absurd_counts_of_layers_and_experts_are_refused(family: TokenLayout) -> None:
    tried = 0
    for variant in family.variants.values():
        for table in (variant, variant.get("text_config", {})):
            for name in {"num_hidden_layers", "num_experts"} & table.keys():
                changed = {**table, name: ABSURD}
                config = changed if table is variant else {**variant, "text_config": changed}
                with pytest.raises(ModelError, match=rf"(must be at most \d+, received {ABSURD}|entries, but)"):
                    family.table(family.config_from_hf(config))
                tried += 1
    assert tried
