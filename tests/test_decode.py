"""Decode kernels, static cache and replayed generation: random configurations on a GPU, a few under Triton's
interpreter."""

import os
import random
import subprocess
import sys
import warnings

import pytest
import torch

from nsa_nb.attention import NSAAttention
from nsa_nb.cache import NSACache, StaticNSACache
from nsa_nb.compress import Compressor
from nsa_nb.kernels.decode import DecodePlan, decode_append, decode_attention
from nsa_nb.errors import UsageError
from nsa_nb.geometry import Geometry
from nsa_nb.kernels.jit import interpreting
from nsa_nb.model import TinyLM
from nsa_nb.fallbacks import fallbacks
from nsa_nb.reference import masked_softmax, reference_branches, sel_mask
from nsa_nb.cache import Replay
from nsa_nb.selection import importance, selections_agree

# Relative error of the output against float64 on the same inputs. fp32: rounding of sums of up to some thousand terms.
# bf16 and fp16: probabilities are rounded before
# their product with v (2^-9, 2^-12), and so is o.
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def draw(seed: int) -> dict:
    r = random.Random(seed)
    d = r.choice([2, 4, 8, 16])
    beta = r.choice([1, 2, 2, 3, 4])
    alpha = r.choice([a for a in (1, 2, 3, 4, 4, 6, 8) if a >= beta])
    n_init, n_local = r.choice([(1, 2), (1, 2), (2, 1), (1, 1)])
    geo = Geometry(
        beta * d, d, alpha * d, r.choice([n_init + n_local, 4, 7, 16]), r.choice([1, 7, 64, 200]), n_init, n_local
    )
    l, sel = geo.l, geo.l_sel
    lengths = [r.choice([1, l - 1, l, l + 1, sel, sel + 1, r.randint(1, 300), r.randint(300, 4000)]) or 1]
    return dict(
        geo=geo, B=r.choice([1, 2, 5]), G=r.choice([1, 2, 4]), h=r.choice([1, 2, 3, 6, 16, 20]),
        D=r.choice([8, 16, 64, 80, 128]), DV=r.choice([8, 16, 64, 128]), n=lengths[0], seed=seed,
    )


def filled(geo, B, G, D, DV, n, dtype, device, room=5):
    "A static cache of n tokens, and the tensors the reference wants."
    phi = Compressor("avg", geo.l, geo.d, G, D)
    k, ks, kw, v, vs, vw = (torch.randn(B, n, G, w, device=device).to(dtype) for w in (D, D, D, DV, DV, DV))
    c = NSACache(geo)
    c.append(k, v, ks, vs, kw, vw, lambda k, v, first: (phi(k), phi(v)))
    return StaticNSACache.from_cache(c, n + room), (c.k_cmp.view(), c.v_cmp.view(), ks, vs, kw, vw)


def check_step(geo, B, G, h, D, DV, n, seed, dtype=torch.float32, device="cpu", plan=None):
    torch.manual_seed(seed)
    cache, kv = filled(geo, B, G, D, DV, n, dtype, device)
    q = torch.randn(B, 1, G*h, D, device=device).to(dtype)
    gates = torch.rand(B, 1, G*h, 3, device=device).to(dtype)
    q64 = q.double()
    kv64 = [x.double() for x in kv]
    *o, idx = reference_branches(q64, *kv64, geo, D**-.5, n - 1, 0, reads := dict(cmp=0, sel=0, win=0))
    for _ in range(2): got = decode_attention(q, cache, gates, plan=plan)          # twice: counters go back to 0
    mine = cache.indices
    # other blocks: only where their scores are within rounding
    if not torch.equal(mine, idx):
        p = masked_softmax(
            torch.einsum("bghd,bngd->bghn", q64.unflatten(2, (G, h))[:, 0], kv64[0]) * D**-0.5,
            torch.ones((), dtype=torch.bool, device=device),
        )
        scores = importance(p, geo, geo.num_sel(n)).sum(2)
        assert selections_agree(mine[:, 0], idx[:, 0], scores, 1e-5 * h).all()
        qg = q64.unflatten(2, (G, h))
        p = masked_softmax(
            torch.einsum("btghd,bkgd->btghk", qg, kv64[2]) * D**-0.5,
            sel_mask(mine, torch.tensor([n - 1], device=device), n, geo)[:, :, :, None],
        )
        o[1] = torch.einsum("btghk,bkgd->btghd", p, kv64[3]).flatten(2, 3)
    want = sum(gates[..., i, None].double() * o[i] for i in range(3))
    err = ((got.double() - want).norm() / want.norm()).item()
    assert err < TOLERANCE[dtype], err
    assert cache.last_reads == reads and cache.reads == {k: 2*x for k, x in reads.items()}
    return err


