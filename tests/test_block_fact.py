"""The one-liner of the runbooks: a block of the given sizes runs and returns finite numbers of its input's shape."""
import torch
from nsa_nb.model import LlamaBlockNSA


def test_block_forward():
    torch.manual_seed(0)
    block = LlamaBlockNSA(dim=512, n_heads=8, n_kv_groups=2, d_k=64, d_v=64, l=32, d=16, l_sel=64, n_sel=4, w=128)
    x = torch.randn(1, 32, 512)
    y = block(x)
    assert y.shape == (1, 32, 512) and torch.isfinite(y).all()
    y.sum().backward()
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in block.parameters())
