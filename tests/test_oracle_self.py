"""The oracle against cases worked by hand: the numbers are written out, nothing of the package is imported."""
import math

import pytest
import torch
from oracle import (
    F64, attend, attention, attention_and_grads, compress_avg, compress_conv, compress_mlp, forced_blocks, gate_values,
    importance, module, n_blocks, n_visible, rel_err, rope, select, selection_disagreements,
)

T = lambda *rows: torch.tensor(rows, dtype=F64)
close = lambda a, b: torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)


def test_rope_turns_channel_i_with_channel_i_plus_half():
    # D = 4: pairs (0, 2) with frequency 1 and (1, 3) with 10000^(-2/4) = 0.01; position 0 stays
    x = T([[1, 0, 0, 0]], [[1, 0, 0, 0]], [[0, 1, 0, 0]])
    y = rope(x, [0, 2, 3])
    f = float(torch.tensor(0.03, dtype=torch.float32))
    close(y[0], x[0])
    close(y[1, 0], T(math.cos(2), 0, math.sin(2), 0))
    assert torch.allclose(y[2, 0], T(0, math.cos(f), 0, math.sin(f)), atol=1e-8)  # 0.01 is not a float32
    close(rope(T([[0., 1.]]), [1])[0, 0], T(-math.sin(1), math.cos(1)))           # the second of a pair gets -sin
    close(rope(x[:1], [6], rope_scale=3.0), rope(x[:1], [2]))


@pytest.mark.parametrize(
    "S,l,d,N",
    [
        (0, 4, 2, 0), (3, 4, 2, 0), (4, 4, 2, 1), (5, 4, 2, 1), (6, 4, 2, 2), (31, 32, 16, 0), (32, 32, 16, 1),
        (47, 32, 16, 1), (48, 32, 16, 2), (5, 2, 2, 2), (3, 1, 1, 3),
    ],
)
def test_block_counts(S, l, d, N):
    assert n_blocks(S, l, d) == N
    assert n_visible(S - 1, l, d) == N, "the last token sees every complete block"


def test_visible_blocks_by_query():
    assert [n_visible(t, 4, 2) for t in range(9)] == [0, 0, 0, 1, 1, 2, 2, 3, 3]


def test_compression():
    x = T([[1.]], [[2.]], [[3.]], [[4.]], [[5.]], [[6.]], [[70.]])  # seven tokens, one group, one channel
    close(compress_avg(x, 4, 2), T([[2.5]], [[4.5]]))               # the seventh token completes no block
    close(compress_conv(x, T([[1.]], [[0.]], [[0.]], [[10.]]), 4, 2), T([[41.]], [[63.]]))
    assert compress_avg(x[:3], 4, 2).shape == (0, 1, 1)
    # mlp on l = 2, d = 2: block (1, 2) plus pe (0, 1) is (1, 3); hidden 2*1 - 3 + 1 = 0 and 1 + 3 = 4; SiLU 0 and
    # 4*sigmoid(4);
    # out 5*0 + 0.5*silu(4) + 7
    pe = T([[0.]], [[1.]])
    w1 = T([[2., -1.], [1., 1.]])
    b1 = T([1., 0.])
    w2 = T([[5., .5]])
    b2 = T([7.])
    close(compress_mlp(x[:2], pe, w1, b1, w2, b2, 2, 2), T([[.5 * 4 / (1 + math.exp(-4)) + 7]]))
    assert compress_mlp(x[:1], pe, w1, b1, w2, b2, 2, 2).shape == (0, 1, 1)


def test_one_softmax():
    out, p = attend(T(2.), T([0.], [math.log(3) / 2]), T([4., 0.], [8., 1.]), 1.0)
    close(p, T(.25, .75))
    close(out, T(7., .75))
    out, p = attend(T(2.), torch.zeros(0, 1, dtype=F64), torch.zeros(0, 2, dtype=F64), 1.0)
    assert out.tolist() == [0, 0] and p.numel() == 0
    close(attend(T(1.), T([1000.], [0.]), T([1.], [5.]), 1.0)[0], T(1.))  # no overflow


