"""Free generation: equal to transformers where nothing is evicted, to brute force where something is, and a row is its own."""

import copy
import warnings

import numpy as np
import pytest
import torch
from transformers import DynamicCache

import kvprobe
import tiny
from kvprobe import draws, writing
from kvprobe.sampling import Sampler, inverse_cdf
from kvprobe.streams import HALF, TextStream
from oracle import Reference, random_scores
from sidebyside import ATOL

KEEP, BUFFER = 10, 4
LENGTHS = [30, 12, 21]


@pytest.fixture(scope="module")
def prompts(ids):
    """Three prompts of unequal length, as id lists."""
    return [ids[b, :n].tolist() for b, n in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def letters():
    """The tiny model with a tokenizer of about a token per byte, float64."""
    return kvprobe.load("tiny", dtype="float64")


def left_padded(prompts):
    ids, mask = writing.left_padded(prompts, "cpu")
    return dict(input_ids=ids, attention_mask=mask)


def first_time(tokens, at: int, others=()) -> int:
    """The first step from `at` on whose token was not written before, nor early in the `others`."""
    tokens, early = tokens.tolist(), {x for other in others for x in other.tolist()[:30]}
    return next(t for t in range(at, len(tokens)) if tokens[t] not in tokens[:t] and tokens[t] not in early)


def log_of(log, row: int):
    """All that a keep log says of a row."""
    return log.died[:, row, :, : log.length[row]].tolist(), log.fired[row], log.length[row], log.layers, log.keep, log.buffer


# -- nothing evicted: transformers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [dict(policy=None), dict(policy="full"), dict(keep=200, buffer=BUFFER)])
def test_greedy_text_is_transformers(prompts, budget):
    """A batch of unequal prompts, of which one ends by an end-of-text id of the generation config."""
    model, stock = tiny.pair("llama")
    free = kvprobe.generate(model, prompts, max_new_tokens=30, **budget)
    assert free.stopped == ("length",) * 3 and len({tuple(t.tolist()) for t in free.tokens}) == 3
    end = int(free.tokens[1][first_time(free.tokens[1], 6)])
    model.model.generation_config.eos_token_id = [end]
    want = stock.generate(**left_padded(prompts), max_new_tokens=30, do_sample=False, eos_token_id=end, pad_token_id=0)[:, max(LENGTHS) :].tolist()
    got = kvprobe.generate(model, prompts, max_new_tokens=30, **budget)
    for b in range(3):
        stop = want[b].index(end) + 1 if end in want[b] else 30
        assert got.tokens[b].tolist() == want[b][:stop] and got.stopped[b] == ("eos" if end in want[b] else "length")
        assert got.sizes[b] == [LENGTHS[b] + t for t in range(stop)] == got.smallest[b]
    assert got.stopped[1] == "eos" and "length" in got.stopped and got.rounds == (0, 0, 0)
    assert kvprobe.generate(model, prompts, max_new_tokens=30, ignore_eos=True, **budget).tokens[1].tolist() == free.tokens[1].tolist()


@pytest.mark.parametrize("warp", [dict(temperature=0.7, top_p=0.8), dict(temperature=1.4, top_k=9), dict(temperature=0.9, top_k=20, top_p=0.6), dict(temperature=1.0)])
def test_sampling_sees_the_logits_that_transformers_processes(llama, prompts, monkeypatch, warp):
    """Along the same tokens: transformers' own sampling is made to draw what ours drew."""
    model, stock = llama
    seen, plain = [], Sampler.processed
    monkeypatch.setattr(Sampler, "processed", lambda self, logits: seen.append(plain(self, logits)) or seen[-1])
    got = kvprobe.generate(model, prompts, keep=200, max_new_tokens=20, seed=5, **warp)
    forced = iter(torch.stack(list(got.tokens), 1))
    monkeypatch.setattr(torch, "multinomial", lambda probs, num_samples: next(forced)[:, None])
    options = dict(top_p=1.0, top_k=0) | warp
    want = stock.generate(**left_padded(prompts), max_new_tokens=20, do_sample=True, pad_token_id=0, output_scores=True, output_logits=True,
                          return_dict_in_generate=True, **options)
    assert want.sequences[:, max(LENGTHS) :].tolist() == torch.stack(list(got.tokens)).tolist() and len(seen) == 20
    for step, (ours, theirs, raw) in enumerate(zip(seen, want.scores, want.logits)):
        assert torch.equal(ours.isfinite(), theirs.isfinite())
        assert float((ours - theirs)[ours.isfinite()].abs().max()) < 1e-5  # transformers rounds to float32
        logp = raw.double().log_softmax(-1)
        for b in range(3):
            assert float(got.logp[b][step]) == pytest.approx(float(logp[b, got.tokens[b][step]]), abs=1e-5)


def test_a_draw_is_the_inverse_of_the_distribution():
    """Against a plain loop, and by frequencies over instances and over steps."""
    logits = torch.randn(400, 7, generator=torch.Generator().manual_seed(0)).double()
    logits[:, 3] = -torch.inf
    u = draws.sampling(9, torch.arange(400), 2)
    for row, x, token in zip(logits, u.tolist(), inverse_cdf(logits, u).tolist()):
        total, p = 0.0, row.softmax(-1).tolist()
        at = 0
        while total + p[at] <= x:
            total, at = total + p[at], at + 1
        assert token == at != 3
    assert inverse_cdf(logits[:2], torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)).tolist() == [0, 6]
    p = torch.tensor([0.5, 0.0, 0.3, 0.2], dtype=torch.float64)
    n = 4000
    over = {"instances": draws.sampling(1, torch.arange(n), 0), "steps": torch.cat([draws.sampling(1, torch.tensor([4]), t) for t in range(n)])}
    for name, u in over.items():
        share = torch.bincount(inverse_cdf(p.log().expand(n, 4), u), minlength=4) / n
        assert float((share - p).abs().max()) < 0.03, name  # four standard errors
    assert draws.sampling(1, torch.tensor([4]), 7) != draws.sampling(2, torch.tensor([4]), 7)


