"""Inputs that broke other systems, one test a kind of fault, for the backends "reference" and "torch" against the
oracle."""

import math

import pytest
import torch
from attn_cases import (
    BACKENDS, BF16, BRANCHES, F32, F64, INPUTS, Case, check, geo, make_inputs, one_hot_gates, run, truth,
)
from nsa_nb.attention import nsa_attention
from nsa_nb.geometry import Geometry
from nsa_nb.reference import masked_softmax, sel_mask
from oracle import attend, n_visible

torch.set_num_threads(1)
backends = pytest.mark.parametrize("backend", BACKENDS)
dtypes = pytest.mark.parametrize("dtype", [F64, F32, BF16], ids=["float64", "float32", "bfloat16"])


def by_name(cases):
    return pytest.mark.parametrize("case", cases, ids=[c.name for c in cases])


def scale_q(x, by):
    x["q"] *= by


def tiny_first_query(x):
    x["q"] *= 10
    x["q"][:, 0] = 0.01


def same_keys(x):
    for name in ("k_cmp", "k_sel", "k_win"):
        x[name] = x[name][:, :1].expand_as(x[name]).clone()


SMALL = geo(4, 2, 8, 4, 5)
PAPER = geo(32, 16, 64, 4, 40)

# ---------------------------------------------------------------- values and gradients against the oracle

CASES = [
    Case("paper block sizes, six selection blocks, four places", 340, H=2, G=1, Dk=16, Dv=16, geo=PAPER),
    Case("d_v 3 times d_k", 60, Dk=8, Dv=24),
    Case("d_k 3 times d_v", 60, Dk=24, Dv=8),
    Case("d_k 192, d_v 128", 40, H=2, G=1, Dk=192, Dv=128),
    Case("d_k 64, d_v 128", 40, H=2, G=1, Dk=64, Dv=128),
    Case("d_k 256, d_v 256", 40, H=2, G=1, Dk=256, Dv=256),
    Case("n_sel 12", 80, H=2, G=2, geo=geo(4, 2, 4, 12, 9)),
    Case("more places than blocks: S 100, l_sel 64, n_sel 16", 100, geo=geo(32, 16, 64, 16, 32)),
    Case("counts and indices: B 2, S 128, n_sel 2", 128, B=2, H=2, G=1, geo=geo(8, 4, 16, 2, 16, n_init=1, n_local=1)),
    Case("only forced places: n_sel 3", 70, geo=geo(4, 2, 8, 3, 5)),
    Case("two first and three last blocks forced", 70, geo=geo(4, 2, 8, 6, 5, n_init=2, n_local=3)),
    Case("l = d = l_sel", 50, geo=geo(4, 4, 4, 4, 5)),
    Case("every size 1", 30, geo=geo(1, 1, 1, 4, 1)),
    Case("l 3 d, l_sel 5 d", 70, geo=geo(6, 2, 10, 4, 5)),
    Case("logits 50 times as large", 60, change=lambda x: scale_q(x, 50)),
    Case("q = 10 randn, q[0] = 0.01", 60, change=tiny_first_query),
    Case("equal keys: ties everywhere", 70, change=same_keys),
    Case("documents 0, 1, 32, 33, 200 in the paper's sizes", 200, H=2, G=1, geo=PAPER, cu=(0, 1, 32, 33, 200)),
    Case("documents 0, 1, 32, 33, 130 in small sizes", 130, cu=(0, 1, 32, 33, 130)),
    Case("only documents too short for a block", 7, cu=(0, 3, 4, 7), degenerate=True),
    Case("an empty document", 20, cu=(0, 9, 9, 20)),
    Case("scale given", 50, extra=(("scale", 0.7),)),
    Case("batch of 3", 40, B=3),
    *(Case(f"{h} heads a group", 45, H=2 * h, G=2) for h in (1, 2, 3, 6, 12)),
    *(Case(f"one group of {h}", 45, H=h, G=1) for h in (1, 4)),
    *(
        Case(
            f"{S} tokens, l 32: {n_visible(S - 1, 32, 16)} compressed blocks", S, H=2, G=1, geo=geo(32, 16, 64, 3, 8),
            degenerate=S == 1,
        )
        for S in (1, 31, 32, 33, 48)
    ),
    *(Case(f"window {w}", 40, geo=geo(4, 2, 8, 4, w), degenerate=w == 1) for w in (1, 2, 39, 40, 512)),
    # long enough for the torch backend to go through several chunks of queries, and from masked to gathered selection
    Case("600 tokens, one head", 600, H=1, G=1, geo=geo(16, 8, 16, 8, 33)),
    Case("300 tokens, few places", 300, H=2, G=1, geo=geo(8, 4, 8, 4, 9)),
]


