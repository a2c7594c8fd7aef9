"""A model's rotary embedding as pairs of dimensions and angular frequencies, read off the model's own code."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .models import Model


@dataclass(frozen=True)
class Rotary:
    """How one layer rotates queries and keys: dimensions (first[f], second[f]) turn by position * omega[f].

    omega [f] float64 [radians per position], 0 for dimensions that are not rotated (each is a pair with itself, whose
    second part does not exist). scale [f] float64: what the rotation multiplies lengths by (YaRN), 1 for dimensions that it
    leaves alone. layout: "half" or "interleaved".
    """

    first: Tensor
    second: Tensor
    omega: Tensor
    scale: Tensor
    layout: str

    def to(self, device: torch.device) -> Rotary:
        return Rotary(self.first.to(device), self.second.to(device), self.omega.to(device), self.scale.to(device), self.layout)

    def pairs(self, x: Tensor) -> Tensor:
        """[... d] -> complex128 [... f]."""
        x = x.double()
        second = torch.where(self.first == self.second, 0.0, 1.0).to(x.device) * x[..., self.second]
        return torch.complex(x[..., self.first], second)

    def dimensions(self, z: Tensor, d: int) -> Tensor:
        """complex [... f] -> float64 [... d], the inverse of `pairs`."""
        x = torch.zeros(*z.shape[:-1], d, dtype=torch.float64, device=z.device)
        x[..., self.second] = z.imag.double()
        x[..., self.first] = z.real.double()  # after: where a dimension is its own pair, this is its value
        return x

    def phase(self, positions: Tensor) -> Tensor:
        """complex128 [... f]: exp(i omega p) for integer positions [...]."""
        angle = positions.double()[..., None] * self.omega.to(positions.device)
        return torch.polar(torch.ones_like(angle), angle)

    def turned(self, x: Tensor, by: Tensor) -> Tensor:
        """x [... d] turned by integer positions [...], in x's own precision; lengths stay as they are."""
        angle = by.double()[..., None] * self.omega.to(by.device)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        a, out = x[..., self.first], torch.empty_like(x)
        pair = self.first != self.second
        b = x[..., self.second]
        out[..., self.first] = torch.where(pair, a * cos - b * sin, a)
        out[..., self.second[pair]] = (a * sin + b * cos)[..., pair]
        return out

    def mean_turn(self, start: Tensor, count: int, d: int) -> Tensor:
        """float64 [b d d]: the mean of the rotations by positions start..start+count-1, for rows x @ matrix. start [b]."""
        positions = start[:, None] + torch.arange(count, device=start.device)
        basis = torch.eye(d, dtype=torch.float64, device=start.device)
        mean = self.phase(positions).mean(1)  # the mean of turns is a turn and a shrinking of each pair
        return self.dimensions(self.pairs(basis) * mean[:, None], d)


@torch.no_grad()
def read(model: Model, layer: int) -> Rotary:
    """The rotary embedding of a layer. Raises ValueError where angles depend on the text's length or no pair is found."""
    from .inside.sites import _cos_sin, _turn, attention_modules, rotate

    attention = model.model.get_submodule(attention_modules(model.model)[layer])
    d, config = getattr(attention, "head_dim", model.geometry.d_head), model.model.config.get_text_config(decoder=True)
    basis = torch.eye(d, dtype=torch.float64, device=model.device)[None, None]  # in half precision no frequency could be told
    turned = rotate(model, layer, basis, 1)[0, 0].cpu()  # refuses what depends on the length
    still = _cos_sin(model.model, config, layer, basis, torch.zeros(1, d, dtype=torch.int64, device=model.device))
    lengths = _turn(attention, basis, *still)[0, 0].diagonal().cpu()
    first, second, angle = [], [], []
    for a in range(d):
        others = [j for j in turned[a].abs().argsort(descending=True).tolist()[:2] if j != a and abs(float(turned[a, j])) > 1e-12]
        if not others:
            first, second, angle = [*first, a], [*second, a], [*angle, 0.0]
        elif float(turned[a, others[0]]) > 0:  # the first of a pair moves towards the second
            first, second = [*first, a], [*second, others[0]]
            angle.append(float(torch.atan2(turned[a, others[0]], turned[a, a])))
    rotated = [(a, b) for a, b in zip(first, second) if a != b]
    if not rotated or len(rotated) * 2 + sum(a == b for a, b in zip(first, second)) != d:
        raise ValueError(f"layer {layer} of {model.name}: the rotary embedding does not turn dimensions in pairs")
    layout = "interleaved" if all(b == a + 1 for a, b in rotated) and len(rotated) > 1 else "half"
    omega = _exact(model, torch.tensor(angle, dtype=torch.float64))
    return Rotary(torch.tensor(first), torch.tensor(second), omega, lengths[first], layout)


def _exact(model: Model, angle: Tensor) -> Tensor:
    """The frequencies that the model multiplies positions with: measured angles are good to float32 only, and phases at
    65,536 positions need more."""
    known = [b.double().flatten().cpu() for name, b in model.model.named_buffers() if name.endswith("inv_freq")]
    if not known:
        raise ValueError(f"{model.name} has no inv_freq buffer: its rotary frequencies cannot be told")
    known = torch.cat(known)
    out = angle.clone()
    for i, a in enumerate(angle.tolist()):
        if a:
            nearest = known[(known - a).abs().argmin()]
            if abs(float(nearest) - a) > 1e-3 * abs(a) + 1e-9:
                raise ValueError(f"{model.name}: no rotary frequency of the model is the measured {a:.3g} radians per position")
            out[i] = nearest
    return out