# -- a row is its own -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.3])
@pytest.mark.parametrize("policy", ["random", "h2o", "snapkv"])
def test_a_row_in_a_batch_is_the_row_alone(llama, prompts, policy, temperature):
    """Tokens, log-probs, sizes, stops and keep log, while a neighbour leaves early."""
    model, _ = llama
    options = dict(policy=policy, keep=KEEP, buffer=BUFFER, protect_prompt=False, temperature=temperature, top_p=0.9 if temperature else 1.0,
                   seed=3, max_new_tokens=40)
    free = kvprobe.generate(model, prompts, instances=[4, 5, 6], **options)
    options["stop"] = int(free.tokens[1][first_time(free.tokens[1], 8, (free.tokens[0], free.tokens[2]))])
    batch = kvprobe.generate(model, prompts, instances=[4, 5, 6], **options)
    assert batch.stopped[1] == f"stop token {options['stop']}" and max(map(len, batch.tokens)) > len(batch.tokens[1])
    assert max(batch.rounds) >= 5 and len({tuple(t.tolist()) for t in batch.tokens}) == 3
    for b, prompt in enumerate(prompts):
        alone = kvprobe.generate(model, prompt, instances=[4 + b], **options)
        assert alone.tokens[0].tolist() == batch.tokens[b].tolist() and alone.stopped[0] == batch.stopped[b]
        assert float((alone.logp[0] - batch.logp[b]).abs().max()) < ATOL
        assert alone.sizes[0] == batch.sizes[b] and alone.smallest[0] == batch.smallest[b]
        assert log_of(alone.keep_log, 0) == log_of(batch.keep_log, b)


