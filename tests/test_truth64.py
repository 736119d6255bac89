"""truth64.py, which the GPU tests are held to, against oracle.py on a CPU: values, selection, scores and gradients."""
import random

import pytest
import torch
import truth64
from attn_cases import Case, geo, make_inputs
from oracle import INPUTS, attention_and_grads, selection_disagreements
from truth64 import allowed, truth, valid

torch.set_num_threads(1)


def drawn(i):
    r = random.Random(i)
    d = r.choice([1, 2, 4])
    l = d * r.choice([1, 2, 3])
    l_sel = max(l, d * r.randint(1, 5))
    n_init, n_local = r.choice([0, 1, 2]), r.choice([0, 1, 2, 3])
    cu = [0]
    for _ in range(r.randint(1, 4)): cu.append(cu[-1] + r.choice([0, 1, l, 7, 23]) + (len(cu) == 1))
    packed = i % 2 == 1
    return Case(
        f"drawn {i}",
        cu[-1] if packed else r.randint(1, 45),
        1 if packed else r.choice([1, 2]),
        4,
        r.choice([1, 2, 4]),
        r.choice([3, 8]),
        r.choice([5, 8]),
        geo(
            l, d, l_sel, max(1, n_init + n_local) + r.randint(0, 4), r.choice([1, 3, 50]), n_init=n_init,
            n_local=n_local,
        ),
        tuple(cu) if packed else None,
        seed=i,
    )


@pytest.mark.parametrize("i", range(24))
@pytest.mark.parametrize("gather", [False, True])
def test_equals_the_oracle(i, gather, monkeypatch):
    if gather: monkeypatch.setattr(truth64, "DENSE", 0)
    case = drawn(i)
    inputs, do = make_inputs(case)
    res, grads = attention_and_grads(inputs, do, **case.kw)
    kw = {k: v for k, v in case.kw.items() if k != "cu_seqlens"}
    # equal scores may be added in another order
    t = truth(inputs, do, **kw, cu=case.cu and list(case.cu), indices=res.indices)
    sel = {k: kw[k] for k in ("l_sel", "n_sel", "n_init", "n_local")}
    assert not selection_disagreements(res, t["indices"], **sel, cu_seqlens=case.kw.get("cu_seqlens"))
    assert valid(t["indices"], **sel, cu=case.cu and list(case.cu)).all()
    for b, rows in enumerate(res.scores):
        for s, groups in enumerate(rows):
            for g, want in enumerate(groups):
                torch.testing.assert_close(
                    t["scores"][b, s, g, : len(want)], torch.tensor(want, dtype=torch.float64), rtol=1e-12, atol=1e-14
                )
    for name in ("o", "o_cmp", "o_sel", "o_win"):
        torch.testing.assert_close(t[name], getattr(res, name), rtol=1e-10, atol=1e-12)
    for name in INPUTS: torch.testing.assert_close(t[name], grads[name], rtol=1e-10, atol=1e-12)


def test_some_rows_are_the_same_rows():
    case = Case("rows", 60, Dk=8, Dv=6)
    inputs, do = make_inputs(case)
    rows = torch.tensor([0, 5, 31, 59])
    kept = torch.zeros_like(do)
    kept[:, rows] = do[:, rows]
    a, b = truth(inputs, kept, **case.kw), truth(inputs, do[:, rows], **case.kw, rows=rows)
    for name in ("o", "o_cmp", "o_sel", "o_win", "indices", "scores", "q", "gates"):
        torch.testing.assert_close(a[name][:, rows], b[name], rtol=1e-12, atol=1e-13)
    for name in INPUTS[1:7]: torch.testing.assert_close(a[name], b[name], rtol=1e-12, atol=1e-13)


def test_gradients_through_the_branches_outputs():
    case = Case("aux", 40)
    inputs, do = make_inputs(case)
    leaves = [x.clone().requires_grad_() for x in inputs]
    from oracle import attention
    res = attention(*leaves, **case.kw)
    more = [torch.randn_like(do), None, torch.randn_like(do)]
    want = torch.autograd.grad([res.o, res.o_cmp, res.o_win], leaves, [do, more[0], more[2]])
    t = truth(inputs, do, **case.kw, dos=more)
    for name, x in zip(INPUTS, want): torch.testing.assert_close(t[name], x, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("change", ["order", "twice", "hole", "future", "forced", "few"])
def test_a_broken_selection_is_seen(change):
    sel = dict(l_sel=2, n_sel=4, n_init=1, n_local=2)
    x = torch.tensor([[0, 1, 2, 3] if t >= 6 else [j if j <= t // 2 else -1 for j in range(4)] for t in range(16)])
    x[8:] = torch.tensor([[0, 1, t // 2 - 1, t // 2] for t in range(8, 16)])
    x = x.reshape(1, 16, 1, 4)
    assert valid(x, **sel).all()
    row = x[0, 12, 0]  # [0, 1, 5, 6]
    row[:] = torch.tensor(
        dict(
            order=[1, 0, 5, 6], twice=[0, 5, 5, 6], hole=[0, -1, 5, 6], future=[0, 5, 6, 7], forced=[1, 2, 5, 6],
            few=[0, 5, 6, -1],
        )[change]
    )
    ok = valid(x, **sel)
    assert not ok[0, 12, 0] and ok.sum() == 15


def test_the_floor_lies_under_the_tolerance_unless_one_key_is_seen():
    case = Case("many", 120, geo=geo(4, 2, 8, 6, 40))
    inputs, do = make_inputs(case)
    t = truth(inputs, do, **case.kw)
    for name in INPUTS[:7]:
        assert allowed(t, name, inputs, do, 8**-0.5, 1e-2, 2.0**-9) <= 1.5e-2 * float(t[name].norm()), name
    one = Case("one", 1)
    inputs, do = make_inputs(one)
    t = truth(inputs, do, **one.kw)
    assert not t["q"].any() and 0 < allowed(t, "q", inputs, do, 8 ** -0.5, 1e-2, 2.0**-9) < 0.05 * float(do.norm())
