"""A prompt with every token coloured by how much of the cache kept it, one block per policy: for a notebook, and as a figure.

    made = {name: kvprobe.compress(lm, ids, policy=name, keep=96) for name in ("snapkv", "lore")}
    shown = highlight.tokens(lm.tokenizer, ids, {name: highlight.share(m) for name, m in made.items()}, {"evidence": (40, 56)})
    shown                     # in a notebook; shown.figure() for a paper, shown.table() and shown.by_span() in numbers
"""

from __future__ import annotations

import functools
import html
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from .keeplog import ALIVE, KeepLog
from .token_text import pieces

if TYPE_CHECKING:
    import pandas as pd

COLORS = "YlGnBu"
MISSING = "#bdbdbd"
"""Colour of tokens without a value."""
MARKS = ("#d62728", "#ff7f0e", "#9467bd", "#111111", "#8c564b", "#e377c2")
"""Colours of the spans, in their order; none of them is on the colour scale."""
WIDEST = 640
"""Cells of a figure along the prompt; longer prompts are binned."""
Span = tuple[int, int]


def share(of, row: int = 0, *, sites: Iterable[tuple[int, int]] | None = None, after: int | None = None) -> np.ndarray:
    """float [n]: share of the sites that hold each position of a row.

    of: a KeepLog, or what has one (`kvprobe.compress`, a cache, `kvprobe.generate`). sites: (layer, KV head) pairs, all evicted
    ones by default. after: right after this round (0-based) instead of now; positions not yet read then are nan.
    Raises ValueError for a row, site or round that does not exist, and for what has no log.
    """
    log = _log(of, row)
    chosen = _chosen(log, sites)
    if after is None:
        return (log.died[:, row, :, : log.length[row]] == ALIVE)[chosen].mean(0)
    held = log.held(row, after)[..., : log.length[row]][chosen].mean(0)
    return np.where(np.arange(log.length[row]) < log.fired[row][after], held, np.nan)


def by_site(of, span: Span | Sequence[Span], row: int = 0) -> np.ndarray:
    """float [l hkv]: share of a span's tokens that each site holds now, the layers as in the log. of: as in `share`. Raises ValueError for a span
    outside the row or without tokens."""
    log = _log(of, row)
    inside = _inside(_spans("span", span, log.length[row]), log.length[row])
    if not inside.any():
        raise ValueError("the span is empty: name at least one half-open (start, end)")
    return (log.died[:, row][..., inside] == ALIVE).mean(-1)


def _log(of, row: int) -> KeepLog:
    log = of if isinstance(of, KeepLog) else getattr(of, "keep_log", None)
    if not isinstance(log, KeepLog):
        raise ValueError(f"{type(of).__name__} has no keep log: "
                         "give a KeepLog, a cache, or what kvprobe.compress or kvprobe.generate under a policy returned")
    if not 0 <= row < len(log.length):
        raise ValueError(f"row {row} does not exist: rows 0..{len(log.length) - 1} were logged")
    return log


def sampled(tokenizer, future, row: int = 0) -> pd.DataFrame:
    """The continuations that a policy looked ahead with, as text, one line each.

    future: what `kvprobe.compress` returned under a policy that samples or decodes continuations, or its `.future`. text: up to and with the token that ended it;
    tokens: of it; weight: of the continuation, nan where the policy weighs none; logq: mean log probability of a token [nats].
    Raises ValueError where there are none, and for a row that does not exist.
    """
    import pandas as pd

    if tokenizer is None:
        raise ValueError("tokens have no text without a tokenizer")
    future = getattr(future, "future", future)
    found = getattr(future, "lookahead", future)
    if not hasattr(found, "valid") or not hasattr(found, "logq"):
        raise ValueError("there are no continuations: only policies that look ahead (lore, single_continuation, laq, laq_plus) write them, and a saved compression keeps none")
    if not 0 <= row < len(found.valid):
        raise ValueError(f"row {row} does not exist: continuations of rows 0..{len(found.valid) - 1} were written")
    lengths = found.valid[row].sum(-1).tolist()
    weights = future.weights[row].tolist() if hasattr(future, "weights") else [float("nan")] * found.m
    return pd.DataFrame([dict(text="".join(pieces(tokenizer, found.tokens[row, m, :n].tolist())), tokens=n, weight=weights[m],
                              logq=float(found.logq[row, m, :n].mean())) for m, n in enumerate(lengths)])