@pytest.mark.parametrize("kind", ["gemma3", "qwen3.5"])
def test_rows_leave_layers_that_are_not_evicted_too(ids, kind):
    model, _ = tiny.pair(kind)
    prompts = [ids[0, :20].tolist(), ids[1, :13].tolist()]
    options = dict(keep=KEEP, buffer=BUFFER, protect_prompt=False, max_new_tokens=25)
    free = kvprobe.generate(model, prompts, **options)
    options["stop"] = int(free.tokens[0][first_time(free.tokens[0], 5)])
    batch = kvprobe.generate(model, prompts, **options)
    for b in (0, 1):
        alone = kvprobe.generate(model, prompts[b], instances=[b], **options)
        assert alone.tokens[0].tolist() == batch.tokens[b].tolist() and log_of(alone.keep_log, 0) == log_of(batch.keep_log, b)
        assert float((alone.logp[0] - batch.logp[b]).abs().max()) < (1e-5 if kind == "qwen3.5" else ATOL)


def test_a_tokenizer_without_padding_token(letters):
    """D06: padding by the mask alone, and no vocabulary row is added."""
    tokenizer = copy.deepcopy(letters.tokenizer)
    tokenizer.pad_token = None
    lm, size = kvprobe.prepare(letters.model, tokenizer), letters.model.get_input_embeddings().weight.shape[0]
    texts = ["Let zq = 4729. So", "Hello"]
    both = kvprobe.generate(lm, texts, keep=40, buffer=4, max_new_tokens=40)
    for b, text in enumerate(texts):
        assert kvprobe.generate(lm, text, keep=40, buffer=4, max_new_tokens=40, instances=[b]).texts[0] == both.texts[b]
    assert tokenizer.pad_token is None and letters.model.get_input_embeddings().weight.shape[0] == size


def test_seeds(llama, prompts):
    """The same seed gives the same text; the two seeds draw for different things."""
    model, _ = llama
    run = lambda **seeds: kvprobe.generate(model, prompts[0], keep=32, buffer=BUFFER, temperature=1.2, max_new_tokens=30, **seeds)
    one, again, other, text = run(seed=1), run(seed=1), run(seed=1, eviction_seed=2), run(seed=2, eviction_seed=1)
    assert one.tokens[0].tolist() == again.tokens[0].tolist() != text.tokens[0].tolist()
    assert (one.keep_log.died == text.keep_log.died).all() and (one.keep_log.died != other.keep_log.died).any()
    n = one.keep_log.fired[0][0] - LENGTHS[0] + 1  # up to the first round nothing differs but the sampling seed
    assert one.tokens[0][:n].tolist() == other.tokens[0][:n].tolist() != text.tokens[0][:n].tolist()


# -- what is held ---------------------------------------------------------------------------------------------------


def expected_size(n: int, step: int, keep: int, buffer: int) -> int:
    """Entries after the forward that gave new token number `step`, by the rule of protocols 1."""
    fires, seen = keep + 2 * buffer, n + step
    return seen if seen < fires else keep + buffer + (seen - max(n, fires)) % buffer


@pytest.mark.parametrize("lengths, keep, buffer", [([30, 12, 21], 10, 4), ([30, 12, 21], 32, 8), ([5, 18, 17], 10, 4), ([3, 70, 2], 64, 16)])
def test_sizes_are_those_of_the_rule(llama, ids, lengths, keep, buffer):
    """B02, B03: after every step, from prompts below, at and above the first round."""
    prompts = [ids[b, :n].tolist() for b, n in enumerate(lengths)]
    got = kvprobe.generate(llama[0], prompts, keep=keep, buffer=buffer, protect_prompt=False, max_new_tokens=120)
    for b, n in enumerate(lengths):
        want = [expected_size(n, t, keep, buffer) for t in range(120)]
        assert got.sizes[b] == got.smallest[b] == want and max(want) < keep + 2 * buffer
        fired = [n + t for t in range(120) if n + t >= keep + 2 * buffer and want[t] == keep + buffer]
        assert got.keep_log.fired[b] == tuple(fired) and got.rounds[b] == len(fired) and got.keep_log.length[b] == n + 119


def test_a_prompt_beyond_the_budget_is_evicted_at_once(llama, ids):
    got = kvprobe.generate(llama[0], ids[:1, :50], keep=KEEP, buffer=BUFFER, protect_prompt=False, max_new_tokens=2)
    assert got.keep_log.fired == ((50,),) and got.sizes == ([14, 15],)
    assert (got.keep_log.died[:, 0, :, :46] == 0).sum(-1).tolist() == [[36, 36]] * 2


