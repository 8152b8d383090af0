"""Stand-ins for the three incompatible libraries that are all imported as `deep_ep`, on CPUs.

An adapter to DeepEP cannot be tested where there is no GPU, and a mock that merely returns
plausible tensors would test nothing. So each module here moves rows over a gloo group by the rules
of its generation, refuses what the real one refuses, and fills whatever the real one leaves
unwritten with values that show: NaN, or ids that look valid.

`v1`: `Buffer` (1.x). `v2`: `ElasticBuffer`, and V1's `Buffer` kept (2.0, 2.1). `v25`: `EPBuffer`
(2.5), with neither of the other names. `tests/dispatch/test_deepep_signatures.py` compares their
parameters with the real packages.
"""

import importlib
import os

GENERATIONS = {"v1": "v1", "v2": "v2", "v2.5": "v25"}


def stand_in(generation: str | None) -> None:
    """In this process the adapters find that generation."""
    from ep_moe.dispatch import deepep_buffers

    if generation is None:
        return
    os.environ["EP_DISABLE_GIN"] = "1"  # as `load` does where there is no network card
    fake = importlib.import_module(f"{__name__}.{GENERATIONS[generation]}")
    deepep_buffers.load = lambda name, ranks, device: fake