@dtypes
@backends
@by_name(CASES)
def test_values_and_gradients(case, backend, dtype):
    check(truth(case), dtype, backend, case.degenerate, **case.kw)


ALONE = [
    Case(f"{name} alone", 61, Dk=8, Dv=12, change=lambda x, b=b: one_hot_gates(x, b)) for b, name in enumerate(BRANCHES)
]


@dtypes
@backends
@pytest.mark.parametrize("branch", range(3), ids=BRANCHES)
def test_a_branch_alone(branch, backend, dtype):
    "Gate 1 for one branch and 0 for the others: their keys and values get exactly no gradient."
    case = ALONE[branch]
    got, want = check(truth(case), dtype, backend, **case.kw)
    assert torch.equal(got["o"], got[f"o_{BRANCHES[branch]}"].to(dtype))
    for name in set(BRANCHES) - {BRANCHES[branch]}:
        assert not got[f"k_{name}"].any() and not got[f"v_{name}"].any()


# ---------------------------------------------------------------- Eq. 9 seen from outside

@backends
@pytest.mark.parametrize("mass", range(13))
def test_importance_of_one_compressed_block(mass, backend):
    """l 32, d 16, l_sel 64, all of p_cmp on block `mass`. With one free place the block picked is the one of
    largest weight
    1,2,2,2,1 on 4j-1 ... 4j+3, and where two weigh the same (mass on 4j+3: weight 1 in j and in j+1) the lower.
    """
    S, t = 448, 447                                   # 7 selection blocks; 0, 5 and 6 are forced, 1 ... 4 compete
    kw = dict(l=32, d=16, l_sel=64, n_sel=4, w=8)
    N = (S - 32) // 16 + 1
    q = torch.ones(1, S, 1, 1)
    k_cmp = torch.zeros(1, N, 1, 1)
    kv = torch.zeros(1, S, 1, 1)
    k_cmp[0, mass + 3] = 500  # every other block's weight underflows to 0
    _, aux = nsa_attention(
        q, k_cmp, k_cmp, kv, kv, kv, kv, torch.ones(1, S, 1, 3), **kw, backend=backend, return_aux=True
    )
    weights = {j: {-1: 1, 0: 2, 1: 2, 2: 2, 3: 1}.get(mass + 3 - 4 * j, 0) for j in (1, 2, 3, 4)}
    want = max(weights, key=lambda j: (weights[j], -j))
    assert aux["indices"][0, t, 0].tolist() == sorted({0, 5, 6, want})


@backends
@dtypes
@pytest.mark.parametrize("h", [1, 2, 3, 6])
def test_equal_scores_go_to_the_lower_index(h, backend, dtype):
    """Equal keys give equal weights whatever their number, 1/3 or 1/7 as well as 1/4: the first free blocks win,
    exactly."""
    S = 150
    kw = dict(l=8, d=4, l_sel=8, n_sel=6, w=8)
    N = (S - 8) // 4 + 1
    r = lambda *s: torch.randn(*s, generator=torch.Generator().manual_seed(h)).to(dtype)
    k, v = r(1, 1, 1, 16), r(1, S, 1, 4)
    _, aux = nsa_attention(
        r(1, S, h, 16), k.expand(1, N, 1, 16), v[:, :N], k.expand(1, S, 1, 16), v, k.expand(1, S, 1, 16), v,
        torch.ones(1, S, h, 3, dtype=dtype), **kw, backend=backend, return_aux=True,
    )
    # block 0's score lacks the term before the sequence but it is forced; the blocks 1 ... cur-2 have all their terms
    for t in range(S):
        cur = t // 8
        want = list(range(cur + 1)) if cur < 6 else [0, 1, 2, 3, cur - 1, cur]
        assert aux["indices"][0, t, 0].tolist() == want + [-1] * (6 - len(want)), t