@pytest.mark.parametrize("policy", ["random", "recency"])
def test_evicted_greedy_text_is_brute_force(llama, prompts, policy):
    """A full cache with a mask per KV head, rows on their own counts, prompts protected."""
    model, stock = llama
    rules = {"random": random_scores(3, [4, 5, 6]), "recency": lambda ref, layer, row, head, number, candidates: {p: p for p in candidates}}
    reference = Reference(stock, (0, 1), 2, 32, BUFFER, rules[policy], held=lambda layer, row, head, ref: set(range(ref.prompt[row])))
    padded = left_padded(prompts)
    logits, wrote = reference.feed(padded["input_ids"], padded["attention_mask"]), []
    for step in range(40):
        wrote.append(logits[:, -1].argmax(-1))
        if step < 39:
            logits = reference.feed(wrote[-1][:, None])
    got = kvprobe.generate(model, prompts, policy=policy, keep=32, buffer=BUFFER, seed=3, instances=[4, 5, 6], max_new_tokens=40)
    assert torch.stack(list(got.tokens), 1).tolist() == torch.stack(wrote).tolist()
    full = kvprobe.generate(model, prompts, policy=None, max_new_tokens=40)
    assert any(a.tolist() != b.tolist() for a, b in zip(got.tokens, full.tokens)), "an eviction that changes nothing tells nothing"
    numbers = [0, 0, 0]
    for row, length, kept in reference.history:
        held = got.keep_log.held(row, numbers[row])
        assert got.keep_log.fired[row][numbers[row]] == length
        assert {s: np.flatnonzero(held[s[0], s[2]]).tolist() for s in kept} == kept
        numbers[row] += 1
    assert tuple(numbers) == got.rounds and min(numbers) >= 3
    for b, n in enumerate(LENGTHS):
        assert (got.keep_log.died[:, b, :, :n] == kvprobe.keeplog.ALIVE).all(), "the prompt is protected"


def test_renumbered_positions_outlive_the_context():
    """A text of bounded distances may be longer than the context; with the tokens' own positions it is refused."""
    model, _ = tiny.pair("llama", max_position_embeddings=64)
    options = dict(policy="streaming_llm", keep=16, buffer=4, max_new_tokens=100)
    got = kvprobe.generate(model, [[1, 2, 3]], positions="renumbered", **options)
    assert len(got.tokens[0]) == 100 and max(got.sizes[0]) < 24
    with pytest.raises(ValueError, match="context of 64 tokens: at most 61 new"):
        kvprobe.generate(model, [[1, 2, 3]], **options)


# -- text -----------------------------------------------------------------------------------------------------------


def test_stop_strings_across_token_borders(letters):
    """Tokens are bytes here, so that a string of three characters lies across two borders."""
    prompts, options = ["Let zq = 4729.", "So"], dict(keep=40, buffer=8, temperature=1.0, max_new_tokens=60, ignore_eos=True)
    free = kvprobe.generate(letters, prompts, **options)
    text = free.texts[0]
    at = next(i for i in range(8, 50) if HALF not in text[i : i + 3] and text.find(text[i : i + 3]) == i and text[i : i + 3] not in free.texts[1])
    got = kvprobe.generate(letters, prompts, stop=["\x00nowhere", text[at : at + 3]], **options)
    n = len(got.tokens[0])
    assert got.stopped == (f"stop string {text[at : at + 3]!r}", "length") and 3 < n < 60
    assert got.tokens[0].tolist() == free.tokens[0][:n].tolist() and got.texts[0].endswith(text[at : at + 3])
    assert text[at : at + 3] not in letters.tokenizer.decode(got.tokens[0][:-1]), "it stops at once"
    assert got.texts[1] == free.texts[1]