def test_importance_weights_of_the_spec():
    # l 32, d 16, l_sel 64: all the mass on compressed block i lands with 1,2,2,2,1 on 4j-1 ... 4j+3
    for i in range(16):
        p = [0.0] * 16
        p[i] = 1.0
        for j, got in enumerate(importance(p, 4, 32, 16, 64)):
            assert got == {-1: 1, 0: 2, 1: 2, 2: 2, 3: 1}.get(i - 4 * j, 0), (i, j)
    # l 16, d 8, l_sel 32 has the same ratios; l = d = l_sel: every block is its own
    assert importance([0, 0, 0, 1.0, 0], 2, 16, 8, 32) == [1, 1]
    assert importance([.5, .25, .25], 3, 4, 4, 4) == [.5, .25, .25]
    # l 3, d 1, l_sel 3: the terms m - n are -2,-1,-1,0,0,0,1,1,2
    # (0,0)(1,1)(2,2) reach block 0 from j = 0; (1,0)(2,1) reach block 1 from j = 0, and from j = 1 only (0,2) does
    assert importance([1, 0, 0, 0, 0], 2, 3, 1, 3) == [3, 0]
    assert importance([0, 1, 0, 0, 0], 2, 3, 1, 3) == [2, 1]
    # blocks past the visible ones count nothing
    assert importance([1.0], 3, 32, 16, 64) == [2, 0, 0] and importance([], 2, 32, 16, 64) == [0, 0]


def test_forced_and_selected():
    assert forced_blocks(9, 1, 2) == {0, 8, 9} and forced_blocks(0, 1, 2) == {0} and forced_blocks(5, 2, 1) == {0, 1, 5}
    s = [0, 5, 7, 7, 1, 7, 0, 9]
    assert select(s, 7, 5, 1, 2) == [0, 2, 3, 6, 7]      # three blocks score 7: the two lower ones get the free places
    assert select(s, 7, 4, 1, 2) == [0, 2, 6, 7]
    assert select(s, 7, 3, 1, 2) == [0, 6, 7]
    assert select(s, 7, 8, 1, 2) == list(range(8))
    assert select(s[:2], 1, 4, 1, 2) == [0, 1, -1, -1]
    assert select(s[:1], 0, 3, 1, 2) == [0, -1, -1]


def tiny(S=5):
    """One head, Dk = Dv = 1, l = d = l_sel = 1, so that every token is its own block; n_sel 3, w 2.

    q is 1 and every key ln 2 at token 0, else 0: token 0 has twice the weight of any other.
    """
    col = lambda *v: torch.tensor(v[:S], dtype=F64).reshape(1, S, 1, 1)
    k, v = col(math.log(2), 0, 0, 0, 0), col(1, 2, 4, 8, 16)
    gates = torch.tensor([1., 10., 100.], dtype=F64).expand(1, S, 1, 3).contiguous()
    return [col(*[1] * 5), k, v, k, v, k, v, gates], dict(l=1, d=1, l_sel=1, n_sel=3, w=2, n_init=1, n_local=2)


def test_whole_op_by_hand():
    inputs, kw = tiny()
    res = attention(*inputs, **kw)
    flat = lambda x: x.flatten()
    # weights 2:1:1:1:1 over what is visible
    close(flat(res.o_cmp), T(1., 4 / 3, 8 / 4, 16 / 5, 32 / 6))
    # t = 3: candidates 0..3, forced 0, 2, 3, no free place; t = 4: forced 0, 3, 4
    assert res.indices[0, :, 0].tolist() == [[0, -1, -1], [0, 1, -1], [0, 1, 2], [0, 2, 3], [0, 3, 4]]
    close(flat(res.o_sel), T(1., 4 / 3, 8 / 4, 14 / 4, 26 / 4))
    # two tokens: 0; 0, 1 with 2:1; then 1, 2 with 1:1 ...
    close(flat(res.o_win), T(1., 4 / 3, 3., 6., 12.))
    close(flat(res.o), T(111., 148., 2 + 20 + 300, 3.2 + 35 + 600, 32 / 6 + 65 + 1200))
    assert res.scores[0][2][0] == pytest.approx([.5, .25, .25])


def test_gradients_by_hand():
    # t = 1 of tiny(2): p = (2/3, 1/3), v = (1, 2), o = 4/3 in each branch, gates 1, 10, 100, do = (0, 1)
    inputs, kw = tiny(2)
    _, g = attention_and_grads(inputs, torch.tensor([0., 1.], dtype=F64).reshape(1, 2, 1, 1), **kw)
    close(g["gates"].flatten(), T(0, 0, 0, 4 / 3, 4 / 3, 4 / 3))
    close(g["v_cmp"].flatten(), T(2 / 3, 1 / 3))
    close(g["v_sel"].flatten(), T(20 / 3, 10 / 3))
    close(g["v_win"].flatten(), T(200 / 3, 100 / 3))
    # ds = p (v - o) = (-2/9, 2/9); dk = q ds, dq = sum ds k = -2/9 ln 2
    close(g["k_win"].flatten(), T(-200 / 9, 200 / 9))
    close(g["q"].flatten(), T(0, -111 * 2 / 9 * math.log(2)))


