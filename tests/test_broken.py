"""What a hostile reader found, each as a small input: padded pasts, edits that do nothing, damaged folders, users' policies."""

from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

import kvprobe
import tiny
from kvprobe import cli, engine


@pytest.fixture(scope="module")
def lm():
    return tiny.pair("llama")[0]


def padded(ids):
    """Two rows of 26 columns, the first padded by 7, and their mask."""
    mask = torch.ones(2, 26, dtype=torch.int64)
    mask[0, :7] = 0
    return ids[:2, :26], mask


@pytest.mark.parametrize("evicting", [True, False])
def test_a_chunk_behind_a_padded_prefill_equals_single_runs(lm, ids, evicting):
    batch, mask = padded(ids)

    def cache():
        return kvprobe.cache(lm, keep=100, buffer=4) if evicting else DynamicCache(config=lm.model.config)

    both, alone = cache(), cache()
    kvprobe.prefill(lm, both, batch[:, :20], mask[:, :20])
    got = kvprobe.capture(lm, batch[:, 20:], cache=both, what=("q", "k", "attn", "out"), attention_mask=None if evicting else mask)
    kvprobe.prefill(lm, alone, batch[:1, 7:20])
    want = kvprobe.capture(lm, batch[:1, 20:], cache=alone, what=("q", "k", "attn", "out"))
    assert got.q_positions.tolist() == [list(range(13, 19)), list(range(20, 26))]
    for i in want.layers:
        torch.testing.assert_close(got.q[i][:1], want.q[i], rtol=0, atol=1e-10)
        torch.testing.assert_close(got.out[i][:1], want.out[i], rtol=0, atol=1e-10)
        torch.testing.assert_close(got.attn[i][:1, ..., :19], want.attn[i], rtol=0, atol=1e-10)
    torch.testing.assert_close(got.logits[:1], want.logits, rtol=0, atol=1e-10)


def test_positions_count_in_each_rows_own_text(lm, ids):
    batch, mask = padded(ids)
    c = kvprobe.capture(lm, batch, what=("q", "k", "attn"), attention_mask=mask, positions=[-1, 2])
    assert c.q_positions.tolist() == [[2, 18], [2, 25]] and c.k_positions[0][:, 0].tolist() == [[2, 18], [2, 25]]
    alone = kvprobe.capture(lm, batch[:1, 7:], what=("q", "k"), positions=[2, -1])
    torch.testing.assert_close(c.q[1][:1], alone.q[1], rtol=0, atol=1e-10)
    torch.testing.assert_close(c.k[1][:1], alone.k[1], rtol=0, atol=1e-10)
    assert kvprobe.estimate(lm, batch[0], what="q", positions=[5, 2]) == kvprobe.capture(lm, batch[:1], what="q", positions=[5, 2]).nbytes
    with pytest.raises(ValueError, match="twice"):
        kvprobe.capture(lm, batch, positions=[5, 2, 2])


def test_padding_is_not_scored(lm, ids):
    batch, mask = padded(ids)
    with pytest.raises(ValueError, match="at least 8"):
        kvprobe.intervene(lm, batch, [], attention_mask=mask, all_logits=True).logp(3)
    both = kvprobe.intervene(lm, batch, [], attention_mask=mask, all_logits=True).logp(9)
    alone = kvprobe.intervene(lm, batch[:1, 7:], [], all_logits=True).logp(2)
    torch.testing.assert_close(both[:1], alone, rtol=0, atol=1e-10)


def test_keys_from_elsewhere_are_refused_where_positions_are_renumbered(lm, ids):
    donor = kvprobe.capture(lm, ids[:1], what=("k", "v"))
    cache = kvprobe.cache(lm, keep=16, buffer=4, positions="renumbered")
    kvprobe.prefill(lm, cache, ids[:1, :40])
    with pytest.raises(ValueError, match="renumbers"):
        kvprobe.intervene(lm, ids[:1, 40:42], kvprobe.transplant(donor, (5, 6), {(0, 0)}), cache=cache)


