"""TriAttention: the series written with scalars, calibration, and what statistics know of their model."""

import copy
import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import kvprobe
import stub
import tiny
from kvprobe import calibration, models, rotary
from kvprobe.policies.triattention import POLICY
from kvprobe.registry import make_policy
from oracle import Reference
from sidebyside import feed, walk
from test_policies import BUFFER, KEEP

YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=128)
# kind -> (tiny's name, changes, interleaved pairs?, rotated dimensions of 8)
KINDS = {
    "llama": ("llama", {}, False, 8),
    "interleaved": ("cohere", {}, True, 8),
    "interleaved, half of the dimensions": ("glm", {}, True, 4),
    "half of the dimensions": ("phi3", dict(rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5)), False, 4),
    "q-norm": ("qwen3", {}, False, 8),
    "gated, q-norm, a quarter, every other layer": ("qwen3.5", {}, False, 2),
    "another base in every other layer": ("gemma3", {}, False, 8),
    "yarn": ("llama", dict(rope_parameters=YARN), False, 8),
    "yarn on half of the dimensions": ("qwen3.5", dict(rope_parameters=YARN | dict(partial_rotary_factor=0.5)), False, 4),
}


# -- the plain version: scalars, and nothing of kvprobe's rotary or calibration ---------------------------------------


class Plain:
    """A stock model's rotary pairs, and queries before rotation averaged over a text."""

    def __init__(self, stock, interleaved: bool, rotated: int, layers):
        self.stock, self.layers, self.d, half = stock, tuple(layers), 8, rotated // 2
        pairs = [(2 * f, 2 * f + 1) if interleaved else (f, f + half) for f in range(half)]
        self.pairs = pairs + [(i, None) for i in range(rotated, self.d)]
        module = next(m for m in stock.modules() if "rotary" in type(m).__name__.lower())
        frequencies = module.full_attention_inv_freq if hasattr(module, "full_attention_inv_freq") else module.inv_freq
        self.omega = [*frequencies.double().tolist(), *[0.0] * (self.d - rotated)]
        s = getattr(module, "full_attention_attention_scaling", None) or getattr(module, "attention_scaling", 1.0)
        self.scale = [s] * half + [1.0] * (self.d - rotated)

    def numbers(self, x) -> list[complex]:
        return [complex(x[a], 0 if b is None else x[b]) for a, b in self.pairs]

    @torch.no_grad()
    def calibrate(self, ids: torch.Tensor) -> None:
        """Means over a text of one passage."""
        self.mean, self.norm, noted = {}, {}, before_rope(self.stock, self.layers, ids)
        for layer, queries in noted.items():  # [hq n d]
            z = np.array([[self.numbers(q) for q in head] for head in queries.double().numpy()])
            self.mean[layer], self.norm[layer] = z.mean(1), np.abs(z).mean(1)

    def series(self, layer: int, q: int, rotated_key, position: int, now: int, offsets: list[int]) -> float:
        """S of one cached key and query head: its key turned back, then methods 21."""
        total = 0.0
        for f, z in enumerate(self.numbers(rotated_key)):
            s, w = self.scale[f], self.omega[f]
            key = z * complex(math.cos(w * position), -math.sin(w * position)) / s
            mean, norm = self.mean[layer][q][f], self.norm[layer][q][f]
            phi = np.angle(mean * np.conj(key))
            wave = sum(math.cos(w * (now - position + x) + phi) for x in offsets) / len(offsets)
            total += s * s * abs(mean) * abs(key) * wave + s * s * (norm - abs(mean)) * abs(key)
        return total

    def voted(self, reference, layer, row, head, candidates, held=frozenset(), offsets=17) -> dict[int, float]:
        """The largest z-score of the group, over candidates that are not pinned."""
        keys, now, group = reference.keys_at(layer, row, head, candidates), len(reference.column[row]) - 1, 2
        best = []
        for q in range(head * group, (head + 1) * group):
            s = np.array([self.series(layer, q, k, p, now, [2**i for i in range(offsets)]) for k, p in zip(keys, candidates)])
            free = s[[p not in held for p in candidates]]
            best.append((s - free.mean()) / max(free.std(), 1e-6))
        return dict(zip(candidates, np.max(best, axis=0)))

    def rule(self, held=None, **options):
        return lambda reference, layer, row, head, number, candidates: self.voted(
            reference, layer, row, head, candidates, held(layer, row, head, reference) if held else frozenset(), **options)

    def shared(self, reference, layer, row, head, number, candidates):
        every = [self.voted(reference, i, row, head, candidates) for i in self.layers]
        return {p: float(np.mean([v[p] for v in every])) for p in candidates}