def test_streamed_pieces_are_the_text(letters, capsys):
    pieces = {0: [], 1: []}
    got = kvprobe.generate(letters, ["Let zq", "So it is"], keep=40, buffer=8, temperature=1.0, max_new_tokens=50, ignore_eos=True,
                           stream=lambda row, piece: pieces[row].append(piece))
    for row in (0, 1):
        assert "".join(pieces[row]) == got.texts[row] == letters.tokenizer.decode(got.tokens[row], skip_special_tokens=True)
        assert len(pieces[row]) > 5 and all(pieces[row])
    one = kvprobe.generate(letters, "Let zq", keep=40, buffer=8, max_new_tokens=20, stream=True)
    assert capsys.readouterr().out == one.texts[0] + "\n"


def test_characters_of_several_tokens_come_whole(letters):
    text = "naïve 🙂 für 中文 Let"
    stream = TextStream(letters.tokenizer.decode)
    pieces = [stream.push(i) for i in letters.tokenizer(text).input_ids]
    assert "".join(pieces) == text == stream.text and stream.flush() == "" and not any(HALF in p for p in pieces)
    assert "🙂" in pieces and "" in pieces
    cut = TextStream(letters.tokenizer.decode)
    ids = letters.tokenizer("a🙂").input_ids[:-1]
    assert [cut.push(i) for i in ids] == ["a", "", "", ""] and cut.flush() and cut.text == letters.tokenizer.decode(ids)


def test_chat(letters):
    tokenizer = copy.deepcopy(letters.tokenizer)
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[it]{% endif %}"
    lm = kvprobe.prepare(letters.model, tokenizer)
    got = kvprobe.generate(lm, "Hi", chat=True, policy=None, max_new_tokens=2)
    assert tokenizer.decode(got.prompts[0]) == "[user]Hi[it]"


def test_it_says_what_happened(letters):
    got = kvprobe.generate(letters, ["Let zq = 4729.", "So"], keep=20, buffer=4, max_new_tokens=30, ignore_eos=True)
    assert "row 0: 12 + 30 tokens, length, 4 rounds, at most 27 entries" in repr(got) and "2 + 30 tokens, length, 1 round, at" in repr(got) and "tokens/s" in repr(got)
    assert got.prefill_s > 0 and got.decode_s > 0 and got.tokens_per_second == pytest.approx(58 / got.decode_s) and got.peak_memory is None


# -- the context ----------------------------------------------------------------------------------------------------


def test_the_users_generate_writes_the_same(llama, prompts):
    """B01: greedy text and logs of kvprobe.generate; a second call starts from nothing."""
    model, _ = llama
    options = dict(keep=32, buffer=BUFFER, protect_prompt=True, seed=3)
    want = kvprobe.generate(model, prompts, max_new_tokens=40, **options)
    with kvprobe.evicting(model, **options) as seen:
        outs = [model.model.generate(**left_padded(prompts), max_new_tokens=40, do_sample=False) for _ in range(2)]
        alone = model.model.generate(**left_padded(prompts[:1]), max_new_tokens=40, do_sample=False)
    assert outs[0][:, max(LENGTHS) :].tolist() == outs[1][:, max(LENGTHS) :].tolist() == torch.stack(list(want.tokens)).tolist()
    assert alone[0, LENGTHS[0] :].tolist() == want.tokens[0].tolist()
    assert len(seen.caches) == 3 and seen.caches[0] is not seen.caches[1] and seen.keep_log.length == (69,)
    for cache in seen.caches[:2]:
        assert [log_of(cache.keep_log, b) for b in range(3)] == [log_of(want.keep_log, b) for b in range(3)]
        assert all(v < 40 for v in cache.most)


def test_sampling_and_beams_in_the_context(llama, prompts):
    """With everything kept both are stock transformers; beams that evict stay within the budget."""
    model, stock = llama
    for options in (dict(do_sample=True, num_return_sequences=2), dict(num_beams=3, num_return_sequences=2)):
        with kvprobe.evicting(model, keep=200):
            torch.manual_seed(0)
            got = model.model.generate(**left_padded(prompts), max_new_tokens=15, pad_token_id=0, **options)
        torch.manual_seed(0)
        assert torch.equal(got, stock.generate(**left_padded(prompts), max_new_tokens=15, pad_token_id=0, **options))
    with kvprobe.evicting(model, keep=KEEP, buffer=BUFFER) as seen:
        model.model.generate(**left_padded(prompts), max_new_tokens=30, num_beams=2, pad_token_id=0)
    assert seen.keep_log.died.shape[1] == 6 and max(seen.caches[0].most) < KEEP + 2 * BUFFER and min(map(len, seen.keep_log.fired)) >= 5


