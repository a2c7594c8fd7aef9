"""The oracle in one example: every number of it by brute force from one plain forward, and its kept sets against the policies' own evictions."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import kvprobe
from kvprobe import example, tasks
from kvprobe.comparing import eviction_seed
from kvprobe.models import load
from kvprobe.prompting import CHANCE

LAYER, HEAD, GROUP, W, KEEP, BUDGETS = 1, 2, 2, 8, 40, (24, 40, 90)


@pytest.fixture(scope="module")
def lm():
    return load("tiny", dtype="float64")


@pytest.fixture(scope="module")
def task(lm):
    return tasks.build(lm.tokenizer, "needles", [0], length=400)[0]


@pytest.fixture(scope="module")
def made(lm, task):
    return example.read(lm, task, LAYER, HEAD, budget=KEEP, window=W, m=3, t=4, future=6, draws=2)


def forward(lm, task, tokens):
    """q [hq n d], k, v [hkv n d] of the layer, of one plain forward over the prompt and what comes after it."""
    seen = kvprobe.capture(lm, torch.cat([torch.as_tensor(task.ids), tokens])[None], layers=[LAYER])
    return (getattr(seen, x)[LAYER][0].numpy() for x in "qkv")


@pytest.fixture(scope="module")
def states(lm, task, made):
    return (*forward(lm, task, made.ahead), kvprobe.head_weights(lm, "O", LAYER).numpy())


def attend(q, k, v, kept=slice(None)):
    z = np.exp((k[kept] @ q - (k @ q).max()) / np.sqrt(len(q)))
    return z / z.sum() @ v[kept]


def test_queries_keys_and_values_are_those_of_a_plain_forward(lm, task, made, states):
    q, k, v, w = states
    n = len(task.ids)
    wanted = dict(window=q[HEAD, n - W : n], future=q[HEAD, n:], keys=k[HEAD // GROUP, :n], values=v[HEAD // GROUP, :n], output=w[HEAD])
    assert made.n == n and len(made.ahead) == 6 and made.kv_head == 1
    for name, want in wanted.items():
        np.testing.assert_allclose(getattr(made, name), want, atol=1e-9, err_msg=name)
    assert len({tuple(x.tolist()) for x in made.continued}) == 3
    for tokens, written, mine in zip(made.continued, made.written, made.continuations):
        np.testing.assert_allclose(mine[written], next(forward(lm, task, tokens))[HEAD, n:][written], atol=1e-9)
    told = made.queries().set_index("set")
    assert told.queries.to_dict() == {"window": W, "future": 6} | {f"continuation {i + 1}": int(x.sum()) for i, x in enumerate(made.written)}
    assert told.positions["window"] == f"{n - W}..{n - 1}" and told.positions["future"] == f"{n}..{n + 5}"
    assert told.text["future"] == lm.tokenizer.decode(made.ahead.tolist())


def test_coverage_by_hand(made):
    def unit(x):
        return x.numpy() / np.linalg.norm(x.numpy(), axis=-1, keepdims=True)

    def nearest(*sets):
        return np.mean([max(unit(f) @ unit(q) for s in sets for q in s) for f in made.future])

    table = {(r[0], r[1]): (r.mixture, r.union) for r in made.coverage().itertuples(index=False)}
    each = [q[w] for q, w in zip(made.continuations, made.written)]
    assert sorted(table) == [(s, m) for s in ("both", "continuations") for m in (1, 2, 3)] + [("window", 0)]
    assert table["window", 0] == pytest.approx([nearest(made.window)] * 2)
    assert table["continuations", 2] == pytest.approx([np.mean([nearest(s) for s in each[:2]]), nearest(*each[:2])])
    assert table["continuations", 3] == pytest.approx([np.mean([nearest(s) for s in each]), nearest(*each)])
    assert table["both", 2] == pytest.approx([nearest(made.window) / 2 + sum(nearest(s) for s in each[:2]) / 4, nearest(made.window, *each[:2])])


def brute(states, head, n, step):
    """[n]: each entry left out of the softmax by itself, what that changes in the residual stream."""
    q, k, v, w = states
    k, v = k[head // GROUP, :n], v[head // GROUP, :n]
    full = attend(q[head, n + step], k, v)
    return np.array([np.linalg.norm((attend(q[head, n + step], k, v, np.arange(n) != i) - full) @ w[head]) for i in range(n)])


def test_what_deletion_costs_is_the_change_it_makes(made, states):
    every = np.stack([[brute(states, h, made.n, t) for t in range(6)] for h in (2, 3)])  # the query heads of KV head 1
    np.testing.assert_allclose(made.costs(eps=0.0), every[0], rtol=1e-9)
    np.testing.assert_allclose(made.costs(), every[0], rtol=1e-5)
    np.testing.assert_allclose(made.scores["oracle"][0], every.mean((0, 1)), rtol=1e-5)
    table = made.deleted(step=3, top=5)
    assert table.position.tolist() == np.argsort(-made.attention()[3].numpy())[:5].tolist() and table["relative difference"].max() < 1e-9
    np.testing.assert_allclose(table["directly"], every[0, 3, table.position], rtol=1e-9)
    full = attend(states[0][HEAD, made.n + 3], made.keys.numpy(), made.values.numpy()) @ states[3][HEAD]
    np.testing.assert_allclose(table["directly"] / table["over the output's norm"], np.linalg.norm(full), rtol=1e-9)
    with pytest.raises(ValueError, match="step=6"):
        made.deleted(step=6)


def held(made):
    return {0, *range(made.n - W, made.n)}


def best(made, name, draw, keep):
    """The protected entries and the highest of the others, in python, the newest first among equals."""
    score = made.scores[name][draw].tolist()
    free = sorted(set(range(made.n)) - held(made), key=lambda i: (-score[i], -i))
    return free, held(made) | set(free[: keep - len(held(made))])


def test_kept_sets_ranks_and_recall_by_sets(made):
    assert set(made.protected.nonzero().flatten().tolist()) == held(made)
    assert [len(made.scores[x]) for x in ("oracle", "window only", "LORE /E", "random")] == [1, 1, 2, 2]
    recall, p = made.recall(BUDGETS), len(held(made))
    for keep in BUDGETS:
        truth = best(made, "oracle", 0, keep)[1]
        for name, score in made.scores.items():
            kept = [best(made, name, draw, keep)[1] for draw in range(len(score))]
            assert set(made.kept(keep)[name].nonzero().flatten().tolist()) == kept[0]
            assert recall[f"B = {keep}", "all"][name] == pytest.approx(np.mean([len(x & truth) / keep for x in kept]))
            assert recall[f"B = {keep}", "free slots"][name] == pytest.approx(np.mean([len(x & truth - held(made)) / (keep - p) for x in kept]))
        assert recall[f"B = {keep}", "all"][CHANCE] == pytest.approx((p + (keep - p) ** 2 / (made.n - p)) / keep)
        assert recall[f"B = {keep}", "free slots"][CHANCE] == pytest.approx((keep - p) / (made.n - p))
    ranks = made.ranking(7)
    assert ranks.position.tolist() == best(made, "oracle", 0, KEEP)[0][:7] and ranks["rank: oracle"].tolist() == list(range(7))
    assert ranks["rank: LORE /E"].tolist() == [best(made, "LORE /E", 0, KEEP)[0].index(i) for i in ranks.position]
    np.testing.assert_allclose(ranks["this head"], made.costs().mean(0)[ranks.position.tolist()])


@pytest.mark.parametrize("name, policy, options", [("window only", "window_only", dict(form="magnitude", chunk=1, window=W)), ("random", "random", {}),
                                                   ("LORE /E", "lore", dict(form="magnitude", chunk=1, window=W, m=3, t=4))])
def test_what_is_kept_is_what_the_policy_keeps(lm, task, made, name, policy, options):
    own = kvprobe.compress(lm, [task.ids.tolist()], policy=policy, keep=KEEP, protect_window=W, seed=eviction_seed(0, 0), instances=[0], **options)
    assert set(own.cache.positions[LAYER, 0, made.kv_head].tolist()) == set(made.kept()[name].nonzero().flatten().tolist())


def test_output_error_by_masked_attention(made, states):
    q, k, v, _ = states
    k, v = k[made.kv_head, : made.n], v[made.kv_head, : made.n]
    table = made.errors(BUDGETS).set_index(["arm", "keep"])
    for name, score in made.scores.items():
        for keep in BUDGETS:
            errors = []
            for draw in range(len(score)):
                pairs = [(attend(q[HEAD, made.n + t], k, v), attend(q[HEAD, made.n + t], k, v, sorted(best(made, name, draw, keep)[1]))) for t in range(6)]
                errors.append(1 - np.mean([a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in pairs]))
            row = table.loc[name, keep]
            assert [row.value, row.low, row.high] == pytest.approx([np.mean(errors), min(errors), max(errors)], abs=1e-10) and row.draws == len(errors)


def test_kept_text_says_what_is_kept(made, task):
    a, z = task.spans["evidence"][0]
    lines = made.kept_text(90).split("\n")
    for name, title, text in zip(made.kept(), lines[::2], lines[1::2]):
        mine = best(made, name, 0, 90)[1]
        assert title == f"{name} ({len(mine & set(range(a, z)))} of the {z - a} tokens of the statement asked for)"
        free = sorted(mine - held(made))
        assert text.strip().replace("…", "") == "".join(made.model.tokenizer.decode([int(task.ids[i])]) for i in free).replace("\n", "⏎").strip()


def test_every_statement_that_leads_to_the_answer_counts(made, task):
    """A chain of variables has several."""
    spans = ((30, 40), (200, 212))
    chain = replace(made, task=replace(task, spans=dict(task.spans) | {"evidence": spans}))
    inside = {i for a, z in spans for i in range(a, z)}
    for name, title in zip(made.kept(), chain.kept_text(90).split("\n")[::2]):
        assert title == f"{name} ({len(best(made, name, 0, 90)[1] & inside)} of the 22 tokens of the statements that lead to the answer)"
    figure = chain.attention_figure()
    drawn = [(p.get_x() + 0.5, p.get_x() + p.get_width() + 0.5) for p in figure.axes[1].patches]
    assert drawn == [*spans, (made.n - W, made.n)]
    assert [t.get_text() for t in figure.legends[0].get_texts()][2:] == ["statements that lead to the answer", "window (protected)"]


def test_protected_entries_are_no_candidates_of_the_ranking(made):
    every = made.ranking(10**6)
    assert set(every.position) == set(range(made.n)) - held(made) and every["rank: oracle"].tolist() == list(range(len(every)))


def test_figures_draw_the_tables_and_name_what_they_are_of(made):
    table, figures = made.errors(BUDGETS), [made.plane(), made.attention_figure(), made.order_figure(), made.error_figure(BUDGETS)]
    for figure in figures:
        assert f"tiny, layer {LAYER}, query head {HEAD} (KV head 1)\nprompt of {made.n} tokens, question seen, n = 1" in figure.get_suptitle()
        assert all("[" in a.get_xlabel() or "%" in a.get_xlabel() for a in figure.axes if a.get_xlabel()) and figure.legends
    assert [len(c.get_offsets()) for c in figures[0].axes[0].collections] == [W, int(made.written.sum()), 6]
    np.testing.assert_allclose(figures[1].axes[0].images[0].get_array(), made.attention().clamp(min=1e-4))
    for axes, name in zip(figures[2].axes, ("window only", "LORE /E")):
        points = np.concatenate([np.asarray(c.get_offsets()) for c in axes.collections])
        free = ~made.protected
        want = np.stack([made.scores[name][0][free], made.scores["oracle"][0][free]], -1)
        np.testing.assert_allclose(points[np.lexsort(points.T)], want[np.lexsort(want.T)])
        both, kept = made.kept()[name] & made.kept()["oracle"] & free, made.kept()["oracle"] & free
        assert [len(c.get_offsets()) for c in axes.collections][2:] == [int((kept & ~both).sum()), int(both.sum())]
    for line in figures[3].axes[0].lines:
        assert any(np.allclose(line.get_ydata(), own.value) for _, own in table.groupby("arm"))
    assert len(figures[3].axes[0].lines) == 4


def test_refusals(lm, task, made):
    for given, said in ((dict(layer=7), "layer=7"), (dict(q_head=99), "q_head=99"), (dict(budget=5), "cannot hold"),
                        (dict(budget=4000), "nothing would be evicted"), (dict(m=0), "m=0")):
        with pytest.raises(ValueError, match=said):
            example.read(lm, task, **(dict(layer=LAYER, q_head=HEAD) | given))
    with pytest.raises(ValueError, match="keep=3"):
        made.kept(3)


def test_wrong_types_are_refused_by_what_is_allowed(lm, task, made):
    for change, said in ((dict(model="tiny"), "kvprobe.load.*not str"), (dict(task=task.ids), "tasks.build.*not ndarray"), (dict(layer=1.0), "layer=1.0 must be a whole"),
                         (dict(q_head=True), "q_head=True"), (dict(budget="40"), "budget='40'"), (dict(t=4.0), "t=4.0"), (dict(question="later"), "seen, unseen")):
        with pytest.raises(ValueError, match=said):
            example.read(**(dict(model=lm, task=task, layer=LAYER, q_head=HEAD) | change))
    for call, said in ((lambda: made.recall(64), r"\(48, 64\)"), (lambda: made.errors("64"), r"\(48, 64\)"), (lambda: made.error_figure(()), r"\(48, 64\)"),
                       (lambda: made.recall((40.5,)), "keep=40.5 must be a whole"), (lambda: made.kept(48.5), "keep=48.5 must be a whole"),
                       (lambda: made.deleted(step=0.5), "step=0.5"), (lambda: made.ranking(top=None), "top=None")):
        with pytest.raises(ValueError, match=said):
            call()
    assert made.recall(np.array(BUDGETS)).equals(made.recall(iter(BUDGETS)))


def test_of_an_unseen_question_the_window_and_the_continuations_know_nothing(lm, task):
    """What is compressed ends before the question; the future's queries come behind it, and ask for entries of what is compressed only."""
    n, cut = len(task.ids), task.cut
    made = example.read(lm, task, LAYER, HEAD, budget=KEEP, window=W, m=3, t=4, future=6, draws=2, question="unseen")
    q, k, v = forward(lm, task, made.ahead)
    assert made.n == cut < n and f"prompt of {cut} tokens, question unseen" in repr(made)
    for name, want in dict(window=q[HEAD, cut - W : cut], future=q[HEAD, n:], keys=k[HEAD // GROUP, :cut], values=v[HEAD // GROUP, :cut]).items():
        np.testing.assert_allclose(getattr(made, name), want, atol=1e-9, err_msg=name)
    short = replace(task, ids=task.ids[:cut])
    for tokens, written, mine in zip(made.continued, made.written, made.continuations):
        np.testing.assert_allclose(mine[written], next(forward(lm, short, tokens))[HEAD, cut:][written], atol=1e-9)
    told = made.queries().set_index("set").positions
    assert told["window"] == f"{cut - W}..{cut - 1}" and told["continuation 1"].startswith(f"{cut}..") and told["future"] == f"{n}..{n + 5}"
    states = np.concatenate([q[:, :cut], q[:, n:]], 1), k, v, kvprobe.head_weights(lm, "O", LAYER).numpy()  # the future's queries right behind what is compressed
    np.testing.assert_allclose(made.scores["oracle"][0], np.mean([brute(states, h, cut, t) for h in (2, 3) for t in range(6)], 0), rtol=1e-5)
    own = kvprobe.compress(lm, [task.ids[:cut].tolist()], policy="lore", keep=KEEP, protect_window=W, seed=eviction_seed(0, 0), instances=[0],
                           form="magnitude", chunk=1, window=W, m=3, t=4)
    assert set(own.cache.positions[LAYER, 0, made.kv_head].tolist()) == set(made.kept()["LORE /E"].nonzero().flatten().tolist())
