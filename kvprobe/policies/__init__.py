"""One file per policy; each exports POLICY, a frozen dataclass. Found by `kvprobe.registry`, nothing to edit here."""
