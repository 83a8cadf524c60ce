"""Where kernels run: compiled, or interpreted where Triton is installed and no GPU is there."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(params=["interpreted", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    import torch

    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
        return torch.device("cuda")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("interpreted only where there is no GPU")
    return torch.device("cpu")