interpreted = pytest.mark.skipif(not interpreting(), reason="needs Triton's interpreter (TRITON_INTERPRET=1)")

@pytest.mark.skipif(interpreting(), reason="this process is the interpreter")
def test_in_the_interpreter():
    "The tests below that end so, in a process of their own: Triton's mode is set before it is imported."
    pytest.importorskip("triton")
    env = os.environ | dict(TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    done = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k",
            "in_the_interpreter and not test_in_the_interpreter",
        ],
        capture_output=True,
        text=True,
        env=env,
    )
    assert done.returncode == 0 and "11 passed" in done.stdout, done.stdout[-3000:] + done.stderr[-1000:]


@interpreted
@pytest.mark.parametrize("seed", range(3))
def test_step_in_the_interpreter(seed):
    case = draw(seed)
    case |= dict(B=min(case["B"], 2), h=min(case["h"], 6), D=8, DV=8, n=min(case["n"], 70))
    check_step(
        **case, plan=DecodePlan(2, 2, 2, max(16, 1 << (case["geo"].l_sel // case["geo"].d - 1).bit_length()), 16, 1)
    )


@interpreted
@pytest.mark.parametrize("phi,rope", [("avg", "before"), ("conv", "after"), ("mlp", "after"), ("avg", "none")])
def test_layer_with_a_static_cache_in_the_interpreter(phi, rope):
    "From the first token on, a layer gives what the growing cache gives (fp32, 1e-5)."
    torch.manual_seed(0)
    a = NSAAttention(24, 4, 2, 8, 6, 8, 4, 8, 4, 10, phi=phi, cmp_rope=rope, backend="triton").eval()
    x = torch.randn(2, 18, 24)
    grows = a.new_cache()
    fixed = StaticNSACache(a.geo, 2, 18, 2, 8, 6)
    a.backend = "torch"
    with torch.no_grad(): want = torch.cat([a(x[:, t:t + 1], cache=grows) for t in range(18)], 1)
    a.backend = "triton"
    with torch.no_grad(): got = torch.cat([a(x[:, t:t + 1], cache=fixed) for t in range(18)], 1)
    assert (got - want).norm() < 1e-5 * want.norm()
    assert fixed.reads == grows.reads


@interpreted
@pytest.mark.parametrize(
    "more,dtype,card,reason",
    [
        (dict(n_sel=65), torch.float32, 232448, "n_sel=65"),
        (dict(d_k=258), torch.float32, 232448, "head widths 258 and 8"),
        (dict(), torch.float64, 232448, "dtype torch.float64"),
        (
            dict(d_k=256, d_v=256, n_heads=20, n_kv_groups=1), torch.float32, 101376,
            "_decode needs about 116,864 bytes of shared memory, this card has 101,376",
        ),
    ],
)
def test_decode_step_says_why_in_the_interpreter(more, dtype, card, reason, monkeypatch):
    """Where Triton was chosen and its decode kernels can't serve, the reason is told once and counted at each
    call; the growing cache serves as before."""
    monkeypatch.setattr("nsa_nb.kernels.decode.shared_memory", lambda: card)
    m = (
        TinyLM(
            **dict(
                vocab=31, dim=16, n_layers=2, n_heads=2, n_kv_groups=1, d_k=8, d_v=8, l=4, d=2, l_sel=8, n_sel=4, w=8
            )
            | more,
            backend="triton",
        )
        .eval()
        .to(dtype)
    )
    ids = torch.randint(0, 31, (1, 5))
    counts = []
    texts = []
    def choose(name):
        for a in m.attentions(): a.backend = name
    for name in ("triton", "triton", "torch"):
        choose("torch")
        with torch.no_grad(): m(ids[:, :2], caches=(caches := m.new_caches()))
        choose(name)
        before = fallbacks.counts["selection_triton"]
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            step = m.decode_step(caches, 20)
        counts.append(fallbacks.counts["selection_triton"] - before)
        texts.append([str(w.message) for w in told])
        choose("torch")
        with torch.no_grad(): assert torch.allclose(step(ids[:, 2:3])[:, -1], m(ids[:, :3])[:, -1], atol=1e-4)
    assert counts == [1, 1, 0] and [len(t) for t in texts] == [1, 0, 0] and reason in texts[0][0], texts
    choose("triton")
    a = m.attentions()[0]
    with pytest.raises(UsageError, match=reason):
        static = StaticNSACache(a.geo, 1, 8, a.heads.G, a.heads.d_k, a.heads.d_v, dtype)
        a(torch.randn(1, 1, 16, dtype=dtype), cache=static)


@pytest.mark.cuda
@pytest.mark.parametrize("seed", range(24))
def test_step(seed):
    dtype = (torch.float32, torch.bfloat16, torch.float16)[seed % 3]
    check_step(**draw(seed), dtype=dtype, device="cuda")


@pytest.mark.cuda
@pytest.mark.parametrize("h,G,D", [(6, 2, 64), (16, 4, 128)])
@pytest.mark.parametrize("n", [31, 513, 5000, 40000])
def test_step_at_the_paper_sizes(h, G, D, n):
    for launches in (1, 2):
        for B in (1, 9):
            check_step(
                Geometry(), B, G, h, D, D, n, n, torch.bfloat16, "cuda",
                plan=None if launches == 1 else DecodePlan(8, 2, 4, 64, 1024, 0, launches=2),
            )


@pytest.mark.cuda
@pytest.mark.parametrize("n", [1, 30, 700])
def test_replay_equals_eager(n):
    """Sixty steps of appending and attending, replayed, against the same called one by one: equal bits, and equal
    caches."""
    torch.manual_seed(n)
    geo = Geometry(32, 16, 64, 4, 50)
    G = 2
    h = 6
    D = 64
    a, _ = filled(geo, 3, G, D, D, n, torch.bfloat16, "cuda", room=60)
    torch.manual_seed(n)
    b, _ = filled(geo, 3, G, D, D, n, torch.bfloat16, "cuda", room=60)
    assert torch.equal(a.k_sel, b.k_sel)
    gates = torch.rand(3, 1, G*h, 3, device="cuda")
    def step(cache):
        def f(x):      # x [3, 1, 6·G + H, D]
            decode_append(cache, *x[:, :, :6*G].unflatten(2, (6, G)).unbind(2))
            return decode_attention(x[:, :, 6*G:], cache, gates)
        return f
    replayed = Replay(step(a))
    for _ in range(60):
        x = torch.randn(3, 1, 6*G + G*h, D, device="cuda", dtype=torch.bfloat16)
        assert torch.equal(replayed(x), step(b)(x))
    for name in ("k_sel", "k_cmp", "v_cmp", "k_win", "v_tail", "length", "reads_sum"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name


@pytest.mark.cuda
@pytest.mark.parametrize(
    "phi,rope,shared", [("avg", None, False), ("avg", "after", True), ("conv", None, False), ("mlp", None, False)]
)
def test_generate_replayed_equals_eager(phi, rope, shared, monkeypatch):
    "Greedy continuation of random weights in fp32, over several completed blocks."
    torch.manual_seed(0)
    m = TinyLM(97, 96, 2, 6, 2, 16, 16, 16, 8, 32, 4, 40, phi=phi, cmp_rope=rope, shared_kv=shared).cuda().eval()
    # logits far apart: no ties of rounding
    for p in m.parameters(): torch.nn.init.normal_(p, std=0.3) if p.dim() > 1 else None
    for T in (1, 15, 16, 150):
        ids = torch.randint(0, 97, (2, T), device="cuda")
        fast = m.generate(ids, 60)
        monkeypatch.setattr("nsa_nb.generation.REPLAY_FROM", 10**9)
        slow = m.generate(ids, 60)
        monkeypatch.undo()
        assert torch.equal(fast, slow), (T, (fast != slow).int().argmax(1))


@pytest.mark.cuda
def test_generate_in_bf16_samples():
    m = TinyLM(97, 96, 2, 6, 2, 16, 16, 16, 8, 32, 4, 40).cuda().eval()
    ids = torch.randint(0, 97, (3, 40), device="cuda")
    draw = lambda: m.generate(ids, 30, 1.0, top_k=50, generator=torch.Generator("cuda").manual_seed(3))
    with torch.autocast("cuda", torch.bfloat16): a, b = draw(), draw()
    assert torch.equal(a, b) and a.shape == (3, 70)