# ---------------------------------------------------------------- masked means weight 0

@backends
@dtypes
def test_masked_keys_weigh_nothing(backend, dtype):
    """Visible logits near -2e12, hidden ones +2e12: a finite mask value of -1e4 or -1e9 would let the hidden ones
    win or share.
    In each branch the hidden keys are every key that is not visible to the last query: older than the window,
    not selected, and
    for earlier queries the future. Visible values are 1 and hidden ones -1e30, so the least share of a hidden
    key would show.
    """
    S = 65
    t = 64
    kw = dict(l=4, d=2, l_sel=4, n_sel=3, w=5)
    N = (S - 4) // 2 + 1
    q = torch.full((1, S, 2, 4), 1e6)
    bad, good = torch.full((4,), 1e6), torch.full((4,), -1e6)         # logits +-4e12 / 2
    k_cmp, k_sel, k_win = torch.zeros(1, N, 1, 4), torch.zeros(1, S, 1, 4), torch.zeros(1, S, 1, 4)
    k_cmp[:] = good
    k_sel[:], k_win[:] = bad, bad
    # blocks 0, 15, 16 are the forced ones of query 64
    k_sel[0, :4], k_sel[0, 60:], k_win[0, 60:] = good, good, good
    v = lambda k: (k[..., :2] < 0).float() - 1e30 * (k[..., :2] > 0).float()
    gates = torch.ones(1, S, 2, 3)
    one = lambda x: (x.double() - 1).abs().max() < 1e-2               # bfloat16 adds to 1 within 2^-8
    args = [x.to(dtype) for x in (q, k_cmp, v(k_cmp), k_sel, v(k_sel), k_win, v(k_win), gates)]
    _, aux = nsa_attention(*args, **kw, backend=backend, return_aux=True)
    assert aux["indices"][0, t, 0].tolist() == [0, 15, 16]
    for name in ("o_cmp", "o_sel", "o_win"):
        assert one(aux[name][0, t]), (name, aux[name][0, t])
    # and the future: hidden from query t-1 is what only later queries see
    k_win[0], k_sel[0], k_cmp[0] = good, good, good
    k_win[0, 33:], k_sel[0, 33:], k_cmp[0, 15:] = bad, bad, bad         # compressed block 15 covers tokens 30 ... 33
    args = [x.to(dtype) for x in (q, k_cmp, v(k_cmp), k_sel, v(k_sel), k_win, v(k_win), gates)]
    _, aux = nsa_attention(*args, **kw, backend=backend, return_aux=True)
    for name in ("o_cmp", "o_sel", "o_win"):
        assert one(aux[name][0, 3:33]), name


# ---------------------------------------------------------------- no visible compressed block

@backends
@dtypes
@pytest.mark.parametrize("S", [1, 31, 32, 33])
def test_queries_that_see_no_compressed_block(S, backend, dtype):
    case = Case(
        f"no block before 31 of {S}", S, H=2, G=1, geo=geo(32, 16, 64, 3, 8), change=lambda x: one_hot_gates(x, 0)
    )
    inputs, do = make_inputs(case)
    got, _ = run(inputs, do, dtype, backend, **case.kw)
    assert not got["o_cmp"][:, :31].any() and not got["o"][:, :31].any()
    assert not got["q"][:, :31].any() and not got["gates"][:, :31, :, 0].any()
    assert all(torch.isfinite(x).all() for x in got.values())
    assert bool(got["o_cmp"][:, 31:].any()) == (S > 31)


# ---------------------------------------------------------------- window

@backends
@pytest.mark.parametrize("w", [1, 2, 512])
def test_window_is_exactly_w_keys(w, backend):
    """Equal logits: the window's output is the mean of the values of tokens max(0, t-w+1) ... t. Values are 2^(t
    mod 8) and t."""
    S = 520
    t = torch.arange(S, dtype=F64)
    v = torch.stack([2.0 ** (t % 8), t], -1).reshape(1, S, 1, 2)
    z = torch.zeros(1, S, 1, 2, dtype=F64)
    N = (S - 32) // 16 + 1
    _, aux = nsa_attention(
        z, z[:, :N], z[:, :N], z, z, z, v, torch.ones(1, S, 1, 3, dtype=F64), l=32, d=16, l_sel=64, n_sel=3, w=w,
        backend=backend, return_aux=True,
    )
    want = torch.stack([v[0, max(0, i - w + 1): i + 1, 0].mean(0) for i in range(S)])
    torch.testing.assert_close(aux["o_win"][0, :, 0], want, rtol=1e-13, atol=0)


