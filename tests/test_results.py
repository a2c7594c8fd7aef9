"""A run's folder: resume at any point, damage, refusals. The oracle is an uninterrupted run."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import kvprobe
from kvprobe import runner

FIELDS = dict(instances=4, batch_size=1, check_instances=1)


def smoke(out, **more):
    return kvprobe.run("planted_fact", preset="smoke", out=out, progress=False, **(FIELDS | more))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return smoke(tmp_path_factory.mktemp("runs") / "whole")


def rows_of(path) -> bytes:
    return (Path(path) / "rows.jsonl").read_bytes()


def test_same_settings_give_the_same_bytes(whole, tmp_path):
    assert rows_of(smoke(tmp_path / "b").path) == rows_of(whole.path)


@pytest.mark.parametrize("after", [1, 2, 4])
def test_killed_runs_end_with_the_same_rows(whole, tmp_path, after):
    """SIGKILL once `after` batches are in the ledger, twice over if it was too fast, then finish."""
    out = tmp_path / "killed"
    code = f"import kvprobe; kvprobe.run('planted_fact', preset='smoke', out={str(out)!r}, progress=False, **{FIELDS!r})"
    process = subprocess.Popen([sys.executable, "-c", code])
    ledger = out / "batches.jsonl"
    while process.poll() is None and not (ledger.exists() and ledger.read_bytes().count(b"\n") >= after):
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert smoke(out).manifest["status"] == "finished"
    assert rows_of(out) == rows_of(whole.path)


@pytest.mark.parametrize("cut", [1, 40, 3000, 9000])
def test_truncated_rows_keep_the_good_part_and_say_so(whole, tmp_path, cut):
    said = []
    out = tmp_path / "cut"
    smoke(out)
    text = rows_of(out)
    (out / "rows.jsonl").write_bytes(text[:-cut])
    kvprobe.run("planted_fact", preset="smoke", out=out, progress=False, say=said.append, **FIELDS)
    assert rows_of(out) == rows_of(whole.path)
    assert any("kept" in s and "computed again" in s for s in said)


def test_a_changed_digit_is_noticed_and_only_its_batch_computed_again(whole, tmp_path, monkeypatch):
    out = tmp_path / "digit"
    smoke(out)
    lines = rows_of(out).decode().splitlines(keepends=True)
    at = next(i for i, line in enumerate(lines) if '"batch": 1' in line and '"logp"' in line)
    lines[at] = lines[at].replace('"value": -', '"value": -1')
    (out / "rows.jsonl").write_text("".join(lines))
    computed = count_batches(monkeypatch)
    smoke(out)
    assert rows_of(out) == rows_of(whole.path) and computed == [1]


def count_batches(monkeypatch) -> list[int]:
    from kvprobe.probes import planted_fact

    computed: list[int] = []
    real = planted_fact.Session.compute
    monkeypatch.setattr(planted_fact.Session, "compute", lambda self, i, *a: (computed.append(i), real(self, i, *a))[1])
    return computed


def test_a_damaged_keep_log_is_computed_again(whole, tmp_path, monkeypatch):
    out = tmp_path / "log"
    smoke(out)
    log = out / "keeplogs" / "batch-0002.npz"
    log.write_bytes(log.read_bytes()[:-7])
    computed = count_batches(monkeypatch)
    smoke(out)
    assert rows_of(out) == rows_of(whole.path) and computed == [2]


def test_a_finished_run_computes_nothing(whole, monkeypatch):
    computed = count_batches(monkeypatch)
    assert smoke(whole.path).rows.equals(whole.rows) and computed == []


def test_another_setting_in_the_same_folder_is_refused_and_named(whole):
    before = rows_of(whole.path)
    with pytest.raises(ValueError, match=r"keep: 64 there, 48 now"):
        smoke(whole.path, keep=48)
    assert rows_of(whole.path) == before


def test_a_folder_with_other_files_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(ValueError, match="other files"):
        smoke(tmp_path)


def test_bad_input_leaves_no_folder(tmp_path):
    for bad in (dict(policy="nope"), dict(keep=8), dict(buffer=0), dict(conditions="0+7"), dict(layers="0-9"), dict(model="nope"),
                dict(keep=100_000), dict(filler="nowhere.txt"), dict(keep=32, keep_ratio=0.5), dict(keep=None), dict(instances=0),
                dict(policy="random", policy_options={"block": 1000}), dict(policy="random", policy_options={"size": 1}), dict(age=9000)):
        with pytest.raises(ValueError):
            smoke(tmp_path / "never", **bad)
        assert not (tmp_path / "never").exists(), bad


def test_a_full_disk_is_refused_before_work(tmp_path, monkeypatch):
    import shutil

    monkeypatch.setattr(shutil, "disk_usage", lambda p: shutil._ntuple_diskusage(10, 10, 0))
    with pytest.raises(OSError, match="free"):
        smoke(tmp_path / "full")


def test_a_disk_that_fills_up_loses_no_batch(whole, tmp_path, monkeypatch):
    from kvprobe import results

    real, calls = results._append, []

    def fills_up(path, text):
        calls.append(path)
        if len(calls) == 4:
            with open(path, "a") as file:  # half a batch reaches the disk
                file.write(text[: len(text) // 2])
            raise OSError(28, "No space left on device")
        real(path, text)

    out = tmp_path / "fills"
    monkeypatch.setattr(results, "_append", fills_up)
    with pytest.raises(OSError, match="No space"):
        smoke(out)
    monkeypatch.setattr(results, "_append", real)
    computed = count_batches(monkeypatch)
    smoke(out)
    assert rows_of(out) == rows_of(whole.path) and 0 not in computed


def test_two_writers_are_refused(tmp_path):
    from kvprobe.results import RunFolder

    first = RunFolder(tmp_path / "x", {"probe": "p"})
    first.open()
    with pytest.raises(RuntimeError, match="another process"):
        RunFolder(tmp_path / "x", {"probe": "p"}).open()
    first.close()


def test_rerun_from_the_manifest_gives_identical_rows(whole, tmp_path):
    said = []
    again = kvprobe.rerun(whole.path / "manifest.json", out=tmp_path / "again", progress=False, say=said.append)
    assert rows_of(again.path) == rows_of(whole.path)
    assert any("identical" in s for s in said)


def test_the_manifest_holds_everything(whole):
    m = whole.manifest
    for name in ("probe", "preset", "keep", "buffer", "policy", "conditions", "seed", "batch_size", "filler", "model"):
        assert name in m["settings"]
    assert m["plan"] == {"keep": 64, "buffer": 8, "fires_at": 80, "pins_free": False}
    assert len(m["policy"]["sha256"]) == 16 and m["policy"]["fields"] == {"shared": False, "block": 1}
    assert m["versions"]["torch"] and m["versions"]["transformers"] and m["threads"] == 1
    assert m["attention_function"] == "kvprobe" and m["dtype"] == "float32" and len(m["model"]["fingerprint"]) == 16
    assert len(m["script"]["hashes"]) == 4 and m["rounds_before_value"] == whole_rounds(whole)


def whole_rounds(run) -> list[int]:
    """Counted here from the plan by hand: a round at 80 entries, then every 8 tokens, up to the value's first logits."""
    before = run.manifest["script"]["answer"][0] - 1
    return [sum(1 for length in range(80, before + 1) if (length - 80) % 8 == 0)]