def test_the_context_ends_clean(llama, prompts):
    """After an exception of the body or of a call; within another context it is refused."""
    model, stock = llama
    plain = model.model.generate
    with pytest.raises(ZeroDivisionError):
        with kvprobe.evicting(model, keep=KEEP, buffer=BUFFER) as seen:
            with pytest.raises(ValueError, match="keep=10 cannot hold the protected prompt"):
                with pytest.raises(RuntimeError, match="already"):
                    with kvprobe.evicting(model.model, keep=20):
                        pass
                raise ValueError("keep=10 cannot hold the protected prompt")
            1 / 0
    assert "generate" not in vars(model.model) and model.model.generate == plain
    with pytest.raises(ValueError, match="cannot hold the protected prompt of 30"):
        with kvprobe.evicting(model, keep=KEEP, buffer=BUFFER, protect_prompt=True) as seen:
            model.model.generate(**left_padded(prompts), max_new_tokens=3)
    assert "generate" not in vars(model.model) and not seen.caches
    with pytest.raises(ValueError, match="not called"):
        seen.keep_log
    out = model.model.generate(**left_padded(prompts), max_new_tokens=12, do_sample=False)
    assert torch.equal(out, stock.generate(**left_padded(prompts), max_new_tokens=12, do_sample=False))


def test_a_generate_of_the_users_own_comes_back(llama, prompts):
    model, _ = llama
    inner, calls = model.model, []
    plain = inner.generate
    inner.generate = mine = lambda *a, **k: calls.append(sorted(k)) or plain(*a, **k)
    try:
        with kvprobe.evicting(model, keep=KEEP, buffer=BUFFER):
            inner.generate(**left_padded(prompts), max_new_tokens=3)
        assert inner.generate is mine and "cache" in calls[0]
    finally:
        del inner.generate


def test_a_given_cache_is_used(llama, prompts):
    model, _ = llama
    own, full = kvprobe.cache(model, keep=12, buffer=2), DynamicCache(config=model.model.config)
    with kvprobe.evicting(model, keep=KEEP, buffer=BUFFER) as seen:
        for cache in (own, full):
            model.model.generate(**left_padded(prompts), cache=cache, max_new_tokens=12)
        model.model.generate(**left_padded(prompts), cache=None, max_new_tokens=12)
    assert len(seen.caches) == 1 and own.physical < 16 and full.get_seq_length() == 41 and seen.caches[0].plan.keep == KEEP


@pytest.mark.parametrize("options, say", [(dict(use_cache=False), "nothing to evict"), (dict(prompt_lookup_num_tokens=3), "takes tokens back"),
                                          (dict(cache_implementation="static"), "does not evict")])
def test_calls_that_would_not_evict_are_refused(llama, prompts, options, say):
    with kvprobe.evicting(llama[0], keep=KEEP, buffer=BUFFER):
        with pytest.raises(ValueError, match=say):
            llama[0].model.generate(**left_padded(prompts), max_new_tokens=3, **options)