def test_gradients_by_differences():
    torch.manual_seed(0)
    S = 7
    H = 4
    G = 2
    Dk = 3
    Dv = 2
    kw = dict(l=2, d=1, l_sel=2, n_sel=3, w=3)
    r = lambda *s: torch.randn(*s, dtype=F64).requires_grad_()
    N = n_blocks(S, 2, 1)
    inputs = [
        r(1, S, H, Dk), r(1, N, G, Dk), r(1, N, G, Dv), r(1, S, G, Dk), r(1, S, G, Dv), r(1, S, G, Dk), r(1, S, G, Dv),
        r(1, S, H, 3),
    ]
    assert torch.autograd.gradcheck(lambda *a: attention(*a, **kw).o, inputs, fast_mode=True)


def test_two_groups_share_inside_not_across():
    # group 0 (heads 0, 1) votes for block 1, group 1 (heads 2, 3) for block 2, by the sum over its heads
    S = 6
    kw = dict(l=1, d=1, l_sel=1, n_sel=4, w=1)
    q = torch.ones(1, S, 4, 1, dtype=F64)
    k = torch.zeros(1, S, 2, 1, dtype=F64)
    k[0, 1, 0, 0], k[0, 2, 1, 0] = 1, 1
    v = torch.arange(2 * S, dtype=F64).reshape(1, S, 2, 1)
    gates = torch.ones(1, S, 4, 3, dtype=F64)
    res = attention(q, k, v, k, v, k, v, gates, **kw)
    assert res.indices[0, 5].tolist() == [[0, 1, 4, 5], [0, 2, 4, 5]]
    assert torch.equal(res.o[:, :, 0], res.o[:, :, 1]) and not torch.equal(res.o[:, :, 1], res.o[:, :, 2])
    # equal keys: the free place goes to the lower index
    res = attention(q, k * 0, v, k, v, k, v, gates, **kw)
    assert res.indices[0, 5].tolist() == [[0, 1, 4, 5]] * 2
    e = math.e
    s = res.o_sel[0, 5]
    close(s[0], T((0 + 2 * e + 8 + 10) / (3 + e)))  # group 0's values are 0, 2, 4 ...; its token 1 has weight e


def test_sequences_are_alone():
    inputs, kw = tiny(5)
    res = attention(*inputs, cu_seqlens=[0, 2, 2, 5], **kw)
    col = lambda *v: torch.tensor(v, dtype=F64).reshape(1, -1, 1, 1)
    parts = [attention(*(x[:, :2] for x in inputs), **kw), attention(*(x[:, 2:] for x in inputs), **kw)]
    for name in ("o", "o_cmp", "o_sel", "o_win", "indices"):
        assert torch.equal(getattr(res, name), torch.cat([getattr(p, name) for p in parts], 1))
    close(res.o_cmp, col(1., 4 / 3, 4., 6., 28 / 3))  # tokens 2, 3, 4 weigh the same: 4; (4+8)/2; (4+8+16)/3
    assert res.indices[0, 2, 0].tolist() == [0, -1, -1], "positions begin again"


def test_nothing_selected():
    inputs, kw = tiny(3)
    none = torch.full((1, 3, 1, 3), -1, dtype=torch.int32)
    res, g = attention_and_grads(inputs, torch.ones(1, 3, 1, 1), indices=none, **kw)
    assert not res.o_sel.any() and not g["k_sel"].any() and not g["v_sel"].any()