def before_rope(stock, layers, ids: torch.Tensor) -> dict[int, torch.Tensor]:
    """Queries [hq n d] as they leave the projection, or the norm behind it."""
    noted, hooks = {}, []
    for name, module in stock.named_modules():
        if getattr(module, "layer_idx", None) not in layers or not hasattr(module, "o_proj"):
            continue

        def keep(_, __, out, layer=module.layer_idx):
            noted[layer] = out.view(ids.shape[0], -1, 8)[:, :4].transpose(0, 1) if out.ndim == 2 else out[0].unflatten(-1, (-1, 8))[:, :4].transpose(0, 1)

        def keep_normed(_, __, out, layer=module.layer_idx):
            noted[layer] = out[0] if out.shape[1] == 4 else out[0].transpose(0, 1)

        if hasattr(module, "q_norm"):
            hooks.append(module.q_norm.register_forward_hook(keep_normed))
        else:  # a fused projection begins with the queries
            hooks.append((module.qkv_proj if hasattr(module, "qkv_proj") else module.q_proj).register_forward_hook(keep))
    stock(ids[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    return noted


TEXT = torch.randint(0, tiny.VOCABULARY, (90,), generator=torch.Generator().manual_seed(3))
_made: dict = {}


def made(kind: str, tmp_path_factory):
    """(model, stock, plain version, file of statistics) of a kind, made once."""
    if kind not in _made:
        name, changes, interleaved, rotated = KINDS[kind]
        model, stock = tiny.pair(name, **changes)
        plain = Plain(stock, interleaved, rotated, model.geometry.kv_layers)
        plain.calibrate(TEXT)
        path = tmp_path_factory.mktemp("statistics") / "tri.safetensors"
        calibration.save(calibration.make(model, TEXT, "a random text"), path)
        _made[kind] = model, stock, plain, str(path)
    return _made[kind]


@pytest.fixture(params=KINDS)
def kind(request, tmp_path_factory):
    return made(request.param, tmp_path_factory)


@pytest.fixture
def llama_kind(tmp_path_factory):
    return made("llama", tmp_path_factory)


# -- reference numbers ----------------------------------------------------------------------------------------------

OMEGA, MEAN, NORM, KEY, P, T0 = [1.0, 0.1], [1 + 1j, 0.5 - 0.5j], [2.0, 1.0], [0.3 + 0.4j, 1 + 0j], 5, 9
R9 = {17: 0.905144, 3: 1.527273}


def toy(interleaved: bool, offsets: int, dtype=torch.float64, scale: float = 1.0) -> tuple[POLICY, torch.Tensor]:
    """A policy bound to R9's statistics, and R9's key as it lies in a cache [1 1 1 4]."""
    first, second = (torch.tensor([0, 2]), torch.tensor([1, 3])) if interleaved else (torch.tensor([0, 1]), torch.tensor([2, 3]))
    turn = rotary.Rotary(first, second, torch.tensor(OMEGA, dtype=torch.float64), torch.full((2,), scale, dtype=torch.float64), "half")
    table = calibration.Table(torch.tensor(MEAN, dtype=torch.complex128)[None], torch.tensor(NORM, dtype=torch.float64)[None], turn)
    policy = POLICY(offsets=offsets)
    object.__setattr__(policy, "_tables", calibration.Statistics({0: table}, {}))
    key = torch.zeros(4, dtype=torch.float64)
    for f, (k, w) in enumerate(zip(KEY, OMEGA)):
        z = scale * k * np.exp(1j * w * P)
        key[first[f]], key[second[f]] = z.real, z.imag
    return policy, key.to(dtype)[None, None, None]


@pytest.mark.parametrize("offsets", R9)
def test_the_reference_numbers(offsets):
    """methods R9: the cosines, the rotated key, and the policy in both layouts, to 1e-6 in float64."""
    deltas = [2**i for i in range(offsets)]
    spare = sum((n - abs(m)) * abs(k) for n, m, k in zip(NORM, MEAN, KEY))
    cosines = sum(abs(m) * abs(k) * math.cos(w * (T0 - P + x) + np.angle(m * np.conj(k))) for x in deltas for m, k, w in zip(MEAN, KEY, OMEGA)) / offsets
    turned = sum((m * np.conj(k * np.exp(1j * w * P)) * np.exp(1j * w * (T0 + x))).real for x in deltas for m, k, w in zip(MEAN, KEY, OMEGA)) / offsets
    assert cosines + spare == pytest.approx(R9[offsets], abs=6e-7) and turned + spare == pytest.approx(cosines + spare, abs=1e-9)
    for interleaved in (False, True):
        policy, key = toy(interleaved, offsets)
        view = stub.view(key, positions=torch.full((1, 1, 1), P), now=[T0 + 1])
        assert float(policy._series(view)) == pytest.approx(cosines + spare, abs=1e-9)
        scaled, key = toy(interleaved, offsets, scale=1.5)
        assert float(scaled._series(stub.view(key, positions=view.positions, now=[T0 + 1]))) == pytest.approx(2.25 * (cosines + spare), abs=1e-9)


@pytest.mark.parametrize("at", [65_536, 131_072, 1_000_003])
def test_a_float32_model_far_into_a_text(at):
    """Phases in float64: in float32 those of 65,536 positions and more are off by about 0.01."""
    g = torch.Generator().manual_seed(0)
    z = torch.complex(torch.randn(40, 2, generator=g, dtype=torch.float64), torch.randn(40, 2, generator=g, dtype=torch.float64))
    positions = at - 60 + torch.arange(40)
    turned = z * torch.polar(torch.ones(1, dtype=torch.float64), positions[:, None] * torch.tensor(OMEGA, dtype=torch.float64))
    keys = torch.cat([turned.real, turned.imag], -1)[None, None]
    got = {}
    for dtype in (torch.float32, torch.float64):
        policy, _ = toy(False, 17)
        view = stub.view(keys.to(dtype), positions=positions[None, None], now=[at + 1])
        got[dtype] = policy.score(view)[0, 0]
        assert got[dtype].dtype == dtype
        series = [sum(abs(m) * abs(k) * sum(math.cos(w * (at - p + 2**i) + np.angle(m * np.conj(k))) for i in range(17)) / 17 + (n - abs(m)) * abs(k)
                      for m, n, k, w in zip(MEAN, NORM, key, OMEGA)) for p, key in zip(positions.tolist(), z.tolist())]
        want = (np.array(series) - np.mean(series)) / np.std(series)
        assert got[dtype].tolist() == pytest.approx(want, abs=2e-6 if dtype == torch.float32 else 1e-9)
    assert got[torch.float32].argsort().tolist() == got[torch.float64].argsort().tolist()


# -- calibration ----------------------------------------------------------------------------------------------------


def test_statistics_are_those_of_the_stock_model(kind):
    """Means of queries before RoPE and behind a norm, pair by pair, from hooks on the stock twin; rotation read off the model."""
    model, _, plain, path = kind
    statistics = calibration.load(path, model)
    assert set(statistics.tables) == set(plain.layers)
    for layer, table in statistics.tables.items():
        turn = table.rotary
        assert [(a, None if a == b else b) for a, b in zip(turn.first.tolist(), turn.second.tolist())] == plain.pairs
        assert turn.omega.tolist() == plain.omega and turn.scale.tolist() == pytest.approx(plain.scale, abs=1e-7)
        # the model rotates by angles in float32, so that what is turned back is good to that
        assert np.allclose(table.mean.numpy(), plain.mean[layer], atol=1e-5) and np.allclose(table.norm.numpy(), plain.norm[layer], atol=1e-5)
        assert bool((table.norm - table.mean.abs() > 1e-3).any())
    assert statistics.about["tokens"] == len(TEXT) and statistics.about["source"] == "a random text"


def test_frequencies_follow_the_base():
    """C10: of Gemma 3 the base of the full layers, not that of the sliding ones."""
    for name, base in (("llama", 10000.0), ("gemma3", 1000000.0)):
        model = tiny.pair(name)[0]
        omega = rotary.read(model, model.geometry.kv_layers[0]).omega
        assert omega.tolist() == pytest.approx([base ** (-f / 4) for f in range(4)], rel=1e-6)


@torch.no_grad()
def test_calibration_is_behind_the_q_norm(tmp_path_factory):
    """E02: the released script reads q_proj, which is the wrong tensor for Qwen3."""
    model, stock, _, path = made("q-norm", tmp_path_factory)
    layer, norm = stock.model.layers[0], calibration.load(path, model).tables[0].norm
    x = layer.self_attn.q_proj(layer.input_layernorm(stock.model.embed_tokens(TEXT))).unflatten(-1, (4, 8))

    def lengths(q):
        return torch.complex(q[..., :4], q[..., 4:]).abs().mean(0)

    assert torch.allclose(norm, lengths(layer.self_attn.q_norm(x)), atol=1e-5)
    assert not torch.allclose(norm, lengths(x), rtol=0.1)


def test_passages_begin_anew(llama, monkeypatch):
    """A long text is read in passages, each from position 0 and alone."""
    monkeypatch.setattr(calibration, "PASSAGE", 40)
    ticks = []
    both = calibration.make(llama[0], TEXT, "", ticks.append)
    parts = [calibration.make(llama[0], part, "") for part in TEXT.split(40)]
    want = sum(p.tables[1].mean * p.about["tokens"] for p in parts) / 90
    assert torch.allclose(both.tables[1].mean, want, atol=1e-12) and both.about["tokens"] == 90 and sum(ticks) == 90


@torch.no_grad()
def test_identical_queries_leave_a_dot_product():
    """methods R9, extra: R_f = 1, the second term vanishes, and S is q(t0 + 1) . k(p) as the model rotates them, without 1 / sqrt d."""
    model, stock = tiny.pair("llama")
    statistics = calibration.make(model, torch.full((30,), 5), "one token")
    assert torch.allclose(statistics.tables[0].mean.abs(), statistics.tables[0].norm, atol=1e-5)
    policy, seen = POLICY(offsets=1), {}
    object.__setattr__(policy, "_tables", statistics)

    class Noting:
        needs = policy.needs

        def score(self, view):
            seen.setdefault(view.layer, (view, policy._series(view)))
            return policy.score(view)

    feed(model, kvprobe.cache(model, policy=Noting(), keep=KEEP, buffer=BUFFER), TEXT[None, :18])
    view, got = seen[0]
    query = before_rope(stock, (0,), torch.full((30,), 5))[0][None, :, :1]  # [1 hq 1 d]
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    cos, sin = stock.model.rotary_emb(query, torch.tensor([[18]]))  # the newest entry is 17
    turned = apply_rotary_pos_emb(query, query, cos, sin)[0][0, :, 0]
    want = torch.einsum("hgd,hcd->hgc", turned.unflatten(0, (2, 2)), view.keys[0])
    assert torch.allclose(got[0], want, atol=1e-4) and float(want.abs().max()) > 1


def test_half_precision_reads_the_same_frequencies(tmp_path):
    """A checkpoint loaded in bfloat16 keeps its frequencies in float32; angles measured in bfloat16 could not be told apart from others."""
    for name, changes in (("llama", {}), ("llama", dict(rope_parameters=YARN)), ("glm", {})):
        stock = tiny.build(name, torch.float32, **changes)
        stock.save_pretrained(tmp_path / name)
        wide = rotary.read(kvprobe.prepare(stock), 0)
        for dtype in (torch.bfloat16, torch.float16):
            half = rotary.read(kvprobe.prepare(type(stock).from_pretrained(tmp_path / name, dtype=dtype)), 0)
            assert torch.equal(half.omega, wide.omega) and torch.equal(half.scale, wide.scale) and torch.equal(half.first, wide.first)


def test_a_rotary_embedding_that_depends_on_the_length_is_refused():
    model = tiny.pair("llama", rope_parameters=dict(rope_type="dynamic", rope_theta=10000.0, factor=4.0))[0]
    with pytest.raises(ValueError, match="dynamic.*depends on the text's length"):
        calibration.make(model, TEXT, "")


# -- the score ------------------------------------------------------------------------------------------------------


def test_through_rounds(kind, ids):
    """Every kind of rotary embedding: keys turned back one by one, the series with scalars, z-scores, the largest of the group."""
    model, stock, plain, path = kind
    cache = kvprobe.cache(model, policy="triattention", statistics=path, keep=KEEP, buffer=BUFFER)
    reference = Reference(stock, model.geometry.kv_layers, 2, KEEP, BUFFER, plain.rule())
    assert walk(model, cache, reference, ids[:2, :28], prefill=18, longest=5, atol=1e-8) == 2 * 3


@pytest.mark.parametrize("longest", [1, 64], ids=["tokens", "chunks"])
def test_padded_rows(llama_kind, ids, longest):
    model, stock, plain, path = llama_kind
    mask = torch.ones(3, 34, dtype=torch.bool)
    mask[1, :3], mask[2, :8] = False, False
    cache = kvprobe.cache(model, policy="triattention", statistics=path, offsets=3, keep=KEEP, buffer=BUFFER)
    reference = Reference(stock, (0, 1), 2, KEEP, BUFFER, plain.rule(offsets=3))
    assert walk(model, cache, reference, ids[:, :34], prefill=22, longest=longest, mask=mask) > 8


def test_at_prompt_end(llama_kind, ids):
    model, stock, plain, path = llama_kind
    cache = kvprobe.cache(model, policy="triattention", statistics=path, keep=14, schedule="prompt_end")
    assert walk(model, cache, Reference(stock, (0, 1), 2, 14, 0, plain.rule(), rounds=False), ids[:, :36], prefill=33, longest=3) == 3


def scored(model, path, ids, pins=(), mask=None, **options):
    """The first round's scores by layer, and the views."""
    noted, policy = {}, make_policy("triattention", dict(statistics=path, **options), model)

    class Noting:
        needs = policy.needs

        def score(self, view):
            noted.setdefault(view.layer, (view, policy.score(view)))
            return policy.score(view)

    feed(model, kvprobe.cache(model, policy=Noting(), keep=KEEP, buffer=BUFFER, pins=pins), ids, mask)
    return noted


@pytest.mark.parametrize("pins", [(), (kvprobe.SpanPin(2, 6), kvprobe.SinkPin(1))], ids=["free", "pinned"])
def test_the_numbers(llama_kind, ids, pins):
    """Pinned entries are left out of mean and spread; with pins the numbers differ from those without."""
    model, stock, plain, path = llama_kind
    reference, held = Reference(stock, (0, 1), 2, 10**6, BUFFER, None), {0, 2, 3, 4, 5} if pins else set()
    reference.feed(ids[:1, :18])
    for layer, (view, score) in scored(model, path, ids[:1, :18], pins).items():
        for head in (0, 1):
            want = plain.voted(reference, layer, 0, head, list(range(14)), held)
            assert score[0, head].tolist() == pytest.approx(list(want.values()), abs=1e-6), "calibrated queries are turned by float32 angles"
            every = plain.voted(reference, layer, 0, head, list(range(14)))
            assert bool(pins) != (list(want.values()) == pytest.approx(list(every.values()), abs=1e-3))


def test_pinned_entries_through_rounds(llama_kind, ids):
    model, stock, plain, path = llama_kind

    def held(*_):
        return {0, 2, 3, 4}

    cache = kvprobe.cache(model, policy="triattention", statistics=path, keep=KEEP, buffer=BUFFER, pins=[kvprobe.SinkPin(1), kvprobe.SpanPin(2, 5)])
    reference = Reference(stock, (0, 1), 2, KEEP, BUFFER, plain.rule(held), held=held)
    assert walk(model, cache, reference, ids[:1, :34], prefill=18, longest=64) == 5


def test_entries_that_are_all_alike_or_all_pinned_have_finite_scores():
    policy, key = toy(False, 17)
    same = stub.view(key.expand(1, 1, 5, 4))
    for pinned in (None, torch.ones(1, 1, 5, dtype=torch.bool)):
        assert torch.isfinite(policy.score(stub.view(same.keys, pinned=pinned))).all()


def test_padding_takes_no_part(llama_kind, ids):
    """D02: scores of padded rows are those of single runs, whatever stands in the padding."""
    model, _, _, path = llama_kind
    mask = torch.ones(2, 30, dtype=torch.long)
    mask[1, :9] = 0
    padded, filled = (scored(model, path, torch.where(mask.bool(), ids[:2, :30], x), mask=mask) for x in (0, 55))
    single = scored(model, path, ids[1:2, 9:30])
    for layer, (view, score) in padded.items():
        real = view.real[1]
        assert torch.allclose(score[1][real], single[layer][1].flatten(), atol=1e-10)
        assert torch.equal(score[1][real], filled[layer][1][1][real]) and (score[1][~real] == 0).all()


def test_one_set_for_all_layers(llama_kind, ids):
    """shared_over_layers: the mean over layers of each layer's score."""
    model, stock, plain, path = llama_kind
    cache = kvprobe.cache(model, policy="triattention", statistics=path, shared_over_layers=True, keep=KEEP, buffer=BUFFER)
    reference = Reference(stock, (0, 1), 2, KEEP, BUFFER, plain.shared)
    assert walk(model, cache, reference, ids[:2, :34], prefill=18, longest=64) == 2 * 5
    assert torch.equal(cache.positions[0], cache.positions[1]) and not torch.equal(cache.positions[0, :, 0], cache.positions[0, :, 1])
    own = kvprobe.cache(model, policy="triattention", statistics=path, keep=KEEP, buffer=BUFFER)
    feed(model, own, ids[:2, :18])
    assert not torch.equal(own.positions[0], own.positions[1])


def test_a_shared_set_refuses_layers_that_hold_different_entries(llama_kind, ids):
    model, _, _, path = llama_kind
    cache = kvprobe.cache(model, policy="triattention", statistics=path, shared_over_layers=True, keep=KEEP, buffer=BUFFER,
                          pins=[kvprobe.SpanPin(0, 4, frozenset({(0, 0)}))])
    with pytest.raises(ValueError, match="pins that differ between layers"):
        for a, b in ((0, 18), (18, 22), (22, 26), (26, 30)):
            feed(model, cache, ids[:1, a:b])


def test_everything_follows_the_device_of_the_keys():
    """On torch's device without data: a table left on the CPU would be refused."""
    policy, key = toy(False, 17)
    view = stub.view(key.expand(1, 1, 6, 4))
    away = {name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in vars(view).items()}
    assert policy.score(type(view)(**away)).device.type == "meta"
    assert policy._tables.of(0, torch.device("meta")) is policy._tables.of(0, torch.device("meta")), "moved once"


# -- files ----------------------------------------------------------------------------------------------------------


def test_a_file_comes_back_as_it_was(llama, tmp_path):
    made = calibration.make(llama[0], TEXT, "here")
    calibration.save(made, tmp_path / "new" / "a.safetensors")
    again = calibration.load(tmp_path / "new" / "a.safetensors", llama[0])
    assert again.about == json.loads(json.dumps(made.about)) and [p.name for p in (tmp_path / "new").iterdir()] == ["a.safetensors"]
    for layer, table in made.tables.items():
        back = again.tables[layer]
        assert torch.equal(back.mean, table.mean) and torch.equal(back.norm, table.norm) and torch.equal(back.rotary.omega, table.rotary.omega)


FIELDS = ["fingerprint", "rope", "layout", "rotated", "query_heads", "kv_heads", "head_size", "layers"]


@pytest.mark.parametrize("name, changes, seed, differ", [
    ("llama", {}, 1, ["fingerprint"]), ("llama", dict(rope_parameters=dict(rope_type="default", rope_theta=500000.0)), 0, ["rope"]),
    ("llama", dict(rope_parameters=YARN), 0, ["rope"]), ("llama", dict(num_attention_heads=8), 0, ["fingerprint", "query_heads"]),
    ("llama", dict(num_key_value_heads=4), 0, ["fingerprint", "kv_heads"]), ("llama", dict(num_hidden_layers=3), 0, ["fingerprint", "layers"]),
    ("llama", dict(head_dim=16), 0, ["fingerprint", "head_size", "rotated"]), ("cohere", {}, 0, ["fingerprint", "rope", "layout"])])
def test_statistics_of_another_model_are_refused(llama_kind, name, changes, seed, differ):
    """C09: the message names the fields that differ, and no others."""
    path = llama_kind[3]
    other = kvprobe.prepare(tiny.build(name, seed=seed, **changes))
    with pytest.raises(ValueError, match="another model") as refused:
        kvprobe.cache(other, policy="triattention", statistics=path, keep=8)
    said = str(refused.value).split("they differ in ")[1]
    assert [field for field in FIELDS if f"{field} (file " in said] == [f for f in FIELDS if f in differ]


def damaged(path, how: str) -> None:
    """A file that is cut short, empty, gone, or of another kind; or that lacks a tensor."""
    if how == "cut":
        path.write_bytes(path.read_bytes()[:-50])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "text":
        path.write_text("no statistics")
    elif how == "unnamed":
        save_file({"x": torch.zeros(1)}, path)
    else:
        from safetensors import safe_open

        with safe_open(path, framework="pt") as file:
            about, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}
        tensors = {k: v for k, v in tensors.items() if k != "1.norm"} if how == "lacking" else {k: v[:1].contiguous() for k, v in tensors.items()}
        save_file(tensors, path, metadata=about)


DAMAGE = ["cut", "empty", "text", "unnamed", "lacking", "short"]


@pytest.mark.parametrize("how", [*DAMAGE, "gone"])
def test_a_file_that_holds_none_is_refused(llama, tmp_path, how):
    path = tmp_path / "a.safetensors"
    if how != "gone":
        calibration.save(calibration.make(llama[0], TEXT[:8], ""), path)
        damaged(path, how)
    with pytest.raises(ValueError, match="holds no calibration statistics"):
        kvprobe.cache(llama[0], policy="triattention", statistics=str(path), keep=8)


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A model with a tokenizer, an empty cache folder, and an automatic calibration of 300 tokens."""
    monkeypatch.setenv("KVPROBE_CACHE", str(tmp_path))
    monkeypatch.setattr(calibration, "AUTOMATIC", 300)
    monkeypatch.setattr(calibration.from_filler, "__defaults__", ("builtin", 300, calibration.from_filler.__defaults__[2]))
    return kvprobe.prepare(*models.tiny(torch.float64), "tiny")


def test_without_a_file_statistics_are_made_once(small, tmp_path, monkeypatch):
    cache = kvprobe.cache(small, policy="triattention", keep=KEEP, buffer=BUFFER)
    (path,) = tmp_path.iterdir()
    facts = cache.policy.facts
    assert facts["tokens"] == 300 and facts["source"].startswith("first 300 tokens of filler builtin") and facts["fingerprint"] == small.fingerprint
    feed(small, cache, TEXT[None, :18])
    assert cache.keep_log.fired == ((18,),)
    monkeypatch.setattr(calibration, "make", None)
    again = kvprobe.cache(small, policy="triattention", keep=KEEP, buffer=BUFFER)
    assert again.policy.facts == facts and list(tmp_path.iterdir()) == [path]
    assert torch.equal(again.policy._tables.tables[1].mean, cache.policy._tables.tables[1].mean)


@pytest.mark.parametrize("how", [*DAMAGE, "another rope"])
def test_a_damaged_file_in_the_cache_folder_is_made_again(small, tmp_path, how):
    want = calibration.automatic(small)
    (path,) = tmp_path.iterdir()
    if how == "another rope":
        tokenizer, other = small.tokenizer, copy.deepcopy(small.model)
        other.config.rope_parameters = other.config.rope_parameters | dict(rope_theta=500000.0)
        other.model.rotary_emb = type(other.model.rotary_emb)(other.config)
        calibration.automatic(kvprobe.prepare(other, tokenizer, "tiny"))
        assert len(list(tmp_path.iterdir())) == 2, "the same weights that turn otherwise have a file of their own"
    else:
        damaged(path, how)
    again = calibration.automatic(small)
    assert torch.equal(again.tables[0].mean, want.tables[0].mean) and torch.equal(again.tables[0].rotary.omega, want.tables[0].rotary.omega)
    assert torch.equal(calibration.load(path, small).tables[0].mean, want.tables[0].mean)


def test_more_tokens_than_the_filler_has_are_refused(small):
    for tokens in (0, 10**9):
        with pytest.raises(ValueError, match=f"tokens={tokens} must be in 1"):
            calibration.from_filler(small, tokens=tokens)


# -- refusals -------------------------------------------------------------------------------------------------------


def test_without_a_model_it_says_what_it_needs(llama):
    cache = stub.cache(8, 3, "triattention")
    with pytest.raises(ValueError, match="needs its model's statistics"):
        stub.walk(cache, 14)
    with pytest.raises(ValueError, match="without a tokenizer.*statistics="):
        kvprobe.cache(llama[0], policy="triattention", keep=8)
    assert POLICY().facts == {}


@pytest.mark.parametrize("offsets", [0, -1, 41])
def test_offsets_that_cannot_be_are_refused(offsets):
    with pytest.raises(ValueError, match=f"offsets={offsets} must be in 1..40"):
        POLICY(offsets=offsets)


def test_binding_changes_no_policy(llama_kind):
    """The same policy bound to a model is equal to it, and the first stays unbound."""
    model, _, _, path = llama_kind
    policy = POLICY(statistics=path)
    assert policy.bind(model) == policy and policy.facts == {} and policy.bind(model).facts["query_heads"] == 4