def test_rows_are_long_format_with_units(whole):
    rows = whole.rows
    assert set(rows.columns) >= {"batch", "stage", "instance", "condition", "n_heads", "metric", "value", "unit"}
    assert set(rows.unit) == {"nats", "fraction", "rounds", "sites"}
    assert json.loads(rows_of(whole.path).splitlines()[0])["batch"] == 0


def test_figures_are_written_and_tell_their_run(whole):
    for suffix in ("png", "pdf"):
        assert (whole.path / "figures" / f"head_pooling.{suffix}").stat().st_size > 5000
    text = " ".join(t.get_text() for t in whole.figure().texts)
    assert "K = 64" in text and "r = 8" in text and "4 instances" in text and "rounds" in text


def test_drawn_numbers_are_the_tables(tmp_path):
    run = smoke(tmp_path / "fig")
    from kvprobe.figures import head_pooling

    table = head_pooling.reduce(run.rows, run.manifest)
    axes = head_pooling.draw(table, run.manifest).axes
    drawn = [bar.get_height() for bar in axes[0].patches]
    want = run.rows[(run.rows.stage == "eval") & (run.rows.metric == "retrieved")].groupby("condition").value.mean()
    assert drawn == pytest.approx([want[c] for c in table.condition])
    assert all(ax.get_ylabel() for ax in axes) and axes[-1].get_xlabel()


def test_failed_checks_are_written_and_told(tmp_path):
    run = smoke(tmp_path / "fails", check_forcing=0.0)
    assert run.manifest["status"] == "finished"
    assert runner.Run.read(run.path).checks[0].passed is (run.checks[0].measured.startswith("largest difference in log p 0.0e+00"))


def test_another_filler_under_the_same_name_is_not_mixed_in(tmp_path):
    text = "so we add the terms and find twelve apples. " * 300
    filler = tmp_path / "filler.txt"
    filler.write_text(text)
    out = tmp_path / "run"
    smoke(out, filler=str(filler))
    lines = (out / "batches.jsonl").read_text().splitlines(keepends=True)
    (out / "batches.jsonl").write_text("".join(lines[:2]))
    filler.write_text(text.replace("apples", "pears"))
    with pytest.raises(ValueError, match="another script"):
        smoke(out, filler=str(filler))


def test_kill_leaves_no_lock_behind(whole):
    assert os.path.exists(whole.path / ".lock") and smoke(whole.path)


def test_a_figure_that_fails_loses_nothing_else(tmp_path, monkeypatch):
    from kvprobe import registry

    found = registry.find

    def broken(kind, name):
        module = found(kind, name)
        return SimpleNamespace(READS=module.READS, reduce=module.reduce, draw=lambda table, manifest: 1 / 0) if (kind, name) == ("figure", "fork_gain") else module

    monkeypatch.setattr(registry, "find", broken)
    run = kvprobe.run("fork", preset="smoke", out=tmp_path / "run", progress=False)
    assert run.manifest["status"] == "finished" and len(run.rows) and not run.ok
    assert [c.measured for c in run.checks if c.passed is False] == ["fork_gain: ZeroDivisionError: division by zero"]


def test_going_on_under_other_files_is_said_and_noted(tmp_path, monkeypatch):
    from kvprobe import registry

    settings = dict(preset="smoke", out=tmp_path / "run", progress=False, instances=2, batch_size=1)
    whole = kvprobe.run("planted_fact", **settings)
    with open(whole.path / "rows.jsonl", "r+") as file:
        lines = [line for line in file if '"batch": 0' in line]
        file.seek(0), file.truncate(), file.writelines(lines)
    monkeypatch.setattr(registry, "code_hash", lambda: "another")
    said = []
    again = kvprobe.run("planted_fact", **settings, say=said.append)
    assert any("begun under other versions (source" in s for s in said) and again.manifest["versions"]["source"] == "another"
    assert again.manifest["earlier_versions"] == [whole.manifest["versions"]]
    assert again.rows.equals(whole.rows)
