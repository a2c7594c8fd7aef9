"""`kvprobe memory`: bytes of a model's cache by kind of layer, whole and compressed, from its config alone (methods R5).

An entry of an attention layer is a key and a value per KV head, 2 * heads * d * p bytes; a sliding layer stores its window's
last w - 1 entries, a linear layer a state of fixed size, a layer that reuses another's keys and values nothing. What is counted
is what transformers' DynamicCache holds between two forwards; weights, activations and the allocator's slack are not in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from . import model_checks, models

DELTA_RULE = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Linear attention whose states have the sizes below; other kinds are refused."""


@dataclass(frozen=True)
class Row:
    """One kind of layer, all of them and all rows of the batch together.

    grows: with the text. evicted: kvprobe evicts it, down to `kept` entries per KV head. state: bytes of a layer whose size
    does not depend on the text, per row of the batch.
    """

    kind: str
    layers: tuple[int, ...]
    heads: int
    d_head: int
    grows: bool
    evicted: bool
    entries: int
    kept: int
    bytes: int
    bytes_compressed: int
    state: int = 0


@dataclass(frozen=True)
class Memory:
    """Bytes of a cache, whole and compressed to `keep` entries per KV head in the layers that are evicted (None: nothing is)."""

    rows: tuple[Row, ...]
    context: int
    keep: int | None
    batch: int
    dtype: str
    limit: int | None

    @property
    def full(self) -> int:
        return sum(row.bytes for row in self.rows)

    @property
    def compressed(self) -> int:
        return sum(row.bytes_compressed for row in self.rows)

    @property
    def frame(self):
        """The rows as a DataFrame."""
        import pandas as pd

        return pd.DataFrame([asdict(row) for row in self.rows])

    def text(self) -> str:
        """The table and the totals."""
        import pandas as pd

        table = pd.DataFrame([_cells(row, self.keep is not None) for row in self.rows]).to_string(index=False)
        lines = [f"{self.context} tokens, batch {self.batch}, {self.dtype}", "", table, "", f"full cache: {self.full:,} bytes ({_short(self.full)})"]
        if self.keep is not None:
            share = f"{self.compressed / self.full:.4f} of it" if self.full else "nothing to compress"
            lines.append(f"compressed to {self.keep} entries per KV head: {self.compressed:,} bytes ({_short(self.compressed)}), {share}")
            lines += [] if any(row.evicted for row in self.rows) else ["no layer can be evicted: the compressed cache is the full one"]
        if self.limit is not None and self.context > self.limit:
            lines.append(f"this model was made for {self.limit} tokens")
        return "\n".join(lines)


def cache_bytes(config, context: int, *, keep: int | None = None, batch: int = 1, dtype: str | torch.dtype | None = None) -> Memory:
    """Bytes that a cache holds once `context` tokens were seen, by kind of layer.

    config: a transformers config, multimodal ones included (their text decoder counts). keep: entries per KV head left in each
    layer that kvprobe evicts (B). dtype: of keys and values; default the config's own, else float32; recurrent states are
    float32 always. Raises ValueError for numbers under 1 and for layers whose sizes kvprobe does not know, naming them.
    """
    for name, value in (("context", context), ("batch", batch), ("keep", 1 if keep is None else keep)):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{type(config).__name__} is an encoder-decoder's; kvprobe takes decoder-only models")
    config = config.get_text_config(decoder=True)
    kind = models.dtype_of(dtype, None, None) if dtype is not None else _own_dtype(config)
    layers = [_layer(config, i, name, context, keep, kind) for i, name in enumerate(_layer_types(config))]
    limit = getattr(config, "max_position_embeddings", None)
    return Memory(_by_kind(layers, batch, kind.itemsize), context, keep, batch, str(kind).removeprefix("torch."), limit)


def _own_dtype(config) -> torch.dtype:
    found = getattr(config, "dtype", None)
    found = getattr(torch, found, None) if isinstance(found, str) else found
    return found if isinstance(found, torch.dtype) else torch.float32


def _layer_types(config) -> list[str]:
    """What transformers' own cache makes of each layer."""
    from transformers.cache_utils import get_layer_types_and_kwargs

    if getattr(config, "kv_lora_rank", None):
        raise ValueError(f"{type(config).__name__} has latent attention (kv_lora_rank={config.kv_lora_rank}): kvprobe does not know what its cache holds")
    return get_layer_types_and_kwargs(config)[0]


def _layer(config, i: int, name: str, context: int, keep: int | None, dtype: torch.dtype) -> Row:
    """Layer i for one row of a batch; its bytes are filled in later."""
    own = config.per_layer_config[i]
    shared = i in model_checks.sources_of_shared_layers(config, config.num_hidden_layers)
    if name == "dummy":
        modes = getattr(config, "kv_sharing_modes", None)
        return Row("reuses an earlier layer's" if modes and modes[i] == "reuse" else "no attention", (i,), 0, 0, False, False, 0, 0, 0, 0)
    if name == "linear_attention":
        return Row("linear, a state", (i,), 0, 0, False, False, 0, 0, 0, 0, _state_bytes(config, own, dtype))
    heads, d_head = _heads(own)
    if name == "full_attention":
        kind = "full" + (", K=V" if getattr(config, "attention_k_eq_v", False) else "") + (", shared with later layers" if shared else "")
        kept = context if keep is None or shared else min(keep, context)
        return Row(kind, (i,), heads, d_head, True, not shared, context, kept, 0, 0)
    if name in ("sliding_attention", "chunked_attention"):
        window = own.sliding_window if name == "sliding_attention" else own.attention_chunk_size
        held = min(context, window - 1) if window > 1 else context  # a slice from -0 on is all of it
        return Row(f"{name.split('_')[0]}, window {window}", (i,), heads, d_head, False, False, held, held, 0, 0)
    raise ValueError(f"layer {i} of {type(config).__name__} is of kind {name!r}: kvprobe does not know what its cache holds")