# -- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes, say", [
    (dict(prompt=[]), "no prompt"), (dict(prompt=[[1, 2], []]), "prompt 1 has no tokens"), (dict(prompt=[[1, 97]]), "ids 0..96"),
    (dict(prompt=[[1, -1]]), "ids 0..96"), (dict(prompt="text"), "without a tokenizer"), (dict(prompt=torch.rand(2, 3)), "whole numbers"),
    (dict(prompt=torch.zeros(1, 0, dtype=torch.long)), "no tokens"), (dict(prompt=["a", [1]]), "a text, a list of texts"), (dict(prompt=7), "not int"),
    (dict(chat=True), "chat"), (dict(temperature=-0.1), "at least 0"), (dict(temperature="hot"), "number"), (dict(top_p=0.0), r"\(0, 1\]"),
    (dict(top_p=1.1), r"\(0, 1\]"), (dict(top_k=-1), "top_k=-1"), (dict(top_k=1.5), "whole"), (dict(seed=None), "seed=None"),
    (dict(max_new_tokens=0), "at least 1"), (dict(max_new_tokens=510), "context of 512 tokens: at most 509"), (dict(instances=[1, 2]), "1 prompts"),
    (dict(stop=""), "at least one character"), (dict(stop=97), "ids 0..96"), (dict(stop="x"), "needs a tokenizer"), (dict(stop=[1.5]), "string or a token id"),
    (dict(stream=True), "without a tokenizer"), (dict(stream=3), "to call"), (dict(keep=2), "keep=3 or more"), (dict(keep=None), "give keep"),
    (dict(policy="nothing"), "known:"), (dict(policy=None), "leave out keep"), (dict(policy="full", keep=None, n_sink=3), "leave out n_sink"),
    (dict(n_sink=3), "no option 'n_sink'"), (dict(positions="old"), "renumbered"), (dict(buffer=0), "at least 1 token"),
    (dict(keep=4, pins=[kvprobe.SpanPin(3, 5)]), "keep=4 cannot hold 5"), (dict(pins=[kvprobe.SpanPin(1, 2, frozenset())]), "two pins disagree"),
    (dict(row_pins=[[], []]), "2 lists of row_pins for 1 prompts"),
])
def test_bad_input_is_refused_before_any_work(llama, monkeypatch, changes, say):
    monkeypatch.setattr(llama[0].model, "forward", lambda *a, **k: pytest.fail("a forward ran"))
    given = dict(prompt=[[1, 2, 3]], keep=KEEP, buffer=BUFFER, max_new_tokens=4) | changes
    with pytest.raises(ValueError, match=say):
        kvprobe.generate(llama[0], given.pop("prompt"), **given)


def test_one_row_is_printed_and_no_more(letters):
    with pytest.raises(ValueError, match="one row"):
        kvprobe.generate(letters, ["a", "b"], keep=10, stream=True)
    with pytest.raises(ValueError, match="no chat template"):
        kvprobe.generate(letters, "a", keep=10, chat=True)
    with pytest.raises(ValueError, match="known"):
        with kvprobe.evicting(letters, policy="nothing", keep=3):
            pass


# -- the embedded model ---------------------------------------------------------------------------------------------


@pytest.mark.model
def test_the_embedded_model_writes_as_transformers_does():
    lm = kvprobe.load("smollm2")
    got = kvprobe.generate(lm, ["The capital of France is", "One, two,"], keep=100, buffer=16, max_new_tokens=8)
    for b, prompt in enumerate(got.prompts):
        want = lm.model.generate(prompt[None], attention_mask=torch.ones_like(prompt[None]), max_new_tokens=8, do_sample=False)
        assert got.tokens[b].tolist() == want[0, len(prompt) :].tolist()
    assert "Paris" in got.texts[0]


def test_a_tiny_budget_without_protection_is_warned_of(llama, ids):
    """B18: collapse is not forgetting."""
    model, _ = llama
    with pytest.warns(UserWarning, match="collapse"):
        kvprobe.generate(model, ids[:1, :20], policy="recency", keep=4, buffer=2, protect_prompt=False, max_new_tokens=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kvprobe.generate(model, ids[:1, :20], policy="recency", keep=8, buffer=2, protect_prompt=False, pins=[kvprobe.SinkPin(4)], max_new_tokens=2)


def test_a_config_that_bends_logits_is_named(ids):
    model, _ = tiny.pair("llama")
    model.model.generation_config.repetition_penalty = 1.3
    with pytest.warns(UserWarning, match="repetition_penalty=1.3"):
        kvprobe.generate(model, ids[:1, :8], policy=None, max_new_tokens=2)