# ---------------------------------------------------------------- causality

def edited(inputs, t, case, how):
    "Everything at positions >= t changed, and every compressed block that holds such a token."
    gen = torch.Generator().manual_seed(t)
    out = []
    for name, x in zip(INPUTS, inputs):
        x = x.clone()
        first = t
        if name in ("k_cmp", "v_cmp"):
            borders = case.cu or (0, case.S)
            first = 0
            for a, b in zip(borders, borders[1:]):
                first += n_visible(min(t, b) - 1 - a, case.kw["l"], case.kw["d"]) if t > a else 0
        new = torch.randn(x[:, first:].shape, generator=gen, dtype=F32)
        x[:, first:] = (1e3 * new if how == "large" else x[:, first:].float() + new).to(x.dtype)
        out.append(x)
    return out


CAUSAL = [Case("one sequence", 70, geo=geo(8, 4, 16, 4, 9), H=4, G=2),
          Case("three documents", 70, geo=geo(8, 4, 16, 4, 9), cu=(0, 1, 33, 70)),
          Case("d_v 3, gathered", 150, geo=geo(4, 2, 4, 4, 5), H=2, G=1, Dv=3),
          Case("600 tokens, several chunks", 600, geo=geo(16, 8, 16, 8, 33), H=1, G=1)]
BORDERS = (1, 3, 4, 5, 7, 8, 9, 11, 12, 13, 15, 16, 17, 31, 32, 33, 34, 47, 48, 49, 63, 64, 65, 69)
FAR = (16, 129, 511, 512, 513, 599)


@pytest.mark.parametrize("dtype", [F64, F32, BF16], ids=["float64", "float32", "bfloat16"])
@backends
@by_name(CAUSAL)
def test_the_future_changes_no_bit_of_the_past(case, backend, dtype):
    inputs, do = make_inputs(case)
    inputs = [x.to(dtype) for x in inputs]
    o, aux = nsa_attention(*inputs, **case.kw, backend=backend, return_aux=True)
    for t in FAR if case.S > 500 else BORDERS:
        for how in ("added", "large"):
            o2, aux2 = nsa_attention(*edited(inputs, t, case, how), **case.kw, backend=backend, return_aux=True)
            assert torch.equal(o[:, :t], o2[:, :t]), (t, how)
            for name in aux:
                assert torch.equal(aux[name][:, :t], aux2[name][:, :t]), (name, t, how)
            assert not torch.equal(o[:, t:], o2[:, t:])


@backends
@by_name(CAUSAL[:2])
def test_the_past_sends_no_gradient_to_the_future(case, backend):
    inputs, do = make_inputs(case)
    for t in (1, 8, 9, 16, 33, 64):
        past = do.clone()
        past[:, t:] = 0
        got, _ = run(inputs, past, F32, backend, **case.kw)
        for name in ("q", "k_sel", "v_sel", "k_win", "v_win", "gates"):
            assert not got[name][:, t:].any(), (name, t)