def test_the_selection_check_sees_each_fault():
    torch.manual_seed(1)
    S = 24
    kw = dict(l=2, d=1, l_sel=2, n_sel=5, w=3, n_init=1, n_local=2)
    r = lambda n, D: torch.randn(1, n, 1, D, dtype=F64)
    N = n_blocks(S, 2, 1)
    res = attention(r(S, 4), r(N, 4), r(N, 4), r(S, 4), r(S, 4), r(S, 4), r(S, 4), r(S, 3), **kw)
    sel_kw = {k: kw[k] for k in ("l_sel", "n_sel", "n_init", "n_local")}
    check = lambda x: selection_disagreements(res, x, **sel_kw)
    assert check(res.indices) == []
    own = res.indices[0, 23, 0].tolist()
    scores = res.scores[0][23][0]
    worst = min((j for j in range(12) if j not in own), key=lambda j: scores[j])
    best = max((j for j in own if j not in (0, 10, 11)), key=lambda j: scores[j])
    def with_row(row, t=23):
        x = res.indices.clone()
        x[0, t, 0] = torch.tensor(row, dtype=torch.int32)
        return check(x)
    assert "scores" in with_row(sorted((set(own) | {worst}) - {best}))[0]
    assert "forced" in with_row(sorted((set(own) | {worst}) - {0}))[0]
    assert "ascending" in with_row(own[::-1])[0]
    assert "ascending" in with_row(own[:3] + own[2:4])[0]
    assert "ascending" in with_row([-1] + own[1:])[0]
    assert "count" in with_row(own[:4] + [-1])[0]
    assert "count" in with_row([0, 1, 2, -1, -1], t=3)[0], "block 2 is the future of token 3"
    assert check(res.indices.long()) != []
    # a near tie is forgiven within float32 rounding, and not beyond
    a, b = [j for j in own if j not in (0, 10, 11)]
    low = a if scores[a] < scores[b] else b
    scores[worst] = scores[low] * (1 - 2.0 ** -22)
    swapped = sorted((set(own) | {worst}) - {low})
    assert with_row(swapped) == []
    scores[worst] = scores[low] * (1 - 1e-3)
    assert "scores" in with_row(swapped)[0]


def test_gates_by_hand():
    x, W = T([1., 2.]), T([1., 0.], [0., 1.], [1., 1.], [0., 0.], [0., 0.], [0., math.log(2) / 2])
    sig = lambda z: 1 / (1 + math.exp(-z))
    close(gate_values(x, [(W, None)], 2), T([[sig(1), sig(2), sig(3)], [.5, .5, 2 / 3]]))
    close(gate_values(x, [(W, None)], 2, "softmax")[0, 1], T(.25, .25, .5))
    close(gate_values(x, [(W, None)], 2, "softmax", temp=.5)[0, 1], T(1 / 6, 1 / 6, 4 / 6))


def test_module_by_hand():
    # dim 1, one head of Dk = 2, Dv = 1; x = 1 everywhere. Values are 3, so every branch gives 3, gates 1/2: 4.5, times
    # o = 2
    ones = torch.ones(2, 1, dtype=F64)
    W = dict(q=ones, k_cmp=ones, k_sel=ones, k_win=ones, v_cmp=T([3.]), v_sel=T([3.]), v_win=T([3.]), o=T([2.]),
             gate=[(torch.zeros(3, 1, dtype=F64), None)])
    kw = dict(n_heads=1, n_kv_groups=1, d_k=2, d_v=1, l=2, d=1, l_sel=2, n_sel=3, w=2)
    y, res = module(W, torch.ones(1, 4, 1, dtype=F64), **kw)
    close(y.flatten(), T(6., 9., 9., 9.))  # token 0 sees no compressed block
    # with rope "before", block 0's key is the mean of (1, 1) and (1, 1) turned by 1; "none" leaves (1, 1); "after"
    # turns by i*d
    V = dict(W, v_cmp=torch.ones(1, 1, dtype=F64), gate=[(T([50.], [-50.], [-50.]), None)], o=T([1.]))
    x = torch.ones(1, 3, 1, dtype=F64)
    # the last token's key and value are three times as long
    x[0, 2] = 3.
    logit = lambda angle: math.cos(angle) * 2                     # (1,1) turned against (1,1), Dk = 2
    q_norm = 3.                                                   # the query is token 2
    def expect(a, b):                                             # compressed logits a, b; values 1 and (1+3)/2 = 2
        ea, eb = math.exp(a / math.sqrt(2)), math.exp(b / math.sqrt(2))
        return (ea + 2 * eb) / (ea + eb)
    got = lambda rope_at: float(module(V, x, cmp_rope=rope_at, **kw)[0][0, 2, 0])
    assert got("before") == pytest.approx(
        expect(q_norm * (logit(2) + logit(1)) / 2, q_norm * (logit(1) + 3 * logit(0)) / 2), rel=1e-7
    )
    assert got("after") == pytest.approx(expect(q_norm * logit(2), q_norm * 2 * logit(1)), rel=1e-7)
    assert got("none") == pytest.approx(expect(q_norm * logit(2), q_norm * 2 * logit(2)), rel=1e-7)


def test_rel_err():
    assert rel_err(T(3., 4.), T(3., 4.)) == 0 and rel_err(T(3., 4.5), T(3., 4.)) == pytest.approx(.1)
    assert (
        rel_err(T(0.0), T(0.0)) == 0
        and rel_err(T(1e-30), T(0.0)) == math.inf
        and rel_err(T(math.nan), T(1.0)) == math.inf
    )
