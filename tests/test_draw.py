"""Figures of captures show the numbers they were given (I06, I07)."""

import numpy as np
import pytest
import torch

import kvprobe
from kvprobe.inside import draw


def test_queries_in_plane_draws_every_query_at_its_projection(llama, ids):
    c = kvprobe.capture(llama[0], ids, what="q")
    figure = draw.queries_in_plane(c, 1, 2, {"early": range(10), "late": range(60, 75)})
    points = np.concatenate([np.asarray(s.get_offsets()) for s in figure.axes[0].collections])
    x = torch.cat([c.q[1][0, 2, :10], c.q[1][0, 2, 60:75]]).float().numpy()
    centred = x - x.mean(0)
    _, s, vt = np.linalg.svd(centred, full_matrices=False)
    want = centred @ vt[:2].T
    np.testing.assert_allclose(np.abs(points), np.abs(want), atol=1e-4)
    assert f"{100 * s[0] ** 2 / (s**2).sum():.0f} %" in figure.axes[0].get_xlabel()
    with pytest.raises(ValueError, match="captured"):
        draw.queries_in_plane(c, 5, 0, {"a": range(3)})


def test_a_head_map_is_bounded_and_names_missing_cells():
    values = np.arange(1024.0).reshape(32, 32)
    values[0, :3] = np.nan
    first, again = (draw.head_map(values, "x", "t", low=0, high=1023) for _ in range(2))
    assert first.get_size_inches().tolist() == again.get_size_inches().tolist() and max(first.get_size_inches()) <= 12
    assert "not measured (3)" in first.axes[0].get_legend().get_texts()[0].get_text()
    mesh = first.axes[0].collections[0]
    assert mesh.get_clim() == (0, 1023) and np.ma.getmaskarray(mesh.get_array()).sum() == 3


def test_a_figure_drawn_twice_is_the_same():
    """I06: the layout's first pass moved what the second found."""
    figure = draw.head_map(np.array([[0.1, np.nan], [0.3, 0.4]]), "share", "t", "n = 1")
    assert figure._repr_png_() == figure._repr_png_()


def test_rows_of_a_head_map_are_named_by_their_layer():
    figure = draw.head_map(np.zeros((2, 3)), "share", "t", layers=(5, 11))
    assert [t.get_text() for t in figure.axes[0].get_yticklabels()] == ["5", "11"]
    with pytest.raises(ValueError, match="2 rows"):
        draw.head_map(np.zeros((2, 3)), "share", "t", layers=(5,))


def test_names_are_no_formulas():
    name = "a $x_{ y$"
    for figure in (draw.head_map(np.zeros((2, 3)), name, name, name, heads=name), draw.bars({name: 1.0, "b": 2.0}, name, name, name)):
        figure.draw_without_rendering()
        assert figure.axes[0].get_title() == name
    assert [t.get_text() for t in figure.axes[0].get_xticklabels()] == [name, "b"]


def test_bars_carry_their_numbers():
    figure = draw.bars({"a": -1.5, "b": 2.0}, "nats", "t", "footer")
    assert [p.get_height() for p in figure.axes[0].patches] == [-1.5, 2.0]
    assert {t.get_text() for t in figure.axes[0].texts} == {"-1.50", "2.00"} and figure.texts[0].get_text() == "footer"
