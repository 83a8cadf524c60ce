"""What lets a CPU try what a GPU will run."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def flex_on_cpu():
    """FlexAttention can compute gradients on a CPU, not compiled; torch refuses because it is slow."""
    from torch.nn.attention import flex_attention as module

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_validate_device", lambda *given: None)
        patch.setattr(module, "_warn_once", lambda *given, **more: None, raising=False)
        yield
