"""A prompt-time session whose LORE arms share their walks over the keys: what a continuation's queries cost is the same for every
number of continuations, weighting, budget and rule of selection, and is most of the work."""

from __future__ import annotations

from collections.abc import Sequence

from .comparing import Gather
from .prompt_reading import Prompt
from .prompt_settings import COMMON
from .prompting import Arm, Prompting
from .tasks import Task
from .types import Needs


class Scored:
    """A policy whose scores {layer: [b hkv n]} were made before; all else is the policy's own."""

    needs = Needs()

    def __init__(self, policy, scores: dict):
        self.policy, self.scores = policy, scores

    def score(self, view):
        return self.scores[view.layer]

    def __getattr__(self, name: str):
        if name in ("policy", "scores", "queries", "check"):
            raise AttributeError(name)
        return getattr(self.policy, name)


class Walking(Prompting):
    """Scores every LORE arm by eq. 7 from costs that are walked once per prompt, draw and cost; other arms as in `Prompting`."""

    def __init__(self, config: COMMON, model, prompts: Sequence[Task], arms: Sequence[Arm]):
        super().__init__(config, model, prompts, arms)
        self.sizes = sorted({(a.policy.m, a.policy.t) for a in self.arms if a.ahead})
        self._walked: tuple = (None, {})

    def _gather(self) -> Gather:
        has = super()._gather().needs
        return Gather(Needs(window=max(has.window, self.config.window), attn_mass=has.attn_mass))

    def evicted(self, a: Arm, prompt: Prompt):
        from .policies import lore

        if not isinstance(a.policy, lore.POLICY):
            return super().evicted(a, prompt)
        return self.evict(prompt.cache, a, Scored(a.policy, self.scores(a, prompt)), None)

    def scores(self, a: Arm, prompt: Prompt) -> dict:
        """{layer: [1 hkv n]}: eq. 7 of the arm's policy."""
        p, psi = a.policy, self._psi(a, prompt)
        if not a.ahead:
            return {layer: mine["window"] for layer, mine in psi.items()}
        omega = p.weigh(prompt.draws[a.draw]).weights[0].tolist()
        return {layer: mine["window"] + p.lam_l * sum(w * mine[k, p.t] for k, w in enumerate(omega)) for layer, mine in psi.items()}

    def _psi(self, a: Arm, prompt: Prompt) -> dict:
        """{layer: {"window" or (continuation, steps): [1 hkv n]}}, kept while the prompt is at work."""
        if self._walked[0] is not prompt:
            self._walked = (prompt, {})
        p, draw = a.policy, a.draw if a.ahead else min(prompt.draws, default=None)  # the window alone is in every draw's walk
        key = (draw, p.window, p.objective, p.form, p.eps, p.group, p.alpha, p.kappa)
        if key not in self._walked[1]:
            self._walked[1][key] = self._walk(p, prompt, None if draw is None else prompt.draws[draw])
        return self._walked[1][key]

    def _walk(self, p, prompt: Prompt, found) -> dict:
        """One walk over the keys of every layer: psi of the window and of the first T steps of each continuation, for all sizes of the arms."""
        import torch

        from . import deletion

        cache, out = prompt.cache, {}
        at = cache.window_positions[:, -p.window :]
        w, n = at.shape[1], 0 if found is None else found.m * found.t
        sets = {"window": torch.cat([at[0] >= 0, torch.zeros(n, dtype=torch.bool, device=at.device)])}
        for k, t in {(k, t) for m, t in self.sizes for k in range(m)} if n else ():
            own = torch.zeros_like(found.valid[0])
            own[k, :t] = found.valid[0, k, :t]
            sets[k, t] = torch.cat([torch.zeros(w, dtype=torch.bool, device=at.device), own.flatten().to(at.device)])
        cost, psi = deletion.Cost(p.objective, p.form, p.eps, p.group), deletion.Psi(p.alpha, p.kappa)
        for i, layer in enumerate(cache.geometry.kv_layers):
            held = cache.layers[layer]
            visible = cache.positions[i, :, :, None, :] <= at[:, None, :, None]
            queries = held.queries[:, :, -w:]
            if n:
                ahead = found.queries[layer].to(queries.device).transpose(1, 2).flatten(2, 3)
                queries, visible = torch.cat([queries, ahead], dim=2), torch.cat([visible, torch.ones_like(visible[:, :, :1]).expand(-1, -1, n, -1)], dim=2)
            gram = p._gram(layer, held.keys.device) if p.objective == "projected" else None
            out[layer] = deletion.by_set(queries, held.keys, held.values, held.scaling, sets, gram, visible.to(queries.device), psi, cost)
        return out
