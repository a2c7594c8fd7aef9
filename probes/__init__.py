"""One file per probe: CONFIG, PRESETS, start(config, model) -> session. Found by `kvprobe.registry`."""
