"""Loading models; those whose attention kvprobe would misread are refused (model_checks.py)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from .embedded import EMBEDDED, embedded_folder
from .model_checks import check_attention, fingerprint, inspect
from .types import Geometry
from .versions import require

TINY = "tiny"


@dataclass(frozen=True)
class Model:
    """A transformers model ready for eviction: `model` is the live transformers object, `tokenizer` may be None.

    fingerprint: a hash of the config and of a sample of every weight, the same wherever the weights are the same.
    """

    name: str
    model: torch.nn.Module
    tokenizer: object
    geometry: Geometry
    fingerprint: str

    @property
    def device(self) -> torch.device:
        """Where token ids go: the device of the input embedding."""
        return self.model.get_input_embeddings().weight.device

    @property
    def context(self) -> int | None:
        """Longest text the model was made for [tokens], None if its config does not say."""
        return getattr(self.model.config.get_text_config(decoder=True), "max_position_embeddings", None)


def cuda_devices(model: Model) -> list[torch.device]:
    """Those that hold some of the weights, sorted."""
    return sorted({p.device for p in model.model.parameters() if p.device.type == "cuda"}, key=str)


def load(name: str = EMBEDDED, *, device: str | None = None, dtype: str | torch.dtype | None = None,
         device_map: str | dict | None = None) -> Model:
    """Load a decoder-only model and put kvprobe's attention function into it.

    name: "smollm2" (the embedded model, fetched once), "tiny" (random weights, for tests), a local folder, a .gguf file,
    or a hub id. dtype: e.g. "float32"; default the checkpoint's on a GPU, float32 on a CPU. Never trusts remote code.
    Raises ValueError naming the reason when the model is one that kvprobe would misread.
    """
    if device is not None and device_map is not None:
        raise ValueError(f"give device={device!r} or device_map={device_map!r}, not both")
    if device is not None:
        _check_device(device)
    model, tokenizer = _read(name, dtype_of(dtype, device, device_map), device_map)
    if device is not None and device_map is None:
        model = model.to(device)
    return prepare(model, tokenizer, name)


def prepare(model: torch.nn.Module, tokenizer=None, name: str | None = None) -> Model:
    """Check a transformers model that is already in memory and put kvprobe's attention function into it.

    The model is changed in place: evaluation mode, no gradients, kvprobe's attention function.
    """
    from .attention_function import ATTENTION, register

    require("transformers")
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"model={model!r} is no model: give what kvprobe.load returns, or a transformers model in memory")
    model.eval().requires_grad_(False)
    geometry = inspect(model)
    register()
    native = model.config._attn_implementation
    if native != ATTENTION:
        check_attention(model, native)
        model.set_attn_implementation(ATTENTION)
    return Model(name or getattr(model.config, "name_or_path", "") or type(model).__name__, model, tokenizer, geometry, fingerprint(model))


def dtype_of(dtype, device: str | None, device_map) -> torch.dtype | str:
    """What to load a model in; "auto" is the checkpoint's own. Raises ValueError for an unknown name."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype is not None:
        found = getattr(torch, dtype, None)
        if not isinstance(found, torch.dtype) or not found.is_floating_point:
            raise ValueError(f"dtype {dtype!r} is unknown; known: 'float32', 'bfloat16', 'float16', 'float64'")
        return found
    # half precision wins nothing in decode on a CPU, and hides errors
    return torch.float32 if device_map is None and (device is None or device.startswith("cpu")) else "auto"


def _check_device(device: str) -> None:
    try:
        torch.empty(0, device=device)
    except Exception as error:
        have = ["cpu"] + (["cuda"] if torch.cuda.is_available() else []) + (["mps"] if torch.backends.mps.is_available() else [])
        raise ValueError(f"device {device!r} cannot be used here ({str(error).splitlines()[0]}); available: {have}") from error


def _read(name: str, dtype, device_map):
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    if name == TINY:
        if device_map is not None:
            raise ValueError("model 'tiny' takes no device_map")
        return tiny(dtype if isinstance(dtype, torch.dtype) else torch.float32)
    kwargs: dict = dict(dtype=dtype, device_map=device_map)
    where = str(embedded_folder()) if name == EMBEDDED else name
    if where.endswith(".gguf"):
        path = Path(where)
        if not path.is_file():
            raise ValueError(f"model file {name!r} does not exist")
        where = str(path.parent)
        kwargs.update(gguf_file=path.name, quantization_config=GgufConfig(dequantize=True))
    elif not Path(where).is_dir() and where.count("/") != 1:
        raise ValueError(f"model {name!r} is unknown; allowed: '{EMBEDDED}', '{TINY}', a local folder, a .gguf file, or a hub id 'owner/name'")
    try:
        model = _auto(where, AutoModelForCausalLM).from_pretrained(where, trust_remote_code=False, **kwargs)
    except Exception as error:  # whatever a damaged file, an unknown architecture or a missing hub raises
        raise ValueError(f"model {name!r} could not be loaded: {type(error).__name__}: {error}") from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(where, trust_remote_code=False, **{k: v for k, v in kwargs.items() if k == "gguf_file"})
    except (OSError, ValueError):
        tokenizer = None  # capture and forcing by ids need none; what needs one says so
    return model, tokenizer


def _auto(where: str, causal):
    """The class that loads a checkpoint: one of text, or where a text decoder comes inside an image model only (Ministral 3), that."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    if where.endswith(".gguf") or not Path(where, "config.json").is_file():
        return causal
    kind = type(AutoConfig.from_pretrained(where, trust_remote_code=False))
    return AutoModelForImageTextToText if kind not in causal._model_mapping and kind in AutoModelForImageTextToText._model_mapping else causal


def tiny(dtype: torch.dtype = torch.float32, seed: int = 0):
    """A random Llama (2 layers, 4 query and 2 KV heads) with a tokenizer of about one token per byte; no download."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "Le", "Let"]  # one merged word: the second box has 17 letters
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate([*tokens, "<s>"])}, merges=[("L", "e"), ("Le", "t")]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="<s>", pad_token="<s>")
    config = LlamaConfig(vocab_size=len(tokens) + 1, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2, head_dim=16, max_position_embeddings=8192, bos_token_id=len(tokens),
                         eos_token_id=len(tokens), pad_token_id=len(tokens), tie_word_embeddings=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    return model.to(dtype), tokenizer