def _heads(config) -> tuple[int, int]:
    """(KV heads, head size) of a layer. Raises ValueError where keys and values differ in size."""
    n_q = config.num_attention_heads
    d_head = getattr(config, "head_dim", None) or config.hidden_size // n_q
    if getattr(config, "v_head_dim", None) not in (None, d_head):
        raise ValueError(f"{type(config).__name__} has values of another size than keys (v_head_dim={config.v_head_dim}, head size {d_head}): kvprobe does not count those")
    return getattr(config, "num_key_value_heads", None) or n_q, d_head


def _state_bytes(config, own, dtype: torch.dtype) -> int:
    """Convolution window [2 keys + values, kernel] and recurrent state [value heads, d_k, d_v], the latter in float32."""
    if config.model_type not in DELTA_RULE:
        raise ValueError(f"{type(config).__name__}: kvprobe knows the linear attention of {', '.join(DELTA_RULE)} only")
    keys, values = own.linear_num_key_heads * own.linear_key_head_dim, own.linear_num_value_heads * own.linear_value_head_dim
    return (2 * keys + values) * own.linear_conv_kernel_dim * dtype.itemsize + values * own.linear_key_head_dim * torch.float32.itemsize


def _by_kind(layers: Sequence[Row], batch: int, itemsize: int) -> tuple[Row, ...]:
    """Layers that differ in nothing but their number as one row, in order of the first."""
    groups: dict[tuple, list[Row]] = {}
    for row in layers:
        groups.setdefault((row.kind, row.heads, row.d_head, row.evicted, row.state), []).append(row)
    return tuple(_sum(rows, batch, itemsize) for rows in groups.values())


def _sum(rows: Sequence[Row], batch: int, itemsize: int) -> Row:
    one, n = rows[0], len(rows) * batch
    entry = 2 * one.heads * one.d_head * itemsize
    whole, left = (n * (entries * entry + one.state) for entries in (one.entries, one.kept))
    return Row(one.kind, tuple(row.layers[0] for row in rows), one.heads, one.d_head, one.grows, one.evicted, one.entries, one.kept, whole, left, one.state)


def _cells(row: Row, compressed: bool) -> dict[str, str]:
    """One line of the table."""
    cells = {"layers": row.kind, "n": str(len(row.layers)), "KV heads x d": f"{row.heads} x {row.d_head}" if row.heads else "",
             "entries": str(row.entries) if row.heads else "", "bytes": f"{row.bytes:,}"}
    return cells | ({"kept": str(row.kept) if row.heads else "", "bytes compressed": f"{row.bytes_compressed:,}"} if compressed else {})


def _short(n: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if n < 1000:
            return f"{n:.4g} {unit}"
        n /= 1000
    return f"{n:.4g} TB"


# -- the command ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """What a cache takes."""

    model: str
    """'smollm2', 'tiny', a local folder, a config.json, a .gguf file or a hub id; no weights are read"""
    context: int
    """tokens that the cache has seen"""
    keep: int | None = None
    """entries per KV head that are left in each layer that grows (B); nothing is evicted without it"""
    batch: int = 1
    """rows"""
    dtype: str | None = None
    """of keys and values: float32, bfloat16, float16, ...; default the config's own, else float32"""


def command(settings: Settings) -> str:
    """The table as text."""
    made = cache_bytes(read_config(settings.model), settings.context, keep=settings.keep, batch=settings.batch, dtype=settings.dtype)
    return f"cache of {settings.model}: {made.text()}"


def read_config(name: str):
    """The config of a model by name, without its weights. Raises ValueError naming what is allowed, or why it cannot be read."""
    from transformers import AutoConfig, LlamaConfig

    if name == models.EMBEDDED:  # known here, so that nothing is fetched for it
        return LlamaConfig(num_hidden_layers=30, hidden_size=576, num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=8192)
    if name == models.TINY:
        return models.tiny()[0].config
    path = Path(name)
    if not path.exists() and (name.count("/") != 1 or name.endswith(".gguf")):
        raise ValueError(f"model {name!r} is unknown; allowed: '{models.EMBEDDED}', '{models.TINY}', a local folder, a config.json, a .gguf file, or a hub id 'owner/name'")
    where = dict(pretrained_model_name_or_path=str(path.parent), gguf_file=path.name) if name.endswith(".gguf") else dict(pretrained_model_name_or_path=name)
    try:
        return AutoConfig.from_pretrained(**where, trust_remote_code=False)
    except Exception as error:  # whatever a damaged file, an unknown architecture or a missing hub raises
        raise ValueError(f"the config of {name!r} could not be read: {type(error).__name__}: {error}") from error