@backends
def test_a_document_changes_no_bit_of_another(backend):
    "cu_seqlens 0, 1, 32, 33, 200: each as if alone, and each blind to what the others hold, before and after it."
    case = Case("documents", 200, H=2, G=1, geo=geo(8, 4, 16, 4, 20), cu=(0, 1, 32, 33, 200))
    inputs = [x.to(F32) for x in make_inputs(case)[0]]
    kw = {k: v for k, v in case.kw.items() if k != "cu_seqlens"}
    o, aux = nsa_attention(*inputs, **case.kw, backend=backend, return_aux=True)
    blk = 0
    for a, b in zip(case.cu, case.cu[1:]):
        n = n_visible(b - a - 1, 8, 4)
        at = {name: slice(blk, blk + n) if name in ("k_cmp", "v_cmp") else slice(a, b) for name in INPUTS}
        blk += n
        other = []
        for name, x in zip(INPUTS, inputs):
            y = 7 - 3 * x
            y[:, at[name]] = x[:, at[name]]
            other.append(y)
        o2, aux2 = nsa_attention(*other, **case.kw, backend=backend, return_aux=True)
        assert torch.equal(o[:, a:b], o2[:, a:b]), (a, b)
        assert torch.equal(aux["indices"][:, a:b], aux2["indices"][:, a:b])
        alone, aux1 = nsa_attention(
            *(x[:, at[name]] for name, x in zip(INPUTS, inputs)), **kw, backend=backend, return_aux=True
        )
        # float32; another shape may add in another order
        torch.testing.assert_close(o[:, a:b], alone, rtol=1e-5, atol=1e-6)
        assert torch.equal(aux["indices"][:, a:b], aux1["indices"])


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_document_that_is_not_finite_harms_no_other(backend, value):
    "A NaN or inf in one document's values: the other document's outputs keep their bits."
    case = Case("45 in two documents", 45, H=2, G=1, cu=(0, 25, 45))
    inputs = [x.to(F32) for x in make_inputs(case)[0]]
    o = nsa_attention(*inputs, **case.kw, backend=backend)
    for name in ("v_sel", "v_win"):
        for t, other in ((0, slice(25, 45)), (24, slice(25, 45)), (25, slice(0, 25))):
            bad = [x.clone() for x in inputs]
            bad[INPUTS.index(name)][:, t] = value
            assert torch.equal(nsa_attention(*bad, **case.kw, backend=backend)[:, other], o[:, other]), (name, t)


# ---------------------------------------------------------------- hand-made indices

def test_rows_that_select_nothing():
    """The reference's mask and softmax on indices written by hand: -1 anywhere reads nothing, a row of -1 gives 0
    and gradient 0."""
    S = 12
    geom = Geometry(l=2, d=2, l_sel=4, n_sel=3, w=1)
    idx = torch.tensor([[-1, -1, -1]] * 4 + [[0, -1, -1]] * 4 + [[0, 2, -1]] * 4).reshape(1, S, 1, 3)
    mask = sel_mask(idx, torch.arange(S), S, geom)[0, :, 0]
    for t in range(S):
        assert mask[t].nonzero().flatten().tolist() == [
            u for j in idx[0, t, 0].tolist() if j >= 0 for u in range(4 * j, 4 * j + 4) if u <= t
        ]
    q, k, v = (torch.randn(S, 5, dtype=F64, requires_grad=True) for _ in range(3))
    o = masked_softmax(q @ k.T, mask) @ v
    want = torch.stack([attend(q[t], k[mask[t]], v[mask[t]], 1.0)[0] for t in range(S)])
    do = torch.randn(S, 5, dtype=F64)
    assert not o[:4].any()
    torch.testing.assert_close(o, want, rtol=1e-12, atol=1e-14)
    got, exact = torch.autograd.grad(o, [q, k, v], do), torch.autograd.grad(want, [q, k, v], do)
    assert not got[0][:4].any() and not got[1][4:8].any()
    for a, b in zip(got, exact):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


# ---------------------------------------------------------------- how it is called

@backends
def test_strided_inputs_and_partial_gradients(backend):
    "Transposed and expanded inputs give the same numbers; a gradient asked for alone is the same gradient."
    case = Case("strided", 45, H=4, G=2)
    inputs, do = make_inputs(case)
    want, _ = run(inputs, do, F64, backend, **case.kw)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    got, _ = run(strided, do.transpose(1, 3).contiguous().transpose(1, 3), F64, backend, **case.kw)
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-12, atol=1e-12)
    for i, name in enumerate(INPUTS):
        leaves = [x.clone().requires_grad_(i == j) for j, x in enumerate(inputs)]
        o = nsa_attention(*leaves, **case.kw, backend=backend)
        g, = torch.autograd.grad(o, [leaves[i]], do)
        torch.testing.assert_close(g, want[name], rtol=1e-12, atol=1e-12)


