"""n_init=0 and n_local=0: nothing is forced there, on every backend, in the layer, in decoding and in a run.

A query may then choose no block near itself. The truth is tests/oracle.py on a CPU and tests/truth64.py for the
kernels: both force blocks by a rule of their own."""

import itertools

import pytest
import torch
from attn_cases import BACKENDS, F32, F64, Case, check, geo, make_inputs, truth_of
from triton_cases import Config, Shape, compare, record
from zygote import in_the_interpreter

from nsa_nb.attention import NSAAttention
from nsa_nb.cache import StaticNSACache
from nsa_nb.geometry import Geometry
from nsa_nb.model import TinyLM, build_model
from nsa_nb.schema import RunConfig

torch.set_num_threads(1)
FORCED = [(0, 2, 2), (1, 0, 1), (0, 0, 1), (0, 0, 4), (2, 0, 3), (0, 3, 5)]      # n_init, n_local, n_sel
forced = pytest.mark.parametrize("n_init,n_local,n_sel", FORCED)


def loud(x): x["q"] *= 50      # most probabilities are 0 to the last bit: scores tie, and the lowest indices must win


@forced
@pytest.mark.parametrize("backend", BACKENDS)
def test_backends_against_the_oracle(backend, n_init, n_local, n_sel):
    "Selection, outputs and all gradients; packed and not; scores that tie."
    sizes = geo(4, 2, 8, n_sel, 5, n_init=n_init, n_local=n_local)
    for case, dtype in (
        (Case("plain", 43, geo=sizes), F64), (Case("packed", 50, geo=sizes, cu=(0, 1, 9, 50)), F32),
        (Case("loud", 43, geo=sizes, change=loud), F64),
    ):
        check(truth_of(*make_inputs(case), **case.kw), dtype, backend, **case.kw)


@forced
@pytest.mark.parametrize("backend", BACKENDS)
def test_layer_decodes_what_it_prefills_and_sees_no_future(backend, n_init, n_local, n_sel):
    torch.manual_seed(0)
    a = NSAAttention(24, 4, 2, 8, 6, 4, 2, 8, n_sel, 5, n_init=n_init, n_local=n_local, backend=backend).eval()
    x = torch.randn(2, 45, 24)
    with torch.no_grad():
        whole = a(x)
        other = x.clone()
        for steps in ((1,), (7, 1, 3), (45,)):
            cache = a.new_cache()
            at = 0
            parts = []
            for n in itertools.cycle(steps):
                if at == 45: break
                parts.append(a(x[:, at:at + n], cache=cache))
                at = min(45, at + n)
            assert torch.cat(parts, 1).sub(whole).norm() < 1e-5 * whole.norm()
        for t in (1, 8, 17, 31):
            other = x.clone()
            other[:, t:] = torch.randn_like(other[:, t:])
            assert torch.equal(a(other)[:, :t], whole[:, :t])


IN_THE_INTERPRETER = """
import torch; torch.set_num_threads(1)
import test_forced_blocks as t
for forced in t.FORCED[:4]: t.check_kernels(*forced)
for forced in t.FORCED[:4]: t.check_decode(*forced)
"""


def check_kernels(n_init, n_local, n_sel):
    "v1, v2, v3 and v3_skip, forward and backward, against float64; packed and not."
    for S, cu, q in ((18, None, 50.0), (19, (0, 1, 19), 1.0)):
        compare(Config(Shape("few", F32, 1, 2, 4, 4, 4, 2, 4, n_sel), S, 5, n_init, n_local, cu, loud=q), "cpu")


def check_decode(n_init, n_local, n_sel):
    """One step on a long past, and a layer from its first token on: kernels that split compressed keys among
    tasks, and choose."""
    from test_decode import DecodePlan, check_step
    sizes = Geometry(4, 2, 4, n_sel, 5, n_init, n_local)
    # 4 blocks at a time are looked at: the choice goes in rounds
    check_step(sizes, 1, 1, 2, 8, 8, 39, 0, plan=DecodePlan(2, 2, 2, 16, 4, 1))
    check_step(sizes, 1, 1, 2, 8, 8, 39, 1, plan=DecodePlan(1, 1, 1, 16, 16, 1))
    torch.manual_seed(0)
    a = NSAAttention(16, 2, 1, 8, 8, 4, 2, 4, n_sel, 5, n_init=n_init, n_local=n_local, backend="torch").eval()
    x = torch.randn(1, 11, 16)
    fixed = StaticNSACache(a.geo, 1, 11, 1, 8, 8)
    with torch.no_grad():
        want = a(x)
        a.backend = "triton"
        got = torch.cat([a(x[:, t:t + 1], cache=fixed) for t in range(11)], 1)
    assert (got - want).norm() < 1e-5 * want.norm()


def test_kernels_in_the_interpreter():
    pytest.importorskip("triton")
    in_the_interpreter(IN_THE_INTERPRETER)


@pytest.mark.cuda
@forced
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, F32])
def test_kernels_on_a_card(dtype, packed, n_init, n_local, n_sel, record_property):
    shape = Shape("forced", dtype, 2, 6, 64, 64, 32, 16, 64, n_sel)
    record(record_property, compare(Config(shape, 1111, 100, n_init, n_local, (0, 1, 70, 1111) if packed else None)))


@pytest.mark.cuda
@forced
@pytest.mark.parametrize("dtype", [torch.bfloat16, F32])
def test_decode_on_a_card(dtype, n_init, n_local, n_sel):
    from test_decode import check_step

    for n in (1, 65, 3000):
        check_step(Geometry(32, 16, 64, n_sel, 100, n_init, n_local), 2, 2, 6, 64, 64, n, n, dtype, "cuda")


def test_a_run_can_ask_for_them():
    "As config fields; the built model has them; what does not fit is refused by name."
    cfg = RunConfig(
        nsa=dict(l=4, d=2, l_sel=8, n_sel=1, w=8, n_init=0, n_local=0),
        model=dict(dim=16, n_layers=1, n_heads=2, n_kv_groups=1, d_k=8, d_v=8),
    )
    m = build_model(cfg, 31)
    assert (m.attentions()[0].geo.n_init, m.attentions()[0].geo.n_local, m.attentions()[0].geo.n_sel) == (0, 0, 1)
    ids = torch.randint(0, 31, (2, 40))
    loss = m.nll(ids, ids.roll(-1, 1))
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in m.parameters())
    with pytest.raises(ValueError, match="n_sel=2 must be at least n_init[+]n_local=0[+]3"):
        RunConfig(nsa=dict(n_sel=2, n_init=0, n_local=3))
    with pytest.raises(ValueError, match="n_local"): RunConfig(nsa=dict(n_local=-1))


def test_generation_goes_through_the_same_choice():
    "Greedy text through the cache is the text that whole forwards give."
    torch.manual_seed(0)
    m = TinyLM(31, 16, 2, 2, 1, 8, 8, 4, 2, 8, 1, 3, n_init=0, n_local=0).eval()
    ids = torch.randint(0, 31, (2, 20))
    got = m.generate(ids, 12)
    with torch.no_grad(): assert torch.equal(got[:, 20:], m(got)[:, 19:-1].argmax(-1))
