"""Figures of the oracle suite where a run has less than usual: one prompt, nothing deleted, a future of one token."""

import pytest

import kvprobe
from kvprobe import runner
from kvprobe.figures import budget_equivalence, logit_oracle, retention_shift


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "save_figures", lambda *a: [])
        return kvprobe.run("oracle_suite", preset="smoke", out=tmp_path_factory.mktemp("edges") / "run", progress=False, instances=1, sampling_seeds=1, deletions=0, keeps="24,48")


def texts(figure):
    return " ".join(t.get_text() for ax in figure.axes for t in ax.texts)


def test_nothing_deleted(run):
    table = logit_oracle.reduce(run.rows, run.manifest)
    figure = logit_oracle.draw(table, run.manifest)
    assert set(table[table.part == "criterion"].arm) and "nothing was deleted" in texts(figure) and "0 deletions" in figure.get_suptitle()


def test_a_future_of_one_token(run):
    """Its logits are the full prompt's: there is no KL, and nothing that a deletion could change."""
    rows = run.rows[run.rows.metric != "kl"]
    figure = logit_oracle.draw(logit_oracle.reduce(rows, run.manifest), run.manifest)
    assert "no token of a future" in texts(figure) and "n = 0" in figure.get_suptitle()


def test_an_unseen_question_leaves_no_token_out(run):
    table, asked = logit_oracle.reduce(run.rows, run.manifest), run.manifest | dict(settings=run.manifest["settings"] | dict(question="unseen"))
    said = {q: "".join(t.get_text() for t in logit_oracle.draw(table, m).texts).replace("\n", " ") for q, m in (("seen", run.manifest), ("unseen", asked))}
    assert "but the first" in said["seen"] and "but the first" not in said["unseen"]


def test_one_prompt_has_no_interval(run):
    match = budget_equivalence.reduce(run.rows, run.manifest).query("part == 'match'")
    assert (match.n == 1).all() and match.value.notna().all() and match.low.isna().all() and match.high.isna().all()
    budget_equivalence.draw(budget_equivalence.reduce(run.rows, run.manifest), run.manifest)
    assert "nan" not in texts(retention_shift.draw(retention_shift.reduce(run.rows, run.manifest), run.manifest))