@backends
def test_one_pair_for_three_branches(backend):
    "The same tensor as key of the selected and the window branch collects both gradients."
    case = Case("shared", 45, H=4, G=2)
    inputs, do = make_inputs(case)
    inputs[5], inputs[6] = inputs[3], inputs[4]
    want, _ = run(inputs, do, F64, backend, **case.kw)
    q, kc, vc, k, v, _, _, g = [x.clone().requires_grad_() for x in inputs]
    gk, gv = torch.autograd.grad(nsa_attention(q, kc, vc, k, v, k, v, g, **case.kw, backend=backend), [k, v], do)
    torch.testing.assert_close(gk, want["k_sel"] + want["k_win"], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gv, want["v_sel"] + want["v_win"], rtol=1e-12, atol=1e-12)


@backends
def test_inputs_are_left_alone_and_calls_repeat(backend):
    case = Case("again", 45)
    inputs, do = make_inputs(case)
    kept = [x.clone() for x in inputs]
    a, _ = run(inputs, do, F32, backend, **case.kw)
    b, _ = run(inputs, do, F32, backend, **case.kw)
    assert all(torch.equal(a[n], b[n]) for n in a) and all(torch.equal(x, y) for x, y in zip(inputs, kept))
    with torch.inference_mode():
        o = nsa_attention(*(x.to(F32) for x in inputs), **case.kw, backend=backend)
    assert torch.equal(o, a["o"])


@backends
def test_two_settings_in_turn(backend):
    "No state is left behind: calls with other sizes in between change no bit."
    one = Case("one", 50, geo=geo(4, 2, 8, 4, 5))
    two = Case("two", 50, geo=geo(8, 4, 16, 3, 17), Dk=12, Dv=4, seed=1)
    runs = lambda c: run(*make_inputs(c), F32, backend, **c.kw)[0]
    a, b = runs(one), runs(two)
    for _ in range(2):
        a2, b2 = runs(one), runs(two)
        assert all(torch.equal(a[n], a2[n]) and torch.equal(b[n], b2[n]) for n in a)


def test_auto_on_a_cpu_is_the_torch_backend():
    case = Case("auto", 45)
    inputs = [x.to(F32) for x in make_inputs(case)[0]]
    assert torch.equal(nsa_attention(*inputs, **case.kw), nsa_attention(*inputs, **case.kw, backend="torch"))


BROKEN = [("G | H", dict(H=3, G=2), {}, ("3", "2")),
          ("d | l", {}, dict(l=5), ("l", "5", "2")),
          ("d | l_sel", {}, dict(l_sel=9), ("l_sel", "9", "2")),
          ("l <= l_sel", {}, dict(l=10), ("l", "10", "8")),
          ("n_sel >= n_init + n_local", {}, dict(n_sel=2), ("n_sel", "2", "3")),
          ("w >= 1", {}, dict(w=0), ("w", "0")),
          ("d >= 1", {}, dict(d=0), ("d", "0")),
          ("backend", {}, dict(backend="refernce"), ("refernce", "reference"))]


@pytest.mark.parametrize("sizes,change,words", [b[1:] for b in BROKEN], ids=[b[0] for b in BROKEN])
def test_what_does_not_fit_is_a_value_error_with_both_numbers(sizes, change, words):
    inputs = make_inputs(Case("broken", 20, **sizes))[0]
    with pytest.raises(ValueError) as e:
        nsa_attention(*inputs, **(dict(l=4, d=2, l_sel=8, n_sel=4, w=5) | change))
    assert all(word in str(e.value) for word in words), str(e.value)


@pytest.mark.parametrize("i,name", [(i, n) for i, n in enumerate(INPUTS)])
def test_a_wrong_shape_is_a_value_error(i, name):
    "One token (or block) too few in one input: never an answer from the wrong rows."
    case = Case("short", 20)
    inputs = make_inputs(case)[0]
    inputs[i] = inputs[i][:, :-1]
    with pytest.raises(ValueError):
        nsa_attention(*inputs, **case.kw)


@pytest.mark.parametrize("cu", [(0, 10), (0, 12, 10, 20), (1, 20), (0, 25)])
def test_wrong_borders_are_a_value_error(cu):
    inputs = make_inputs(Case("borders", 20))[0]
    with pytest.raises(ValueError):
        nsa_attention(*inputs, **Case("borders", 20).kw, cu_seqlens=torch.tensor(cu, dtype=torch.int32))