@pytest.mark.parametrize("edit", [
    lambda d: kvprobe.transplant(d, (5, 9), {(0, 0)}, at=1000), lambda d: kvprobe.transplant(d, (5, 9), {(0, 0)}, at=-3), lambda d: kvprobe.transplant(d, (9, 5), {(0, 0)}),
    lambda d: kvprobe.pin(100, 108, {(0, 0)}), lambda d: kvprobe.pin(8, 0, {(0, 0)}), lambda d: kvprobe.head_masks({(0, 0): [1000]}),
    lambda d: kvprobe.head_masks({(0, 0): [-1]}), lambda d: kvprobe.ablate({(0, 0)}, positions=[1000])])
def test_edits_that_would_do_nothing_are_refused(lm, ids, edit):
    donor = kvprobe.capture(lm, ids[:1], what=("k", "v"))
    with pytest.raises(ValueError, match="positions 0..79|non-empty interval"):
        kvprobe.intervene(lm, ids[:1], edit(donor))


def test_a_pin_without_a_store_says_what_is_gone(lm, ids):
    cache = kvprobe.cache(lm, keep=16, buffer=4, pins=[kvprobe.SpanPin(3, 8, frozenset())])
    kvprobe.prefill(lm, cache, ids[:1, :40])
    with pytest.raises(ValueError, match="position 3 has been evicted from layer 0, KV head 1"):
        kvprobe.intervene(lm, ids[:1, 40:42], kvprobe.pin(3, 8, {(0, 1)}), cache=cache)
    part = kvprobe.capture(lm, ids[:1], what=("k", "v"), positions=range(3, 8), kv_heads=[1])
    with pytest.raises(ValueError, match="all KV heads"):
        kvprobe.pin(3, 8, {(0, 1)}, store=part)


def test_a_later_mask_cannot_hide_a_cached_token(lm, ids):
    cache = kvprobe.cache(lm, keep=100, buffer=4)
    kvprobe.prefill(lm, cache, ids[:1, :20])
    mask = torch.ones(1, 25, dtype=torch.int64)
    mask[0, 5] = 0
    with pytest.raises(ValueError, match="masks may only grow"):
        lm.model(ids[:1, 20:25], cache=cache, attention_mask=mask)


@pytest.mark.parametrize("pins, says", [
    ([kvprobe.SpanPin(0, 30)], "cannot hold 30"), ([kvprobe.SpanPin(0, 10), kvprobe.SinkPin(20)], "cannot hold 20"),
    ([kvprobe.SinkPin(4), kvprobe.SpanPin(2, 6, frozenset())], "two pins disagree about position 2")])
def test_impossible_pins_are_refused_before_any_work(lm, pins, says):
    with pytest.raises(ValueError, match=says):
        kvprobe.cache(lm, keep=16, buffer=4, pins=pins)


def test_a_prompt_larger_than_keep_is_refused_at_the_prompt(lm, ids):
    with pytest.raises(ValueError, match="protected prompt of 20"):
        kvprobe.prefill(lm, kvprobe.cache(lm, keep=16, buffer=4, protect_prompt=True), ids[:1, :20])


SCORES = {"short": "view.rand()[..., :-1]", "none": "None", "typo": "view.keyz", "nan": "view.rand() * float('nan')", "complex": "view.rand() * 1j"}


@pytest.mark.parametrize("name", SCORES)
def test_a_users_policy_that_is_wrong_is_named(lm, ids, tmp_path, name):
    path = tmp_path / "mine.py"
    path.write_text(f"from dataclasses import dataclass\nfrom kvprobe.types import Needs\n@dataclass(frozen=True)\nclass POLICY:\n    needs = Needs()\n"
                    f"    def score(self, view):\n        return {SCORES[name]}\n")
    with pytest.raises((ValueError, RuntimeError), match="policy"):
        kvprobe.prefill(lm, kvprobe.cache(lm, policy=str(path), keep=16, buffer=4), ids[:1, :40])