def _chosen(log: KeepLog, sites) -> np.ndarray:
    """bool [l hkv]."""
    heads = log.died.shape[2]
    if sites is None:
        return np.ones((len(log.layers), heads), dtype=bool)
    out = np.zeros((len(log.layers), heads), dtype=bool)
    for layer, head in sites:
        if layer not in log.layers or not 0 <= head < heads:
            raise ValueError(f"site (layer {layer}, KV head {head}) was not logged: "
                             f"layers {', '.join(map(str, log.layers))}, KV heads 0..{heads - 1}")
        out[log.layers.index(layer), head] = True
    if not out.any():
        raise ValueError("sites is empty: name at least one (layer, KV head)")
    return out


@dataclass(frozen=True, repr=False)
class Tokens:
    """A prompt's tokens, ids and pieces of text [n], with the share kept by policy (name -> float [n], nan where there is none) and marked spans."""

    ids: tuple[int, ...]
    pieces: tuple[str, ...]
    kept: Mapping[str, np.ndarray]
    spans: Mapping[str, tuple[Span, ...]]
    title: str = ""

    def __repr__(self) -> str:
        return f"Tokens({len(self.ids)} tokens; kept by {', '.join(self.kept)}; spans {', '.join(self.spans) or 'none'})"

    def inside(self, span: str) -> np.ndarray:
        """bool [n]: the tokens of a span."""
        return _inside(self.spans[span], len(self.ids))

    def table(self) -> pd.DataFrame:
        """One line per policy and token: policy, position, id, piece, share kept."""
        import pandas as pd

        return pd.DataFrame([dict(policy=name, position=i, id=self.ids[i], piece=self.pieces[i], share=value)
                             for name, kept in self.kept.items() for i, value in enumerate(kept.tolist())])

    def by_span(self) -> pd.DataFrame:
        """Mean share kept by policy (lines) over the tokens of each span and over all tokens (columns); what is nan is left out."""
        import pandas as pd

        return pd.DataFrame({f"{place} ({at.sum()} tokens)": {name: _mean(kept[at]) for name, kept in self.kept.items()}
                             for place, at in self._places().items()})

    def _places(self) -> dict[str, np.ndarray]:
        return {name: self.inside(name) for name in self.spans} | {"all": np.ones(len(self.ids), dtype=bool)}

    def binned(self) -> pd.DataFrame:
        """What `figure` draws: mean share by policy over each bin of equally many tokens (start, end); one token a bin where they all fit."""
        import pandas as pd

        width = -(-len(self.ids) // WIDEST)
        bins = [(a, min(a + width, len(self.ids))) for a in range(0, len(self.ids), width)]
        return pd.DataFrame([dict(policy=name, start=a, end=z, share=_mean(kept[a:z])) for name, kept in self.kept.items() for a, z in bins])

    def figure(self, footer: str = ""):
        """A matplotlib Figure: position by policy, the share kept as colour, spans in a strip above. footer: what there is to know of the run."""
        return _figure(self, footer)

    def _repr_html_(self) -> str:
        return _page(self)


def _inside(spans: Sequence[Span], n: int) -> np.ndarray:
    """bool [n]: in any of the spans, however often."""
    out = np.zeros(n, dtype=bool)
    for start, end in spans:
        out[start:end] = True
    return out


def _mean(values: np.ndarray) -> float:
    return float("nan") if np.isnan(values).all() else float(np.nanmean(values))


def tokens(tokenizer, ids: Sequence[int], kept: Mapping[str, Sequence], spans: Mapping[str, Span | Sequence[Span]] = (), title: str = "") -> Tokens:
    """Show what was kept of a prompt, token by token.

    ids [n]. kept: name -> bool [n], or share of the (layer, KV head) sites in 0..1 [n], nan for none (`share` makes it). spans: name ->
    half-open (start, end) or several of them; underlined. Raises ValueError for lengths that differ, shares outside 0..1, spans
    outside the prompt, and a span called "all", as the whole prompt is.
    """
    if tokenizer is None:
        raise ValueError("tokens have no text without a tokenizer")
    whole = _ids(ids)
    if not isinstance(kept, Mapping) or not kept:
        raise ValueError("kept must name at least one policy: {name: what it kept of each token}")
    if not hasattr(spans, "keys") and spans != ():
        raise ValueError(f"spans must be named: {{'evidence': (40, 56)}}, not {spans!r}")
    if "all" in dict(spans):
        raise ValueError("no span can be called 'all': means over all tokens are")
    return Tokens(whole, tuple(pieces(tokenizer, whole)), {str(name): _shares(name, values, len(whole)) for name, values in kept.items()},
                  {str(name): _spans(name, span, len(whole)) for name, span in dict(spans).items()}, title)


def _array(values) -> np.ndarray:
    """As numpy has it: a tensor from any device, floats of any width as float64 (numpy has no bfloat16)."""
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
        return (values.double() if values.is_floating_point() else values).numpy()
    return np.asarray(values)


def _ids(ids) -> tuple[int, ...]:
    found = _array(ids)
    if found.ndim != 1 or not found.size or found.dtype.kind not in "iu":
        raise ValueError(f"ids must be whole numbers [n], of one prompt, not {found.dtype} {list(found.shape)}")
    return tuple(map(int, found))


def _shares(name, values, n: int) -> np.ndarray:
    found = _array(values)
    if found.shape != (n,) or found.dtype.kind not in "bfiu":
        raise ValueError(f"kept[{name!r}] must be bool or a share for each of the {n} tokens, not {found.dtype} {list(found.shape)}")
    found = found.astype(float)
    if ((found < 0) | (found > 1)).any():
        raise ValueError(f"kept[{name!r}] holds {found[(found < 0) | (found > 1)][0]:g}: shares are between 0 and 1")
    return found


def _spans(name, span, n: int) -> tuple[Span, ...]:
    try:
        pairs = _array(span) if len(span) else np.zeros((0, 2), dtype=int)
        pairs = pairs[None] if pairs.ndim == 1 else pairs
    except (TypeError, ValueError):
        pairs = np.zeros(0)
    if pairs.dtype.kind not in "iu" or pairs.shape[1:] != (2,):
        raise ValueError(f"spans[{name!r}] must be a half-open (start, end) of whole numbers, or several of them, not {span!r}")
    for a, z in pairs.tolist():
        if not 0 <= a < z <= n:
            raise ValueError(f"spans[{name!r}]: {(a, z)} is no half-open (start, end) within the {n} tokens")
    return tuple((int(a), int(z)) for a, z in pairs.tolist())


# -- as a page ----------------------------------------------------------------------------------------------------------

STYLE = ("<style>.kvprobe-tokens b{font-weight:inherit;border-radius:2px;margin-right:1px;padding:1px 0}"
         ".kvprobe-tokens p{margin:.2em 0 1em;line-height:2.05;font-family:monospace;font-size:12px;overflow-wrap:anywhere}</style>")
"""What a page loses where a viewer takes style sheets out; colours are written on each token and stay."""


def _page(shown: Tokens) -> str:
    texts = [html.escape(visible(piece)) for piece in shown.pieces]
    marks = _underlines(shown)
    blocks = [f"<div><strong>{html.escape(name)}</strong> {_means(shown, name)}</div>"
              f"<p style='white-space:pre-wrap'>{_block(shown, kept, texts, marks)}</p>"
              for name, kept in shown.kept.items()]
    title = f"<div style='font-size:14px'><strong>{html.escape(shown.title)}</strong></div>" if shown.title else ""
    return (f"{STYLE}<div class='kvprobe-tokens' style='background:#ffffff;color:#111111;padding:8px'>{title}"
            f"<div>Colour: share of the sites (layer, KV head) looked at that kept the token. {_scale(shown)}</div>{_legend(shown)}{''.join(blocks)}</div>")


def visible(piece: str) -> str:
    """A piece as it is shown: ends of lines, tabs and lone blanks as signs, other characters that are not printed (or turn the line around) written
    out, "…" for a token that only goes on with the character before."""
    if not piece:
        return "…"
    if not piece.strip(" "):
        return "·" * len(piece)
    signs = {"\n": "↵", "\t": "⇥"}
    return "".join(signs.get(c) or (c if c.isprintable() or unicodedata.category(c) == "Zs" else c.encode("unicode_escape").decode()) for c in piece)


def color(value: float) -> tuple[str, str]:
    """(background, text) of a share; the text is black or white, whichever is further from the background."""
    return (MISSING, "#000000") if value != value else _color(min(255, int(value * 256)))


@functools.cache
def _color(step: int) -> tuple[str, str]:
    """One of the 256 steps of the scale, as matplotlib counts them."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex
    from seaborn.utils import relative_luminance

    rgb = colormaps[COLORS](step)[:3]
    return to_hex(rgb), "#000000" if relative_luminance(rgb) > 0.179 else "#ffffff"


def _block(shown: Tokens, kept: np.ndarray, texts: list[str], marks: list[tuple[str, str]]) -> str:
    out = []
    for i, (text, (shadow, names), value) in enumerate(zip(texts, marks, kept.tolist())):
        back, front = color(value)
        said = "no value" if value != value else f"kept {value:.3f}"
        out.append(f"<b style='background:{back};color:{front}{shadow}' title='{i} | id {shown.ids[i]} | {said}{names}'>{text}</b>")
        out += ["<br>"] if "↵" in text else []
    return "".join(out)


def _underlines(shown: Tokens) -> list[tuple[str, str]]:
    """Per token the lines of its spans, one below the other, and their names for the title."""
    inside = {name: shown.inside(name) for name in shown.spans}
    out = []
    for i in range(len(shown.ids)):
        mine = [(k, name) for k, name in enumerate(inside) if inside[name][i]]
        lines = ",".join(f"0 {2 * (j + 1)}px 0 {MARKS[k % len(MARKS)]}" for j, (k, _) in enumerate(mine))
        out.append((f";box-shadow:{lines}" if mine else "", "".join(f" | {html.escape(name, quote=True)}" for _, name in mine)))
    return out


def _scale(shown: Tokens) -> str:
    cells = [(f"{v:.1f}", *color(v)) for v in np.linspace(0, 1, 11)]
    if any(np.isnan(k).any() for k in shown.kept.values()):
        cells.append(("no value", *color(float("nan"))))
    return "".join(f"<span style='background:{back};color:{front};padding:1px 5px;font-size:11px'>{text}</span>" for text, back, front in cells)


def _legend(shown: Tokens) -> str:
    marks = [f"<span style='box-shadow:0 2px 0 {MARKS[k % len(MARKS)]}'>{html.escape(name)}</span> ({shown.inside(name).sum()} tokens)"
             for k, name in enumerate(shown.spans)]
    return f"<div>Underlined: {', '.join(marks)}.</div>" if marks else ""


def _means(shown: Tokens, name: str) -> str:
    return "mean share kept: " + ", ".join(f"{html.escape(place)} {_mean(shown.kept[name][at]):.2f}" for place, at in shown._places().items())


# -- as a figure --------------------------------------------------------------------------------------------------------


def _figure(shown: Tokens, footer: str):
    from matplotlib import colormaps

    from . import plotting

    drawn = shown.binned()
    names, n, rows = list(shown.kept), len(shown.ids), len(shown.spans)
    cells = np.array([drawn[drawn.policy == name].share for name in names])
    width = int(drawn.end.iloc[0] - drawn.start.iloc[0])
    heights = [max(0.26 * rows, 0.01), 0.34 * len(names)]
    figure, (above, ax) = plotting.picture(8.6, min(12, 1.9 + sum(heights)), 2, sharex=True, height_ratios=heights)
    colors = colormaps[COLORS].with_extremes(bad=MISSING)
    edges = [*drawn.start[: cells.shape[1]], n]
    drawn_mesh = ax.pcolormesh(edges, np.arange(len(names) + 1), np.ma.masked_invalid(cells), cmap=colors, vmin=0, vmax=1)
    ax.set_yticks(np.arange(len(names)) + 0.5, names, **plotting.PLAIN)
    ax.set(ylabel="policy", ylim=(len(names), 0))
    ax.set(xlabel="position in the text [tokens]", xlim=(0, n))
    ax.grid(False)
    figure.colorbar(drawn_mesh, ax=[above, ax], label="kept [share of the sites\n(layer, KV head) looked at]", pad=0.01)
    _strip(above, shown)
    figure.suptitle(shown.title or "What was kept of a text", fontsize=11)
    bins = f"mean of every {width} tokens" if width > 1 else "one cell per token"
    empty = f"; grey: no value ({int(np.isnan(cells).sum())} cells)" if np.isnan(cells).any() else ""
    plotting.footer(figure, f"one text (n = 1) of {n} tokens, {bins}{empty}" + (f"\n{footer}" if footer else ""))
    return figure


def _strip(ax, shown: Tokens) -> None:
    """The spans, one row each; at least a hair wide, so that a few tokens of a long prompt show."""
    from . import plotting

    ax.grid(False)
    if not shown.spans:
        ax.set_axis_off()
        return
    for k, (name, spans) in enumerate(shown.spans.items()):
        mark = MARKS[k % len(MARKS)]
        ax.broken_barh([(a, z - a) for a, z in spans], (k + 0.15, 0.7), facecolors=mark, edgecolors=mark, linewidth=0.8)
    ax.set_yticks(np.arange(len(shown.spans)) + 0.5, list(shown.spans), **plotting.PLAIN)
    ax.set(ylim=(len(shown.spans), 0))
    ax.tick_params(labelbottom=False)
