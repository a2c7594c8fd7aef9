"""kvprobe: find out why a KV-cache eviction policy keeps or loses what a language model needs.

    import kvprobe
    run = kvprobe.run("planted_fact", preset="demo")     # rows, table, figure
    lm = kvprobe.load("smollm2")
    cache = kvprobe.cache(lm, policy="random", keep=256, buffer=16)
    lm.model.generate(**lm.tokenizer("...", return_tensors="pt"), cache=cache)

Nothing heavy is loaded until it is used.
"""

from importlib import import_module as _import

__version__ = "0.1.0"

_WHERE = {
    "load": "models", "prepare": "models", "Model": "models",
    "cache": "api", "compress": "compression", "Compressed": "compression", "plant": "api", "sites": "api", "run": "runner", "rerun": "runner", "Run": "runner",
    "Plan": "types", "Needs": "types", "Geometry": "types", "CacheView": "types",
    "SpanPin": "pins", "PromptPin": "pins", "SinkPin": "pins", "WindowPin": "pins",
    "KeepLog": "keeplog", "force": "engine", "prefill": "engine",
    "generate": "generation", "evicting": "generate_evicting", "Generation": "generation",
    "available": "registry",
    "capture": "inside.look", "estimate": "inside.look", "Capture": "inside.capture", "head_weights": "inside.sites", "list_sites": "inside.sites",
    "intervene": "inside.intervene", "head_masks": "inside.edits", "pin": "inside.edits", "ablate": "inside.edits",
    "transplant": "inside.edits", "compare": "inside.intervene", "kv_head": "inside.intervene",
}
_MODULES = ("stats",)  # submodules that are public as they are
__all__ = ["__version__", *_MODULES, *sorted(_WHERE)]


def __getattr__(name: str):
    if name in _MODULES:
        return _import(f"{__name__}.{name}")
    if name in _WHERE:
        value = getattr(_import(f"{__name__}.{_WHERE[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return __all__
