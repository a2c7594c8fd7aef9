"""The embedded real model: what the probes stand on."""

import time

import pytest
import torch

import kvprobe
from kvprobe import engine, needles

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def lm():
    return kvprobe.load("smollm2")


def test_geometry_and_fingerprint(lm):
    g = lm.geometry
    assert (g.n_layers, g.n_q, g.n_kv, g.d_head, g.d_model, len(g.kv_layers)) == (30, 9, 3, 64, 576, 30)
    assert lm.fingerprint == "cd68c707278d41fa" and lm.context == 8192


def test_later_loads_are_quick(lm):
    start = time.process_time()
    kvprobe.load("smollm2")
    assert time.process_time() - start < 15  # de-quantising takes longer than this alone; a prepared copy takes a second or two


def test_the_full_cache_recalls_a_planted_value(lm):
    filler = needles.Filler("builtin", lm.tokenizer)
    layout = needles.Layout(pre=32, age=160, second_box=False)
    script = needles.build(lm.tokenizer, filler, layout, [0], seed=0)[0]
    ids = torch.from_numpy(script.ids)[None]
    n = script.answer[0]
    got = engine.force(lm, kvprobe.cache(lm, keep=1000, buffer=16), ids[:, :-1], targets=ids[:, n:], first=n)
    assert got.top.all() and got.logp.sum() > -3


def test_deleting_the_fact_everywhere_loses_it(lm):
    filler = needles.Filler("builtin", lm.tokenizer)
    script = needles.build(lm.tokenizer, filler, needles.Layout(pre=32, age=160, second_box=False), [0], seed=0)[0]
    ids = torch.from_numpy(script.ids)[None]
    n = script.answer[0]
    pin = kvprobe.SpanPin(*script.box, sites=frozenset(), elsewhere="ban")
    got = engine.force(lm, kvprobe.cache(lm, keep=120, buffer=16, pins=[pin]), ids[:, :-1], targets=ids[:, n:], first=n)
    assert not got.top.all() and got.logp.sum() < -6


def test_digits_are_one_token_each(lm):
    assert len(needles.encode(lm.tokenizer, "4729")) == 4


def test_generation_under_eviction_stays_within_its_budget(lm):
    ids = lm.tokenizer("Count: one, two, three,", return_tensors="pt").input_ids
    cache = kvprobe.cache(lm, policy="streaming_llm", keep=16, buffer=4)
    out = engine.generate(lm, cache, ids, max_new_tokens=40)
    assert cache.get_seq_length() == out.shape[1] - 1 and cache.physical < 16 + 2 * 4