@pytest.mark.parametrize("text, says", [
    ("class POLICY: pass", "must be a dataclass"), ("from dataclasses import dataclass\n@dataclass\nclass POLICY:\n    a: int\n    needs = 1\n    def score(self, v): pass", "needs a value for a"),
    ("x =", "does not load"), ("x = 1", "defines no POLICY")])
def test_policy_files_are_checked(lm, tmp_path, text, says):
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(ValueError, match=says):
        kvprobe.cache(lm, policy=str(path), keep=16, buffer=4)


@pytest.mark.parametrize("fields, says", [
    (dict(policy="snapkv", policy_options={"pooling": "foo"}), "'average' or 'max'"), (dict(policy_options={"block": 2.5}, policy="random"), "it takes int"),
    (dict(second_box="no"), "it takes bool"), (dict(keep="64"), "int"), (dict(layers=0), "str"), (dict(instances=2.5), "int"), (dict(seed=-1), "negative")])
def test_values_of_the_wrong_kind_are_refused(tmp_path, fields, says):
    with pytest.raises(ValueError, match=says):
        kvprobe.run("planted_fact", preset="smoke", out=tmp_path / "x", **fields)


def test_the_buffer_may_count_inside_keep(lm, ids):
    """B06: budget 32 with buffer 8 inside fires at exactly 40 and returns to 32."""
    cache = kvprobe.cache(lm, keep=32, buffer=8, buffer_in_keep=True)
    sizes = []
    for t in range(60):
        lm.model(ids[:1, t : t + 1], cache=cache)
        sizes.append(cache.physical)
    assert cache.keep_log.fired[0] == (40, 48, 56) and sizes[38:41] == [39, 32, 33]


def test_a_long_second_turn_is_split_by_our_own_generate(lm, ids):
    cache = kvprobe.cache(lm, keep=16, buffer=4)
    first = engine.generate(lm, cache, ids[:1, :30], max_new_tokens=3)
    longer = torch.cat([first, ids[:1, 30:60]], 1)
    out = engine.generate(lm, cache, longer, max_new_tokens=3)
    assert out.shape[1] == longer.shape[1] + 3 and cache.physical < 16 + 8


# -- damaged folders --------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kvprobe.run("planted_fact", preset="smoke", instances=2, batch_size=1, out="r", progress=False)
    return Path("r")


def test_audit_changes_nothing_and_names_what_is_damaged(run, capsys):
    log = run / "keeplogs/batch-0000.npz"
    log.write_bytes(log.read_bytes()[:100])
    before = (run / "rows.jsonl").read_bytes()
    assert cli.main(["audit", "r"]) == 1 and "batches [0]" in capsys.readouterr().err
    assert (run / "rows.jsonl").read_bytes() == before
    assert cli.main(["show", "r"]) == 0 and "batches [0] are left out" in capsys.readouterr().err


def test_show_trusts_only_whole_batches(run, capsys):
    with open(run / "rows.jsonl", "a") as file:
        file.write('{"batch": "x"}\n{"batch": 99, "value": 1}\n')
    assert cli.main(["show", "r"]) == 0
    assert "[99]" in capsys.readouterr().err
    (run / "rows.jsonl").unlink()
    assert cli.main(["show", "r"]) == 1 and "no whole batch" in capsys.readouterr().err


def test_a_ledger_line_without_rows_is_computed_again(run):
    from kvprobe.results import canonical, digest

    with open(run / "batches.jsonl", "a") as file:
        file.write(canonical({"batch": 7, "sha256": digest(""), "log": None, "members": []}) + "\n")
    assert cli.main(["run", "planted_fact", "--preset", "smoke", "--instances", "2", "--batch-size", "1", "--out", "r"]) == 0


@pytest.mark.parametrize("change", ['"speed": 3, "keep"', '"keep": "x", "old_keep"'])
def test_rerun_of_a_strange_manifest_is_refused(run, change, capsys):
    path = run / "manifest.json"
    path.write_text(path.read_text().replace('"keep"', change, 1))
    assert cli.main(["rerun", "r/manifest.json", "--out", "s"]) == 1 and "Traceback" not in capsys.readouterr().err
