"""The protection probe: its tables from rows made by hand, and a protected prompt is held."""

import numpy as np
import pytest
import scipy.stats

import compared
from compared import pick
from kvprobe.keeplog import ALIVE

cheap, lm, done = compared.cheap, compared.lm, compared.done


def made_by_hand(gains: dict):
    """policy -> instance -> (log p without, with, prompt survival without), two draws around each."""
    import pandas as pd

    rows = []
    for policy, per in gains.items():
        for instance, (without, with_, head) in enumerate(per):
            for protect, logp, share in ((False, without, head), (True, with_, 1.0)):
                for draw, off in ((0, -0.5), (1, 0.5)):
                    base = dict(policy=policy, protect=protect, draw=draw, instance=instance)
                    rows += [base | dict(ask=f"fact {k}", metric="logp", value=logp + off + k - 0.5) for k in (0, 1)]
                    rows += [base | dict(ask=f"fact {k}", metric="retrieved", value=float(protect)) for k in (0, 1)]
                    rows += [base | dict(ask="", metric=m, value=share) for m in ("prompt_head", "prompt_union")]
    rows += [dict(policy="full", protect=False, draw=0, instance=i, ask="fact 0", metric=m, value=v) for i in range(3) for m, v in (("logp", -0.1), ("retrieved", 1.0))]
    return pd.DataFrame(rows)


def test_gain_is_with_minus_without_and_goes_with_the_deficit():
    from kvprobe.probes import protection

    gains = {"a": [(-9, -1, 0.1), (-8, -2, 0.3), (-7, -1, 0.2)], "b": [(-5, -2, 0.5), (-4, -3, 0.6), (-6, -2, 0.45)], "c": [(-2, -2.5, 0.9), (-3, -2, 0.8), (-2, -1.5, 0.95)]}
    rows, manifest = made_by_hand(gains), {"settings": {"seed": 0}}
    got = protection.gains(rows).set_index(["policy", "instance"])
    for policy, per in gains.items():
        for instance, (without, with_, head) in enumerate(per):
            line = got.loc[policy, instance]
            assert (line.gain, line.deficit, line.gain_retrieved) == pytest.approx((with_ - without, 1 - head, 1.0)) and line.logp == pytest.approx(without)
    assert len(got) == 9 and "full" not in got.index.get_level_values(0)
    pooled, means = protection.correlation(rows, manifest)
    flat = [(1 - head, with_ - without) for per in gains.values() for without, with_, head in per]
    assert pooled.value == pytest.approx(scipy.stats.spearmanr(*zip(*flat)).statistic)
    assert means.value == pytest.approx(scipy.stats.spearmanr(*zip(*[np.mean([(1 - h, w - o) for o, w, h in per], axis=0) for per in gains.values()])).statistic)
    table = protection.report_table(rows, manifest).set_index("policy")
    assert table.loc["b", "gain [nats]"].startswith("2.67") and table.loc["b", "prompt survival, head"] == "0.517" and table.loc["full", "retrieval without"].startswith("1.00")


def test_a_protected_prompt_is_held(done):
    d, protected = done("protection"), 0
    for (i, label, _), (log, k) in d.logs.items():
        prompt = log.died[:, k, :, : d.session.stories[i].prompt]
        if label.endswith(" + prompt"):
            assert (prompt == ALIVE).all()
            protected += 1
        elif label in ("random", "recency"):
            assert (prompt != ALIVE).any()
    assert protected == 2 * 4 and (pick(d.rows, metric="prompt_head", protect=True).value == 1).all()
